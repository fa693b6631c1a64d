"""The two functions of a synchronization: the state at first, and a step.

Groups of leaves go through their schemes, what a scheme keeps back is added to the next
gradient, and gradients are accumulated and averaged: here, once for all schemes.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from sparsejax import _compat, axes, entries, leaves as leaf_rules, schemes, wire
from sparsejax._compat import AxisName, as_varying, varying_axes
from sparsejax.errors import AxisError, StateError
from sparsejax.plan import Plan
from sparsejax.schemes import base
from sparsejax.schemes.base import Scheme
from sparsejax.schemes.two_level import two_axes
from sparsejax.sparsify import Sparsify
from sparsejax.state import OBSERVER, PerRank, SyncState


def observed(tx: optax.GradientTransformation, params: Any) -> list[tuple]:
    """What the synchronizations in a transformation would do, however deep they are.

    Nothing is computed, and no mesh is needed.

    Returns:
        For each of them itself, its groups of leaves, and the leaves.
    """
    found: list[tuple] = []
    token = OBSERVER.set(lambda *seen: found.append(seen))
    try:
        # A fresh function, and none inside it cached: JAX would remember this run.
        with jax.disable_jit():
            jax.eval_shape(lambda params: tx.init(params), params)
    finally:
        OBSERVER.reset(token)
    return found


@dataclasses.dataclass(frozen=True)
class Synchronizer:
    """The two functions of the transformation."""

    scheme: Scheme
    axis_name: AxisName | None
    mean: bool
    rules: leaf_rules.Rules | None
    every: int
    warmup_steps: int
    plan: Plan | None
    two_level: bool
    sparsifier: Sparsify | None = None

    def _groups(self, paths, leaves):
        chosen = None
        if self.plan is not None:
            self.plan.check_leaves(paths, leaves)
            chosen = self.plan.chosen()
        elements = frozenset()
        if self.sparsifier is not None:
            pairs = zip(paths, leaves, strict=True)
            elements = frozenset(p for p, x in pairs if self.sparsifier.sparsifies(p, x))
        return leaf_rules.group(
            paths, leaves, self.scheme, self.rules, chosen=chosen, elements=elements
        )

    def _check_ranks(self, axis_name):
        """Raises where a plan was made for another number of ranks, or of hosts."""
        if self.plan is None:
            return
        pair = self.two_level and isinstance(axis_name, tuple) and len(axis_name) == 2
        self.plan.check_ranks(wire.ranks(axis_name[0] if pair else axis_name))

    def init(self, params: Any) -> Any:
        """The state for parameters like these."""
        paths, leaves, structure = leaf_rules.flatten(params)
        groups = self._groups(paths, leaves)
        if (told := OBSERVER.get()) is not None:
            told(self, groups, leaves)
            return SyncState(jnp.int32(0), {}, {}, None, {})
        axis_name, ranks = self._ranks_at_init(groups)
        if axis_name:
            self._check_ranks(axis_name)

        def per_rank(shape, dtype, like):
            zeros = as_varying(jnp.zeros((1, *shape), dtype), varying_axes(like))
            return wire.per_rank(zeros, axis_name)

        pending = None
        if self.every > 1:
            held = [per_rank(p.shape, leaf_rules.wide(p.dtype), p) for p in leaves]
            pending = PerRank(structure.unflatten(held), axis_name)
        residual = {}
        scheme_states = {}
        for group in groups:
            like = jax.ShapeDtypeStruct(
                (sum(group.units), *group.shape), leaves[group.leaves[0]].dtype
            )
            if group.scheme.keeps_residual:
                first = leaves[group.leaves[0]]
                held = per_rank(like.shape, leaf_rules.wide(like.dtype), first)
                residual[group.name] = PerRank(held, axis_name)
            each: Any = ranks
            if isinstance(group.scheme, schemes.TwoLevel) and axis_name:
                each = tuple(wire.ranks(name) for name in two_axes(axis_name))
            scheme_states[group.name] = group.scheme.init(like, each)
        nothing = base.traffic(base.stage(), base.stage())
        nothing = jax.tree.map(jnp.zeros_like, nothing)
        # Each its own arrays: a state that is donated may hold none twice.
        traffic = {group.name: jax.tree.map(jnp.zeros_like, nothing) for group in groups}
        own = None
        if self.sparsifier is not None:
            own = self._sparsifier_on(axis_name).init(params)
        return SyncState(jnp.int32(0), scheme_states, residual, pending, traffic, own)

    def _sparsifier_on(self, axis_name):
        """The sparsifier, over this axis where it names none."""
        assert self.sparsifier is not None
        return dataclasses.replace(
            self.sparsifier, axis_name=self.sparsifier.axis_name or axis_name or None
        )

    def _ranks_at_init(self, groups):
        """The axis and its size; no axis and 1 where nothing depends on them."""
        try:
            axis_name = axes.resolve(self.axis_name, "init of sparsejax.sync")
            return axis_name, wire.ranks(axis_name)
        except AxisError as error:
            by_rank = (
                self.every > 1
                or self.sparsifier is not None
                or any(
                    group.scheme.keeps_residual or group.scheme.needs_ranks
                    for group in groups
                )
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
        """The gradients, synchronized, and the next state."""
        del params, extra_args
        axis_name = axes.resolve(self.axis_name, "update of sparsejax.sync")
        self._check_ranks(axis_name)
        paths, leaves, structure = leaf_rules.flatten(updates)
        groups = self._groups(paths, leaves)
        for path, leaf in zip(paths, leaves, strict=True):
            axes.require_local(path, getattr(leaf, "values", leaf), axis_name)
            if leaf_rules.is_sparse(leaf):
                leaf.check(path)
        _check_state(groups, state, self.every)
        if self.every == 1:
            present = leaf_rules.touched(groups, leaves, ids, leaf_rules.is_masked(updates))
            result, state = self._synchronize(
                groups, leaves, leaves, structure, present, state, axis_name
            )
        else:
            result, state = self._accumulate(groups, leaves, structure, state, axis_name)
        step = state.step + 1
        return structure.unflatten(result), state._replace(step=step)

    def _accumulate(self, groups, leaves, structure, state, axis_name):
        """Adds up until the k-th call, then synchronizes; zeros in between."""
        held = structure.flatten_up_to(state.pending.value)
        leaves = [leaf_rules.to_dense(leaf) for leaf in leaves]
        held = [h + g.astype(h.dtype)[None] for h, g in zip(held, leaves, strict=True)]

        def now(held):
            scale = self.every if self.mean else 1
            whole = [h[0] / scale for h in held]
            if self.sparsifier is None:  # Else what rounding takes is remembered.
                whole = [h.astype(g.dtype) for h, g in zip(whole, leaves, strict=True)]
            result, after = self._synchronize(
                groups, whole, leaves, structure, {}, state, axis_name
            )
            return result, [jnp.zeros_like(h) for h in held], after._replace(pending=None)

        def later(held):
            zeros = [jnp.zeros(g.shape, g.dtype) for g in leaves]
            return zeros, held, state._replace(pending=None)

        due = state.step % self.every == self.every - 1
        result, held, state = _branch(due, now, later, held)
        pending = PerRank(structure.unflatten(held), axis_name)
        return result, state._replace(pending=pending)

    def _synchronize(self, groups, leaves, like, structure, present, state, axis_name):
        """The reduced leaves, and the state with what was kept and sent."""
        if self.sparsifier is None:
            return self._exchange(groups, leaves, present, state, axis_name)
        sparsifier = self._sparsifier_on(axis_name)

        def going(leaves, densely=False):
            tree = structure.unflatten(leaves)
            own_like = structure.unflatten(like)
            tree, own = sparsifier.on(
                axis_name, tree, state.sparsifier, whole=densely, like=own_like
            )
            _, own_leaves, _ = leaf_rules.flatten(tree)
            after = state._replace(sparsifier=own)
            return self._exchange(groups, own_leaves, {}, after, axis_name, densely)

        if not self.warmup_steps:
            return going(leaves)
        densely = functools.partial(going, densely=True)
        return _branch(state.step < self.warmup_steps, densely, going, leaves)

    def _exchange(self, groups, leaves, present, state, axis_name, densely=None):
        """The same once it is settled what goes; None where the step says if densely."""
        result: list[Any] = [None] * len(leaves)
        scheme_states = dict(state.schemes)
        residual = dict(state.residual)
        traffic = {}
        for group in groups:
            kept = residual.get(group.name)
            # What a scheme keeps, and tables of its units, are of the group as it is.
            fixed = kept is not None or group.scheme.needs_ranks
            parts = [group] if fixed else group.split(leaves)
            sent = []
            for part in parts:
                x = part.gather(leaves, as_elements=not fixed)
                known = present.get(group.name) if len(parts) == 1 else None
                if kept is not None:
                    x = entries.dense(x)
                    x, known = x.astype(kept.value.dtype) + kept.value[0], None
                reduced = self._reduce(part, x, known, state, axis_name, densely)
                total = reduced.total
                if self.mean:
                    total = wire.mean_of(total, axis_name)
                if kept is not None:
                    back = x if reduced.residual is None else reduced.residual
                    residual[group.name] = PerRank(back[None], kept.axis_name)
                part.scatter(total.astype(leaves[part.leaves[0]].dtype), result, leaves)
                # Of two parts the sparse one comes first, and is what is remembered.
                if not sent:
                    scheme_states[group.name] = reduced.state
                sent.append(wire.agree(reduced.traffic))
            traffic[group.name] = functools.reduce(base.add_traffic, sent)
        state = state._replace(schemes=scheme_states, residual=residual, traffic=traffic)
        return result, state

    def _reduce(self, group, x, known, state, axis_name, densely):
        before = state.schemes[group.name]

        def sparse(x):
            if not isinstance(x, entries.Entries):
                return group.scheme(x, before, axis_name, present=known)
            if x.shared:
                narrow = getattr(group.scheme, "wire_dtype", None)
                return base.sum_of_shared(x, before, axis_name, narrow)
            if not group.scheme.takes_entries:
                x, flags = x.to_units(), x.flags
                return group.scheme(x, before, axis_name, present=flags)
            return group.scheme(x, before, axis_name, present=x.flags)

        settled = not self.warmup_steps or isinstance(group.scheme, schemes.AllReduce)
        if densely is False or (settled and not densely):
            return sparse(x)

        def dense(x):
            scheme = schemes.AllReduce(getattr(group.scheme, "wire_dtype", None))
            reduced = scheme(x, (), axis_name)
            residual = jnp.zeros_like(x) if group.scheme.keeps_residual else None
            return reduced._replace(state=before, residual=residual)

        if densely:
            return dense(x)
        return _branch(state.step < self.warmup_steps, dense, sparse, x)


def _branch(predicate, yes, no, operand):
    """`lax.cond` whose sides may differ in the axes over which results vary."""
    sides = [jax.eval_shape(side, operand) for side in (yes, no)]
    types = jax.tree.map(lambda a, b: varying_axes(a) | varying_axes(b), *sides)

    def typed(side):
        return lambda operand: jax.tree.map(as_varying, side(operand), types)

    return lax.cond(predicate, typed(yes), typed(no), operand)


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
