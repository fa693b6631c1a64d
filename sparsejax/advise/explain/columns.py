"""Forecasts a table as a `ColumnTable`, to be compared with rows of a replicated table.

The formulas are EmbRace's, for n ranks, m distinct rows that one rank reads, and u that all
ranks read together. By rows, (n - 1)/n (m + u) rows are sent, to owners and from them to
all. By columns, 2 (n - 1)/n m rows and (n - 1) m ids are sent. So columns send less if
(u/m - 1) times the bytes of a row exceeds about 4 n: if ranks read different rows, and rows
are wide.
"""

from sparsejax.advise.explain.reading import Group
from sparsejax.schemes.forecast import Forecast, agreeing


def forecast(group: Group) -> Forecast | None:
    """Forecasts hybrid communication for a group whose gradients are rows.

    Its `capacity` is the number of distinct rows that a rank reads. It is None for other
    groups, for one rank, and for rows of fewer columns than ranks, which cannot be sharded.
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
    """Returns the messages and the bytes that a rank sends for a table by columns.

    They are those of AlltoAll in EmbRace's table 2, 2 (n - 1)/n m rows for vectors and
    gradients, without ids, and of an all-gather of (n - 1) m ids before it.

    Args:
        ranks: n.
        distinct: m, the number of distinct rows that a rank reads.
        row_bytes: The bytes of a row.
        id_bytes: The bytes of an id.
    """
    rows = 2 * (ranks - 1) / ranks * distinct * row_bytes
    return 3 * (ranks - 1), rows + (ranks - 1) * distinct * id_bytes
