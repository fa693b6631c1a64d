"""What a table would cost as a `ColumnTable`, beside rows of a table that is on all ranks.

By the formulas of EmbRace, for m different rows that a rank reads and u that any rank does:
rows go to owners and their sums to all, (n - 1)/n (m + u) of them; columns send
2 (n - 1)/n m and (n - 1) m ids. So columns send less, the more ranks read other rows than
one another, and the wider rows are: where (u/m - 1) times the bytes of a row exceeds about
4 n.
"""

from sparsejax.advise.explain.reading import Group
from sparsejax.schemes.forecast import Forecast, agreeing


def forecast(group: Group) -> Forecast | None:
    """The forecast of hybrid communication for a group of rows; None where it has none.

    With a `capacity` of the rows that a rank reads; rows of fewer numbers than there are
    ranks cannot be sharded.
    """
    load = group.load
    distinct = load.counts[0]
    if not group.ids or load.ranks == 1 or load.numbers < load.ranks or not distinct:
        return None
    messages, sent = hybrid_cost(load.ranks, distinct, load.unit_bytes())
    waits = agreeing(load.ranks) + messages
    return Forecast(sent / 2, sent / 2, waits, capacity=round(distinct), rounds=3)


def hybrid_cost(
    ranks: int, distinct: float, row_bytes: float, id_bytes: float = 4.0
) -> tuple[int, float]:
    """Messages and bytes that a rank sends for a table by columns.

    EmbRace's table 2, AlltoAll, after an all-gather of (n - 1) m ids: 2 (n - 1)/n m rows,
    there and back. No id travels with them.

    Args:
        ranks: n.
        distinct: m, different rows that a rank reads.
        row_bytes: Bytes of a row's numbers.
        id_bytes: Bytes of a row's number.
    """
    rows = 2 * (ranks - 1) / ranks * distinct * row_bytes
    return 3 * (ranks - 1), rows + (ranks - 1) * distinct * id_bytes
