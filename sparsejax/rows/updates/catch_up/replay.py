"""The steps that rows have missed, taken one by one as the optimizer takes them."""

import dataclasses
from collections.abc import Mapping
from typing import cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

from sparsejax.axes import as_varying, varying_axes
from sparsejax.rows.updates.call import Rows
from sparsejax.rows.updates.catch_up.missed import MissedSteps, decayed, over


@dataclasses.dataclass(frozen=True)
class Replay:
    """Rows catch up step by step, all tables in one loop.

    The loop has as many turns as the largest number of steps missed by a row that is not
    idle. For idle rows, such as those with a momentum of zero, `TableFacts.decays` gives
    the effect of all missed steps.

    Attributes:
        moves: Whether a step may change a parameter whose gradient is zero; otherwise all
            rows are idle.
    """

    moves: bool
    lags = True
    is_cheap = False

    def due(self, height: int, step: jax.Array) -> None:
        """Returns None: no rows are due, and a row may miss any number of steps."""
        del height, step

    def advance(self, missed: MissedSteps, rows: Mapping[int, Rows]) -> dict[int, Rows]:
        """Catches up rows of tables to the last step."""
        by_type: dict[frozenset[str], dict[int, Rows]] = {}
        for at, part in rows.items():
            # The carry of a loop has one type. With one loop for each set of varying axes,
            # rows equal on all ranks are not typed as varying because of a shard.
            leaves = jax.tree.leaves((part, missed.count))
            types = frozenset().union(*map(varying_axes, leaves))
            by_type.setdefault(types, {})[at] = as_varying(part, types)
        caught: dict[int, Rows] = {}
        for types, parts in by_type.items():
            caught |= _replayed(missed, parts, types)
        return caught

    settled = advance


def _replayed(missed, rows, types):
    """Catches up rows of tables that vary over the same mesh axes."""
    tables, count = missed.call.layout.tables, as_varying(missed.count, types)
    idle = {at: _idle_rows(tables[at], part) for at, part in rows.items()}
    moving = {
        at: part._replace(last=jnp.where(idle[at], count, part.last))
        for at, part in rows.items()
        if idle[at] is not True
    }
    caught = rows | _step_by_step(missed, moving, count, types)
    for at, part in rows.items():
        done, decays = caught[at], tables[at].decays
        quiet = decayed(part.own, decays, count - part.last) if decays else part.own
        own = jax.tree.map(
            lambda a, b, at=at: jnp.where(over(idle[at], a), a, b), quiet, done.own
        )
        param = done.param
        if missed.history.values and at in moving:
            lost = _lost(missed, at, part) & ~idle[at]
            param = jnp.where(over(lost, param), jnp.nan, param).astype(param.dtype)
        caught[at] = Rows(param, own, jnp.broadcast_to(count, part.last.shape))
    return caught


def _idle_rows(table, part):
    """Flags the idle rows, for which `TableFacts.decays` gives the effect of all steps."""
    if not table.moves:
        return True
    return _are_zero(part, None if table.shrinks else table.idle)


def _lost(missed, at, part):
    """Flags the rows that missed a step which depends on forgotten values."""
    layout = missed.call.layout
    table = layout.tables[at]

    def of(leaves):
        numbers = [k for k, j in enumerate(layout.held) if j in leaves]
        return missed.history.has_lost(part.last + 1, numbers)

    return jnp.where(_are_zero(part, table.still), of(table.wanted), of(table.scalars))


def _step_by_step(missed, rows, count, types):
    """Takes all steps that rows have missed, one by one."""
    if not rows:
        return {}
    first = [jnp.min(part.last, initial=2**31 - 1) for part in rows.values()]
    first = jnp.min(jnp.stack(first)) + 1

    def one_step(step, rows):
        updates, own = missed.take(step, rows)
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


def _are_zero(part, which):
    """Flags the rows in which the given leaves of the state are zero; none for None."""
    flags = jnp.full(part.last.shape, which is not None)
    for at in which or ():
        flags &= jnp.all(part.own[at] == 0, axis=range(1, part.own[at].ndim))
    return flags


def added(params: jax.Array, update: jax.Array) -> jax.Array:
    """Adds an update to rows of a parameter, as `optax.apply_updates` does."""
    return cast(jax.Array, optax.apply_updates(params, update))
