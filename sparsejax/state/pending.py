"""What a state holds back: rows for the next step, and the numbers of steps that sums wait.

Rows of gradients that ranks hold back are given to other ranks where a job of another size
continues from a checkpoint.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sparsejax.axes import axis_names
from sparsejax.errors import StateError
from sparsejax.state.per_rank import PerRank
from sparsejax.units.row_grads import RowGrads


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("ids", "rows"),
    meta_fields=("height", "dim"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class Pending:
    """Delayed rows: whole rows of the gradient of a table that is sharded by columns.

    Attributes:
        ids: int32 [ranks, capacity]: the ids of the rows that each rank holds, equal on all
            ranks; the sentinel `height` marks an empty place.
        rows: [ranks, capacity, columns]: the rows of each rank, as `PerRank`.
        height: The number of rows of the table.
        dim: The number of columns of the table; further columns are padding.
    """

    ids: jax.Array
    rows: PerRank
    height: int
    dim: int

    def check(self, path: str, ranks: int, shape: tuple[int, int]) -> None:
        """Raises unless it is of `ranks` ranks, and of a table of this height and width.

        It is called inside `shard_map`.

        Args:
            path: The path of the table.
            ranks: The number of ranks.
            shape: The number of the table's rows, and of the columns of all ranks, padding
                included.
        """
        made = self.ids.shape[0]
        if made != ranks or self.rows.value.shape[0] != 1:
            raise StateError(
                f"of the table {path!r} the state holds back rows of {made} ranks, and "
                f"there are {ranks}, each to be given its own: sparsejax.resized(state, "
                "like=sparsejax.init(tx, params, mesh)) gives them to those there are, "
                "sparsejax.state_specs(state) says how a state is passed to shard_map."
            )
        held = self.height, self.rows.value.shape[2]
        if held != shape:
            raise StateError(
                f"the state holds back rows of a table {path!r} {list(held)}, and its "
                f"gradient is one of {list(shape)}: make the state with the parameters "
                "that are trained, sparsejax.init(tx, params, mesh)."
            )

    def resized(
        self, fresh: "Pending", mean: bool, whole: Callable[..., np.ndarray], path: str
    ) -> "Pending":
        """Returns the rows distributed among other ranks: see `resizing.resized`.

        Rows with equal ids on several ranks are summed. If a new rank gets more rows than
        the capacity of the fresh state, the capacity grows. The first step makes it what it
        was, and JAX warns that it could not reuse the memory of this donated buffer.

        Args:
            fresh: The node of a new state for the other ranks.
            mean: Whether gradients are averaged: rows are then scaled by the new number of
                ranks over the old one.
            whole: A function from a path and a `jax.Array` to the whole NumPy array.
            path: The path of the node in the state.
        """
        if (self.height, self.dim) != (fresh.height, fresh.dim):
            raise StateError(
                f"the state has at {path!r} rows of a table {[self.height, self.dim]}, "
                f"and `like` has those of {[fresh.height, fresh.dim]}: they were made for "
                "other parameters."
            )
        ids, rows = whole(path, self.ids), whole(path, self.rows.value)
        ranks, room = fresh.ids.shape
        if ids.shape != (ranks, room):
            ids, rows = self._spread(ids, rows, mean, ranks, room)
        filled = np.zeros((*rows.shape[:2], fresh.rows.value.shape[2]), rows.dtype)
        filled[..., : self.dim] = rows[..., : self.dim]

        def placed(x, like):
            x = x.astype(like.dtype)
            return jax.make_array_from_callback(x.shape, like.sharding, lambda at: x[at])

        value = placed(filled, fresh.rows.value)
        return dataclasses.replace(
            fresh, ids=placed(ids, fresh.ids), rows=fresh.rows.with_value(value)
        )

    def _spread(self, ids, rows, mean, ranks, room):
        """Returns the ids and rows distributed among other ranks, each row to one rank."""
        real = ids < self.height
        distinct, place = np.unique(ids[real], return_inverse=True)
        sums = np.zeros((len(distinct), rows.shape[2]), np.float64)
        np.add.at(sums, place.reshape(-1), rows[real].astype(np.float64))
        sums = sums * (ranks / len(ids) if mean else 1)
        room = max(room, -(-len(distinct) // ranks))
        new = np.full((ranks, room), self.height, np.int32)
        moved = np.zeros((ranks, room, rows.shape[2]), np.float64)
        for rank in range(ranks):
            own = slice(rank, None, ranks)
            count = len(distinct[own])
            new[rank, :count], moved[rank, :count] = distinct[own], sums[own]
        return new, moved


def per_rank(rows: jax.Array, path: str, axis_name: Any, ranks: Any) -> PerRank:
    """Returns a `PerRank` of rows that a rank holds back, [1, capacity, columns]."""
    return PerRank(rows, axis_name, (path,), axis_names(axis_name), ranks)


def is_pending(node: Any) -> bool:
    """Returns whether a node of a state is `Pending`."""
    return isinstance(node, Pending)


def row_grads(ids: jax.Array, rows: jax.Array, height: int) -> RowGrads:
    """Returns rows [n, k, columns] of n ranks, with their ids [n, k], as one gradient."""
    flat = rows.reshape(-1, rows.shape[-1])
    return RowGrads.marked(ids.reshape(-1), flat, (height, rows.shape[-1]))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Period:
    """The numbers of steps for which a state holds something back; static under `jit`.

    Attributes:
        every: The number of steps from one exchange to the next.
        delay: The number of steps from an exchange to its use.
    """

    every: int
    delay: int = 0

    def __str__(self) -> str:
        return f"every={self.every}" + (f" and delay={self.delay}" if self.delay else "")

    def check(self, other: "Period | None", what: str) -> None:
        """Raises if a state was made for other numbers.

        Args:
            other: The numbers of the state; None if it does not depend on them.
            what: The transformation that has these, for the message.
        """
        if other is not None and other != self:
            raise StateError(
                f"{what} has {self}, and the state was made with {other}: what it holds "
                "back would count differently, or be used at the wrong step. Continue with "
                f"{other}; or at the end of a round, with which all of it has been used, "
                "make a new state, sparsejax.init(tx, params, mesh), and give it what the "
                "optimizers in the old one keep, by _replace."
            )
