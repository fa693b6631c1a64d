"""The gradient of a table that was read by rows: which rows, and what each of them gets.

Unlike the entries of a `SparseTensor`, which a sparsifier selects by their values, these
are the rows that a loss has read. One whose gradient happens to be zero is still among
them, and an optimizer takes its step for it.

Ids are leaves of a tree of gradients, as the indices of a `SparseTensor` are, and who made
them says so (`Origin`): `check` finds ids that something has computed with.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import checkify

import pallas_kernels
from pallas_kernels import rank_select
from sparsejax.errors import ArgumentError
from sparsejax.units import bits
from sparsejax.units.dtypes import wide
from sparsejax.units.sparse_tensor import Origin


# To how many rows of the table for one that was read flags of all rows merge faster than a
# sort. On two CPU cores they are level at 300; a flag is a byte, so this also bounds their
# memory by that of the rows that were read.
_FLAGS_AT_MOST = 256


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("ids", "rows"),
    meta_fields=("shape", "origin"),
)
@dataclasses.dataclass(frozen=True)
class RowGrads:
    """Rows of a gradient of a given shape; rows that are not listed are zero.

    Attributes:
        ids: int32 [capacity], the row of the table that each row belongs to; `shape[0]`
            marks a place without a row. Ids may repeat, and their rows add up.
        rows: [capacity, ...], the gradients of these rows.
        shape: The shape of the table.
        origin: The ids that a gradient or a sum was made with.
    """

    ids: jax.Array
    rows: jax.Array
    shape: tuple[int, ...]
    origin: Origin = dataclasses.field(default_factory=Origin, repr=False, compare=False)

    @classmethod
    def marked(cls, ids: jax.Array, rows: jax.Array, shape: tuple[int, ...]) -> "RowGrads":
        """Rows whose ids `check` knows again."""
        return cls(ids, rows, shape, Origin(ids))

    @property
    def size(self) -> int:
        """How many elements the table has."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """How many axes the table has."""
        return len(self.shape)

    @property
    def capacity(self) -> int:
        """How many rows there is room for."""
        return self.ids.shape[0]

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the rows."""
        return self.rows.dtype

    def check(self, name: str = "RowGrads") -> None:
        """Raises where shapes or dtypes do not fit, or something computed with the ids.

        Under checkify it looks at the ids, too.
        """
        shape = self.shape
        if not isinstance(shape, tuple) or not all(isinstance(n, int) for n in shape):
            raise ArgumentError(
                f"{name}: shape must be a tuple of Python ints, because it decides what is "
                f"compiled, got {shape!r}."
            )
        if len(shape) < 2:
            raise ArgumentError(
                f"{name}: a table has at least two axes, got the shape {list(shape)}. "
                "Entries of an array of one axis are a sparsejax.SparseTensor."
            )
        if self.origin.is_changed(self.ids):
            raise ArgumentError(
                f"{name}: the ids of these RowGrads were changed since they were made: "
                "optax.scale, and all that computes with every array of the gradients, "
                "computes with them, too. Put it in front of the gradients, as a factor of "
                "the loss, or into sparsejax.lazy, which works on rows."
            )
        if self.ids.ndim != 1 or not jnp.issubdtype(self.ids.dtype, jnp.integer):
            raise ArgumentError(
                f"{name}: ids must be integers of shape [capacity], got "
                f"{self.ids.dtype}{list(self.ids.shape)}."
            )
        wanted = (self.capacity, *shape[1:])
        if self.rows.shape != wanted:
            raise ArgumentError(
                f"{name}: rows of shape {list(self.rows.shape)} do not fit {self.capacity} "
                f"ids into a table of shape {list(shape)}; they must have shape "
                f"{list(wanted)}."
            )
        checkify.debug_check(
            jnp.all((self.ids >= 0) & (self.ids <= shape[0])),
            name
            + ": ids must lie in [0, {height}], where {height} marks a place without a "
            "row; the smallest is {low}, the largest {high}.",
            height=jnp.int32(shape[0]),
            low=jnp.min(self.ids, initial=shape[0]),
            high=jnp.max(self.ids, initial=0),
        )

    def to_dense(self) -> jax.Array:
        """The whole gradient, rows of equal ids added up."""
        if not self.size:
            return jnp.zeros(self.shape, self.dtype)
        return pallas_kernels.coo_add(self._kept(), self.rows, self.shape[0])

    def merged(self) -> "RowGrads":
        """The same with distinct ids, ascending; places without a row are behind them.

        Rows of equal ids are added up in float32, or wider where they are wider. There is
        room for as many as before, so nothing is left out.
        """
        if not self.capacity or not self.size:
            return self
        merge = merged(self.ids, self.shape[0])
        return RowGrads.marked(merge.ids, merge.sums(self.rows), self.shape)

    def _kept(self) -> jax.Array:
        """The ids, `shape[0]` for all that are out of range."""
        inside = (self.ids >= 0) & (self.ids < self.shape[0])
        return jnp.where(inside, self.ids, self.shape[0]).astype(jnp.int32)


def is_row_grads(leaf: Any) -> bool:
    """Whether a leaf of a tree of gradients holds rows."""
    return isinstance(leaf, RowGrads)


class Merge(NamedTuple):
    """Where rows of equal ids go, to be one.

    Attributes:
        ids: int32 [room], the distinct ids, ascending; the height behind the last.
        place: int32 [k], where the row of each id goes; `room` if it is none of the table.
        found: int32, how many distinct ids there are.
    """

    ids: jax.Array
    place: jax.Array
    found: jax.Array

    def sums(self, rows: jax.Array) -> jax.Array:
        """Rows [k, ...] of equal ids added up in float32, or wider where they are wider."""
        wider = rows.astype(wide(rows.dtype))
        # No constant: XLA would make one for all that begins with zeros, and keep it.
        zero = jnp.minimum(self.found, 0).astype(wider.dtype)
        sums = jnp.broadcast_to(zero, (*self.ids.shape, *rows.shape[1:]))
        return sums.at[self.place].add(wider, mode="drop").astype(rows.dtype)


def merged(ids: jax.Array, height: int, room: int | None = None) -> Merge:
    """Finds the distinct ids of a list, and where each id is among them.

    Args:
        ids: Integers [k]; those outside of [0, height) are of no row.
        height: How many rows the table has.
        room: How many distinct ids there is room for, at least k; k if None.
    """
    room = ids.size if room is None else room
    inside = (ids >= 0) & (ids < height)
    ids = jnp.where(inside, ids, height).astype(jnp.int32)
    if height > _FLAGS_AT_MOST * ids.size:
        found, place = distinct(ids, room, height)
        return Merge(found, place, jnp.sum(found < height, dtype=jnp.int32))
    flags = jnp.zeros(height, bool).at[ids].set(True, mode="drop")
    index = rank_select.rank_index(bits.pack_all(flags), room)
    place = rank_select.rank_of(index, jnp.where(inside, ids, 0))
    found, there = bits.listed(index, room)
    found = jnp.where(there, found, height)
    return Merge(found, jnp.where(inside, place, room), index.row_end[-1])


def distinct(keys: jax.Array, capacity: int, nowhere: int) -> tuple[jax.Array, jax.Array]:
    """The distinct keys, by a sort, and where each key is among them.

    Args:
        keys: int32 [k], none above `nowhere`.
        capacity: How many distinct keys there is room for; there must not be more.
        nowhere: The key of no entry.

    Returns:
        int32 [capacity], the distinct keys ascending, `nowhere` behind the last; and int32
        [k], the place of each key, `capacity` where it is `nowhere`.
    """
    # Keys alone: XLA sorts pairs of keys and places six times slower on a CPU.
    ordered = lax.sort(keys)
    first = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    place = jnp.cumsum(first, dtype=jnp.int32) - 1
    found = jnp.full(capacity, nowhere, jnp.int32)
    found = found.at[place].set(ordered, mode="drop", indices_are_sorted=True)
    where = jnp.searchsorted(found, keys, method="scan").astype(jnp.int32)
    return found, jnp.where(keys < nowhere, where, capacity)
