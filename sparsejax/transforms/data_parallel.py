"""A data-parallel train step over a mesh, with nothing left to get wrong.

On the wire: what the synchronization in `tx` sends, and one psum for the loss. Parameters
are replicated over the axis of the ranks, made varying before the gradient is taken so that
it stays local, and updated alike on every rank. Another axis of the mesh may shard them;
what is sent over that is up to the loss function. The state is donated: a step reuses its
memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sparsejax import axes
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError
from sparsejax.transforms.state import placed, specs
from sparsejax.transforms.state.per_rank import check_ranks
from sparsejax.units.dtypes import wide
from sparsejax.wire import Wire


class TrainState(NamedTuple):
    """The state of a training run.

    Attributes:
        step: int32: steps taken.
        params: The parameters, replicated.
        opt_state: The optimizer's state.
    """

    step: jax.Array
    params: Any
    opt_state: Any


class DataParallel:
    """See `data_parallel`."""

    def __init__(self, loss_fn, tx, mesh, axis_name, *, has_aux, ids, param_specs):
        self._loss_fn = loss_fn
        self._tx = optax.with_extra_args_support(tx)
        self._mesh = mesh
        self._axis_name = specs.data_axis(mesh, axis_name, "sparsejax.data_parallel")
        self._ranks = specs.ranks_of(mesh, self._axis_name)
        self._has_aux = has_aux
        self._ids = ids
        self._param_specs = param_specs
        self._compiled: dict[Any, Any] = {}

    def init(self, params: Any) -> TrainState:
        """The first state, from parameters; these are copied, not taken over."""
        own = self._specs_of(params)
        params = jax.tree.map(self._put, params, own)
        # Through shard_map, so that the first step sees what all later ones will see.
        both = (own, PartitionSpec())
        copy = jax.shard_map(
            lambda tree: jax.tree.map(lambda x: jnp.array(x, copy=True), tree),
            mesh=self._mesh,
            in_specs=(both,),
            out_specs=both,
        )
        params, step = jax.jit(copy)((params, jnp.int32(0)))
        opt_state = placed.init(
            self._tx, params, self._mesh, self._axis_name, param_specs=self._param_specs
        )
        return TrainState(step, params, opt_state)

    def _specs_of(self, params):
        given = PartitionSpec() if self._param_specs is None else self._param_specs
        return specs.full_specs(params, given)

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        """One step. The state given is used up.

        Args:
            state: From `init` or from the last step.
            batch: A tree of arrays, the ranks' shares one after another along the leading
                axis. Several processes pass global `jax.Array`s, as
                `jax.make_array_from_process_local_data` makes them.

        Returns:
            The next state, and the loss averaged over ranks; with `has_aux`, the loss and
            the auxiliary tree, averaged too.
        """
        return self.compiled(state)(state, jax.tree.map(self._placed, batch))

    def _placed(self, x):
        ranks, shape = self._ranks, np.shape(x)
        if not shape or shape[0] % ranks:
            raise ArgumentError(
                f"each array of a batch is split over {ranks} ranks along its leading "
                f"axis, which {ranks} must divide; got shape {list(shape)}. What is not "
                "to be split belongs into the parameters, or into the loss function."
            )
        return self._put(x, PartitionSpec(self._axis_name))

    def _put(self, x, spec):
        """Places what this process holds; what spans processes is placed already."""
        if isinstance(x, jax.ShapeDtypeStruct):
            return x
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return x
        return jax.device_put(x, NamedSharding(self._mesh, spec))

    def compiled(self, state: TrainState) -> Any:
        """The jitted step, for `lower` and `compile`; one for each structure of state."""
        check_ranks(state.opt_state, self._ranks, inside=False)
        key = jax.tree.structure(state)
        if key not in self._compiled:
            own = self._specs_of(state.params)
            known = (state.params, own) if self._param_specs is not None else ()
            opt_state = specs.state_specs(state.opt_state, *known)
            whole = TrainState(PartitionSpec(), own, opt_state)  # type: ignore
            step = jax.shard_map(
                self._local_step,
                mesh=self._mesh,
                in_specs=(whole, PartitionSpec(self._axis_name)),
                out_specs=(whole, PartitionSpec()),
            )
            self._compiled[key] = jax.jit(step, donate_argnums=0)
        return self._compiled[key]

    def _local_step(self, state, batch):
        axis_name = self._axis_name
        value_and_grad = jax.value_and_grad(self._loss_fn, has_aux=self._has_aux)
        out, grads = value_and_grad(axes.local(state.params, axis_name), batch)
        extra = {"ids": self._ids(batch)} if self._ids else {}
        updates, opt_state = self._tx.update(grads, state.opt_state, state.params, **extra)
        self._require_synchronized(updates)
        params = optax.apply_updates(state.params, updates)
        mean = jax.tree.map(self._mean, out)
        return TrainState(state.step + 1, params, opt_state), mean

    def _mean(self, x):
        further = sorted(axes.varying_axes(x) - set(axes.axis_names(self._axis_name)))
        if further:
            raise ArgumentError(
                f"what loss_fn returns differs over {further[0]!r}, which shards the "
                f"parameters: add it up there, lax.psum(..., {further[0]!r})."
            )
        wire = Wire(self._axis_name)
        x = wire.per_rank(jnp.asarray(x, wide(jnp.result_type(x))))
        return wire.psum(x)[0] / wire.ranks

    def _require_synchronized(self, updates):
        names = set(axes.axis_names(self._axis_name))
        for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
            if names & axes.varying_axes(leaf):
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                raise ArgumentError(
                    f"after tx.update the update of {name!r} still differs by rank: tx "
                    "does not synchronize it. Put sparsejax.zen_sync() first in the chain; "
                    "under optax.masked or optax.partition give the other leaves "
                    "sparsejax.dense_sync()."
                )


def data_parallel(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: AxisName | None = None,
    has_aux: bool = False,
    ids: Callable[[Any], dict[str, jax.Array]] | None = None,
    param_specs: Any = None,
) -> DataParallel:
    """Makes a train step that runs on every device of a mesh axis.

    Example:
        trainer = sparsejax.data_parallel(
            loss_fn, optax.chain(sparsejax.zen_sync(), optax.adam(1e-3)), mesh)
        state = trainer.init(params)
        for batch in batches:
            state, loss = trainer.step(state, batch)

    Args:
        loss_fn: From parameters and this rank's share of a batch to the mean loss over
            that share, or to (loss, aux).
        tx: The optimizer, a sparsejax synchronization in it.
        mesh: The mesh.
        axis_name: The axis over which the batch is split, where the mesh has several.
        has_aux: Whether `loss_fn` returns (loss, aux).
        ids: From a batch to the rows that it touches, {path: ids}, so that gradients need
            not be searched for them; see `sparsejax.sync`.
        param_specs: The parameters' PartitionSpecs, where a further axis of the mesh shards
            them: a tree like the parameters, or a prefix of it. `loss_fn` is then given
            shards, and the same share of the batch on each of that axis; it may send over
            that axis, and its loss is to be the same there.

    Returns:
        An object with `init(params)` and `step(state, batch)`.
    """
    return DataParallel(
        loss_fn, tx, mesh, axis_name, has_aux=has_aux, ids=ids, param_specs=param_specs
    )
