"""Wrappers that act by step: `accumulate` skips steps, `warm_up` sends all in the first.

They depend on a step counter, which is equal on all ranks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sparsejax import arguments, axes, branches
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError
from sparsejax.state import observing, sharded, tree
from sparsejax.state.pending import Period
from sparsejax.state.per_rank import PerRank, by_rank, check_kind, check_like, check_ranks
from sparsejax.transforms.described import described
from sparsejax.transforms.entry import Entry
from sparsejax.transforms.wrappers.common import checked, require_exchange
from sparsejax.units.units import rounded
from sparsejax.wire.collectives import Wire


class AccumulateState(NamedTuple):
    """State of `accumulate`.

    Attributes:
        step: int32: updates so far.
        pending: The sum of the gradients since the last synchronization, a tree like the
            parameters: `PerRank`.
        inner: The state of the chain inside.
        inside: float32: bytes that the last update sent over axes that are not the ranks',
            if it was entered under `jit`; else 0.
        period: The number of steps from one synchronization to the next, by which a mean
            divides the sums; None for sums.
    """

    step: jax.Array
    pending: PerRank | None
    inner: Any
    inside: jax.Array
    period: Period | None = None


class WarmUpState(NamedTuple):
    """State of `warm_up`.

    Attributes:
        step: int32: updates so far.
        inner: The state of the chain inside.
    """

    step: jax.Array
    inner: Any


@described
def accumulate(
    tx: optax.GradientTransformation,
    every: int,
    axis_name: AxisName | None = None,
    *,
    reduce: str = "mean",
) -> optax.GradientTransformationExtraArgs:
    """Adds up gradients on each rank, and runs a chain at every k-th step.

    With g[1], ..., g[k] the gradients of a rank since the last exchange, the chain is given

        (g[1] + ... + g[k]) / k    with reduce="mean"
        g[1] + ... + g[k]          with reduce="sum"

    The steps between return zeros, send nothing, and leave the state of the chain
    unchanged, the optimizer's too. Sums are kept in float32 or wider. The error of rounding
    them to the gradient's dtype is added to the next sum. `ids` are not passed on, because
    they belong to one batch.

    Each step counts as much as the others, also where `sparsejax.data_parallel(weight=)`
    weighs the ranks within a step.

    A state of means is refused by a transformation with another k, which would divide what
    is pending by another number.

    Args:
        tx: The chain, with a synchronization in it.
        every: k: the chain runs at every k-th step; larger sends less often.
        axis_name: The mesh axis of the ranks; the only manual one if None.
        reduce: Whether the chain is given the "mean" of k gradients or their "sum".

    Returns:
        An `optax.GradientTransformationExtraArgs`, the chain with the wrapper around it.

    Example:
        >>> tx = optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))
        >>> tx = sparsejax.accumulate(tx, every=4)

    See Also:
        `sparsejax.local_steps`: ranks take optimizer steps between exchanges.
    """
    tx = checked(tx, "accumulate")
    arguments.check_whole("every", every, 1)
    arguments.check_reduce(reduce)
    name = "sparsejax.accumulate"
    # A mean is a sum that is divided by the number of all its steps, earlier ones, too.
    period = Period(every) if reduce == "mean" else None

    def nothing_yet(params):
        why = f"{name} (every={every}) adds up gradients on each rank"
        return by_rank(params, axes.resolve_for_state(axis_name, name, why))

    def first_state(pending, inner):
        return AccumulateState(jnp.int32(0), pending, inner, jnp.float32(0), period)

    def init(params):
        if observing.is_observing():
            with observing.inside(observing.Wrapper(every=every, takes_rows=False)):
                return first_state(None, tx.init(params))
        require_exchange(tx, params, name)
        mesh = entry.of_parameters(params)
        pending = entry.init(mesh, nothing_yet, params) if mesh else nothing_yet(params)
        return first_state(pending, tx.init(params))

    entry = Entry(name, axis_name, sums=False)
    scale = every if reduce == "mean" else 1

    def added(updates, pending, entered=None):
        """Adds the gradients to the pending sums.

        Returns:
            The gradients unchanged; the new sums, and the bytes sent over inner axes.
        """
        wire = Wire.over(axis_name, f"update of {name}")
        sharded.require_sent(updates, name)
        paths, leaves, structure = tree.flatten(updates, name)
        for path, leaf in zip(paths, leaves, strict=True):
            tree.check_dtype(path, leaf)
            axes.require_local(path, tree.numbers(leaf), wire.axis)
        check_ranks(pending, wire.ranks)
        check_like(pending, paths, leaves, structure)
        sums = [
            total + tree.to_dense(leaf).astype(total.dtype)[None]
            for total, leaf in zip(
                structure.flatten_up_to(pending.value), leaves, strict=True
            )
        ]
        inside = jnp.float32(0.0 if entered is None else sum(entered.inside))
        return updates, (pending.with_value(structure.unflatten(sums)), inside)

    def taken(updates, pending, **entered):
        """Returns the scaled sums, and what rounding took from the sums before, to keep."""
        del entered
        _, leaves, structure = tree.flatten(updates, name)
        sums = structure.flatten_up_to(pending.value)
        sent = [
            rounded(total[0] / scale, leaf.dtype)
            for total, leaf in zip(sums, leaves, strict=True)
        ]
        rest = [
            scale * tree.rounding_error(total[0] / scale, x)[None]
            for total, x in zip(sums, sent, strict=True)
        ]
        rest = pending.with_value(structure.unflatten(rest))
        return structure.unflatten(sent), rest

    def update(updates, state, params=None, **extra):
        check_kind(state, AccumulateState, f"{name} (every={every})")
        if period is not None:
            period.check(state.period, name)
        if every > 1 and extra.get("weight") is not None:
            raise ArgumentError(
                f"update of {name} (every={every}) was given weight=, and the gradients of "
                f"{every} steps are sent as one, which has one weight. Multiply the loss "
                "by the weight of the rank over the mean of all weights."
            )
        extra.pop("ids", None)
        updates, (sums, inside) = entry.run(added, updates, state.pending, params)

        def now(sums):
            sent, rest = entry.run(taken, updates, sums, params)
            out, inner = tx.update(sent, state.inner, params, **extra)
            return out, rest, inner

        def later(sums):
            return tree.nothing(jax.eval_shape(now, sums)[0]), sums, state.inner

        is_due = state.step % every == every - 1
        out, pending, inner = branches.cond(is_due, now, later, sums)
        return out, AccumulateState(state.step + 1, pending, inner, inside, period)

    return tree.transformation(init, update)


@described
def warm_up(
    tx: optax.GradientTransformation, steps: int
) -> optax.GradientTransformationExtraArgs:
    """Sends whole gradients, by dense sums, in the first steps.

    Sparsifiers and lossy schemes in the chain then send their whole accumulated gradient.

    Args:
        tx: The chain, with a synchronization in it.
        steps: The number of dense steps. Inside `accumulate` it counts synchronizations.

    Returns:
        An `optax.GradientTransformationExtraArgs`, the chain with the wrapper around it.

    Example:
        >>> tx = optax.chain(sparsejax.dgc(0.01), sparsejax.zen_sync(), optax.adam(1e-3))
        >>> tx = sparsejax.warm_up(tx, steps=100)

    See Also:
        `sparsejax.sparsifiers.Warmup`: a density that falls in the first steps.
        `sparsejax.sparsifiers.Schedule`: a density that follows any schedule.
    """
    tx = checked(tx, "warm_up")
    arguments.check_whole("steps", steps, 0)
    name = "sparsejax.warm_up"

    def init(params):
        if not observing.is_observing():
            require_exchange(tx, params, name)
        with observing.inside(observing.Wrapper(dense_steps=steps)):
            return WarmUpState(jnp.int32(0), tx.init(params))

    def update(updates, state, params=None, **extra):
        check_kind(state, WarmUpState, name)

        def side(dense):
            extras = {**extra, "dense": dense or extra.get("dense", False)}
            return lambda updates: tx.update(updates, state.inner, params, **extras)

        out, inner = branches.cond(state.step < steps, side(True), side(False), updates)
        return out, WarmUpState(state.step + 1, inner)

    return tree.transformation(init, update)
