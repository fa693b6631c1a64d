"""The steps that rows have missed: what a gradient of zero would have done to them.

A step changes all rows of a table in the dense optimizer, those without a gradient too: a
momentum goes on, weights decay. Rows that a step does not list keep the number of the last
one that they have seen, and catch up when they are written, and before they are read.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

from sparsejax.axes import as_varying, cond, varying_axes
from sparsejax.rows.updates.anatomy import Anatomy
from sparsejax.rows.updates.fading import FadingSums, Probe, decayed, over, probe_of


# How many changes of numbers by hand are remembered.
_CHANGES = 64
# How many rows catch up at a time where all their steps are added up at once, which takes a
# hundred bytes a row.
_ROWS = 262_144


class Rows(NamedTuple):
    """Some rows of a table.

    Attributes:
        param: [n, ...], of the parameter.
        own: Of each leaf of the state that has rows of it.
        last: int32 [n], the step that each has seen last.
    """

    param: jax.Array
    own: tuple[jax.Array, ...]
    last: jax.Array


class History(NamedTuple):
    """The last values of the numbers of the state which only the user changes.

    Attributes:
        since: Of each such number int32 [changes], ascending: the first step of each of
            its values; the last is that of now.
        values: Of each such number, [changes].
    """

    since: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    def at(self, step: jax.Array) -> list[jax.Array]:
        """The values at a step."""

        def one(since, values):
            place = jnp.sum(since <= step, dtype=jnp.int32) - 1
            return values[jnp.maximum(place, 0)]

        return list(map(one, self.since, self.values))

    def noted(self, step: jax.Array, values: list[jax.Array]) -> "History":
        """The history with the values of a new step."""

        def one(since, old, new):
            pushed = lambda kept, last: jnp.where(
                new != old[-1],
                jnp.concatenate([kept[1:], jnp.asarray(last, kept.dtype)[None]]),
                kept,
            )
            return pushed(since, step), pushed(old, new)

        pairs = list(map(one, self.since, self.values, values))
        return History(*(tuple(x) for x in zip(*pairs, strict=True))) if pairs else self

    def has_lost(self, step: jax.Array, numbers: Sequence[int]) -> jax.Array:
        """Flags the steps at which some of the numbers had values that are forgotten."""
        first = [self.since[number][0] for number in numbers]
        return step < jnp.max(jnp.stack(first)) if first else jnp.zeros(step.shape, bool)


def history(values: list[jax.Array]) -> History:
    """The history that begins with some values."""
    kept = tuple(jnp.broadcast_to(jnp.asarray(value), (_CHANGES,)) for value in values)
    return History(tuple(jnp.full(_CHANGES, -1, jnp.int32) for _ in values), kept)


@dataclasses.dataclass(frozen=True)
class CatchUp:
    """Catches rows up on steps with a gradient of zero.

    Attributes:
        tx: The optimizer.
        anatomy: What it is made of.
        structures: Those of the parameters and of its state.
        params: The shapes of the parameters.
        state: The leaves of the state, of which the numbers matter.
        history: Of those that only the user changes.
        count: How many steps there were: rows are to be as after that one.
        sums: By which rows move whose momentum fades, by the number of `Table.moving`.
    """

    tx: optax.GradientTransformationExtraArgs
    anatomy: Anatomy
    structures: tuple[Any, Any]
    params: tuple[jax.ShapeDtypeStruct, ...]
    state: tuple[Any, ...]
    history: History
    count: Any
    sums: Mapping[int, FadingSums]

    def faded(self, at: int, part: Rows) -> Rows:
        """Rows of a table whose momentum fades, as after the last step.

        Args:
            at: The table.
            part: The rows.
        """
        table = self.anatomy.tables[at]
        assert table.fading is not None
        assert table.moving is not None
        moved = table.fading.caught_up(*part, self.count, self.sums[table.moving])
        own = decayed(part.own, table.fading.factors, self.count - part.last)
        return Rows(moved, own, jnp.broadcast_to(self.count, part.last.shape))

    def __call__(
        self, rows: Mapping[int, Rows], one_by_one: bool = False
    ) -> dict[int, Rows]:
        """Rows of some tables, as after the last step.

        Args:
            rows: The rows, by the number of the table.
            one_by_one: Whether steps are taken one by one even where there is a sum for
                all of them: less to compile where hardly ever a row is late.
        """
        alike: dict[frozenset[str], dict[int, Rows]] = {}
        for at, part in rows.items():
            # A loop has one type: what is the same on all ranks stays so beside shards.
            leaves = jax.tree.leaves((part, self.count))
            types = frozenset().union(*map(varying_axes, leaves))
            alike.setdefault(types, {})[at] = as_varying(part, types)
        caught: dict[int, Rows] = {}
        for types, parts in alike.items():
            caught |= self._caught(parts, types, one_by_one)
        return caught

    def _caught(self, rows, types, one_by_one):
        """Rows of tables that vary over the same mesh axes."""
        count = as_varying(self.count, types)
        tables = self.anatomy.tables
        faded, others = {}, {}
        for at, part in rows.items():
            fading = tables[at].fading
            if fading is None or one_by_one or not part.last.size:
                others[at] = part
            else:
                faded[at] = self._faded(at, part)
        return faded | self._replayed(others, count, types)

    def _faded(self, at, part):
        """Rows of a table whose momentum fades, all steps at once."""

        def in_parts(part):
            n = part.last.shape[0]
            if n <= _ROWS:
                return self.faded(at, part)

            def one(number, made):
                # The last part begins where it ends with the rows; some are moved twice,
                # from where they were at first.
                start = jnp.minimum(number * _ROWS, n - _ROWS)
                cut = lambda x: lax.dynamic_slice_in_dim(x, start, _ROWS)
                put = lambda x, y: lax.dynamic_update_slice_in_dim(x, y, start, 0)
                return jax.tree.map(put, made, self.faded(at, jax.tree.map(cut, part)))

            return lax.fori_loop(0, -(-n // _ROWS), one, part)

        return cond(jnp.any(part.last < self.count), in_parts, lambda part: part, part)

    def probe(self, at: int) -> Probe:
        """How far a parameter moves whose momentum is 1, at each of some steps."""
        return probe_of(lambda *args: self.samples([at], *args)[0])

    def samples(
        self, tables: Sequence[int], step: jax.Array, m: Any, v: Any, p: Any
    ) -> list[jax.Array]:
        """How far a step with a gradient of zero moves numbers of each of some tables.

        Args:
            tables: The tables.
            step: The step.
            m: [k], of the momentum.
            v: [k], of the mean of squares, where there is one.
            p: [k], of the parameter.
        """
        rows = {}
        for at in tables:
            shape = (m.shape[0],) + (1,) * (len(self.params[at].shape) - 1)
            table = self.anatomy.tables[at]
            own = [m if j == table.may_fade else v for j in range(len(table.own))]
            own = tuple(x.reshape(shape) for x in own)
            rows[at] = Rows(p.reshape(shape), own, m)
        made, _ = self._zero_step(step, rows)
        return [made[at].reshape(-1) for at in tables]

    def _replayed(self, rows, count, types):
        """Rows of tables whose steps are taken one by one."""
        asleep = {at: self._asleep(at, part) for at, part in rows.items()}
        moving = {
            at: part._replace(last=jnp.where(asleep[at], count, part.last))
            for at, part in rows.items()
            if asleep[at] is not True
        }
        caught = rows | self._step_by_step(moving, count, types)
        for at, part in rows.items():
            done, decays = caught[at], self.anatomy.tables[at].decays
            quiet = decayed(part.own, decays, count - part.last) if decays else part.own
            own = jax.tree.map(
                lambda a, b, at=at: jnp.where(over(asleep[at], a), a, b), quiet, done.own
            )
            param = done.param
            if self.history.values and at in moving:
                lost = self._lost(at, part) & ~asleep[at]
                param = jnp.where(over(lost, param), jnp.nan, param).astype(param.dtype)
            caught[at] = Rows(param, own, jnp.broadcast_to(count, part.last.shape))
        return caught

    def _asleep(self, at, part):
        """Flags the rows of which `Table.decays` says what all steps do."""
        table = self.anatomy.tables[at]
        if not table.moves:
            return True
        return _are_zero(part, None if table.shrinks else table.idle)

    def _lost(self, at, part):
        """Flags the rows that missed a step which depends on forgotten numbers."""
        table = self.anatomy.tables[at]

        def of(leaves):
            numbers = [k for k, j in enumerate(self.anatomy.held) if j in leaves]
            return self.history.has_lost(part.last + 1, numbers)

        return jnp.where(_are_zero(part, table.still), of(table.wanted), of(table.scalars))

    def _step_by_step(self, rows, count, types):
        """Rows after all steps that they have missed, taken as the optimizer takes them."""
        if not rows:
            return {}
        first = [jnp.min(part.last, initial=2**31 - 1) for part in rows.values()]
        first = jnp.min(jnp.stack(first)) + 1

        def one_step(step, rows):
            updates, own = self._zero_step(step, rows)
            made = {
                at: Rows(
                    added(part.param, updates[at]), own[at], jnp.full_like(part.last, step)
                )
                for at, part in rows.items()
            }
            late = {at: part.last < step for at, part in rows.items()}
            choose = lambda at: lambda new, old: jnp.where(over(late[at], old), new, old)
            kept = {at: jax.tree.map(choose(at), made[at], rows[at]) for at in rows}
            return as_varying(kept, types)

        return lax.fori_loop(as_varying(first, types), count + 1, one_step, rows)

    def _zero_step(self, step, rows):
        """A step with a gradient of zero: the updates of rows, and their state."""
        anatomy = self.anatomy
        of_params, of_state = self.structures
        # What is not among the rows matters to none of them: nothing of it is computed.
        params = [jnp.zeros(x.shape, x.dtype) for x in self.params]
        grads = list(params)
        state = [
            jnp.zeros(x.shape, x.dtype) if k is not None else x
            for x, k in zip(self.state, anatomy.owner, strict=True)
        ]
        for j in anatomy.counts:
            state[j] = state[j] - (self.count - step + 1).astype(state[j].dtype)
        for j, value in zip(anatomy.held, self.history.at(step), strict=True):
            state[j] = value
        for at, part in rows.items():
            grads[at] = jnp.zeros_like(part.param)
            params[at] = part.param
            for j, own in zip(anatomy.tables[at].own, part.own, strict=True):
                state[j] = own
        whole = lambda flat: jax.tree.unflatten(of_params, flat)
        made, state = self.tx.update(
            whole(grads), jax.tree.unflatten(of_state, state), whole(params)
        )
        made, state = of_params.flatten_up_to(made), jax.tree.leaves(state)
        own = {at: tuple(state[j] for j in anatomy.tables[at].own) for at in rows}
        return {at: made[at] for at in rows}, own


def _are_zero(part, which):
    """Flags the rows in which some of the state is zero; no row if which is None."""
    flags = jnp.full(part.last.shape, which is not None)
    for at in which or ():
        flags &= jnp.all(part.own[at] == 0, axis=range(1, part.own[at].ndim))
    return flags


def added(params: jax.Array, update: jax.Array) -> jax.Array:
    """Rows of a parameter with an update, as `optax.apply_updates` adds it."""
    return cast(jax.Array, optax.apply_updates(params, update))
