"""Wrappers around any chain with a synchronization: accumulate, warm up, skip, clip.

Each takes an optax transformation and returns one, and they nest:

    tx = sparsejax.accumulate(
        optax.chain(sparsejax.dgc(0.01), sparsejax.zen_sync(), optax.adam(1e-3)), every=4)

The optimizer belongs inside: in a step in which nothing is sent it is not run, and its
state, the momentum and the count of steps, stays as it is.

Over the wire goes what the chain inside sends, and for `skip_nonfinite` one number, on
which all ranks agree. What decides between sending and not sending is a step counter or
that number, so all ranks decide alike.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sparsejax import axes, errors
from sparsejax.axes import AxisName
from sparsejax.transforms import select
from sparsejax.transforms.signatures import described
from sparsejax.transforms.state import observing, sharded, tree
from sparsejax.transforms.state.per_rank import (
    PerRank,
    by_rank,
    check_kind,
    check_like,
    check_ranks,
)
from sparsejax.units.dtypes import wide
from sparsejax.units.row_grads import is_row_grads
from sparsejax.wire import Wire


class AccumulateState(NamedTuple):
    """State of `accumulate`.

    Attributes:
        step: int32: updates so far.
        pending: The sum of the gradients since the last synchronization, a tree like the
            parameters: `PerRank`.
        inner: The state of the chain inside.
    """

    step: jax.Array
    pending: PerRank | None
    inner: Any


class WarmUpState(NamedTuple):
    """State of `warm_up`.

    Attributes:
        step: int32: updates so far.
        inner: The state of the chain inside.
    """

    step: jax.Array
    inner: Any


class SkipState(NamedTuple):
    """State of `skip_nonfinite`.

    Attributes:
        skipped: int32: updates left out because a gradient was not finite.
        inner: The state of the chain inside.
    """

    skipped: jax.Array
    inner: Any


@described
def accumulate(
    tx: optax.GradientTransformation,
    every: int,
    axis_name: AxisName | None = None,
    *,
    reduce: str = "mean",
) -> optax.GradientTransformationExtraArgs:
    """Adds up gradients on each rank, and runs a chain at every k-th step alone.

    The steps between return zeros, send nothing, and leave the state of the chain as it
    is, an optimizer's too. Sums are kept in float32 or wider, and what rounding to the
    gradient's dtype takes from them is added to the next ones. `ids` are not passed on,
    since they are those of one batch.

    Args:
        tx: The chain, with a synchronization in it.
        every: Run it at every k-th step; larger sends less often.
        axis_name: The mesh axis of the ranks; the only manual one if None.
        reduce: Whether the chain is given the "mean" of k gradients or their "sum".

    Example:
        >>> tx = optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))
        >>> tx = sparsejax.accumulate(tx, every=4)
    """
    tx = _checked(tx, "accumulate")
    errors.check_whole("every", every, 1)
    check_reduce(reduce)
    name = "sparsejax.accumulate"

    def init(params):
        if observing.is_observing():
            with observing.inside(observing.Wrapper(every=every, takes_rows=False)):
                return AccumulateState(jnp.int32(0), None, tx.init(params))
        _require_exchange(tx, params, name)
        why = f"{name} (every={every}) adds up gradients on each rank"
        axis = axes.resolve_for_state(axis_name, name, why)
        return AccumulateState(jnp.int32(0), by_rank(params, axis), tx.init(params))

    def update(updates, state, params=None, **extra):
        check_kind(state, AccumulateState, f"{name} (every={every})")
        wire = Wire.over(axis_name, f"update of {name}")
        sharded.require_sent(updates, name)
        paths, leaves, structure = tree.flatten(updates, name)
        for path, leaf in zip(paths, leaves, strict=True):
            tree.check_dtype(path, leaf)
            axes.require_local(path, tree.numbers(leaf), wire.axis)
        check_ranks(state.pending, wire.ranks)
        check_like(state.pending, paths, leaves, structure)
        extra.pop("ids", None)
        scale = every if reduce == "mean" else 1
        dtypes = [leaf.dtype for leaf in leaves]
        sums = [
            total + tree.to_dense(leaf).astype(total.dtype)[None]
            for total, leaf in zip(
                structure.flatten_up_to(state.pending.value), leaves, strict=True
            )
        ]

        def now(sums):
            sent = [
                tree.rounded(total[0] / scale, dtype)
                for total, dtype in zip(sums, dtypes, strict=True)
            ]
            rest = [
                scale * tree.rounding_error(total[0] / scale, x)[None]
                for total, x in zip(sums, sent, strict=True)
            ]
            out, inner = tx.update(structure.unflatten(sent), state.inner, params, **extra)
            return out, rest, inner

        def later(sums):
            return tree.nothing(jax.eval_shape(now, sums)[0]), sums, state.inner

        is_due = state.step % every == every - 1
        out, sums, inner = axes.cond(is_due, now, later, sums)
        pending = state.pending.with_value(structure.unflatten(sums))
        return out, AccumulateState(state.step + 1, pending, inner)

    return tree.transformation(init, update)


@described
def warm_up(
    tx: optax.GradientTransformation, steps: int
) -> optax.GradientTransformationExtraArgs:
    """Sends everything, by dense sums, in the first steps.

    Sparsifiers and top-k schemes inside the chain then send their whole accumulated
    gradient.

    Args:
        tx: The chain, with a synchronization in it.
        steps: How many steps. Inside `accumulate` these are synchronizations.

    Example:
        >>> tx = optax.chain(sparsejax.dgc(0.01), sparsejax.zen_sync(), optax.adam(1e-3))
        >>> tx = sparsejax.warm_up(tx, steps=100)
    """
    tx = _checked(tx, "warm_up")
    errors.check_whole("steps", steps, 0)
    name = "sparsejax.warm_up"

    def init(params):
        if not observing.is_observing():
            _require_exchange(tx, params, name)
        with observing.inside(observing.Wrapper(dense_steps=steps)):
            return WarmUpState(jnp.int32(0), tx.init(params))

    def update(updates, state, params=None, **extra):
        check_kind(state, WarmUpState, name)

        def side(dense):
            extras = {**extra, "dense": dense or extra.get("dense", False)}
            return lambda updates: tx.update(updates, state.inner, params, **extras)

        out, inner = axes.cond(state.step < steps, side(True), side(False), updates)
        return out, WarmUpState(state.step + 1, inner)

    return tree.transformation(init, update)


@described
def skip_nonfinite(
    tx: optax.GradientTransformation, axis_name: AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    """Leaves out a step in which any rank has a number that is not finite.

    Updates are then zero on all ranks, nothing is sent or remembered, and the state of the
    chain, an optimizer's too, stays as it is. `sparsejax.metrics` counts such steps.

    Args:
        tx: A sparsifier, or a chain with a synchronization.
        axis_name: The mesh axis of the ranks; the only manual one if None.

    Example:
        >>> tx = optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))
        >>> tx = sparsejax.skip_nonfinite(tx)
    """
    tx = _checked(tx, "skip_nonfinite")
    name = "sparsejax.skip_nonfinite"

    def init(params):
        return SkipState(jnp.int32(0), tx.init(params))

    def update(updates, state, params=None, **extra):
        check_kind(state, SkipState, name)
        wire = Wire.over(axis_name, f"update of {name}")
        sharded.require_sent(updates, name)
        paths, leaves, _ = tree.flatten(updates, name, rows=True)
        is_bad = jnp.int32(0)
        for path, leaf in zip(paths, leaves, strict=True):
            numbers = tree.numbers(leaf)
            axes.require_local(path, numbers, wire.axis)
            is_bad = jnp.maximum(is_bad, jnp.any(~jnp.isfinite(numbers)).astype(jnp.int32))
        is_bad, _ = wire.maximum(wire.per_rank(is_bad))

        def run(updates):
            return tx.update(updates, state.inner, params, **extra)

        def skip(updates):
            return tree.nothing(jax.eval_shape(run, updates)[0]), state.inner

        out, inner = axes.cond(is_bad > 0, skip, run, updates)
        return out, SkipState(state.skipped + (is_bad > 0), inner)

    return tree.transformation(init, update)


@described
def clip_by_rank(
    norm: float,
    axis_name: AxisName | None = None,
    *,
    model_axis: AxisName | None = None,
) -> optax.GradientTransformation:
    """Clips each rank's gradient, before anything is sent, at a norm over all leaves.

    The norm is divided by the square root of the number of ranks: so the norm of a sum of
    gradients that point in independent directions is at most about `norm`.

    Args:
        norm: The norm; smaller clips more.
        axis_name: The mesh axis of the ranks; the only manual one if None.
        model_axis: The mesh axis over which tensors are sharded, if any.

    Example:
        >>> clip, top = sparsejax.transforms.clip_by_rank(1.0), sparsejax.dgc(0.01)
        >>> tx = optax.chain(clip, top, sparsejax.zen_sync(), optax.sgd(0.1))
    """
    errors.check_positive("clip_norm", norm)
    name = "sparsejax.transforms.clip_by_rank"

    def init(params):
        del params
        return optax.EmptyState()

    def update(updates, state, params=None, **extra):
        del params, extra
        wire = Wire.over(axis_name, f"update of {name}")
        sharded.refuse(
            updates,
            name,
            "and its gradient holds those of all ranks already: leave it out with "
            "optax.masked, or scale the loss.",
        )
        paths, leaves, structure = tree.flatten(updates, name, rows=True)
        # Rows that are listed twice add up before they have a norm.
        leaves = [leaf.merged() if is_row_grads(leaf) else leaf for leaf in leaves]
        select.check_model_axis(model_axis, wire)
        for path, leaf in zip(paths, leaves, strict=True):
            select.require_local(path, tree.numbers(leaf), wire)
        arrays = [tree.numbers(leaf) for leaf in leaves]
        select.check_shards(arrays, model_axis, "clip_norm")
        numbers = [x.astype(wide(x.dtype)) for x in arrays]
        # A number that is not finite would make the norm, and all other numbers, so.
        finite = [jnp.where(jnp.isfinite(x), x, 0) for x in numbers]
        squares = [_over_shards(jnp.sum(x * x), model_axis) for x in finite]
        most = norm * wire.ranks**-0.5
        scale = most / jnp.maximum(jnp.sqrt(sum(squares, jnp.float32(0))), most)
        clipped = [
            tree.with_numbers(leaf, (x * scale).astype(leaf.dtype))
            for x, leaf in zip(numbers, leaves, strict=True)
        ]
        return structure.unflatten(clipped), state

    return tree.transformation(init, update)


def _over_shards(square, model_axis):
    """A square added up over the shards of a leaf; a replicated leaf counts once."""
    if model_axis is None:
        return square
    shards = Wire(model_axis)
    names = frozenset(axes.axis_names(model_axis))
    if axes.is_checking(model_axis) and not names & axes.varying_axes(square):
        return square
    return shards.psum(shards.per_rank(square))[0]


def _checked(tx, what):
    """The transformation, with extra arguments passed on."""
    if not isinstance(tx, optax.GradientTransformation):
        raise errors.ArgumentError(
            f"{what} wraps an optax transformation, such as "
            f"optax.chain(sparsejax.zen_sync(), optax.adam(1e-3)), got {tx!r}."
        )
    return optax.with_extra_args_support(tx)


def _require_exchange(tx, params, what):
    """Raises where nothing inside synchronizes."""
    if not observing.observed(tx, params).exchanges:
        raise errors.ArgumentError(
            f"{what} wraps nothing that synchronizes: put the whole chain in it, "
            "optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))."
        )


def check_reduce(reduce: str) -> None:
    """Raises unless it is "sum" or "mean"."""
    if reduce not in ("sum", "mean"):
        hint = " Did you mean 'mean'?" if reduce in ("avg", "average") else ""
        raise errors.ArgumentError(f"reduce must be 'sum' or 'mean', got {reduce!r}.{hint}")
