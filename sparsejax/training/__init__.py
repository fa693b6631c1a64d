"""A data-parallel train step over a mesh.

    trainer = sparsejax.data_parallel(loss_fn, tx, mesh)
    state = trainer.init(params)
    for batch in batches:
        state, loss = trainer.step(state, batch)

The design. `loss_fn(params, batch)` is written for one rank: it is given the parameters and
this rank's share of the batch, and returns the mean loss over that share. Its other inputs
are in the state, and are passed by keyword if the state has them; its other outputs are
reduced over the ranks as the arguments of the trainer say.

=====================  =========================  ==========================================
to have                the state is made with     and the loss function is
=====================  =========================  ==========================================
random numbers         init(params, key=key)      loss_fn(params, batch, key=key)
variables              init(params, variables=v)  loss_fn(..., variables=v) -> loss, v
auxiliary outputs      has_aux=True, or aux=...   loss_fn(...) -> loss, aux
both of these          both                       loss_fn(...) -> loss, (aux, v)
=====================  =========================  ==========================================

* The key differs by rank and by step: it is `fold_in(fold_in(key, step), rank)`. The state
  keeps only the first key, so a run that resumes from a checkpoint draws the same numbers
  as one that was not interrupted.
* Variables are arrays that are not trained by gradients: batch statistics, moving averages,
  counters. Floating variables are averaged over the ranks after each step, or kept by rank
  with `variables="by_rank"`; then they are `PerRank` in the state, so that checkpoints keep
  all of them. Integers must be equal on all ranks, or kept by rank.
* Auxiliary outputs are averaged, summed, or stacked: `aux="mean"`, "sum", "stack".
* Shares may be uneven. `weight=lambda batch: batch["mask"].sum()` is the weight of a rank's
  share in the means; a rank of weight 0 contributes zeros, and keeps its variables.
* With `sparsejax.embrace_sync` in `tx` a step is given the next batch, too, None at the end
  of the data: `for batch, next_batch in sparsejax.embrace.lookahead(batches)`.
  `trainer.flush(state)` applies delayed rows.
* `trainer.evaluate(state, batch)` is a step without gradient and optimizer: it returns the
  loss and the auxiliary outputs of `eval_fn`, which is called like `loss_fn`.
* Several processes run the same script, each with its own part of a batch as NumPy arrays.

On the wire: what the synchronization in `tx` sends, one psum for the loss, one for each
averaged or summed output and each averaged variable, and with `weight` one for the sum of
the weights. Stacked outputs are not sent. Parameters are replicated over the axis of the
ranks, cast to varying before differentiation so that gradients stay local, and updated
equally on all ranks. Another axis of the mesh may shard them; communication over that axis
is up to the loss function. A step donates the state that it is given.
"""

from sparsejax.training.data_parallel import data_parallel as data_parallel
from sparsejax.training.train_state import TrainState as TrainState
from sparsejax.training.trainer import DataParallel as DataParallel
