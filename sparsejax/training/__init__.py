"""A data-parallel train step over a mesh, with nothing left to get wrong.

    trainer = sparsejax.data_parallel(loss_fn, tx, mesh)
    state = trainer.init(params)
    for batch in batches:
        state, loss = trainer.step(state, batch)

The design. `loss_fn(params, batch)` is written for one rank: it is given the parameters and
this rank's share of the batch, and returns the mean loss over that share. Whatever else it
needs is in the state, and is given to it by keyword once the state has it; whatever else it
returns is put together over the ranks in the way that the trainer was given.

=====================  =========================  ==========================================
to have                the state is made with     and the loss function is
=====================  =========================  ==========================================
random numbers         init(params, key=key)      loss_fn(params, batch, key=key)
variables              init(params, variables=v)  loss_fn(..., variables=v) -> loss, v
auxiliary outputs      has_aux=True, or aux=...   loss_fn(...) -> loss, aux
both of these          both                       loss_fn(...) -> loss, (aux, v)
=====================  =========================  ==========================================

* The key is another one on each rank and in each step, `fold_in(fold_in(key, step), rank)`.
  The state keeps only the first key, so a run that resumes from a checkpoint draws what it
  would have drawn.
* Variables are what no gradient trains: batch statistics, moving averages, counters.
  Floating numbers are averaged over the ranks after each step, or kept by rank with
  `variables="by_rank"`; then they are `PerRank` in the state, so that checkpoints keep all
  of them. Integers must be equal on all ranks, or kept by rank.
* Auxiliary outputs are averaged, summed, or stacked: `aux="mean"`, "sum", "stack".
* Data may be uneven. `weight=lambda batch: batch["mask"].sum()` says how much a rank's
  share counts in the means; a rank whose weight is 0 takes part with zeros, keeps its
  variables, and does not count.
* With `sparsejax.embrace_sync` in `tx` a step is given the next batch, too, None at the end
  of the data: `for batch, next_batch in sparsejax.embrace.lookahead(batches)`.
  `trainer.flush(state)` applies delayed rows.
* `trainer.evaluate(state, batch)` is a step without gradient and optimizer: the loss and
  the auxiliary outputs of `eval_fn`, which is called as `loss_fn` is.
* Several processes run the same script, each with its own part of a batch as NumPy arrays.

On the wire: what the synchronization in `tx` sends, one psum for the loss, one for each
averaged or summed output and each averaged variable, and with `weight` one for the sum of
the weights. Stacked outputs stay where they are. Parameters are replicated over the axis of
the ranks, made varying before the gradient is taken so that it stays local, and updated
the same on every rank. Another axis of the mesh may shard them; what is sent over that is
up to the loss function. A step uses up the state that it is given, and reuses its memory.
"""

from sparsejax.training.data_parallel import data_parallel as data_parallel
from sparsejax.training.train_state import TrainState as TrainState
from sparsejax.training.trainer import DataParallel as DataParallel
