"""Lists of rows merged: rows of equal ids added up, and lists united.

What is merged stays a list: nothing here costs what the table does.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import rank_select
from pallas_kernels.operations.merge_rows import merge_rows
from pallas_kernels.platforms import policy
from pallas_kernels.reference.bitmap import bitmaps_of
from pallas_kernels.reference.indices import MergedRows, distinct as distinct
from pallas_kernels.reference.ordered import add_repeated
from sparsejax import branches
from sparsejax.units import bits
from sparsejax.units.indices import in_range
from sparsejax.units.row_grads import RowGrads
from sparsejax.units.units import wide


def merge(grads: RowGrads) -> RowGrads:
    """RowGrads of distinct ids, ascending; places without a row come after them.

    Rows of equal ids are added up in float32, or wider where they are wider. There is
    room for as many as before, so nothing is left out. Of a table without numbers there
    is no row.
    """
    ids = grads.kept()
    if not grads.size:
        return _without_rows(grads)
    if not grads.capacity:
        return grads
    found = Merge(*merge_rows(ids, grads.shape[0]))
    return RowGrads.marked(found.ids, found.sums(grads.rows), grads.shape)


def distinct_rows(grads: RowGrads) -> RowGrads:
    """RowGrads of distinct ids, in any order; places without a row come after them.

    Unlike `merge` it merges only where it has to: entries of a sparsifier are distinct
    already.
    """
    ids, height = grads.kept(), grads.shape[0]
    if not grads.size:
        return _without_rows(grads)
    if not grads.capacity:
        return grads
    as_is = lambda ids, rows: (ids, rows)

    def merge(ids, rows):
        found = Merge(*merge_rows(ids, height))
        return found.ids, found.sums(rows)

    is_merged = _has_each_once(ids, height)
    ids, rows = branches.cond(is_merged, as_is, merge, ids, grads.rows)
    return RowGrads(ids, rows, grads.shape)


def nonzero_rows(grads: RowGrads, capacity: int) -> RowGrads:
    """RowGrads of distinct ids without the rows that are zero, ids ascending.

    Args:
        grads: Rows of distinct ids.
        capacity: How many rows there is room for; there must not be more.
    """
    height = grads.shape[0]
    real = (grads.ids < height) & bits.nonzero_units(grads.rows)
    ids = jnp.where(real, grads.ids, height)

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
    ids, rows = branches.cond(ascending, as_is, moved, ids, grads.rows)
    return RowGrads(ids, rows, grads.shape)


def _without_rows(grads):
    """Room for as many rows, all unused: the same, whatever ranks list."""
    ids = jnp.full(grads.capacity, grads.shape[0], jnp.int32)
    return RowGrads.marked(ids, jnp.zeros(grads.rows.shape, grads.dtype), grads.shape)


class Merge(MergedRows):
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
    return Merge(*merge_rows(ids, height, room=room))


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
    if nowhere > policy().flags * lists.size or words >= 2**31:
        found, place = distinct(lists.reshape(-1), capacity, nowhere)
        return found, place.reshape(lists.shape)
    words = lax.reduce(_bits_of(lists, nowhere), np.uint32(0), lax.bitwise_or, (0,))
    real = lists < nowhere
    place = rank_select.rank_of(bits.rank_index(words), jnp.where(real, lists, 0))
    place = jnp.where(real, place, capacity)
    # Written where they belong: to search for the bits takes three times as long.
    found = jnp.full(capacity, nowhere, jnp.int32).at[place].set(lists, mode="drop")
    return found, place


def _is_ascending(ids, nowhere):
    """Whether all ids are distinct and ascending, but for `nowhere` after the last."""
    return jnp.all((ids[1:] > ids[:-1]) | (ids[1:] == nowhere))


def _has_each_once(ids, nowhere):
    """Whether no id occurs twice and all are in front; no where that takes a sort."""
    ascending = _is_ascending(ids, nowhere)
    if nowhere > policy().flags * ids.size:
        return ascending

    def by_bits(ids):
        real = ids < nowhere
        number = jnp.sum(real, dtype=jnp.int32)
        in_front = jnp.all(real == (lax.iota(jnp.int32, ids.size) < number))
        return in_front & (bits.members(_bits_of(ids[None], nowhere)) == number)

    yes = lambda ids: ids[0] == ids[0]
    return branches.cond(ascending, yes, by_bits, ids)


def _bits_of(lists, nowhere):
    """The bits of the keys of each list, which carry where a key occurs twice."""
    return bitmaps_of(lists, lists < nowhere, nowhere // bits.WORD + 1)
