"""Text of values, equal in all processes that have equal values, and of lists of names."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any


def text_of(value: Any) -> str:
    """Returns a value as text that is equal in all processes that have an equal value.

    `repr` is not: it depends on the order of a set and on the addresses of objects.
    """
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(text_of, value))) + "}"
    if type(value) in (list, tuple):
        begin, end = "[]" if type(value) is list else "()"
        return begin + ", ".join(map(text_of, value)) + end
    if isinstance(value, Mapping):
        pairs = sorted(f"{text_of(key)}: {text_of(one)}" for key, one in value.items())
        return "{" + ", ".join(pairs) + "}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(one.name, getattr(value, one.name)) for one in dataclasses.fields(value)]
        inside = ", ".join(f"{name}={text_of(one)}" for name, one in fields)
        return f"{type(value).__name__}({inside})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def listed(names: Sequence[str], most: int = 8) -> str:
    """Returns names as text: the first `most` of them, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
