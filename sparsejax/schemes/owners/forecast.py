"""What schemes built on owners would send: the same steps, reckoned."""

import jax

from sparsejax.schemes import row_lists
from sparsejax.schemes.forecast import Forecast, Load, agreeing, fullest_part
from sparsejax.schemes.owners.pulls import has_even_parts
from sparsejax.schemes.owners.push_pull import PushPull
from sparsejax.schemes.owners.rows import room_of
from sparsejax.units.ownership import Ownership
from sparsejax.units.ownership.memory import Memory
from sparsejax.wire import collectives
from sparsejax.wire.ladder import sent_bytes


def forecast(load: Load, ownership: Ownership, how: PushPull) -> Forecast:
    """Reckons what one rank would send for a load."""
    n, width = load.ranks, ownership.width(load.units, load.ranks)
    unit_bytes = load.unit_bytes(how.wire_dtype)
    balanced = ownership.balanced
    need = fullest_part(load.counts[0], n, width, balanced, load.skewness, sets=n)
    dense, memory = load.all_reduce(how.wire_dtype), None
    if ownership.memory is not None:
        memory = Memory.of(load.units, n, 0, ownership.memory)
        if need > memory.takes:
            return dense
    push_steps = how.push_ladder(load.units, n, width, unit_bytes, memory)
    pushed, rounds, capacity = sent_bytes(push_steps, need, n - 1)
    whole = least = (n - 1) * width * unit_bytes
    if not has_even_parts(n, width, load.units):
        size = load.size * unit_bytes // load.numbers
        whole, least = collectives.all_reduce_bytes(size, n), 0
    # As where it is traced, and where it runs.
    shortest = (n - 1) * 4.0 * push_steps.rungs[0].words
    if max(pushed, shortest) + least >= dense.bytes:
        return dense
    fullest = fullest_part(load.counts[-1], n, width, balanced, load.sum_skewness)
    pulled, waits, turns = how.way.forecast(load, how.pull, width, unit_bytes, fullest)
    if pulled >= whole:
        pulled, waits, turns = whole, agreeing(n) + n - 1, 1
    messages = rounds * (n - 1) + agreeing(n)
    return Forecast(
        pushed, float(pulled), messages + waits, capacity, rounds=rounds + turns
    )


def forecast_rows(
    load: Load, ownership: Ownership, wire_dtype: jax.typing.DTypeLike | None
) -> Forecast:
    """Reckons what one rank would send for lists of rows, to owners and back."""
    n, listed = load.ranks, load.room or 0
    if n == 1 or not listed or not load.size:
        return Forecast(0.0, 0.0, agreeing(n))
    width, balanced = ownership.width(load.units, n), ownership.balanced
    room = room_of(listed, n, width)
    need = fullest_part(load.counts[0], n, width, balanced, load.skewness, sets=n)
    if need > room:
        # To all, as they are: keys, then rows.
        sent = float((n - 1) * listed * (4 + load.unit_bytes(wire_dtype)))
        return Forecast(sent, 0.0, agreeing(n) + 2 * (n - 1), listed, rounds=1)
    pushed, columns = row_lists.sent_by_lists(load, wire_dtype, room, need)
    owned = min(n * room, width)
    fullest = fullest_part(load.counts[-1], n, width, balanced, load.sum_skewness)
    pulled, more = row_lists.sent_by_lists(load, wire_dtype, owned, fullest)
    waits = 2 * (agreeing(n) + n - 1)
    return Forecast((n - 1) * pushed, (n - 1) * pulled, waits, max(columns, more), rounds=2)
