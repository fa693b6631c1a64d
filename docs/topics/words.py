"""Numbers and names in sentences."""

from recorded import times


def between(values, places=None):
    """From the least to the largest, as `times` has them or to so many places."""
    said = times if places is None else lambda x: f"{x:.{places}f}"
    least, most = said(min(values)), said(max(values))
    return least if least == most else f"{least} to {most}"


def listed(names):
    """Names with commas, and an "and" before the last."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
