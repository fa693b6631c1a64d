"""Whether a checkpoint is of the state that it is to be restored into.

On as many ranks both have the same nodes, shapes and dtypes. On others what ranks hold has
another number of rows, a table another number of columns that fill it up, and of what
schemes remember, which begins anew, only buckets and kinds are the same.
"""

from collections.abc import Callable
from typing import NamedTuple

from sparsejax.checkpoints.description import (
    Array,
    Node,
    Part,
    Value,
    joined,
)
from sparsejax.state.by_owner import ByOwner
from sparsejax.state.pending import Pending
from sparsejax.state.per_rank import PerRank
from sparsejax.state.sharded import Sharded
from sparsejax.transforms.exchange import ExchangeState


Shape = tuple[int, ...]


class Difference(NamedTuple):
    """The first place where two descriptions differ.

    Attributes:
        path: Where it is.
        saved: What the checkpoint has there, in words.
        fresh: What the fresh state has there.
    """

    path: str
    saved: str
    fresh: str


def first_difference(saved: Part, fresh: Part, resizing: bool) -> Difference | None:
    """Where two descriptions differ first; None if one can be restored into the other.

    Args:
        saved: That of the checkpoint.
        fresh: That of the fresh state.
        resizing: Whether they are for ranks that differ.
    """
    return _differ(saved, fresh, "", _equal, resizing)


def _differ(
    saved: Part, fresh: Part, path: str, alike: Callable[[Shape, Shape], bool], resizing
) -> Difference | None:
    if isinstance(saved, Array) and isinstance(fresh, Array):
        if saved.dtype == fresh.dtype and alike(saved.shape, fresh.shape):
            return None
        return Difference(path, str(saved), str(fresh))
    if isinstance(saved, Value) and isinstance(fresh, Value):
        was, now = (type(part.value).__name__ for part in (saved, fresh))
        return None if was == now else Difference(path, was, now)
    if not isinstance(saved, Node) or not isinstance(fresh, Node):
        return Difference(path, str(saved), str(fresh))
    if (saved.type, saved.told) != (fresh.type, fresh.told):
        return Difference(path, str(saved), str(fresh))
    for name in [*fresh.parts, *saved.parts]:
        if name not in saved.parts or name not in fresh.parts:
            was, now = (str(node.parts.get(name, "nothing")) for node in (saved, fresh))
            return Difference(joined(path, name), was, now)
    if resizing and fresh.kind is ExchangeState:
        found = _differ_in_schemes(saved, fresh, path)
        names = ("totals", "reduction")
    else:
        found, names = None, tuple(fresh.parts)
    if alike is not _pending and (resizing or fresh.kind is Pending):
        alike = _ALIKE.get(fresh.kind, alike)
    for name in names:
        if found is not None:
            break
        parts = saved.parts[name], fresh.parts[name]
        found = _differ(*parts, joined(path, name), alike, resizing)
    return found


def _equal(saved, fresh):
    return saved == fresh


def _equal_rows(saved, fresh):
    """What ranks hold: as many rows as ranks. The number of ranks itself has no shape."""
    return len(saved) == len(fresh) and saved[1:] == fresh[1:]


def _equal_columns(saved, fresh):
    """A table with what fills it up, whose width without is compared by itself."""
    if len(saved) < 2 or len(fresh) < 2:
        return saved == fresh
    return len(saved) == len(fresh) and saved[:-1] == fresh[:-1]


def _pending(saved, fresh):
    """Rows that wait: there may be more room than in a fresh state, until the next step."""
    return len(saved) == len(fresh)


def _equal_blocks(saved, fresh):
    """Blocks that ranks share out: each has as many as there are for it."""
    if len(saved) != 4 or len(fresh) != 4:  # the number of ranks itself
        return saved == fresh
    return (saved[1], saved[3]) == (fresh[1], fresh[3])


_ALIKE = {
    ByOwner: _equal_blocks,
    PerRank: _equal_rows,
    Sharded: _equal_columns,
    Pending: _pending,
}


def _differ_in_schemes(saved: Node, fresh: Node, path: str) -> Difference | None:
    """Whether buckets, or the kinds of their schemes' states, are others."""
    path = joined(path, "schemes")
    old, new = saved.parts["schemes"], fresh.parts["schemes"]
    if not isinstance(old, Node) or not isinstance(new, Node):
        return Difference(path, str(old), str(new))
    for name in [*new.parts, *old.parts]:
        was, now = (
            _root(side.parts[name]) if name in side.parts else "nothing"
            for side in (old, new)
        )
        if was != now:
            return Difference(joined(path, name), was, now)
    return None


def _root(part):
    """The kind of a scheme's state."""
    while isinstance(part, Node) and part.type == "PerRank":
        part = part.parts["value"]
    return part.type if isinstance(part, Node) else "an array"
