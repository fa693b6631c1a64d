"""Schemes as optax transformations.

`sync(scheme)` takes each rank's own gradients and returns their mean over the ranks, equal
on all of them bit for bit, so that any optimizer may follow:

    tx = optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))

`init` may run anywhere unless something is kept by rank (`every`, a scheme with a residual
or with tables); then it needs to know the ranks, and `sparsejax.init` provides them.
`update` runs inside `jax.shard_map`. What a scheme keeps back is added to the next gradient
here, once for all schemes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from sparsejax import _compat, axes, leaves as leaf_rules, schemes, wire
from sparsejax._compat import AxisName, as_varying, varying_axes
from sparsejax.errors import ArgumentError, AxisError, StateError
from sparsejax.schemes import base
from sparsejax.schemes.base import Scheme
from sparsejax.state import PerRank, SyncState


def sync(
    scheme: Scheme,
    axis_name: AxisName | None = None,
    *,
    reduce: str = "mean",
    rules: leaf_rules.Rules | None = None,
    every: int = 1,
    warmup_steps: int = 0,
    wire_dtype: jax.typing.DTypeLike | None = None,
    two_level: bool = True,
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
            dense psum.
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
            mean is taken last, so a sum must fit the narrow dtype.
        two_level: Whether a pair of axes is two levels; False adds up over both as one.

    Returns:
        An `optax.GradientTransformationExtraArgs` with state `SyncState`.
    """
    _check(scheme, reduce, every, warmup_steps, wire_dtype)
    leaf_rules.check_rules(rules)
    if wire_dtype is not None:
        scheme = _narrowed(scheme, wire_dtype)
        rules = {
            pattern: _narrowed(rule, wire_dtype) if isinstance(rule, Scheme) else rule
            for pattern, rule in (rules or {}).items()
        }
    if two_level and isinstance(axis_name, tuple) and len(axis_name) == 2:
        scheme = _by_level(scheme)
        rules = {
            pattern: _by_level(rule) if isinstance(rule, Scheme) else rule
            for pattern, rule in (rules or {}).items()
        }
    plan = _Sync(scheme, axis_name, reduce == "mean", rules, every, warmup_steps)
    return optax.GradientTransformationExtraArgs(plan.init, plan.update)


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
        if isinstance(value, jax.Array) and not isinstance(value, bool):
            raise ArgumentError(
                f"{name} must be a Python int, because it decides what is compiled, got a "
                f"JAX array. In optax.inject_hyperparams list it: "
                "static_args=('every', 'warmup_steps')."
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ArgumentError(
                f"{name} must be an int of at least {least}, got {value!r}."
            )
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


@dataclasses.dataclass(frozen=True)
class _Sync:
    """The two functions of the transformation."""

    scheme: Scheme
    axis_name: AxisName | None
    mean: bool
    rules: leaf_rules.Rules | None
    every: int
    warmup_steps: int

    def _groups(self, paths, leaves):
        return leaf_rules.group(paths, leaves, self.scheme, self.rules)

    def init(self, params: Any) -> Any:
        paths, leaves, structure = leaf_rules.flatten(params)
        groups = self._groups(paths, leaves)
        axis_name, ranks = self._ranks_at_init(groups)

        def per_rank(shape, dtype, like):
            zeros = as_varying(jnp.zeros((1, *shape), dtype), varying_axes(like))
            return wire.per_rank(zeros, axis_name)

        pending = None
        if self.every > 1:
            held = [per_rank(p.shape, _wide(p.dtype), p) for p in leaves]
            pending = PerRank(structure.unflatten(held), axis_name)
        residual = {}
        scheme_states = {}
        for group in groups:
            like = jax.ShapeDtypeStruct(
                (sum(group.units), *group.shape), leaves[group.leaves[0]].dtype
            )
            if group.scheme.keeps_residual:
                first = leaves[group.leaves[0]]
                held = per_rank(like.shape, _wide(like.dtype), first)
                residual[group.name] = PerRank(held, axis_name)
            across = isinstance(group.scheme, schemes.TwoLevel) and axis_name
            each = tuple(wire.ranks(name) for name in axis_name) if across else ranks
            scheme_states[group.name] = group.scheme.init(like, each)
        nothing = base.traffic(base.stage(), base.stage())
        nothing = jax.tree.map(jnp.zeros_like, nothing)
        # Each its own arrays: a state that is donated may hold none twice.
        traffic = {group.name: jax.tree.map(jnp.zeros_like, nothing) for group in groups}
        return SyncState(jnp.int32(0), scheme_states, residual, pending, traffic)

    def _ranks_at_init(self, groups):
        """The axis and its size; no axis and 1 where nothing depends on them."""
        try:
            axis_name = axes.resolve(self.axis_name, "init of sparsejax.sync")
            return axis_name, wire.ranks(axis_name)
        except AxisError as error:
            by_rank = self.every > 1 or any(
                group.scheme.keeps_residual or group.scheme.needs_ranks for group in groups
            )
            if not by_rank:
                return (), 1
            if _compat.manual_axes():
                raise error
            raise StateError(
                "this transformation keeps something on each rank, so its state must be "
                "made where the ranks are known: call sparsejax.init(tx, params, mesh) "
                "instead of tx.init(params). (What calls tx.init by itself, as flax does, "
                "can be given that state afterwards.)"
            ) from None

    def update(
        self, updates: Any, state: Any, params: Any = None, *, ids: Any = None, **extra_args
    ) -> Any:
        del params, extra_args
        axis_name = axes.resolve(self.axis_name, "update of sparsejax.sync")
        paths, leaves, structure = leaf_rules.flatten(updates)
        groups = self._groups(paths, leaves)
        for path, leaf in zip(paths, leaves, strict=True):
            axes.require_local(path, leaf, axis_name)
        _check_state(groups, state, self.every)
        if self.every == 1:
            present = leaf_rules.touched(groups, leaves, ids, leaf_rules.is_masked(updates))
            result, state = self._synchronize(groups, leaves, present, state, axis_name)
        else:
            result, state = self._accumulate(groups, leaves, structure, state, axis_name)
        step = state.step + 1
        return structure.unflatten(result), state._replace(step=step)

    def _accumulate(self, groups, leaves, structure, state, axis_name):
        """Adds up until the k-th call, then synchronizes; zeros in between."""
        held = structure.flatten_up_to(state.pending.value)
        held = [h + g.astype(h.dtype)[None] for h, g in zip(held, leaves, strict=True)]

        def now(held):
            scale = self.every if self.mean else 1
            whole = [
                (h[0] / scale).astype(g.dtype) for h, g in zip(held, leaves, strict=True)
            ]
            result, after = self._synchronize(groups, whole, {}, state, axis_name)
            return result, [jnp.zeros_like(h) for h in held], after._replace(pending=None)

        def later(held):
            zeros = [jnp.zeros(g.shape, g.dtype) for g in leaves]
            return zeros, held, state._replace(pending=None)

        due = state.step % self.every == self.every - 1
        result, held, state = _branch(due, now, later, held)
        pending = PerRank(structure.unflatten(held), axis_name)
        return result, state._replace(pending=pending)

    def _synchronize(self, groups, leaves, present, state, axis_name):
        """The reduced leaves, and the state with what was kept and sent."""
        result: list[Any] = [None] * len(leaves)
        scheme_states = dict(state.schemes)
        residual = dict(state.residual)
        traffic = {}
        for group in groups:
            x = group.gather(leaves)
            known = present.get(group.name)
            kept = residual.get(group.name)
            if kept is not None:
                x, known = x.astype(kept.value.dtype) + kept.value[0], None
            reduced = self._reduce(group, x, known, state, axis_name)
            total = reduced.total
            if self.mean:
                total = wire.mean_of(total, axis_name)
            if kept is not None:
                back = x if reduced.residual is None else reduced.residual
                residual[group.name] = PerRank(back[None], kept.axis_name)
            group.scatter(total.astype(leaves[group.leaves[0]].dtype), result, leaves)
            scheme_states[group.name] = reduced.state
            traffic[group.name] = wire.agree(reduced.traffic)
        state = state._replace(schemes=scheme_states, residual=residual, traffic=traffic)
        return result, state

    def _reduce(self, group, x, known, state, axis_name):
        before = state.schemes[group.name]

        def sparse(x):
            return group.scheme(x, before, axis_name, present=known)

        if not self.warmup_steps or isinstance(group.scheme, schemes.AllReduce):
            return sparse(x)

        def dense(x):
            scheme = schemes.AllReduce(getattr(group.scheme, "wire_dtype", None))
            reduced = scheme(x, (), axis_name)
            residual = jnp.zeros_like(x) if group.scheme.keeps_residual else None
            return reduced._replace(state=before, residual=residual)

        return _branch(state.step < self.warmup_steps, dense, sparse, x)


def _branch(predicate, yes, no, operand):
    """`lax.cond` whose sides may differ in the axes over which results vary."""
    sides = [jax.eval_shape(side, operand) for side in (yes, no)]
    types = jax.tree.map(lambda a, b: varying_axes(a) | varying_axes(b), *sides)

    def typed(side):
        return lambda operand: jax.tree.map(as_varying, side(operand), types)

    return lax.cond(predicate, typed(yes), typed(no), operand)


def _wide(dtype):
    return jnp.promote_types(dtype, jnp.float32)


def _check_state(groups, state, every):
    """Raises if the state was made for other leaves or other options."""
    names = [group.name for group in groups]
    if set(names) != set(state.traffic):
        raise StateError(
            "the gradients do not match the state: they form the groups "
            f"{sorted(names)}, the state has {sorted(state.traffic)}. Leaves are grouped "
            "by path, size, dtype and the mesh axes over which they vary. Make the state "
            "from parameters like the gradients: of the same dtypes, and where a second "
            "mesh axis shards them, inside shard_map."
        )
    if (every > 1) != (state.pending is not None):
        raise StateError(
            f"every={every}, but the state "
            + ("holds no" if every > 1 else "holds")
            + " accumulated gradients: it was made with another `every`."
        )
