"""The state of a synchronization: what differs by rank, how it is sharded, its metrics.

What differs by rank (a residual, a gradient accumulated so far) is an array [ranks, ...]
outside `shard_map`, sharded over its leading axis, and [1, ...] inside. It is wrapped in
`PerRank`, so that `state_specs` can tell it from what is replicated: declared as `P()`, a
checkpoint would keep one rank's copy and lose the others.
"""

import contextvars
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from sparsejax import _compat
from sparsejax._compat import AxisName
from sparsejax.errors import AxisError, StateError
from sparsejax.schemes.base import Traffic


# Set while it is only asked what a transformation would do: then no state is made.
OBSERVER: contextvars.ContextVar[Callable | None] = contextvars.ContextVar(
    "observer", default=None
)


@jax.tree_util.register_pytree_with_keys_class
class PerRank:
    """A tree whose arrays differ by rank, each with a leading rank axis.

    Attributes:
        value: The tree.
        axis_name: The mesh axis, or axes, of the ranks.
    """

    def __init__(self, value: Any, axis_name: AxisName):
        self.value = value
        self.axis_name = axis_name

    def tree_flatten_with_keys(self):
        """For JAX: the tree is a child, the axis is part of the structure."""
        return ((jax.tree_util.GetAttrKey("value"), self.value),), self.axis_name

    @classmethod
    def tree_unflatten(cls, axis_name, children):
        """For JAX."""
        return cls(children[0], axis_name)

    def __repr__(self) -> str:
        return f"PerRank({self.value!r}, axis_name={self.axis_name!r})"


class SparsifyState(NamedTuple):
    """State of a sparsifier.

    Attributes:
        step: int32: updates seen.
        residual: What waits, a tree like the parameters: `PerRank`; None without a memory.
        momentum: The velocity, alike; None where there is none.
        sparsifiers: What the sparsifier remembers of each leaf, by path: `PerRank`.
        skipped: int32: updates left out because something was not finite.
    """

    step: jax.Array
    residual: PerRank | None
    momentum: PerRank | None
    sparsifiers: PerRank | None
    skipped: jax.Array


class SyncState(NamedTuple):
    """State of `sparsejax.sync`.

    Attributes:
        step: int32: updates seen.
        schemes: The scheme's state of each group of leaves.
        residual: What each rank keeps back, of each group that keeps any: `PerRank`.
        pending: The gradients added up since they were last synchronized: `PerRank`, or
            None with `every=1`.
        traffic: What was sent the last time, by group.
        sparsifier: The state of the sparsifier given to `sync`, or None.
    """

    step: jax.Array
    schemes: dict[str, Any]
    residual: dict[str, PerRank]
    pending: PerRank | None
    traffic: dict[str, Traffic]
    sparsifier: SparsifyState | None = None


def state_specs(state: Any) -> Any:
    """The PartitionSpecs of a state, for `shard_map` and for checkpoints.

    Args:
        state: An optimizer state, or any tree; abstract values do.

    Returns:
        The same tree with `P(axis)` for every leaf that differs by rank and `P()` for all
        others.
    """

    def specs(node):
        if isinstance(node, PerRank):
            spec = PartitionSpec(node.axis_name)
            return PerRank(jax.tree.map(lambda _: spec, node.value), node.axis_name)
        return PartitionSpec()

    return jax.tree.map(specs, state, is_leaf=lambda node: isinstance(node, PerRank))


def init(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Mesh,
    axis_name: AxisName | None = None,
) -> Any:
    """A state of global arrays: what differs by rank sharded, the rest replicated.

    Needed where a transformation keeps something by rank; right for all.

    Args:
        tx: The optimizer.
        params: The parameters, replicated over the mesh.
        mesh: The mesh to train on.
        axis_name: The axis of the ranks, where the mesh has several.

    Returns:
        The state, to be passed to `shard_map` with `state_specs(state)`.
    """
    axis_name = data_axis(mesh, axis_name, "sparsejax.init")
    specs = None

    def structure(params):
        nonlocal specs
        specs = state_specs(tx.init(params))
        return jnp.zeros(())

    wrap = functools.partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec())
    jax.eval_shape(wrap(structure, out_specs=PartitionSpec()), params)
    return jax.jit(wrap(tx.init, out_specs=specs))(params)


def data_axis(mesh: Mesh, axis_name: AxisName | None, what: str) -> AxisName:
    """The axis given, or the only one of the mesh."""
    if axis_name is None:
        if len(mesh.axis_names) != 1:
            raise AxisError(
                f"{what}: the mesh has the axes {mesh.axis_names}; name the one over which "
                f"gradients are synchronized, axis_name={mesh.axis_names[0]!r}."
            )
        return mesh.axis_names[0]
    missing = [
        name for name in _compat.axis_names(axis_name) if name not in mesh.axis_names
    ]
    if missing:
        raise AxisError(
            f"{what}: the mesh has no axis {missing[0]!r}; it has {mesh.axis_names}."
        )
    return axis_name


def find(state: Any, kind: type = SyncState) -> list[Any]:
    """All states of a kind inside an optimizer state, however deep."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


def residuals(state: Any) -> Any:
    """What sparsifiers hold back, as a tree like the parameters with a leading rank axis.

    A leaf that goes whole holds back what rounding to its dtype took, mostly zeros. Where
    several sparsifiers each have some of the leaves (`optax.masked`, `optax.partition`),
    it is one tree of all of them.

    Args:
        state: An optimizer state, chained, masked or partitioned as you like. Inside
            `shard_map` the rank axis has length 1.
    """
    found = [s.residual for s in find(state, SparsifyState) if s.residual is not None]
    if not found:
        raise StateError(
            "no sparsifier with a memory has its state here; pass the optimizer's state, "
            "as tx.init or tx.update returned it, of a chain with one, such as "
            "sparsejax.dgc()."
        )
    masked = lambda node: isinstance(node, optax.MaskedNode)
    trees = [per_rank.value for per_rank in found]
    first = lambda *own: next((x for x in own if not masked(x)), own[0])
    return jax.tree.map(first, *trees, is_leaf=masked)


def metrics(state: Any) -> dict[str, jax.Array]:
    """What the last synchronization sent, as a flat dict of scalars.

    Keys are `sync/<leaf>/<what>` for each group of leaves that were exchanged together,
    and `sync/<bytes>` for the totals; a second synchronization in the same state is
    `sync1`, and so on. `wire_bytes` is what one rank sent, `payload_bytes` what its entries
    needed, `inside_bytes` what it sent inside a host where there are two levels,
    `dense_bytes` what an all-reduce would have sent, `rounds` how many messages followed
    one another; densities and imbalances are as in `Traffic`. `residual_norm` is
    there where a rank keeps something back: the norm over all ranks (inside `shard_map`,
    over this one). A sparsifier has `sparsify/residual_norm`, over all leaves, and
    `sparsify/skipped`, how many updates were left out because something was not finite.

    Args:
        state: An optimizer state, chained, masked or partitioned as you like.
    """
    found = find(state)
    if not found:
        raise StateError(
            "there is no state of a sparsejax transformation in this state; pass the "
            "optimizer's state, as tx.init or tx.update returned it."
        )
    result: dict[str, jax.Array] = {}
    for number, sync in enumerate(found):
        prefix = f"sync{number or ''}"
        totals: dict[str, Any] = {
            "wire_bytes": 0.0,
            "payload_bytes": 0.0,
            "dense_bytes": 0.0,
        }
        for name, traffic in sync.traffic.items():
            own = _group_metrics(traffic)
            for key, value in own.items():
                result[f"{prefix}/{name}/{key}"] = value
            for key in totals:
                totals[key] = totals[key] + own[key]
        for name, kept in sync.residual.items():
            squares = jnp.sum(jnp.square(kept.value.astype(jnp.float32)))
            result[f"{prefix}/{name}/residual_norm"] = jnp.sqrt(squares)
        result |= {f"{prefix}/{key}": jnp.asarray(value) for key, value in totals.items()}
    for number, own in enumerate(find(state, SparsifyState)):
        prefix = f"sparsify{number or ''}"
        result[f"{prefix}/skipped"] = own.skipped
        if own.residual is not None:
            squares = [
                jnp.sum(jnp.square(x.astype(jnp.float32)))
                for x in jax.tree.leaves(own.residual)
            ]
            result[f"{prefix}/residual_norm"] = jnp.sqrt(sum(squares, jnp.float32(0)))
    return result


def _group_metrics(traffic: Traffic) -> dict[str, jax.Array]:
    return {
        "wire_bytes": traffic.wire,
        "payload_bytes": traffic.payload,
        "inside_bytes": traffic.inside,
        "dense_bytes": traffic.dense,
        "density_before": traffic.density_before,
        "density_after": traffic.density_after,
        "push_imbalance": traffic.push.imbalance,
        "pull_imbalance": traffic.pull.imbalance,
        "rounds": traffic.push.rounds + traffic.pull.rounds,
    }
