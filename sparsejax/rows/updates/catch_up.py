"""The steps that rows have missed: what a gradient of zero would have done to them.

A step changes all rows of a table in the dense optimizer, those without a gradient too: a
momentum goes on, weights decay. Rows that a step does not list keep the number of the last
one that they have seen, and catch up when they are written, and before they are read.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from sparsejax.axes import as_varying, varying_axes
from sparsejax.rows.updates.anatomy import Anatomy


# How many changes of numbers by hand are remembered.
_CHANGES = 64


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
    """The values that numbers of the state had, which only the user changes.

    Attributes:
        since: int32 [changes], ascending: the first step of each value; the last is that
            of now.
        values: Of each such number, [changes].
    """

    since: jax.Array
    values: tuple[jax.Array, ...]

    def at(self, step: jax.Array) -> list[jax.Array]:
        """The values at a step."""
        place = jnp.sum(self.since <= step, dtype=jnp.int32) - 1
        return [value[jnp.maximum(place, 0)] for value in self.values]

    def noted(self, step: jax.Array, values: list[jax.Array]) -> "History":
        """The same with the values of a new step."""
        if not values:
            return self
        changed = [new != old[-1] for new, old in zip(values, self.values, strict=True)]
        changed = jnp.any(jnp.stack(changed))
        pushed = lambda old, new: jnp.where(
            changed, jnp.concatenate([old[1:], new.astype(old.dtype)[None]]), old
        )
        since = pushed(self.since, step)
        return History(since, tuple(map(pushed, self.values, values)))


def history(values: list[jax.Array]) -> History:
    """The history that begins with some values."""
    n = _CHANGES if values else 0
    kept = tuple(jnp.broadcast_to(jnp.asarray(value), (n,)) for value in values)
    return History(jnp.full(n, -1, jnp.int32), kept)


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
    """

    tx: optax.GradientTransformationExtraArgs
    anatomy: Anatomy
    structures: tuple[Any, Any]
    params: tuple[jax.ShapeDtypeStruct, ...]
    state: tuple[Any, ...]
    history: History
    count: jax.Array

    def __call__(self, rows: Mapping[int, Rows]) -> dict[int, Rows]:
        """Rows of some tables, as after the last step."""
        types = frozenset().union(*map(varying_axes, jax.tree.leaves((rows, self.count))))
        rows = {at: as_varying(part, types) for at, part in rows.items()}
        count = as_varying(self.count, types)
        asleep = {at: self._asleep(at, part) for at, part in rows.items()}
        moving = {
            at: part._replace(last=jnp.where(asleep[at], count, part.last))
            for at, part in rows.items()
            if asleep[at] is not True
        }
        caught = dict(rows) | self._step_by_step(moving, count, types)
        for at, part in rows.items():
            decayed = self._decayed(at, part, count)
            done = caught[at]
            own = jax.tree.map(
                lambda a, b, at=at: jnp.where(_over(asleep[at], a), a, b), decayed, done.own
            )
            lost = False
            if self.history.values:
                before = self.history.since[0]
                lost = (part.last + 1 < before) & ~jnp.asarray(asleep[at])
            param = jnp.where(_over(lost, done.param), jnp.nan, done.param)
            param = param.astype(part.param.dtype)
            last = jnp.broadcast_to(count, part.last.shape)
            caught[at] = Rows(param, own, last)
        return caught

    def _asleep(self, at, part):
        """Which rows no step with a gradient of zero moves."""
        table = self.anatomy.tables[at]
        if not table.moves:
            return True
        if table.idle is None:
            return jnp.zeros(part.last.shape, bool)
        own = part.own[table.idle]
        return jnp.all(own == 0, axis=range(1, own.ndim))

    def _decayed(self, at, part, count):
        """The state of rows that do not move."""
        table = self.anatomy.tables[at]
        if table.decays is None:
            return part.own
        steps = count - part.last

        def decayed(own, factor):
            if factor == 1:
                return own
            return own * _over(_power(factor, steps.astype(own.dtype)), own)

        return tuple(map(decayed, part.own, table.decays))

    def _step_by_step(self, rows, count, types):
        """Rows after all steps that they have missed, taken as the optimizer takes them."""
        if not rows:
            return {}
        first = [jnp.min(part.last, initial=2**31 - 1) for part in rows.values()]
        first = jnp.min(jnp.stack(first)) + 1

        def one_step(step, rows):
            made = self._zero_step(step, rows)
            late = {at: part.last < step for at, part in rows.items()}
            choose = lambda at: lambda new, old: jnp.where(_over(late[at], old), new, old)
            kept = {at: jax.tree.map(choose(at), made[at], rows[at]) for at in rows}
            return as_varying(kept, types)

        return lax.fori_loop(as_varying(first, types), count + 1, one_step, rows)

    def _zero_step(self, step, rows):
        """All rows after a step with a gradient of zero."""
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
        return {
            at: Rows(
                added(part.param, made[at]),
                tuple(state[j] for j in anatomy.tables[at].own),
                jnp.full_like(part.last, step),
            )
            for at, part in rows.items()
        }


def _over(flags, x):
    """Something by row, with as many axes as an array of rows."""
    flags = jnp.asarray(flags)
    return flags.reshape(flags.shape + (1,) * (np.ndim(x) - flags.ndim))


def _power(base, exponents):
    """A number to whole powers; the relative error is that of the exponent's logarithm."""
    if base == 0:
        return jnp.where(exponents == 0, 1.0, 0.0)
    return jnp.exp(exponents * math.log(base))


def added(params: jax.Array, update: jax.Array) -> jax.Array:
    """Rows of a parameter with an update, as `optax.apply_updates` adds it."""
    return cast(jax.Array, optax.apply_updates(params, update))
