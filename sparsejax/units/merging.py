"""Lists of rows merged: rows of equal ids added up, and lists united.

What is merged stays a list, and beyond a flag for each row of a table that is small for
the list nothing here costs what the table does. Equal ids are found by such flags, or by a
sort.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import platforms, rank_select
from pallas_kernels.platforms import policy
from pallas_kernels.reference.bitmap import bitmaps_of
from pallas_kernels.reference.ordered import add_repeated
from pallas_kernels.types import untyped
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
    found = _merged(ids, height=grads.shape[0], room=ids.size)
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
        found = _merged(ids, height=height, room=ids.size)
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


class Merge(NamedTuple):
    """The distinct ids of a list, and where each of the list is among them.

    Attributes:
        ids: int32 [room], the distinct ids, ascending; after the last, the number of rows
            of the table.
        places: int32 [k], the position of each id in `ids`; `room` if it is out of range.
        found: int32, the number of distinct ids.
    """

    ids: jax.Array
    places: jax.Array
    found: jax.Array

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
    return _merged(ids, height=height, room=ids.size if room is None else room)


@untyped
def _merged(ids, *, height, room):
    """`merged` for int32, `height` for each that is of no row."""
    if not ids.size:
        return Merge(jnp.full(room, height, jnp.int32), ids, jnp.int32(0))
    inside = ids < height
    if height > policy().flags * ids.size:
        found, places = distinct(ids, room, height)
        return Merge(found, places, jnp.sum(found < height, dtype=jnp.int32))
    flags = jnp.zeros(height, bool).at[ids].set(True, mode="drop")
    index = bits.rank_index(bits.pack_all(flags))
    count = index.row_end[-1]

    def find():
        place = rank_select.rank_of(index, jnp.where(inside, ids, 0))
        return jnp.where(inside, place, room)

    places = platforms.alone_on_cpus(count, find)
    # Written where they belong: to search for the flags takes three times as long.
    found = jnp.full(room, height, jnp.int32).at[places].set(ids, mode="drop")
    return Merge(found, places, count)


def distinct(keys, capacity, nowhere):
    """The distinct keys, by a sort, and where each key is among them.

    On CPUs keys are sorted by themselves, since XLA sorts pairs of keys and places six
    times slower there, and each is searched for. On GPUs the search would be a loop of
    launches, one turn for each bit of a place; pairs are sorted in the time of keys.

    Args:
        keys: int32 [k], none above `nowhere`.
        capacity: How many distinct keys there is room for; there must not be more.
        nowhere: The key of no entry.

    Returns:
        int32 [capacity], the distinct keys ascending, `nowhere` after the last; and int32
        [k], the place of each key, `capacity` where it is `nowhere`.
    """

    def listed(ordered):
        first = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
        place = jnp.cumsum(first, dtype=jnp.int32) - 1
        found = jnp.full(capacity, nowhere, jnp.int32)
        found = found.at[place].set(ordered, mode="drop", indices_are_sorted=True)
        return found, place

    def by_keys():
        found, _ = listed(lax.sort(keys))
        where = jnp.searchsorted(found, keys, method="scan").astype(jnp.int32)
        return found, jnp.where(keys < nowhere, where, capacity)

    def by_pairs():
        ordered, order = lax.sort((keys, lax.iota(jnp.int32, keys.size)), num_keys=1)
        found, place = listed(ordered)
        place = jnp.where(ordered < nowhere, place, capacity)
        where = jnp.zeros(keys.size, jnp.int32)
        return found, where.at[order].set(place, unique_indices=True)

    return platforms.by_platform(cpu=by_keys, default=by_pairs)


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
