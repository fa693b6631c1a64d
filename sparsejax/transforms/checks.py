"""Checks of the arguments of an exchange and of `feedback`: leaves and states."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import axes
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError, StateError
from sparsejax.state import sharded, tree
from sparsejax.state.per_rank import PerRank
from sparsejax.transforms.buckets import Bucket
from sparsejax.units.row_grads import is_row_grads
from sparsejax.wire.collectives import Wire


def check_leaves(
    paths: Sequence[str], leaves: Sequence[Any], buckets: Sequence[Bucket], axis: AxisName
) -> None:
    """Raises if a gradient is summed already, or its scheme does not take its kind.

    Args:
        paths: The leaves' paths.
        leaves: The gradients.
        buckets: The buckets in which they are to be summed.
        axis: The mesh axis of the ranks.
    """
    for path, leaf in zip(paths, leaves, strict=True):
        axes.require_local(path, tree.numbers(leaf), axis)
        if tree.is_sparse(leaf):
            _check_origin(path, leaf)
        if tree.is_sparse(leaf) or is_row_grads(leaf):
            leaf.check(path)
    for bucket in buckets:
        for i, path in zip(bucket.leaves, bucket.paths, strict=True):
            if bucket.is_lossy:
                _check_dense(path, leaves[i], type(bucket.scheme).__name__)


def _check_dense(path, leaf, name):
    """Raises if a lossy scheme is given a gradient of entries or rows."""
    if is_row_grads(leaf):
        raise ArgumentError(
            f"leaf {path!r} is RowGrads, and {name} keeps what it leaves out in an array "
            "as large as the table: sum it by a lossless scheme, such as "
            "sparsejax.zen_sync() or a rule {path: sparsejax.schemes.Zen()}, or make the "
            "leaf dense with its method to_dense()."
        )
    if tree.is_sparse(leaf):
        raise ArgumentError(
            f"the gradient of {path!r} is sparse already, and {name} leaves something out "
            "by itself: two memories would each keep what the other has sent. Leave the "
            "sparsifier out, or use a lossless scheme such as sparsejax.zen_sync()."
        )


def _check_origin(path, leaf):
    """Raises if indices, or values in a code, were changed after the sparsifier."""
    changed = "indices" if leaf.origin.is_changed(leaf.indices) else ""
    if leaf.coded is not None and leaf.coded.origin.is_changed(leaf.values):
        changed = changed or f"values, which are in the code {leaf.coded.code!r},"
    if changed:
        raise ArgumentError(
            f"between the sparsifier and the synchronization the {changed} of the selected "
            f"entries of {path!r} were changed: optax.scale, and all that computes with "
            "every array of the gradients, computes with them, too. Put it in front of the "
            "sparsifier, or after the synchronization: optax.chain(sparsejax.dgc(0.01), "
            "sparsejax.zen_sync(), optax.scale(2.0))."
        )


# Ends messages about a parameter of which each rank holds a shard: why, and the fix.
_SHARDED = (
    "each rank holds a shard of it (FSDP), whose gradient is no part of a sum over the "
    "ranks. Synchronize what all ranks hold whole, and give shards an optimizer without a "
    "synchronization, by optax.partition; or shard them over a mesh axis that is none of "
    "the ranks'"
)


def check_replicated(params: Any, axis_name: AxisName | None, what: str) -> None:
    """Raises if the type of a parameter varies over the axis of the ranks.

    Args:
        params: The parameters, or None.
        axis_name: The mesh axis of the ranks; the only manual one if None.
        what: The name of the public function, for the message.
    """
    manual = axes.manual_axes()
    names = axes.axis_names(axis_name) if axis_name is not None else manual
    if params is None or (axis_name is None and len(manual) != 1):
        return
    for keys, leaf in jax.tree_util.tree_leaves_with_path(sharded.apart(params).rest):
        over = sorted(axes.varying_axes(leaf) & set(names))
        if over:
            raise ArgumentError(
                f"{what}: the parameter {tree.named(keys)!r} varies over {over[0]!r}, over "
                f"which gradients are synchronized. If it is sharded over {over[0]!r}, "
                f"{_SHARDED}. If it is what sparsejax.local returned, give the parameters "
                "themselves to init and update."
            )


def require_params(lossy: Any, params: Any) -> None:
    """Raises if the parameters are needed to select entries, and are None.

    Args:
        lossy: The sparsifier on a tree, or the exchange; see `feedback.Lossy`.
        params: The parameters, or None.
    """
    if params is None and lossy.entry.reads_params:
        raise ArgumentError(
            f"update of {lossy.name} was given no parameters, by which it selects what is "
            "sent: tx.update(grads, opt_state, params)."
        )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Leaves:
    """The paths and shapes of the leaves that a state was made for, static under `jit`.

    Attributes:
        shapes: The path and the shape of each leaf.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, paths: Sequence[str], leaves: Sequence[Any]) -> "Leaves":
        """Returns the paths and shapes of parameters, or of gradients."""
        shapes = (tuple(leaf.shape) for leaf in leaves)
        return cls(tuple(zip(paths, shapes, strict=True)))

    def check(self, paths: Sequence[str], leaves: Sequence[Any], wire: Wire) -> None:
        """Raises unless the gradients have the same paths and shapes.

        Args:
            paths: The gradients' paths.
            leaves: The gradients.
            wire: The ranks.
        """
        given = Leaves.of(paths, leaves)
        if given == self:
            return
        what = "the state was made for other parameters"
        fix = "Make it with those that are trained: sparsejax.init(tx, params, mesh)"
        there = [path for path, _ in self.shapes]
        missing, extra = _only_in(paths, there), _only_in(there, paths)
        if missing or extra or len(there) != len(paths):
            raise StateError(
                f"{what}: the gradients have {missing}, the state {extra}. {fix}."
            )
        pairs = zip(self.shapes, given.shapes, strict=True)
        (path, was), (_, now) = next((a, b) for a, b in pairs if a != b)
        fix += ", and with param_specs=... where a second mesh axis shards them."
        fix = axes.hint_of_whole().rstrip() or fix
        over = " or ".join(_sharding(was, now, wire))
        if over:
            fix += f" If {path!r} is sharded over {over}, of the ranks, {_SHARDED}."
        raise StateError(
            f"{what}: in it {path!r} has the shape {list(was)}, its gradient {list(now)}. "
            + fix
        )


def _only_in(paths, others):
    return [path for path in paths if path not in others]


def _sharding(whole, shard, wire):
    """Returns the axes of the ranks over which a leaf may be sharded, judged by shapes.

    These are those axes, one of them or all together, whose size times one dimension of
    `shard` gives `whole`.
    """
    names = axes.axis_names(wire.axis)
    sizes = {repr(name): lax.axis_size(name) for name in names}
    sizes[" and ".join(sizes)] = wire.ranks
    times = lambda at, size: (*shard[:at], shard[at] * size, *shard[at + 1 :])
    return [
        over
        for over, size in sizes.items()
        if whole in [times(at, size) for at in range(len(shard))]
    ]


_HINT = (
    "Leaves are grouped by path, size, dtype and the mesh axes over which they vary. Make "
    "the state from parameters like the gradients: of the same dtypes, and where a second "
    "mesh axis shards them, with sparsejax.init(..., param_specs=...) and the check_vma of "
    "the shard_map in which update runs."
)


def check_groups(buckets: Sequence[Bucket], state: Any, wire: Wire) -> None:
    """Raises if the buckets of the gradients are not those of a state.

    Args:
        buckets: The buckets of the gradients.
        state: The state of an exchange.
        wire: The ranks.
    """
    names = [bucket.name for bucket in buckets]
    if set(names) != set(state.traffic):
        raise StateError(
            "the gradients do not match the state: they form the groups "
            f"{sorted(names)}, the state has {sorted(state.traffic)}. "
            + (axes.hint_of_whole() or _HINT)
        )
    for bucket in buckets:
        _check_scheme_state(bucket, state.schemes[bucket.name], wire)


def _check_scheme_state(bucket, state, wire):
    """Raises unless a bucket's scheme made its state, for this many units and ranks."""
    given = state.value if isinstance(state, PerRank) else state
    if bucket.is_lossy:
        given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), given)
    like = bucket.like(jnp.float32)
    wanted = jax.eval_shape(lambda: bucket.scheme.init(like, wire))
    shapes = lambda tree: [jnp.shape(x) for x in jax.tree.leaves(tree)]
    same = jax.tree.structure(given) == jax.tree.structure(wanted)
    if not same or shapes(given) != shapes(wanted):
        raise StateError(
            f"the state of {bucket.name!r} was made by another scheme than "
            f"{type(bucket.scheme).__name__}, or for another number of ranks. "
            + axes.hint_of_whole()
            + "Make it with the transformation that updates it; "
            "sparsejax.residuals(state) is what the old one held."
        )


def check_shards(lossy: Any, memory: Any, given: Any) -> None:
    """Raises if the memory has momentum, which parameters sharded by rank would not get.

    Args:
        lossy: The sparsifier on a tree, or the exchange; a `Lossy`.
        memory: Its memory, or None.
        given: The parameters, or the gradients.
    """
    if memory is not None and memory.has_momentum:
        sharded.refuse(
            given,
            f"{lossy.name} with memory={memory!r}",
            "and has no velocity: it would be trained without momentum. Let the optimizer "
            "have the momentum, with memory=sparsejax.Residual(), or give tables their own "
            "chain by optax.partition: optax.chain(sparsejax.dense_sync(), "
            "optax.sgd(0.1, momentum=0.9)).",
        )


def check_weight(lossy: Any, given: Any, remembers: bool) -> None:
    """Raises if a part of the chain does not support the weights of ranks.

    Args:
        lossy: The sparsifier on a tree, or the exchange; a `Lossy`.
        given: The gradients.
        remembers: Whether any leaf has a residual or a velocity.
    """
    call = f"update of {lossy.name} was given weight="
    sharded.refuse(
        given,
        call,
        "whose gradient is a sum over the ranks already. Leave weight out, or train the "
        "table in a chain of its own, by optax.partition.",
    )
    if remembers and not lossy.takes_weight:
        raise ArgumentError(
            f"{call}, and it keeps on each rank what it does not send: of a rank of weight "
            "0 it would forget what it sends, and nobody counts it. Leave weight out, or "
            "take a synchronization that sends everything (sparsejax.dense_sync(), "
            "sparsejax.zen_sync()) without a sparsifier, or sparsejax.chunked_sync()."
        )


def check_velocities(
    lossy: Any, paths: Sequence[str], leaves: Sequence[Any], moving: Sequence[bool]
) -> None:
    """Raises if the gradient of a leaf that has a velocity is a list of entries or rows.

    Args:
        lossy: The sparsifier on a tree, or the exchange; a `Lossy`.
        paths: The leaves' paths.
        leaves: The gradients.
        moving: Whether each leaf has a velocity.
    """
    for path, leaf, moves in zip(paths, leaves, moving, strict=True):
        if moves and (tree.is_sparse(leaf) or is_row_grads(leaf)):
            raise ArgumentError(
                f"leaf {path!r} is {type(leaf).__name__}, and with MomentumCorrection "
                f"{lossy.name} keeps its velocity in an array as large as the parameter: "
                "let the optimizer have the momentum, with memory=sparsejax.Residual(), or "
                "give the leaf a chain of its own by optax.partition."
            )


def check_memory(lossy: Any, memory: Any, needs: bool, moves: bool, state: Any) -> None:
    """Raises if the state has a residual and none is needed, or the reverse.

    Args:
        lossy: The sparsifier on a tree, or the exchange; a `Lossy`.
        memory: Its memory, or None.
        needs: Whether any leaf needs a residual.
        moves: Whether any leaf has a velocity.
        state: The state of `feedback`.
    """
    if needs != (state.residual is not None):
        raise StateError(
            f"the state of {lossy.name} was made for another scheme or memory: it "
            + ("holds nothing back" if needs else "holds something back")
            + ", and the transformation does"
            + (". " if needs else " not. ")
            + "Make it with the transformation that updates it."
        )
    if moves != (state.momentum is not None):
        raise StateError(
            f"{lossy.name} has memory={memory!r}, and the state was made with another."
        )


def undifferentiated(leaf: Any, path: str) -> Any:
    """Returns a gradient of which a derivative raises.

    JAX would differentiate the bits in which values are sent, and return 0.

    Args:
        leaf: The gradient.
        path: Its path.
    """

    @jax.custom_jvp
    def itself(x):
        return x

    @itself.defjvp
    def derivative(primals, tangents):
        del primals, tangents
        raise ArgumentError(
            f"the update of {path!r} is differentiated, and lists of entries or rows, and "
            "what a lossy scheme sends, have no derivative. Give whole arrays to a scheme "
            "that is lossless, such as sparsejax.zen_sync(), or stop the derivative before "
            "the synchronization, jax.lax.stop_gradient(grads)."
        )

    return tree.with_numbers(leaf, itself(tree.numbers(leaf)))


def check_model_axis(model_axis: AxisName | None, wire: Wire) -> None:
    """Raises if `model_axis` is, or shares, an axis of the ranks."""
    if model_axis is None:
        return
    shards = axes.resolve(model_axis, "model_axis of a sparsejax sparsifier")
    if set(axes.axis_names(shards)) & set(axes.axis_names(wire.axis)):
        raise ArgumentError(
            f"model_axis={shards!r} is the axis of the ranks, or one of them; it "
            "is the one over which tensors are sharded."
        )
