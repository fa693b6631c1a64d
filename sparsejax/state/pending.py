"""Rows of gradients that ranks hold back for the next step, and how they change ranks."""

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
    """Whole rows of the gradient of a table that is sharded by columns.

    Attributes:
        ids: int32 [ranks, room], which rows each rank holds, the same on all ranks;
            `height` marks a place without one.
        rows: [ranks, room, columns], the rows of each: `PerRank`.
        height: How many rows the table has.
        dim: How many of the columns are the table's; the others fill up.
    """

    ids: jax.Array
    rows: PerRank
    height: int
    dim: int

    def check(self, path: str, ranks: int, shape: tuple[int, int]) -> None:
        """Raises unless it is of `ranks` ranks, and of a table of this height and width.

        Args:
            path: The table.
            ranks: How many ranks there are.
            shape: The table's rows, and the columns of all ranks, on a rank.
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
        """What is held back, by other ranks: see `resizing.resized`.

        Equal rows of several ranks are added up. Where one of the new ranks gets more than
        the fresh state has room for, there is more room. The first step makes it what it
        was, and JAX warns that it could not reuse that memory.

        Args:
            fresh: That of a fresh state for the other ranks.
            mean: Whether ranks are averaged: then a rank of fewer counts more.
            whole: From a path and an array to NumPy's.
            path: Where it is in the state.
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
        """The rows distributed among other ranks, each whole to one of them."""
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
    """Rows that a rank holds back, [1, room, columns], of the table at a path."""
    return PerRank(rows, axis_name, (path,), axis_names(axis_name), ranks)


def is_pending(node: Any) -> bool:
    """Whether a node of a state is rows that are held back."""
    return isinstance(node, Pending)


def row_grads(ids: jax.Array, rows: jax.Array, height: int) -> RowGrads:
    """Rows [n, k, columns] of several ranks, with their ids [n, k], as one gradient."""
    flat = rows.reshape(-1, rows.shape[-1])
    return RowGrads.marked(ids.reshape(-1), flat, (height, rows.shape[-1]))
