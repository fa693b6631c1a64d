"""`data_parallel`: the arguments of a trainer."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from sparsejax import rows
from sparsejax.axes import AxisName
from sparsejax.training.on_rank import outputs
from sparsejax.training.trainer import DataParallel
from sparsejax.transforms.described import without


_GONE = {
    "bad_numbers": "give it sparsejax.skip_nonfinite(tx) for 'skip', and "
    "sparsejax.skip_nonfinite(tx, report=True) for 'raise'."
}


@without(_GONE)
def data_parallel(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: AxisName | None = None,
    has_aux: bool = False,
    ids: Callable[[Any], dict[str, jax.Array]] | None = None,
    param_specs: Any = None,
    aux: Any = None,
    variables: Any = "mean",
    weight: Callable[[Any], Any] | None = None,
    eval_fn: Callable[..., Any] | None = None,
    donate: bool = True,
    capacity: rows.Capacity | None = None,
    check_every: int | None = None,
    check_vma: bool = True,
    overlap: bool = False,
) -> DataParallel:
    """Makes a train step that runs on every device of a mesh axis.

    Example:
        >>> tx = optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))
        >>> trainer = sparsejax.data_parallel(loss_fn, tx, mesh)
        >>> state = trainer.init(params)
        >>> for batch in batches:
        ...     state, loss = trainer.step(state, batch)

        With dropout and batch statistics:

        >>> def loss_fn(params, batch, *, variables, key, train=True):
        ...     logits, variables = model(params, batch, variables, key, train)
        ...     loss = optax.squared_error(logits, batch["y"]).mean()
        ...     return loss, ({"logits": logits}, variables)
        >>> eval_fn = functools.partial(loss_fn, train=False)
        >>> trainer = sparsejax.data_parallel(
        ...     loss_fn, tx, mesh, aux="stack", eval_fn=eval_fn)
        >>> state = trainer.init(params, variables=statistics, key=jax.random.key(0))
        >>> state, (loss, aux) = trainer.step(state, batch)
        >>> loss, aux = trainer.evaluate(state, batch)

    A batch is a tree of arrays, split over the ranks along their leading axis. In a job of
    several processes each gives its own part of it, as NumPy arrays: the shares of the
    ranks that it has, equally long on all processes. All call `step` equally often; one
    that has run out of data gives zeros and `weight` 0.

    Args:
        loss_fn: From parameters and this rank's share of a batch to the mean loss over
            that share. It is given `variables=` and `key=`, another key on each rank and in
            each step, where the state was made with them, and returns the loss; with
            auxiliary outputs (loss, aux), with variables (loss, variables), with both
            (loss, (aux, variables)).
        tx: The optimizer, a sparsejax synchronization in front of it. Tables that it
            updates by rows, as `sparsejax.lazy` does, are differentiated by rows
            (`sparsejax.value_and_grad`). Rows of `state.params` may then be late:
            `evaluate` and the next step read them as they would be, and
            `sparsejax.rows.settle` catches them up. With `sparsejax.embrace_sync` in it
            a step is given the next batch, too, and `flush` does what `settle` does. With
            `sparsejax.skip_nonfinite` around all of it, a step in which the gradient of any
            rank has a NaN or an infinity changes nothing but `state.step`, which counts
            batches; with its `report=True`, `step` raises `errors.BadNumberError`.
        mesh: The mesh.
        axis_name: The axis over which the batch is split, where the mesh has several.
        has_aux: Whether `loss_fn` returns auxiliary outputs. Those are scalars, which are
            averaged, unless `aux` says otherwise.
        ids: From a batch to the rows that it touches, {path: ids}, so that gradients need
            not be searched for them; see `sparsejax.sync`.
        param_specs: The parameters' PartitionSpecs, where a further axis of the mesh shards
            them: a tree like the parameters, or a prefix of it. `loss_fn` is then given
            shards, and the same share of the batch on each of that axis; it may send over
            that axis, and its loss is to be the same there. Without it parameters whose
            arrays are sharded over the mesh are refused.
        aux: How auxiliary outputs are reduced; it says that the loss has some: "mean" over
            ranks, "sum", or "stack", the ranks' arrays one after another along the leading
            axis, and scalars as [ranks]; or a tree of these, or a prefix of one. What is
            stacked is an array sharded over the ranks.
        variables: What becomes of the variables: "mean" over ranks (integers must be equal
            on all), or "by_rank"; or a tree of these, or a prefix of one. The mean of
            variances is not the variance of the whole batch.
        weight: From a rank's share of a batch to how much it counts in the means, such as
            the number of examples that are there, if shares are filled up. The gradient is
            then sum(weight * gradient) / sum(weight), where `tx` averages. A rank whose
            weight is 0 does not count, whatever its loss is; if all are 0, the gradient
            is 0 and the loss NaN. Sums leave such ranks out, and have no other weights;
            what is stacked holds what shares were filled up with. With a weight below 0 the
            loss is NaN.
        eval_fn: What `evaluate` calls, as `loss_fn` is called; `loss_fn` itself if None.
        donate: Whether a step uses up the state that it is given, and reuses its memory.
        capacity: How many distinct rows of a table a rank reads in a step, as a rule, or
            {pattern of paths: number}, where that is far below the number of ids: a step
            whose rows fit takes less time, one whose rows do not is the same, only slower.
            See `sparsejax.rows.within_capacity`.
        check_every: Once in this number of steps, before the step, the state is compared
            over the ranks, bit for bit: `sparsejax.check_replicas`, which raises
            `errors.ReplicaError`. So is a state that is no step's result, as one that was
            restored. 100 is cheap. None compares nothing.
        check_vma: Whether JAX checks, as `jax.shard_map` does, which values differ by rank.
            False is for losses that the check refuses, with a scan whose carry begins with
            zeros (flax's `RNN`), or a Pallas kernel that does not say over which axes its
            results vary. Where the check refuses nothing, gradients are the same. What it
            would have found goes unseen: a `pmean` of gradients in `loss_fn`, and an update
            that is not synchronized. Not with `param_specs`, since JAX adds up gradients of
            what a further axis replicates by the types that it checks.
        overlap: Whether exchanges of `sparsejax.local_steps` run concurrently with the
            steps that follow, as `sparsejax.rounds.Overlap` says. A step then sends
            nothing: the loss that it returns is an array [ranks], of each rank its own, and
            so are auxiliary outputs, with aux="stack".

    Returns:
        An object with `init(params, variables=None, key=None)`, `step(state, batch)`,
        `evaluate(state, batch)` and `flush(state)`. The state is a `sparsejax.TrainState`.
    """
    if aux is None and has_aux:
        aux = outputs.SCALARS
    return DataParallel(
        loss_fn,
        tx,
        mesh,
        axis_name,
        has_aux=aux is not None,
        ids=ids,
        param_specs=param_specs,
        aux=aux,
        variables=variables,
        weight=weight,
        eval_fn=eval_fn,
        donate=donate,
        capacity=capacity,
        check_every=check_every,
        check_vma=check_vma,
        overlap=overlap,
    )
