"""The choice between entries and the dense collective, by their bytes.

A scheme computes the bytes of its entries before it sends them, from counts on which all
ranks agreed. So all ranks take the same branch, and none sends more than a dense collective
does, except for the agreed numbers. On GPUs entries must save as much time as they cost
beside the bytes (`collectives.pays`). On a platform where entries never pay, `suited`
replaces the scheme by a dense sum before any entries are counted.
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
from sparsejax.wire.collectives import Wire, at_once


def or_dense(
    pays: jax.Array,
    by_entries: Callable[..., Any],
    densely: Callable[..., Any],
    *operands: Any,
    copied: bool = True,
) -> Any:
    """Returns the result of `by_entries` if entries pay, else that of `densely`.

    Args:
        pays: Boolean [], whether entries pay, equal on all ranks: see `collectives.pays`.
        by_entries: Sends the entries of the operands.
        densely: Sends the operands as dense arrays; its results have the same shapes.
        *operands: The operands of both functions.
        copied: Whether the dense branch works on copies of the operands, because XLA may
            write over them: see `on_copies`.
    """
    if at_once():
        operands = (pays, *operands)
        by_entries = _without(by_entries)
        densely = on_copies(densely) if copied else _without(densely)
    return branches.cond(pays, by_entries, densely, *operands)


def _without(send):
    return lambda pays, *operands: send(*operands)


def on_copies(densely: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `densely` as a function of `pays` and the operands, which it copies.

    It is called in the branch in which `pays` is false.

    XLA's all-reduce on GPUs writes over its operand. If the operand is needed later, as any
    argument that is not donated is, XLA copies it first, and does so before the branch is
    known, also where entries are sent. A select by `pays` is a copy that XLA does not move
    out of the branch.
    """

    def call(pays, *operands):
        copies = jax.tree.map(lambda x: jnp.where(pays, jnp.zeros_like(x), x), operands)
        return densely(*copies)

    return call


def refuses_numbers(
    scheme: base.Scheme, are_numbers: bool, ranks: int, shared: bool
) -> bool:
    """Returns whether a scheme would list numbers on a platform where that is too slow.

    Args:
        scheme: The scheme.
        are_numbers: Whether units are single numbers.
        ranks: The number of ranks.
        shared: Whether all ranks have the same entries, whose values alone are sent.
    """
    is_listed = are_numbers and ranks > 1 and not shared
    return is_listed and not policy().numbers and not scheme.is_dense


def suited(
    scheme: base.Scheme, x: Units, name: str, wire: Wire, dense: bool = False
) -> base.Scheme:
    """Returns the scheme that sums some units on the platform that is traced for.

    That is a dense sum, with a warning, where single numbers are not worth listing. A lossy
    scheme is kept, with another warning, since a dense sum would change the training.
    Entries whose units are shared by all ranks also keep their scheme, since only their
    values are sent.

    Args:
        scheme: The scheme that was asked for.
        x: The units.
        name: The name of their leaf or bucket, for the warning.
        wire: The ranks.
        dense: Whether a dense sum was asked for.
    """
    if dense and (isinstance(scheme, base.LossyScheme) or not scheme.is_dense):
        return AllReduce(scheme.wire_dtype)
    if not refuses_numbers(scheme, len(x.shape) == 1, wire.ranks, x.shared):
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
