"""Schemes as optax transformations.

`sync(scheme)` takes each rank's own gradients and returns their mean over the ranks, equal
on all of them bit for bit, so that any optimizer may follow:

    tx = optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))

`init` may run anywhere unless something is kept by rank (`every`, a scheme with a residual
or with tables); then it needs to know the ranks, and `sparsejax.init` provides them.
`update` runs inside `jax.shard_map`. What both do is in `synchronizer`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax import errors, schemes
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError
from sparsejax.schemes.base import Scheme
from sparsejax.transforms import buckets as leaf_rules
from sparsejax.transforms.exchange import Synchronizer
from sparsejax.transforms.plan import Plan
from sparsejax.transforms.sparsify import Sparsification


def sync(
    scheme: Scheme | Plan,
    axis_name: AxisName | None = None,
    *,
    reduce: str = "mean",
    rules: leaf_rules.Rules | None = None,
    every: int = 1,
    warmup_steps: int = 0,
    wire_dtype: jax.typing.DTypeLike | None = None,
    two_level: bool = True,
    sparsifier: Sparsification | None = None,
    memory: str | None = "residual",
) -> optax.GradientTransformationExtraArgs:
    """Averages gradients over the ranks of a mesh axis.

    Put it first in a chain: what follows sees the gradient of the whole batch. Clipping
    before it clips each rank's own gradient, after it the average. `update` must run inside
    `jax.shard_map`, on gradients that are still local; see `sparsejax.local`.

    With `every=k`, gradients are added up on each rank and synchronized at every k-th call;
    the calls between return zeros. So that the optimizer sleeps through those, wrap it:
    `optax.conditionally_mask(optax.adam(1e-3), lambda step: step % k == k - 1)`.

    Pass `tx.update(grads, state, params, ids={path: ids})` with the rows that a rank's
    batch touched, and the gradient of that leaf is not searched for them. The ids must name
    every row whose gradient is not zero; others are not sent. Used for leaves whose unit is
    the row, where gradients are not accumulated.

    Args:
        scheme: How to add up leaves of at least 65,536 elements. Smaller ones join one
            dense psum. Or a plan (`sparsejax.make_plan`), which says it for every leaf.
        axis_name: The mesh axis of the ranks; the only manual one if None. A pair is
            (outer, inner), such as ("hosts", "devices"): dense sums inside, the scheme
            across (`schemes.TwoLevel`).
        reduce: "mean" or "sum", over ranks and over accumulated steps.
        rules: From regular expressions, searched in a leaf's path (written a/b/c), to a
            scheme, "dense", "sparse" (the scheme whatever the size), or the unit of the
            indices, "row" or "element". Without a rule, 2-D leaves whose path says
            embedding use rows.
        every: Synchronize at every k-th call; larger sends less often.
        warmup_steps: For so many first calls, add up densely.
        wire_dtype: bfloat16 or float16 to narrow values while they travel. Sums are taken
            in float32 or wider, travel back narrow, and come out in the leaf's dtype. The
            mean is taken last, so a sum must fit the narrow dtype. No memory keeps what is
            rounded here, that of a sparsifier neither.
        two_level: Whether a pair of axes is two levels; False adds up over both as one.
        sparsifier: What makes gradients sparse first, such as `sparsejax.dgc(0.01)`. It can
            as well stand before `sync` in a chain; here it works on what `every` steps have
            added up, and sends everything in `warmup_steps`.
        memory: None to accept a scheme that loses gradients and remembers nothing of them.

    Returns:
        An `optax.GradientTransformationExtraArgs` with state `SyncState`.
    """
    plan, chosen = (scheme, schemes.Zen()) if isinstance(scheme, Plan) else (None, scheme)
    if plan is not None:
        if rules is not None or wire_dtype is not None:
            raise ArgumentError(
                "a plan says for every leaf what rules and wire_dtype say: make it with "
                "them (sparsejax.make_plan), or edit it, and pass it alone."
            )
        pair = two_level and isinstance(axis_name, tuple) and len(axis_name) == 2
        levels = [leaf for leaf in plan.leaves if isinstance(leaf.scheme, schemes.TwoLevel)]
        if levels and not pair:
            raise ArgumentError(
                f"the plan has TwoLevel for leaf {levels[0].path!r}, which works over two "
                f"axes, and axis_name is {axis_name!r}: pass axis_name=(outer, inner)."
            )
    _check(chosen, reduce, every, warmup_steps, wire_dtype)
    leaf_rules.check_rules(rules)
    if wire_dtype is not None:
        chosen = _narrowed(chosen, wire_dtype)
        rules = {
            pattern: _narrowed(rule, wire_dtype) if isinstance(rule, Scheme) else rule
            for pattern, rule in (rules or {}).items()
        }
    if two_level and isinstance(axis_name, tuple) and len(axis_name) == 2:
        chosen = _by_level(chosen)
        rules = {
            pattern: _by_level(rule) if isinstance(rule, Scheme) else rule
            for pattern, rule in (rules or {}).items()
        }
        if plan is not None:
            leaves = [
                dataclasses.replace(leaf, scheme=_by_level(leaf.scheme))
                for leaf in plan.leaves
            ]
            plan = dataclasses.replace(plan, leaves=tuple(leaves))
    if sparsifier is not None and not isinstance(sparsifier, Sparsification):
        raise ArgumentError(
            "sparsifier must be one of this library's, such as sparsejax.dgc(0.01), got "
            f"{sparsifier!r}."
        )
    if memory not in ("residual", None):
        raise ArgumentError(f"memory must be 'residual' or None, got {memory!r}.")
    used = [chosen, *(x for x in (rules or {}).values() if isinstance(x, Scheme))]
    used += [leaf.scheme for leaf in plan.leaves] if plan is not None else []
    for one in used if memory is not None else ():
        if not one.lossless and not one.keeps_residual:
            raise ArgumentError(
                f"{type(one).__name__} loses gradients and remembers none of them; pass "
                "memory=None to accept that."
            )
    for one in used if sparsifier is not None else ():
        if one.selects:
            raise ArgumentError(
                f"{type(one).__name__} chooses what it sends, and remembers the rest: give "
                "it no sparsifier, or the sparsifier a lossless scheme, such as "
                "sparsejax.schemes.Zen()."
            )
    own = None if sparsifier is None else sparsifier.parts
    mean = reduce == "mean"
    made = Synchronizer(
        chosen, axis_name, mean, rules, every, warmup_steps, plan, two_level, own
    )
    return optax.GradientTransformationExtraArgs(made.init, made.update)


def zen_sync(
    axis_name: AxisName | None = None,
    *,
    reduce: str = "mean",
    rules: leaf_rules.Rules | None = None,
    every: int = 1,
    warmup_steps: int = 0,
    wire_dtype: jax.typing.DTypeLike | None = None,
    two_level: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Averages gradients with Zen: exact, and sends only what is not zero.

    The result is that of `jax.lax.pmean`, for any gradient; where zeros are too few to
    matter it becomes an all-reduce. Arguments are those of `sparsejax.sync`.

    Example:
        >>> import optax, sparsejax
        >>> tx = optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))

    References:
        Wang et al., Zen: Empowering Distributed Training with Sparsity-driven Data
        Synchronization, OSDI 2025
    """
    return sync(
        schemes.Zen(),
        axis_name,
        reduce=reduce,
        rules=rules,
        every=every,
        warmup_steps=warmup_steps,
        wire_dtype=wire_dtype,
        two_level=two_level,
    )


def dense_sync(
    axis_name: AxisName | None = None,
    *,
    reduce: str = "mean",
    rules: leaf_rules.Rules | None = None,
    every: int = 1,
    warmup_steps: int = 0,
    wire_dtype: jax.typing.DTypeLike | None = None,
    two_level: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Averages gradients with a dense all-reduce: the yardstick.

    Arguments are those of `sparsejax.sync`.
    """
    return sync(
        schemes.AllReduce(),
        axis_name,
        reduce=reduce,
        rules=rules,
        every=every,
        warmup_steps=warmup_steps,
        wire_dtype=wire_dtype,
        two_level=two_level,
    )


def _check(scheme, reduce, every, warmup_steps, wire_dtype):
    check_scheme(scheme)
    check_reduce(reduce)
    for name, value, least in (("every", every, 1), ("warmup_steps", warmup_steps, 0)):
        errors.check_whole(name, value, least)
    if wire_dtype is not None and not leaf_rules.is_floating(wire_dtype):
        raise ArgumentError(
            f"wire_dtype must be a floating dtype such as jnp.bfloat16, got {wire_dtype!r}."
        )


def check_scheme(scheme: Any) -> None:
    """Raises unless it is a scheme."""
    if not isinstance(scheme, Scheme):
        raise ArgumentError(
            "scheme must be a sparsejax scheme such as sparsejax.schemes.Zen(), got "
            f"{scheme!r}."
        )


def check_reduce(reduce: str) -> None:
    """Raises unless it is "sum" or "mean"."""
    if reduce not in ("sum", "mean"):
        hint = " Did you mean 'mean'?" if reduce in ("avg", "average") else ""
        raise ArgumentError(f"reduce must be 'sum' or 'mean', got {reduce!r}.{hint}")


def _by_level(scheme):
    """The scheme across hosts; a dense sum, or what is two-level already, as it is."""
    whole = isinstance(scheme, (schemes.AllReduce, schemes.TwoLevel))
    return scheme if whole else schemes.TwoLevel(scheme)


def _narrowed(scheme, wire_dtype):
    if isinstance(scheme, schemes.TwoLevel):
        return schemes.TwoLevel(_narrowed(scheme.across, wire_dtype))
    if "wire_dtype" not in {field.name for field in dataclasses.fields(scheme)}:
        raise ArgumentError(f"{type(scheme).__name__} has no wire_dtype to set.")
    return dataclasses.replace(scheme, wire_dtype=jnp.dtype(wire_dtype))
