"""What a table would cost as a `ColumnTable`, beside rows of a table that is on all ranks.

By the formulas of EmbRace (`advise.papers.embrace`), m different rows that a rank reads and
u that any rank does: rows go to owners and their sums to all, (n - 1)/n (m + u) of them;
columns send 2 (n - 1)/n m and (n - 1) m ids. So columns send less, the more ranks read
other rows than one another, and the wider rows are: where (u/m - 1) times the bytes of a
row exceeds about 4 n.
"""

from sparsejax.advise.explain.reading import Group
from sparsejax.advise.papers import embrace
from sparsejax.schemes.forecast import Forecast, agreeing


def forecast(group: Group) -> Forecast | None:
    """The forecast of hybrid communication for a group of rows; None where it has none.

    With a `capacity` of the rows that a rank reads; rows of fewer numbers than there are
    ranks cannot be shared out.
    """
    load = group.load
    distinct, union = load.counts[0], load.counts[-1]
    if not group.ids or load.ranks == 1 or load.numbers < load.ranks or not distinct:
        return None
    # Counts of independent ranks may be off in the last digits.
    union = min(max(union, distinct), load.ranks * distinct)
    number = load.unit_bytes() / load.numbers
    reads = embrace.Reads(load.ranks, load.units, load.numbers, distinct, union, number)
    cost = embrace.hybrid(reads)
    waits = agreeing(load.ranks) + int(cost.rounds)
    half = cost.bytes / 2
    return Forecast(half, half, waits, capacity=round(distinct), rounds=3)
