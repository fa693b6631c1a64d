"""Entries, unless the dense collective sends no more bytes.

A scheme computes beforehand what its entries would take, from counts on which all ranks
agreed. So all ranks take the same side, and none sends more than a dense collective does,
but for what they agreed on.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import axes
from sparsejax.wire.collectives import Wire


def or_dense(
    wire: Wire,
    entry_bytes: jax.Array,
    dense_bytes: float | jax.Array,
    by_entries: Callable[..., Any],
    densely: Callable[..., Any],
    *operands: Any,
    unless: jax.Array | None = None,
    copied: bool = True,
) -> Any:
    """The result of `by_entries`; that of `densely` where it sends no more bytes.

    Args:
        wire: The ranks.
        entry_bytes: Bytes that one rank sends for the entries, equal on all ranks.
        dense_bytes: Bytes that one rank sends for the dense array.
        by_entries: Sends the entries of the operands.
        densely: Sends the operands as dense arrays; its results have the same shapes.
        *operands: What both are called with.
        unless: Whether to send densely in any case, equal on all ranks.
        copied: Whether XLA may write over the operands where they are sent densely.
    """
    pays = entry_bytes < dense_bytes
    pays = pays if unless is None else pays & ~unless
    if wire.at_once:
        operands = (pays, *operands)
        by_entries = _without(by_entries)
        densely = on_copies(densely) if copied else _without(densely)
    return axes.cond(pays, by_entries, densely, *operands)


def _without(send):
    return lambda pays, *operands: send(*operands)


def on_copies(densely: Callable[..., Any]) -> Callable[..., Any]:
    """`densely` on copies of the operands, made where it is called.

    Its arguments are whether entries pay, which is false where it is called, and the
    operands.

    XLA's all-reduce on GPUs writes over its operand, so one that is still needed, as every
    argument of a program that is not donated, is copied first, and XLA does that before it
    knows which side is taken. A copy that it sees no reason for stays where it is.
    """

    def call(pays, *operands):
        copies = jax.tree.map(lambda x: jnp.where(pays, jnp.zeros_like(x), x), operands)
        return densely(*copies)

    return call
