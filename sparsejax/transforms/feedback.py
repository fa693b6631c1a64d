"""Error feedback, written once for sparsifiers and lossy schemes.

    accumulated gradient = residual + gradient = sent + new residual

A sparsifier on a tree, or an exchange, implements `Lossy`: it splits the accumulated
gradient into the part that it sends and the part that it leaves out. `feedback` makes an
optax transformation of it, in which a `Memory` keeps what was left out, on each rank, for
the next step. On the wire: one number a rank, the squared norm of its residual, so that the
norm over all ranks can be read from the state on any one process; and if ranks have weights
one more, their sum (`state.weights`).

The memories, with the law that each obeys, are in `state.memories`. Residuals and
velocities are float32 or wider whatever the dtype of the gradient, so they include the
rounding errors of what was sent.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from sparsejax import axes, branches, errors
from sparsejax.axes import AxisName
from sparsejax.state import observing, sharded, tree
from sparsejax.state.memories import Memory, Residual
from sparsejax.state.per_rank import (
    OUTLINE,
    PerRank,
    by_rank,
    check_kind,
    check_like,
    check_ranks,
    norm_over_ranks,
)
from sparsejax.state.weights import Weight
from sparsejax.transforms import checks
from sparsejax.transforms.buckets.leaf_places import LeafPlaces
from sparsejax.transforms.described import described
from sparsejax.transforms.entry import Entry
from sparsejax.units.units import wide
from sparsejax.wire.collectives import Wire


_RESIDUAL = Residual()


class Accumulated(NamedTuple):
    """Accumulated gradients, and the options with which `update` was called.

    Attributes:
        paths: The leaves' paths.
        leaves: The leaves; float32 or wider if they have a residual.
        likes: The shapes of the leaves, and the dtypes in which they are sent.
        dense: Whether everything is sent.
        ids: The rows that this rank's batch has read, by path, if the caller passed them.
        masked: Whether the tree has masked leaves, to which ids may refer.
        moving: Whether any leaf has a velocity, which is non-zero in rows of earlier
            batches, too.
        weight: This rank's weight, or [ranks] all of them, if `takes_weight`; None for 1.
        entered: What types do not say about the leaves, if the update was entered.
        params: The parameters of the leaves, if entries are selected by them; else None.
    """

    paths: Sequence[str]
    leaves: Sequence[Any]
    likes: Sequence[jax.ShapeDtypeStruct]
    dense: bool = False
    ids: Any = None
    masked: bool = False
    moving: bool = False
    weight: Any = None
    entered: LeafPlaces | None = None
    params: Sequence[Any] | None = None


class Outcome(NamedTuple):
    """The sent and the left out part of an accumulated gradient, as lists over its leaves.

    Attributes:
        sent: The leaves that `update` returns, in the gradients' dtypes: arrays,
            `SparseTensor`s or `RowGrads`.
        left: The part of each accumulated leaf that was not sent, in its dtype; None if
            the leaf has no residual.
        selected: Whether only selected entries of a leaf were sent.
        state: The next state.
    """

    sent: list[Any]
    left: list[Any]
    selected: list[bool]
    state: Any


class Lossy(Protocol):
    """The protocol of a sparsifier on a tree, and of an exchange.

    Either may leave out a part of the gradients that it is given.
    """

    @property
    def name(self) -> str:
        """The call as the user wrote it, for messages."""
        ...

    @property
    def axis_name(self) -> AxisName | None:
        """The mesh axis of the ranks; the only manual one if None."""
        ...

    @property
    def takes_rows(self) -> bool:
        """Whether a leaf may be `RowGrads`."""
        ...

    @property
    def takes_weight(self) -> bool:
        """Whether `step` applies the weights of ranks; if not, its leaves are weighted."""
        ...

    @property
    def entry(self) -> Entry:
        """The `Entry` by which its update is called under `jit`."""
        ...

    def init(self, params: Any) -> Any:
        """Returns the first state for parameters of these shapes and dtypes."""
        ...

    def of_shard(self, path: str, node: Any, wire: Wire) -> Any:
        """Returns the update for the gradient of a parameter sharded among the ranks."""
        ...

    def leaves_out(self, paths: list[str], leaves: list[Any]) -> list[bool]:
        """Returns for each leaf whether it needs a residual."""
        ...

    def check(self, paths: list[str], leaves: list[Any], state: Any, wire: Wire) -> None:
        """Raises if the gradients, or the state, cannot be used."""
        ...

    def outline(self, paths: list[str], leaves: list[Any], wire: Wire) -> list[Any]:
        """Returns leaves with the types of those that `step` sends, and sends nothing.

        Each is computed from its own gradient alone, so that the dependencies of a chain
        can be traced.

        Args:
            paths: The leaves' paths.
            leaves: The gradients.
            wire: The ranks.
        """
        ...

    def step(self, given: Accumulated, state: Any, wire: Wire) -> Outcome:
        """Sends a part of the accumulated gradient, or with `given.dense` all of it."""
        ...


class FeedbackState(NamedTuple):
    """State of `feedback`.

    Attributes:
        step: int32: updates so far.
        residual: The residuals, a tree like the parameters with an `optax.MaskedNode` for
            each leaf that is always sent whole; None if all are, or without a memory.
        momentum: The velocities, a tree of the same kind, of all leaves but integer ones;
            None if the memory has no momentum.
        norm: float32: the norm of the residuals of all ranks; None if there are none.
        inner: The state of the sparsifier, or of the exchange.
    """

    step: jax.Array
    residual: PerRank | None
    momentum: PerRank | None
    norm: jax.Array | None
    inner: Any


@described
def feedback(
    lossy: Lossy, memory: Memory | None = _RESIDUAL
) -> optax.GradientTransformationExtraArgs:
    """Makes an optax transformation of a sparsifier on a tree, or of an exchange.

    Args:
        lossy: The sparsifier, or the exchange.
        memory: How the part that was left out is added to later gradients; if None, it is
            lost.
    """
    if isinstance(lossy, optax.GradientTransformation):
        raise errors.ArgumentError(
            "feedback was given an optax transformation, which has its own memory if it "
            "needs one: two would each keep what the other has sent. Give the memory to "
            "it: sparsejax.dgc(0.01, memory=...), sparsejax.sync(scheme, memory=...)."
        )
    if memory is not None and not isinstance(memory, Memory):
        raise errors.ArgumentError(
            "memory must be sparsejax.Residual(), sparsejax.MomentumCorrection(0.9) or "
            f"None, got {memory!r}."
        )

    def init(params: Any) -> Any:
        if axes.outside_of(params, lossy.axis_name):
            if mesh := lossy.entry.of_parameters(params):
                return lossy.entry.init(mesh, init, params)
        checks.check_shards(lossy, memory, params)
        rest = sharded.apart(params).rest
        paths, leaves, structure = tree.flatten(rest, f"init of {lossy.name}")
        if not observing.is_observing():
            checks.check_replicated(rest, lossy.axis_name, f"init of {lossy.name}")
        inner = lossy.init(params)
        residual = momentum = norm = None
        needed, moving = _remembered(lossy, memory, paths, leaves)
        if any(needed + moving) and observing.is_observing():
            observing.report_memory(memory)
        elif any(needed + moving):
            why = f"{lossy.name} keeps on each rank what was not sent"
            axis_name = axes.resolve_for_state(lossy.axis_name, lossy.name, why)

            def kept(flags):
                pairs = zip(leaves, flags, strict=True)
                kept = [leaf if flag else optax.MaskedNode() for leaf, flag in pairs]
                return by_rank(structure.unflatten(kept), axis_name) if any(flags) else None

            residual, momentum = kept(needed), kept(moving)
            norm = None if residual is None else jnp.float32(0)
        return FeedbackState(jnp.int32(0), residual, momentum, norm, inner)

    def update(
        updates,
        state,
        params=None,
        *,
        dense=False,
        ids=None,
        weight=None,
        entered=None,
        **extra,
    ):
        checks.require_params(lossy, params)
        if not axes.manual_axes() and lossy.entry.outside(updates, state, params):
            extra |= {"dense": dense, "ids": ids, "weight": weight}
            return lossy.entry.run(update, updates, state, params, **extra)
        check_kind(state, FeedbackState, lossy.name)
        wire = Wire.over(lossy.axis_name, f"update of {lossy.name}")
        checks.check_replicated(params, wire.axis, f"update of {lossy.name}")
        checks.check_shards(lossy, memory, updates)
        masked = tree.has_masked(updates)
        shards = sharded.apart(updates)
        pairs = zip(shards.paths, shards.nodes, strict=True)
        parts = [lossy.of_shard(path, node, wire) for path, node in pairs]
        paths, leaves, structure = tree.flatten(
            shards.rest, lossy.name, rows=lossy.takes_rows
        )
        needed, moving = _remembered(lossy, memory, paths, leaves)
        checks.check_memory(lossy, memory, any(needed), any(moving), state)
        check_ranks((state.residual, state.momentum, state.inner), wire.ranks)
        for held in (state.residual, state.momentum):
            check_like(held, paths, leaves, structure)
        lossy.check(paths, leaves, state.inner, wire)
        checks.check_velocities(lossy, paths, leaves, moving)
        if OUTLINE.get():
            # With dense=True a sparsifier returns each gradient unchanged.
            as_is = dense and not lossy.entry.sums
            outlined = leaves if as_is else lossy.outline(paths, leaves, wire)
            outlined = structure.unflatten(outlined)
            return shards.together(outlined, parts), state
        if weight is not None:
            checks.check_weight(lossy, updates, any(needed + moving))
            if lossy.entry.sums and not lossy.takes_weight:
                leaves = list(map(Weight.of(weight, wire).of_leaf, leaves))
        likes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        given = Accumulated(paths, leaves, likes, dense, None, masked, any(moving))
        own_weight = weight if lossy.takes_weight else None
        given = given._replace(weight=own_weight, entered=entered)
        own = _Update(lossy, memory, structure, given, wire)
        exchange = axes.all_manual(own.exchanged, wire.axis)
        # Inside `all_manual`, each device along the further axes has whole leaves.
        reads = lossy.entry.reads_params
        params = structure.flatten_up_to(sharded.apart(params).rest) if reads else None
        with tree.of_shards({}) if axes.further_axes() else contextlib.nullcontext():
            sent, after = exchange(leaves, state, ids, params)
        if axes.further_axes():
            sent = list(map(tree.sharded_as, sent, leaves))
            after = jax.tree.map(axes.sharded_as, after, state)
        return shards.together(structure.unflatten(sent), parts), after

    return tree.transformation(init, update)


class _Update(NamedTuple):
    """The arguments of an update that are static while it is traced.

    Attributes:
        lossy: The sparsifier, or the exchange.
        memory: How residuals are added to later gradients.
        structure: The structure of the tree of leaves.
        given: The leaves' paths and types, and the options of `update`.
        wire: The ranks.
    """

    lossy: Lossy
    memory: Memory | None
    structure: Any
    given: Accumulated
    wire: Wire

    def exchanged(self, leaves, state, ids, params):
        """Sends the leaves; returns the updates and the next state."""
        lossy, memory, structure, given, wire = self
        residuals = _unpacked(structure, state.residual, len(leaves))
        momenta = _unpacked(structure, state.momentum, len(leaves))
        accumulated = list(leaves)
        for i, residual in enumerate(residuals):
            if memory is None or (residual is None and momenta[i] is None):
                continue
            dtype = leaves[i].dtype
            gradient = tree.to_dense(leaves[i]).astype(wide(dtype))
            waiting = jnp.zeros_like(gradient) if residual is None else residual
            accumulate = memory.accumulate
            if getattr(lossy, "reads_often", False):
                accumulate = _once(accumulate, state.step)
            total, momenta[i] = accumulate(gradient, waiting, momenta[i])
            # A leaf without a residual is sent in its gradient's dtype; its rounding error
            # is lost.
            accumulated[i] = total.astype(dtype) if residual is None else total
        given = given._replace(leaves=accumulated, ids=ids, params=params)
        sent, left, selected, inner = lossy.step(given, state.inner, wire)
        for i, momentum in enumerate(momenta):
            if momentum is not None and memory is not None and selected[i]:
                momenta[i] = memory.after(momentum, left[i] != accumulated[i])
        residual = _packed(structure, left, state.residual)
        norm = None if residual is None else _norm(structure, residual, wire, given.entered)
        momentum = _packed(structure, momenta, state.momentum)
        return sent, FeedbackState(state.step + 1, residual, momentum, norm, inner)


def _once(accumulate, step):
    """Wraps `Memory.accumulate` in a branch, so that XLA computes its result once.

    XLA would fuse the sum of gradient and residual into each of its readers, and compute it
    in each of them. It does not recompute the result of a branch.
    """
    unseen = (step | 1) != 0  # always true

    def run(gradient, waiting, momentum):
        nothing = lambda gradient, waiting, momentum: (waiting, momentum)
        return branches.cond(unseen, accumulate, nothing, gradient, waiting, momentum)

    return run


def _unpacked(structure: Any, held: PerRank | None, count: int) -> list[Any]:
    """Returns this rank's arrays of a tree by rank; None for masked leaves."""
    if held is None:
        return [None] * count
    leaves = structure.flatten_up_to(held.value)
    return [None if tree.is_masked(leaf) else leaf[0] for leaf in leaves]


def _packed(structure, arrays, held):
    """Returns arrays as a tree by rank with the structure and dtypes of `held`."""
    if held is None:
        return None
    before = structure.flatten_up_to(held.value)
    leaves = [
        old if tree.is_masked(old) else new[None].astype(old.dtype)
        for new, old in zip(arrays, before, strict=True)
    ]
    return held.with_value(structure.unflatten(leaves))


def _norm(structure, residual, wire, entered):
    """Returns the norm of the residuals of all ranks."""
    held = structure.flatten_up_to(residual.value)
    shards = [()] * len(held) if entered is None else entered.axes
    pairs = zip(held, shards, strict=True)
    return norm_over_ranks([pair for pair in pairs if not tree.is_masked(pair[0])], wire)


def _remembered(
    lossy: Lossy, memory: Memory | None, paths: list[str], leaves: list[Any]
) -> tuple[list[bool], list[bool]]:
    """Returns for each leaf whether it has a residual, and whether it has a velocity.

    With momentum, all leaves of inexact dtypes have a velocity.
    """
    if memory is None:
        return [False] * len(leaves), [False] * len(leaves)
    moving = [
        memory.has_momentum and jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves
    ]
    return lossy.leaves_out(paths, leaves), moving
