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

from sparsejax import axes, schemes, wire
from sparsejax.axes import AxisName, as_varying, assume_same, varying_axes
from sparsejax.errors import AxisError, StateError
from sparsejax.schemes import base
from sparsejax.schemes.base import Scheme
from sparsejax.schemes.two_level import two_axes
from sparsejax.transforms import buckets as leaf_rules
from sparsejax.transforms.plan import Plan
from sparsejax.transforms.select import Sparsify
from sparsejax.transforms.state import checks as state_checks
from sparsejax.transforms.state.per_rank import OBSERVER, PerRank, SyncState
from sparsejax.units import entries


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
            return SyncState(jnp.int32(0), {}, None, None, {})
        axis_name, ranks = self._ranks_at_init(groups)
        if axis_name:
            self._check_ranks(axis_name)

        pending = None
        if self.every > 1:
            held = [leaf_rules.zeros_by_rank(leaf, axis_name) for leaf in leaves]
            pending = PerRank(structure.unflatten(held), axis_name)
        residual = self._first_residual(groups, leaves, structure, axis_name)
        scheme_states = {}
        for group in groups:
            like = jax.ShapeDtypeStruct(
                (sum(group.units), *group.shape), leaves[group.leaves[0]].dtype
            )
            group.scheme.check_size(group.name, like.size)
            each: Any = ranks
            if isinstance(group.scheme, schemes.TwoLevel) and axis_name:
                each = tuple(wire.ranks(name) for name in two_axes(axis_name))
            first = group.scheme.init(like, each)
            if group.scheme.selects:
                over = varying_axes(leaves[group.leaves[0]])
                first = _by_shard(as_varying(first, over), group, axis_name)
            scheme_states[group.name] = first
        nothing = base.traffic(base.stage(), base.stage())
        nothing = jax.tree.map(jnp.zeros_like, nothing)
        # Each its own arrays: a state that is donated may hold none twice.
        traffic = {group.name: jax.tree.map(jnp.zeros_like, nothing) for group in groups}
        own = None
        if self.sparsifier is not None:
            own = self._sparsifier_on(axis_name).init(params)
        return SyncState(jnp.int32(0), scheme_states, residual, pending, traffic, own)

    def _first_residual(self, groups, leaves, structure, axis_name):
        """What schemes keep, as a tree like the parameters; None if they keep nothing."""
        kept = {i for g in groups if g.scheme.keeps_residual for i in g.leaves}
        if not kept:
            return None
        held = [
            leaf_rules.zeros_by_rank(leaf, axis_name) if i in kept else optax.MaskedNode()
            for i, leaf in enumerate(leaves)
        ]
        return PerRank(structure.unflatten(held), axis_name)

    def _sparsifier_on(self, axis_name):
        """The sparsifier, over this axis where it names none."""
        assert self.sparsifier is not None
        return dataclasses.replace(
            self.sparsifier, axis_name=self.sparsifier.axis_name or axis_name or None
        )

    def _ranks_at_init(self, groups):
        """The axis and its size; no axis and 1 where nothing depends on them."""
        by_rank = self.every > 1 or self.sparsifier is not None
        for group in groups:
            by_rank |= group.scheme.keeps_residual or group.scheme.needs_ranks
        try:
            axis_name = axes.resolve_for_state(
                self.axis_name,
                "sparsejax.sync",
                "this transformation keeps something on each rank",
            )
        except (AxisError, StateError):
            if by_rank:
                raise
            return (), 1
        return axis_name, wire.ranks(axis_name)

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
        state_checks.check_sparse(groups, leaves)
        state_checks.check_state(groups, state, self.every, wire.ranks(axis_name))
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
            if self.sparsifier is None:
                # Else, and where a scheme keeps something, what rounding takes is kept.
                kept = {i for g in groups if g.scheme.keeps_residual for i in g.leaves}
                whole = [
                    h if i in kept else h.astype(g.dtype)
                    for i, (h, g) in enumerate(zip(whole, leaves, strict=True))
                ]
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
            return self._exchange(
                groups, leaves, like, structure, present, state, axis_name
            )
        sparsifier = self._sparsifier_on(axis_name)

        def going(leaves, densely=False):
            tree = structure.unflatten(leaves)
            own_like = structure.unflatten(like)
            tree, own = sparsifier.on(
                axis_name, tree, state.sparsifier, whole=densely, like=own_like
            )
            _, own_leaves, _ = leaf_rules.flatten(tree)
            after = state._replace(sparsifier=own)
            return self._exchange(
                groups, own_leaves, like, structure, {}, after, axis_name, densely
            )

        if not self.warmup_steps:
            return going(leaves)
        densely = functools.partial(going, densely=True)
        return _branch(state.step < self.warmup_steps, densely, going, leaves)

    def _exchange(
        self, groups, leaves, like, structure, present, state, axis_name, densely=None
    ):
        """The same once it is settled what goes; None where the step says if densely."""
        result: list[Any] = [None] * len(leaves)
        held = [None] * len(leaves)
        if state.residual is not None:
            held = structure.flatten_up_to(state.residual.value)
        scheme_states, traffic = dict(state.schemes), {}
        for group in groups:
            known = present.get(group.name)
            after, sent = self._exchange_group(
                group, leaves, like, known, held, result, state, axis_name, densely
            )
            scheme_states[group.name], traffic[group.name] = after, sent
        if state.residual is not None:
            after = state.residual.with_value(structure.unflatten(held))
            state = state._replace(residual=after)
        return result, state._replace(schemes=scheme_states, traffic=traffic)

    def _exchange_group(
        self, group, leaves, like, known, held, result, state, axis_name, densely
    ):
        """What its scheme remembers and sent; its leaves in `held` and `result` are new."""
        due = list(leaves)
        if group.scheme.keeps_residual:
            for i in group.leaves:
                now = leaf_rules.to_dense(leaves[i])
                due[i] = now.astype(held[i].dtype) + held[i][0]
        # Tables of units, and thresholds, are of the group as it is.
        parts = [group] if group.scheme.needs_ranks else group.split(due)
        known = known if len(parts) == 1 else None
        states, sent = [], []
        for part in parts:
            own = like[part.leaves[0]].dtype
            reduced = self._reduce_part(part, due, own, known, state, axis_name, densely)
            total = reduced.total
            total = wire.mean_of(total, axis_name) if self.mean else total
            part.scatter(total.astype(own), result, leaves)
            if group.scheme.keeps_residual:
                part.scatter(reduced.residual, held, leaves)
            states.append(reduced.state)
            sent.append(wire.agree(reduced.traffic, axis_name))
        if group.scheme.keeps_residual:
            for i in group.leaves:
                held[i] = held[i][None]
        # Of two parts the sparse one comes first, and is what is remembered.
        after = states[0]
        after = _by_shard(after, group, axis_name) if group.scheme.selects else after
        return after, functools.reduce(base.add_traffic, sent)

    def _reduce_part(self, part, due, own, known, state, axis_name, densely):
        """What a scheme returns for leaves; what it was given where it kept it all."""
        keeps = part.scheme.keeps_residual
        x = part.gather(due, as_elements=not part.scheme.needs_ranks)
        reduced = self._reduce(part, x, None if keeps else known, state, axis_name, densely)
        if not keeps:
            return reduced
        residual = jnp.zeros_like(x) if reduced.residual is None else reduced.residual
        # It was given wider numbers than those that would have gone densely.
        dense = wire.all_reduce_cost(x.size, own, None, wire.ranks(axis_name))
        traffic = reduced.traffic._replace(dense=jnp.float32(dense))
        return reduced._replace(residual=residual, traffic=traffic)

    def _reduce(self, group, x, known, state, axis_name, densely):
        before = state.schemes[group.name]
        if group.scheme.selects:
            # By shard alone; that it is equal on all ranks cannot be seen.
            own = jax.tree.map(lambda x: x[0], before.value)
            before = jax.tree.map(lambda x: assume_same(x, axis_name), own)

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


def _by_shard(state, group, axis_name):
    """What a scheme remembers of leaves that another mesh axis may shard."""
    own = wire.per_rank(jax.tree.map(lambda x: x[None], state), axis_name)
    return PerRank(own, axis_name, group.paths)


def _branch(predicate, yes, no, operand):
    """`lax.cond` whose sides may differ in the axes over which results vary."""
    sides = [jax.eval_shape(side, operand) for side in (yes, no)]
    types = jax.tree.map(lambda a, b: varying_axes(a) | varying_axes(b), *sides)

    def typed(side):
        return lambda operand: jax.tree.map(as_varying, side(operand), types)

    return lax.cond(predicate, typed(yes), typed(no), operand)
