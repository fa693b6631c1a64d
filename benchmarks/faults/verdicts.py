"""Cases that are judged: each is told and recorded as it ends, all are shown behind."""

from collections.abc import Iterable, Sequence

from benchmarks.harness import table
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.table import Column


def judge(
    record: Recorder,
    rows: Iterable[tuple[str, dict]],
    columns: Sequence[Column],
    title: str,
) -> int:
    """The status of a command: 1 where something is wrong in a case.

    Args:
        record: For the rows.
        rows: The name of each case, and its row, with what is `wrong`, as they end.
        columns: Of the table.
        title: Of the table.
    """
    for name, row in rows:
        say(f"{name}: {row['wrong'] or 'as promised'}")
        record.rows.append(row)
        record.write()
    table.show(record.rows, columns, title)
    say(f"\nwritten: {record.write()}")
    return 1 if any(row["wrong"] for row in record.rows) else 0
