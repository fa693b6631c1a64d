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
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from pallas_kernels import rank_select
from pallas_kernels.reference import FLAGS_AT_MOST, distinct as distinct
from pallas_kernels.reference.ordered import add_repeated
from sparsejax import axes
from sparsejax.errors import ArgumentError, LeafError
from sparsejax.units import bits
from sparsejax.units.dtypes import check_in_range, check_numbered, in_range, wide
from sparsejax.units.sparse_tensor import Origin


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("ids", "rows"),
    meta_fields=("shape", "origin"),
)
@dataclasses.dataclass(frozen=True)
class RowGrads:
    """Rows of a gradient of a given shape; rows that are not listed are zero.

    Attributes:
        ids: Integers [capacity], the row of the table that each row belongs to; `shape[0]`
            marks a place without a row. Ids may repeat, and their rows add up. Others out
            of range are treated as those of a `SparseTensor` are: dropped.
        rows: [capacity, ...], the gradients of these rows.
        shape: The shape of the table.
        origin: The ids that a gradient or a sum was made with.

    Example:
        >>> rows = sparsejax.RowGrads(jnp.array([2, 0, 2]), jnp.ones((3, 2)), shape=(4, 2))
        >>> rows.to_dense().tolist()
        [[1.0, 1.0], [0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]
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
                "the loss, or into sparsejax.lazy, which works on rows. Ids that were only "
                "copied, as by jax.device_put, are known again by "
                "sparsejax.RowGrads.marked(ids, rows, shape)."
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
        check_numbered(name, shape[0])
        check_in_range(self.ids, shape[0], f"{name}: ids", "a place without a row")

    def to_dense(self) -> jax.Array:
        """The whole gradient, rows of equal ids added up."""
        return add_repeated(jnp.zeros(self.shape, self.dtype), self._kept(), self.rows)

    def merged(self) -> "RowGrads":
        """The same with distinct ids, ascending; places without a row are behind them.

        Rows of equal ids are added up in float32, or wider where they are wider. There is
        room for as many as before, so nothing is left out. Of a table without numbers there
        is no row.
        """
        if not self.size:
            return self._without_rows()
        if not self.capacity:
            return self
        merge = merged(self.ids, self.shape[0])
        return RowGrads.marked(merge.ids, merge.sums(self.rows), self.shape)

    def each_once(self) -> "RowGrads":
        """The same with distinct ids, in any order; places without a row are behind them.

        Unlike `merged` it merges only where it has to: entries of a sparsifier are distinct
        already.
        """
        if not self.size:
            return self._without_rows()
        if not self.capacity:
            return self
        ids, height = self._kept(), self.shape[0]
        as_is = lambda ids, rows: (ids, rows)

        def merge(ids, rows):
            merge = merged(ids, height)
            return merge.ids, merge.sums(rows)

        is_merged = _has_each_once(ids, height)
        ids, rows = axes.cond(is_merged, as_is, merge, ids, self.rows)
        return RowGrads(ids, rows, self.shape)

    def in_order(self, capacity: int) -> "RowGrads":
        """Rows of distinct ids with these ascending, and without the rows that are zero.

        Args:
            capacity: How many there is room for; there must not be more.
        """
        height = self.shape[0]
        real = (self.ids < height) & bits.nonzero_units(self.rows)
        ids = jnp.where(real, self.ids, height)

        def as_is(ids, rows):
            missing = max(capacity - ids.size, 0)
            ids = jnp.pad(ids, (0, missing), constant_values=height)
            rows = jnp.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1))
            return ids[:capacity], rows[:capacity]

        def moved(ids, rows):
            found, place = union(ids[None], capacity, height)
            place = bits.apart(place[0], ids < height, capacity)
            empty = jnp.zeros((capacity, *rows.shape[1:]), rows.dtype)
            return found, empty.at[place].set(rows, mode="drop", unique_indices=True)

        ascending = _is_ascending(ids, height)
        ids, rows = axes.cond(ascending, as_is, moved, ids, self.rows)
        return RowGrads(ids, rows, self.shape)

    def _without_rows(self) -> "RowGrads":
        """Room for as many rows, and none there: the same, whatever ranks list."""
        ids = jnp.full(self.capacity, self.shape[0], jnp.int32)
        return RowGrads.marked(ids, jnp.zeros(self.rows.shape, self.dtype), self.shape)

    def _kept(self) -> jax.Array:
        """The ids, `shape[0]` for all that are out of range."""
        return in_range(self.ids, self.shape[0])


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("ids", "rows", "late"),
    meta_fields=("shape", "origin"),
)
@dataclasses.dataclass(frozen=True)
class LateRowGrads(RowGrads):
    """Rows of this step's gradient, and rows of the last step's that come only now.

    Rows that no rank reads in the next step can wait for it: `sparsejax.embrace_sync` sends
    them where nothing waits for them. What an optimizer does with them is what it would
    have done in their own step, so it has to know which they are. `sparsejax.lazy` does.

    Attributes:
        late: Those of the last step. It has updated none of their rows, and the loss of
            this step has read none.
    """

    late: Any = None

    @classmethod
    def of(cls, now: RowGrads, late: RowGrads) -> "LateRowGrads":
        """Both of them."""
        return cls(now.ids, now.rows, now.shape, now.origin, late)

    @property
    def now(self) -> RowGrads:
        """The rows of this step's gradient."""
        return RowGrads(self.ids, self.rows, self.shape, self.origin)

    def check(self, name: str = "RowGrads") -> None:
        """Raises: who looks here for the rows of a gradient would lose the late ones."""
        self._refuse(name)

    def to_dense(self) -> jax.Array:
        """Raises, as `check` does."""
        self._refuse("a gradient of rows")

    def merged(self) -> RowGrads:
        """Raises, as `check` does."""
        self._refuse("a gradient of rows")

    def _refuse(self, name: str) -> NoReturn:
        raise LeafError(
            f"{name}: these {type(self).__name__} of a table {list(self.shape)} have rows "
            "of the last step among them, which embrace_sync(vertical=True) has held back, "
            "and only sparsejax.lazy applies them as of their own step. Put it around the "
            "optimizer, directly behind: optax.chain(sparsejax.embrace_sync(), "
            "sparsejax.lazy(optax.adam(1e-3))); or take embrace_sync(vertical=False)."
        )


def _is_ascending(ids, nowhere):
    """Whether all ids are distinct and ascending, but for `nowhere` behind the last."""
    return jnp.all((ids[1:] > ids[:-1]) | (ids[1:] == nowhere))


def _has_each_once(ids, nowhere):
    """Whether no id is there twice and all are in front; no where that takes a sort."""
    ascending = _is_ascending(ids, nowhere)
    if nowhere > FLAGS_AT_MOST * ids.size:
        return ascending

    def by_bits(ids):
        real = ids < nowhere
        number = jnp.sum(real, dtype=jnp.int32)
        in_front = jnp.all(real == (lax.iota(jnp.int32, ids.size) < number))
        return in_front & (bits.members(_bits_of(ids[None], nowhere)) == number)

    yes = lambda ids: ids[0] == ids[0]
    return axes.cond(ascending, yes, by_bits, ids)


def is_row_grads(leaf: Any) -> bool:
    """Whether a leaf of a tree of gradients holds rows."""
    return isinstance(leaf, RowGrads)


class Merge(pallas_kernels.MergedRows):
    """Where rows of equal ids go, to be one."""

    def sums(self, rows: jax.Array) -> jax.Array:
        """Rows [k, ...] of equal ids added up in float32, or wider where they are wider."""
        wider = rows.astype(wide(rows.dtype))
        if not rows.size:
            return jnp.zeros((*self.ids.shape, *rows.shape[1:]), rows.dtype)
        # No constant: XLA would make one for all that begins with zeros, and keep it. Nor
        # is it known before the rows are: memory for the sums would be taken until then.
        sign = jnp.signbit(wider.reshape(-1)[0]).astype(jnp.int32)
        zero = jnp.minimum(self.found + sign, 0).astype(wider.dtype)
        sums = jnp.broadcast_to(zero, (*self.ids.shape, *rows.shape[1:]))
        return add_repeated(sums, self.places, wider).astype(rows.dtype)


def merged(ids: jax.Array, height: int, room: int | None = None) -> Merge:
    """Finds the distinct ids of a list, and where each id is among them.

    Args:
        ids: Integers [k]; those outside of [0, height) are of no row.
        height: How many rows the table has.
        room: How many distinct ids there is room for, at least k; k if None.
    """
    ids = in_range(ids, height)
    return Merge(*pallas_kernels.merge_rows(ids, height, room=room))


def union(lists: jax.Array, capacity: int, nowhere: int) -> tuple[jax.Array, jax.Array]:
    """The keys of several lists, none of which has a key twice, and where each key is.

    Args:
        lists: int32 [lists, k], none above `nowhere`.
        capacity: How many distinct keys there is room for; there must not be more.
        nowhere: The key of no entry.

    Returns:
        As `distinct`, the places [lists, k].
    """
    words = lists.shape[0] * (nowhere // bits.WORD + 1)
    if nowhere > FLAGS_AT_MOST * lists.size or words >= 2**31:
        found, place = distinct(lists.reshape(-1), capacity, nowhere)
        return found, place.reshape(lists.shape)
    words = lax.reduce(_bits_of(lists, nowhere), np.uint32(0), lax.bitwise_or, (0,))
    real = lists < nowhere
    place = rank_select.rank_of(bits.rank_index(words), jnp.where(real, lists, 0))
    place = jnp.where(real, place, capacity)
    # Written where they belong: to search for the bits takes three times as long.
    found = jnp.full(capacity, nowhere, jnp.int32).at[place].set(lists, mode="drop")
    return found, place


def _bits_of(lists, nowhere):
    """uint32 [lists, words], the sum of the bits of the keys of each list.

    The bits are those of the set where no key is there twice. A key that is carries, and
    then fewer bits are set than there are keys.
    """
    count, words = lists.shape[0], nowhere // bits.WORD + 1
    start = words * lax.broadcasted_iota(jnp.int32, (count, 1), 0)
    at = jnp.where(lists < nowhere, start + (lists >> 5), count * words)
    bit = jnp.uint32(1) << (lists & (bits.WORD - 1)).astype(jnp.uint32)
    zeros = jnp.zeros(count * words, jnp.uint32)
    return zeros.at[at].add(bit, mode="drop").reshape(count, words)
