"""What schemes built on owners would send."""

import jax

from sparsejax.schemes import row_lists
from sparsejax.schemes.forecast import Forecast, Load, agreeing
from sparsejax.schemes.owners.push_pull import PushPull
from sparsejax.schemes.owners.rows import room_of
from sparsejax.units.ownership import Ownership
from sparsejax.units.ownership.memory import PartMemory
from sparsejax.wire.ladder import sent_bytes


def forecast(load: Load, ownership: Ownership, how: PushPull) -> Forecast:
    """What one rank would send for a load, by the plan that the exchange itself follows."""
    n, width = load.ranks, ownership.width(load.units, load.ranks)
    need = load.fullest_part(0, width, ownership.balanced, sets=n)
    dense, memory = load.all_reduce(how.wire_dtype), None
    if ownership.memory is not None:
        memory = PartMemory.of(load.units, n, 0, ownership.memory)
        if need > memory.takes:
            return dense
    size = load.unit_bytes(how.wire_dtype)
    plan = how.plan(load.units, n, width, size, dense.bytes, memory)
    if not plan.may_pay or plan.entry_bytes(need) >= plan.dense_bytes:
        return dense
    pushed, rounds, capacity = sent_bytes(plan.push, need, n - 1)
    fullest = load.fullest_part(-1, width, ownership.balanced)
    pulled, waits, turns = how.way.forecast(plan, load, fullest)
    waits += rounds * (n - 1) + agreeing(n)
    return Forecast(pushed, pulled, waits, capacity, rounds=rounds + turns)


def of_rows(
    load: Load, ownership: Ownership, wire_dtype: jax.typing.DTypeLike | None
) -> Forecast:
    """Reckons what one rank would send for lists of rows, to owners and back."""
    n, listed = load.ranks, load.room or 0
    if n == 1 or not listed or not load.size:
        return Forecast(0.0, 0.0, agreeing(n))
    width, balanced = ownership.width(load.units, n), ownership.balanced
    room = room_of(listed, n, width)
    need = load.fullest_part(0, width, balanced, sets=n)
    if need > room:
        # To all, as they are: keys, then rows.
        sent = float((n - 1) * listed * (4 + load.unit_bytes(wire_dtype)))
        return Forecast(sent, 0.0, agreeing(n) + 2 * (n - 1), listed, rounds=1)
    pushed, columns = row_lists.sent_by_lists(load, wire_dtype, room, need)
    owned = min(n * room, width)
    fullest = load.fullest_part(-1, width, balanced)
    pulled, more = row_lists.sent_by_lists(load, wire_dtype, owned, fullest)
    waits = 2 * (agreeing(n) + n - 1)
    return Forecast((n - 1) * pushed, (n - 1) * pulled, waits, max(columns, more), rounds=2)
