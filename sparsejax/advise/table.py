"""Tables and sizes as text."""

from collections.abc import Collection, Sequence


def table(rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Returns the lines of a table, its heading first.

    Args:
        rows: The heading and the rows, a string for each cell.
        left: The columns that are aligned to the left; others are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        aligned = [
            cell.ljust(width) if k in left else cell.rjust(width)
            for k, (cell, width) in enumerate(cells)
        ]
        lines.append("  ".join(aligned).rstrip())
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def size(count: float) -> str:
    """Returns a number of bytes as text with a unit."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"
