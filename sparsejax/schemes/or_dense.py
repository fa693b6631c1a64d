"""Entries, unless the dense collective sends no more bytes.

A scheme reckons beforehand what its entries would take, from counts on which all ranks
agreed. So all ranks take the same side, and none sends more than a dense collective does,
but for what they agreed on.
"""

from collections.abc import Callable
from typing import Any

import jax

from sparsejax import axes


def or_dense(
    entry_bytes: jax.Array,
    dense_bytes: float | jax.Array,
    by_entries: Callable[..., Any],
    densely: Callable[..., Any],
    *operands: Any,
    unless: jax.Array | None = None,
) -> Any:
    """The result of `by_entries`; that of `densely` where it sends no more bytes.

    Args:
        entry_bytes: Bytes that one rank sends for the entries, equal on all ranks.
        dense_bytes: Bytes that one rank sends for the dense array.
        by_entries: Sends the entries of the operands.
        densely: Sends the operands as dense arrays; its results have the same shapes.
        *operands: What both are called with.
        unless: Whether to send densely in any case, equal on all ranks.
    """
    pays = entry_bytes < dense_bytes
    pays = pays if unless is None else pays & ~unless
    return axes.cond(pays, by_entries, densely, *operands)
