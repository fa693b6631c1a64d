"""Tables on the terminal."""

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        header: Its name.
        value: The field of a row that it shows, or a function of the row.
        form: The format of a value, such as ".1f"; a column without one is left-aligned.
        scale: The factor by which numbers are multiplied.
    """

    header: str
    value: str | Callable[[dict], Any]
    form: str = ""
    scale: float = 1

    def text(self, row: dict) -> str:
        """Returns the text of a row's cell; a dash if the value is None."""
        value = row.get(self.value) if isinstance(self.value, str) else self.value(row)
        if value is None:
            return "-"
        return format(value * self.scale if self.scale != 1 else value, self.form)


def show(rows: Iterable[dict], columns: Iterable[Column], title: str = "") -> None:
    """Prints rows as a table, below a title if one is given."""
    columns = list(columns)
    table = Table(box=None, pad_edge=False)
    for column in columns:
        side = "right" if column.form else "left"
        table.add_column(column.header, justify=side, no_wrap=True)
    for row in rows:
        table.add_row(*(column.text(row) for column in columns))
    if title:
        print(f"\n{title}")
    # Output to a file has no width of its own.
    Console(file=sys.stdout, width=240, highlight=False, markup=False).print(table)
    sys.stdout.flush()
