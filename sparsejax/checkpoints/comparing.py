"""Compares a checkpoint with the fresh state into which it is to be restored.

For the same number of ranks both must have the same nodes, shapes and dtypes. A number may
be an array in one of them and a Python number in the other. For another number of ranks,
state by rank may have another number of rows, and a table another number of columns of
padding. The states of schemes are not restored, so only their buckets and types are
compared.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from sparsejax.checkpoints.description import (
    Array,
    Node,
    Part,
    Value,
    joined,
)
from sparsejax.state.by_owner import SAME_SHARDS, ByOwner
from sparsejax.state.pending import Pending
from sparsejax.state.per_rank import PerRank
from sparsejax.state.sharded import Sharded
from sparsejax.transforms.exchange import ExchangeState


Shape = tuple[int, ...]


class Difference(NamedTuple):
    """The first place where two descriptions differ.

    Attributes:
        path: The path of the part that differs.
        saved: That part of the checkpoint, as text.
        fresh: That part of the fresh state, as text.
        fix: What to do about it, if it is known.
    """

    path: str
    saved: str
    fresh: str
    fix: str = ""


def first_difference(saved: Part, fresh: Part, resizing: bool) -> Difference | None:
    """Returns the first difference, or None if the checkpoint can be restored.

    Args:
        saved: The description of the checkpoint.
        fresh: The description of the fresh state.
        resizing: Whether the two are for different numbers of ranks.
    """
    return _differ(saved, fresh, "", _equal, resizing)


def _differ(
    saved: Part, fresh: Part, path: str, matches: Callable[[Shape, Shape], bool], resizing
) -> Difference | None:
    if isinstance(saved, Array) and isinstance(fresh, Array):
        if saved.dtype == fresh.dtype and matches(saved.shape, fresh.shape):
            return None
        return Difference(path, str(saved), str(fresh))
    if isinstance(saved, Array) and isinstance(fresh, Value) and _are_numbers(saved, fresh):
        return None
    if isinstance(saved, Value) and isinstance(fresh, Array) and _fits(saved, fresh):
        return None
    if isinstance(saved, Value) and isinstance(fresh, Value):
        was, now = (type(part.value).__name__ for part in (saved, fresh))
        return None if was == now else Difference(path, was, now)
    if not isinstance(saved, Node) or not isinstance(fresh, Node):
        return Difference(path, str(saved), str(fresh))
    if (saved.type, saved.told) != (fresh.type, fresh.told):
        fix = SAME_SHARDS if fresh.kind is ByOwner and saved.type == fresh.type else ""
        return Difference(path, str(saved), str(fresh), fix)
    for name in [*fresh.parts, *saved.parts]:
        if name not in saved.parts or name not in fresh.parts:
            was, now = (str(node.parts.get(name, "nothing")) for node in (saved, fresh))
            return Difference(joined(path, name), was, now)
    if resizing and fresh.kind is ExchangeState:
        found = _differ_in_schemes(saved, fresh, path)
        names = ("totals", "reduction")
    else:
        found, names = None, tuple(fresh.parts)
    if matches is not _equal_axes and (resizing or fresh.kind is Pending):
        matches = _MATCHES.get(fresh.kind, matches)
    for name in names:
        if found is not None:
            break
        parts = saved.parts[name], fresh.parts[name]
        found = _differ(*parts, joined(path, name), matches, resizing)
    return found


def _are_numbers(array, value):
    """Returns whether an array and a Python value are one number each, of one kind.

    flax's `TrainState.create` makes the number of steps an int, and a step an array.
    """
    kinds = {bool: ("bool",), int: ("int", "uint"), float: ("float", "bfloat")}
    is_kind = array.dtype.startswith(kinds.get(type(value.value), ()))
    return is_kind and not array.shape


def _fits(value, array):
    """Returns whether an array can have the number of a Python value, but for rounding."""
    if not _are_numbers(array, value):
        return False
    given = value.value
    try:
        with np.errstate(all="ignore"):
            number = np.asarray(given, jnp.dtype(array.dtype)).item()
    except OverflowError:
        return False
    if isinstance(given, float):
        return all(of(number) == of(given) for of in (math.isnan, math.isinf))
    return number == given


def _equal(saved, fresh):
    return saved == fresh


def _equal_rows(saved, fresh):
    """Compares shapes of state by rank, which has one row for each rank.

    A shape () is that of the number of ranks, and is compared as it is.
    """
    return len(saved) == len(fresh) and saved[1:] == fresh[1:]


def _equal_columns(saved, fresh):
    """Compares shapes of a table, but for padding; `Node.told` has its width without it."""
    if len(saved) < 2 or len(fresh) < 2:
        return saved == fresh
    return len(saved) == len(fresh) and saved[:-1] == fresh[:-1]


def _equal_axes(saved, fresh):
    """Compares numbers of axes: the capacity of delayed rows may exceed a fresh state's."""
    return len(saved) == len(fresh)


def _equal_blocks(saved, fresh):
    """Compares shapes of blocks by owner: the number of blocks depends on that of ranks."""
    if len(saved) != 4 or len(fresh) != 4:  # the shape () of the number of ranks
        return saved == fresh
    return (saved[1], saved[3]) == (fresh[1], fresh[3])


_MATCHES = {
    ByOwner: _equal_blocks,
    PerRank: _equal_rows,
    Sharded: _equal_columns,
    Pending: _equal_axes,
}


def _differ_in_schemes(saved: Node, fresh: Node, path: str) -> Difference | None:
    """Returns the first bucket that only one has, or whose state has another type.

    Leaves that are sharded otherwise are in other buckets. Then the type of the state of
    each leaf is compared.
    """
    path = joined(path, "schemes")
    old, new = saved.parts["schemes"], fresh.parts["schemes"]
    if not isinstance(old, Node) or not isinstance(new, Node):
        return Difference(path, str(old), str(new))
    if old.parts.keys() != new.parts.keys() and _leaves(old) == _leaves(new):
        return None
    for name in [*new.parts, *old.parts]:
        was, now = (
            _root(side.parts[name]) if name in side.parts else "nothing"
            for side in (old, new)
        )
        if was != now:
            return Difference(joined(path, name), was, now)
    return None


def _leaves(schemes):
    """Returns the paths of the leaves of all buckets, with the types of their states."""
    return {
        (path, _root(part))
        for name, part in schemes.parts.items()
        for path in (part.told.get("of") if isinstance(part, Node) else None) or [name]
    }


def _root(part):
    """Returns the name of the type of a scheme's state, inside `PerRank`."""
    while isinstance(part, Node) and part.type == "PerRank":
        part = part.parts["value"]
    return part.type if isinstance(part, Node) else "an array"
