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

    A batch is a tree of arrays, split over the ranks along the leading axis. In a job of
    several processes each passes the shares of its ranks as NumPy arrays, of the same
    length on all processes. All processes must call `step` equally often. A process that
    has run out of data passes zeros with `weight` 0.

    Args:
        loss_fn: A function from parameters and this rank's share of a batch to the mean
            loss over that share. If the state was made with them, it is passed `variables=`
            and `key=`, a key that differs by rank and by step. It returns the loss; with
            auxiliary outputs (loss, aux); with variables (loss, variables); with both
            (loss, (aux, variables)).
        tx: The optimizer, with a synchronization before it. Tables that it updates by rows,
            as `sparsejax.lazy` does, are differentiated by rows
            (`sparsejax.value_and_grad`). Rows of `state.params` may then have missed steps:
            `evaluate` and the next step catch up the rows that they read, and
            `sparsejax.rows.settle` catches up all. With `sparsejax.embrace_sync` a step is
            given the next batch, too, and `flush` replaces `settle`. With
            `sparsejax.skip_nonfinite` around the whole chain, a step in which the gradient
            of any rank has a NaN or an infinity changes only `state.step`, which counts
            batches; with its `report=True`, `step` raises `errors.BadNumberError`. An
            optimizer that requires `value`, as `optax.contrib.reduce_on_plateau`, is given
            the mean of the loss over the ranks.
        mesh: The mesh.
        axis_name: The mesh axis over which the batch is split, if the mesh has several
            axes.
        has_aux: Whether `loss_fn` returns auxiliary outputs. Unless `aux` is set, they must
            be scalars, and are averaged.
        ids: A function from a batch to the ids of the rows that it reads, {path: ids}, so
            that gradients are not searched for them; see `sparsejax.sync`.
        param_specs: The parameters' PartitionSpecs, if a further axis of the mesh shards
            them: a tree like the parameters, or a prefix of it. `loss_fn` is then given
            shards, and the same share of the batch on each device of that axis. It may
            communicate over that axis, and its loss must be equal there. Without it,
            parameters that are sharded over the mesh raise an error.
        aux: The reduction of auxiliary outputs; if set, `loss_fn` returns some. "mean" or
            "sum" over the ranks; or "stack", which concatenates the ranks' arrays along the
            leading axis, and scalars to [ranks]; or a tree of these, or a prefix of one. A
            stacked output is an array that is sharded over the ranks.
        variables: The reduction of variables: "mean" over the ranks (integers must be equal
            on all), or "by_rank"; or a tree of these, or a prefix of one. The mean of
            variances is not the variance of the whole batch.
        weight: A function from a rank's share of a batch to its weight in means, such as
            the number of examples, if shares are padded. The gradient is then sum(weight *
            gradient) / sum(weight), if `tx` averages. A rank of weight 0 does not count,
            even if its loss is not finite. If all are 0, the gradient is 0 and the loss
            NaN. Sums exclude ranks of weight 0, and are not weighted otherwise. Stacked
            outputs include the padding. With a weight below 0 the loss is NaN.
        eval_fn: The function that `evaluate` calls, with the arguments and outputs of
            `loss_fn`; `loss_fn` itself if None.
        donate: Whether a step donates its state, and reuses the memory.
        capacity: The number of distinct rows of a table that a rank usually reads in a
            step, or {pattern of paths: number}, if that is much less than the number of
            ids. A step whose rows fit takes less time; the result is the same. See
            `sparsejax.rows.within_capacity`.
        check_every: The number of steps after which the state is compared over the ranks,
            bit for bit, by `sparsejax.check_replicas`, which raises `errors.ReplicaError`.
            A state that is not the result of the last step, such as a restored one, is
            compared, too. 100 is cheap. None compares nothing.
        check_vma: Whether JAX checks which values differ by rank, as in `jax.shard_map`.
            Set False for losses that fail this check: with a scan whose carry begins with
            zeros (flax's `RNN`), or a Pallas kernel that does not state the axes over which
            its results vary. Gradients are the same. A `pmean` of gradients in `loss_fn`,
            and an update that is not synchronized, are then not noticed. Not with
            `param_specs`, since JAX sums gradients of replicated parameters by the types
            that it checks.
        overlap: Whether exchanges of `sparsejax.local_steps` run concurrently with later
            steps; see `sparsejax.rounds.Overlap`. A step then sends nothing: its loss is an
            array [ranks], and so are auxiliary outputs, with aux="stack".

    Returns:
        A `sparsejax.training.DataParallel`, with the methods `init`, `step`, `evaluate` and
        `flush`. The state is a `sparsejax.TrainState`.

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
