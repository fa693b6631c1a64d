"""The state of a synchronization: what differs by rank, what was sent, what is held back.

What differs by rank (a residual, a gradient accumulated so far) is an array [ranks, ...]
outside `shard_map`, sharded over its leading axis, and [1, ...] inside. It is wrapped in
`PerRank`, so that `specs` can tell it from what is replicated: declared as `P()`, a
checkpoint would keep one rank's copy and lose the others.
"""

import contextvars
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sparsejax.axes import AxisName
from sparsejax.errors import StateError
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
        paths: The leaves that the arrays are about, or None where the tree is one like the
            parameters.
        same: Mesh axes over which it is the same though those leaves are sharded over them.
    """

    def __init__(
        self,
        value: Any,
        axis_name: AxisName,
        paths: tuple[str, ...] | None = None,
        same: tuple[str, ...] = (),
    ):
        self.value = value
        self.axis_name = axis_name
        self.paths = paths
        self.same = same

    def with_value(self, value: Any) -> "PerRank":
        """Another value of the same kind."""
        return PerRank(value, self.axis_name, self.paths, self.same)

    def tree_flatten_with_keys(self):
        """For JAX: the tree is a child, all else is part of the structure."""
        child = (jax.tree_util.GetAttrKey("value"), self.value)
        return (child,), (self.axis_name, self.paths, self.same)

    @classmethod
    def tree_unflatten(cls, rest, children):
        """For JAX."""
        return cls(children[0], *rest)

    def __repr__(self) -> str:
        return f"PerRank({self.value!r}, axis_name={self.axis_name!r})"


class SparsifyState(NamedTuple):
    """State of a sparsifier.

    Attributes:
        step: int32: updates seen.
        residual: What waits, a tree like the parameters: `PerRank`; None without a memory.
        momentum: The velocity, alike; None where there is none.
        sparsifiers: What the sparsifier remembers of each leaf, by path, or of all under
            the empty one: `PerRank`; None if nothing.
        skipped: int32: updates left out because something was not finite.
    """

    step: jax.Array
    residual: PerRank | None
    momentum: PerRank | None
    sparsifiers: dict[str, PerRank] | None
    skipped: jax.Array


class SyncState(NamedTuple):
    """State of `sparsejax.sync`.

    Attributes:
        step: int32: updates seen.
        schemes: The scheme's state of each group of leaves; `PerRank`, though alike on all
            ranks, where it follows the numbers and so differs by shard.
        residual: What schemes keep back, a tree like the parameters: `PerRank`, with an
            `optax.MaskedNode` for a leaf whose scheme keeps nothing; None if all do.
        pending: The gradients added up since they were last synchronized: `PerRank`, or
            None with `every=1`.
        traffic: What was sent the last time, by group.
        sparsifier: The state of the sparsifier given to `sync`, or None.
    """

    step: jax.Array
    schemes: dict[str, Any]
    residual: PerRank | None
    pending: PerRank | None
    traffic: dict[str, Traffic]
    sparsifier: SparsifyState | None = None


def check_ranks(state: Any, ranks: int, inside: bool = True) -> None:
    """Raises where what is held by rank is not of the ranks that there are.

    Args:
        state: The state of a transformation, or any tree.
        ranks: How many ranks there are.
        inside: Whether each rank was given its own part, as inside `shard_map`.
    """
    is_held = lambda node: isinstance(node, PerRank)
    nodes = jax.tree.leaves(state, is_leaf=is_held)
    held = [node.value for node in nodes if is_held(node) and node.paths is None]
    for leaf in jax.tree.leaves(held):
        rows = leaf.shape[0]
        if rows != (1 if inside else ranks):
            made = rows * ranks if inside else rows
            raise StateError(
                f"the state was made for {made} ranks, and there are {ranks}: "
                "sparsejax.resized(state, like=sparsejax.init(tx, params, mesh)) gives "
                "what was held to those there are; if the synchronization has "
                "reduce='sum', give it that, too." + (_OR_WHOLE if inside else "")
            )


_OR_WHOLE = (
    " (Or the state was passed to shard_map with P(), and each rank has what all hold: its "
    "specs are sparsejax.state_specs(state).)"
)


def find(state: Any, kind: type = SyncState) -> list[Any]:
    """All states of a kind inside an optimizer state, however deep."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


def residuals(state: Any) -> Any:
    """What is held back, as a tree like the parameters with a leading rank axis.

    By sparsifiers, and by schemes that choose what they send. A leaf that a sparsifier lets
    through whole holds back what rounding to its dtype took, mostly zeros; one that a
    scheme sends whole is an `optax.MaskedNode`. Where several transformations each have
    some of the leaves (`optax.masked`, `optax.partition`), it is one tree of all of them.

    Args:
        state: An optimizer state, chained, masked or partitioned as you like. Inside
            `shard_map` the rank axis has length 1.
    """
    states = [*find(state, SparsifyState), *find(state)]
    found = [s.residual for s in states if s.residual is not None]
    if not found:
        raise StateError(
            "nothing with a memory has its state here; pass the optimizer's state, as "
            "tx.init or tx.update returned it, of a chain with a sparsifier such as "
            "sparsejax.dgc(), or with a scheme that chooses, such as "
            "sparsejax.spardl_sync()."
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
    `dense_bytes` what an all-reduce would have sent, `rounds` how many messages with
    entries followed one another, those left out by which ranks agree on a few numbers;
    densities and imbalances are as in `Traffic`. `residual_norm` is
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
        if sync.residual is not None:
            result[f"{prefix}/residual_norm"] = _norm(sync.residual)
        result |= {f"{prefix}/{key}": jnp.asarray(value) for key, value in totals.items()}
    for number, own in enumerate(find(state, SparsifyState)):
        prefix = f"sparsify{number or ''}"
        result[f"{prefix}/skipped"] = own.skipped
        if own.residual is not None:
            result[f"{prefix}/residual_norm"] = _norm(own.residual)
    return result


def _norm(tree) -> jax.Array:
    """The norm of all numbers of a tree."""
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.float32(0)))


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
