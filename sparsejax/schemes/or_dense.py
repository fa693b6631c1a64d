"""Entries, unless the dense collective sends no more bytes.

A scheme computes beforehand what its entries would take, from counts on which all ranks
agreed. So all ranks take the same side, and none sends more than a dense collective does,
but for what they agreed on. On GPUs entries must save as much as they cost beside bytes
(`collectives.pays`). A platform where entries never pay has the dense sum before any is
counted: `suited`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.platforms import policy
from sparsejax import branches, errors
from sparsejax.schemes import base
from sparsejax.schemes.all_reduce import AllReduce
from sparsejax.units.units import Units
from sparsejax.wire.collectives import Wire


def or_dense(
    wire: Wire,
    pays: jax.Array,
    by_entries: Callable[..., Any],
    densely: Callable[..., Any],
    *operands: Any,
    copied: bool = True,
) -> Any:
    """The result of `by_entries` where that pays, else that of `densely`.

    Args:
        wire: The ranks.
        pays: Whether it does, equal on all ranks: see `collectives.pays`.
        by_entries: Sends the entries of the operands.
        densely: Sends the operands as dense arrays; its results have the same shapes.
        *operands: What both are called with.
        copied: Whether XLA may write over the operands where they are sent densely.
    """
    if wire.at_once:
        operands = (pays, *operands)
        by_entries = _without(by_entries)
        densely = on_copies(densely) if copied else _without(densely)
    return branches.cond(pays, by_entries, densely, *operands)


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


def suited(
    scheme: base.Scheme, x: Units, name: str, wire: Wire, dense: bool = False
) -> base.Scheme:
    """The scheme that sums some units on the platform that is traced for.

    Where single numbers are not worth listing, that is a dense sum, and a warning says so.
    A lossy scheme stays, with a warning of its own: a dense sum would train otherwise.
    Entries that all ranks have in common stay, too: of them values alone are sent.

    Args:
        scheme: The scheme that was asked for.
        x: The units.
        name: Of their leaf, or bucket.
        wire: The ranks.
        dense: Whether a dense sum was asked for.
    """
    if dense and not isinstance(scheme, AllReduce):
        return AllReduce(scheme.wire_dtype)
    is_listed = len(x.shape) == 1 and wire.ranks > 1 and not x.shared
    if policy().numbers or isinstance(scheme, AllReduce) or not is_listed:
        return scheme
    what = f"{type(scheme).__name__} was to sum {name!r}, {x.shape[0]:,} single numbers, "
    if isinstance(scheme, base.LossyScheme):
        errors.warn_of_platform(
            "selected numbers",
            f"{what}and does: but a TPU reads and writes selected numbers one after "
            "another, which takes longer than to send all of them. Sum such leaves "
            "densely, by sparsejax.dense_sync() or a rule 'dense'.",
        )
        return scheme
    errors.warn_of_platform(
        "listed numbers",
        f"{what}and they are summed densely: a TPU reads and writes listed numbers one "
        "after another, which takes longer than to send all of them. So no bytes are saved "
        "here. Say so by a rule 'dense' for such leaves, or by sparsejax.dense_sync(). "
        "Rows of tables are sent sparsely, by a rule 'row' or as RowGrads.",
    )
    return AllReduce(scheme.wire_dtype)
