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
        form: How a value is formatted, as ".1f"; texts, which have none, stand left.
        scale: The factor by which a number is shown.
    """

    header: str
    value: str | Callable[[dict], Any]
    form: str = ""
    scale: float = 1

    def text(self, row: dict) -> str:
        """The cell of a row; a dash where there is no value."""
        value = row.get(self.value) if isinstance(self.value, str) else self.value(row)
        if value is None:
            return "-"
        return format(value * self.scale if self.scale != 1 else value, self.form)


def show(rows: Iterable[dict], columns: Iterable[Column], title: str = "") -> None:
    """Prints rows as a table, below a title if there is one."""
    columns = list(columns)
    table = Table(box=None, pad_edge=False)
    for column in columns:
        side = "right" if column.form else "left"
        table.add_column(column.header, justify=side, no_wrap=True)
    for row in rows:
        table.add_row(*(column.text(row) for column in columns))
    if title:
        print(f"\n{title}")
    # A file has no width.
    Console(file=sys.stdout, width=240, highlight=False, markup=False).print(table)
    sys.stdout.flush()
