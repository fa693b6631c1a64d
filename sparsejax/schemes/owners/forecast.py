"""Forecasts of the schemes with owners."""

import jax

from sparsejax.schemes import row_lists
from sparsejax.schemes.forecast import Forecast, Load, agreeing, owned_of, room_of
from sparsejax.schemes.owners.push_pull import PushPull
from sparsejax.schemes.owners.rows import bytes_to_all
from sparsejax.units.ownership import Ownership
from sparsejax.units.ownership.memory import PartMemory
from sparsejax.wire import collectives
from sparsejax.wire.channels import Route


def forecast(load: Load, ownership: Ownership, how: PushPull) -> Forecast:
    """Forecasts what one rank would send, by the plan that the exchange itself follows."""
    n, width = load.ranks, ownership.width(load.units, load.ranks)
    need = load.fullest_part(0, width, ownership.balanced, sets=n)
    dense, memory = load.all_reduce(how.wire_dtype), None
    if ownership.memory is not None:
        memory = PartMemory.of(load.units, n, 0, ownership.memory)
        if need > memory.takes:
            return dense
    size = load.unit_bytes(how.wire_dtype)
    plan = how.plan(load.units, n, width, size, dense.bytes, memory)
    pays = collectives.pays(plan.entry_bytes(need), plan.dense_bytes)
    if not (plan.may_pay and pays):
        return dense
    pushed, rounds, capacity = plan.push.sent(need, plan.route)
    fullest = load.fullest_part(1, width, ownership.balanced)
    pulled, waits, turns = how.way.forecast(plan, load, fullest)
    waits += rounds * (n - 1) + agreeing(n)
    return Forecast(pushed, pulled, waits, capacity, rounds=rounds + turns)


def of_rows(
    load: Load, ownership: Ownership, wire_dtype: jax.typing.DTypeLike | None
) -> Forecast:
    """Forecasts what one rank would send for lists of rows, in a push and a pull."""
    n, listed = load.ranks, load.room or 0
    if n == 1 or not listed or not load.size:
        return Forecast(0.0, 0.0, agreeing(n))
    width, balanced = ownership.width(load.units, n), ownership.balanced
    room, size = room_of(listed, n, width), load.unit_bytes(wire_dtype)
    need = load.fullest_part(0, width, balanced, sets=n)
    if need > room:
        # All lists are gathered: the keys, then the rows.
        sent = bytes_to_all(listed, n, size)
        return Forecast(sent, 0.0, agreeing(n) + 2 * (n - 1), listed, rounds=1)
    owned, fullest = owned_of(room, n, width), load.fullest_part(1, width, balanced)
    pushed, columns = row_lists.sent_by_lists(size, room, need, Route(n - 1))
    pulled, more = row_lists.sent_by_lists(size, owned, fullest, Route(n - 1))
    waits = 2 * (agreeing(n) + n - 1)
    return Forecast(pushed, pulled, waits, max(columns, more), rounds=2)
