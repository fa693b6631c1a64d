"""Merges lists of rows: adds up rows of equal ids, and unites lists.

The result is a list, too. Equal ids are found by a flag for each row of the table, if the
table is small compared with the list, or else by a sort. So the cost does not grow with a
large table.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import platforms, rank_select
from pallas_kernels.platforms import policy
from pallas_kernels.reference.ordered import add_repeated
from pallas_kernels.types import untyped
from sparsejax import branches
from sparsejax.units import bits
from sparsejax.units.indices import in_range
from sparsejax.units.row_grads import RowGrads
from sparsejax.units.units import wide


def merge(grads: RowGrads) -> RowGrads:
    """Returns RowGrads of distinct, ascending ids, followed by unused places.

    Rows of equal ids are added up in float32, or in their own dtype if that is wider. The
    capacity is that of `grads`, so nothing is left out. A table of size 0 has no rows.
    """
    ids = grads.kept()
    if not grads.size:
        return _without_rows(grads)
    if not grads.capacity:
        return grads
    found = _merged(ids, height=grads.shape[0], room=ids.size)
    return RowGrads.marked(found.ids, found.sums(grads.rows), grads.shape)


def distinct_rows(grads: RowGrads) -> RowGrads:
    """Returns RowGrads of distinct ids, in any order, followed by unused places.

    Unlike `merge` it merges only if ids repeat: entries of a sparsifier are distinct
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


def _without_rows(grads):
    """Returns RowGrads of the same capacity without rows, equal on all ranks."""
    ids = jnp.full(grads.capacity, grads.shape[0], jnp.int32)
    return RowGrads.marked(ids, jnp.zeros(grads.rows.shape, grads.dtype), grads.shape)


class Merge(NamedTuple):
    """The distinct ids of a list, and the position of each id of the list among them.

    Attributes:
        ids: int32 [room], the distinct ids, ascending, padded with the number of rows of
            the table.
        places: int32 [k], the position of each id in `ids`; `room` if it is out of range.
        found: int32 [], the number of distinct ids.
    """

    ids: jax.Array
    places: jax.Array
    found: jax.Array

    def sums(self, rows: jax.Array) -> jax.Array:
        """Adds up rows [k, ...] of equal ids, in float32 or wider; returns [room, ...]."""
        wider = rows.astype(wide(rows.dtype))
        if not rows.size:
            return jnp.zeros((*self.ids.shape, *rows.shape[1:]), rows.dtype)
        # The zero is no constant: XLA would share one array of zeros among all sums, and
        # keep it. It depends on the rows, so that the sums are not allocated before them.
        sign = jnp.signbit(wider.reshape(-1)[0]).astype(jnp.int32)
        zero = jnp.minimum(self.found + sign, 0).astype(wider.dtype)
        sums = jnp.broadcast_to(zero, (*self.ids.shape, *rows.shape[1:]))
        return add_repeated(sums, self.places, wider).astype(rows.dtype)


def merged(ids: jax.Array, height: int, room: int | None = None) -> Merge:
    """Finds the distinct ids of a list, and the position of each id among them.

    Args:
        ids: Integers [k]; those outside of [0, height) stand for no row.
        height: The number of rows of the table.
        room: The capacity for distinct ids, at least k; k if None.
    """
    ids = in_range(ids, height)
    return _merged(ids, height=height, room=ids.size if room is None else room)


@untyped
def _merged(ids, *, height, room):
    """Does as `merged` for int32 ids, with the sentinel `height` for no row."""
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

    places = branches.alone_on_cpus(count, find)
    # The ids are scattered to their places: a search for the flags takes three times as
    # long.
    found = jnp.full(room, height, jnp.int32).at[places].set(ids, mode="drop")
    return Merge(found, places, count)


def distinct(keys, capacity, nowhere):
    """Finds the distinct keys by a sort, and the position of each key among them.

    On CPUs keys are sorted alone, and then each is searched for, since XLA sorts pairs of
    keys and places six times slower there. On GPUs such a search would be a loop of
    launches, with a turn for each bit of a place, but pairs are sorted as fast as keys.

    Args:
        keys: int32 [k], none above `nowhere`.
        capacity: The capacity for distinct keys, an upper bound of their number.
        nowhere: The sentinel key of no entry.

    Returns:
        The distinct keys, int32 [capacity], ascending and padded with `nowhere`; and the
        place of each key, int32 [k], with `capacity` for the sentinel.
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
    """Unites lists of keys, of which none has a key twice; see `distinct`.

    Args:
        lists: int32 [lists, k], none above `nowhere`.
        capacity: The capacity for distinct keys, an upper bound of their number.
        nowhere: The sentinel key of no entry.

    Returns:
        The distinct keys, int32 [capacity], and the place of each key, int32 [lists, k].
    """
    words = lists.shape[0] * (nowhere // bits.WORD + 1)
    if nowhere > policy().flags * lists.size or words >= 2**31:
        found, place = distinct(lists.reshape(-1), capacity, nowhere)
        return found, place.reshape(lists.shape)
    words = lax.reduce(_bits_of(lists, nowhere), np.uint32(0), lax.bitwise_or, (0,))
    real = lists < nowhere
    place = rank_select.rank_of(bits.rank_index(words), jnp.where(real, lists, 0))
    place = jnp.where(real, place, capacity)
    # The keys are scattered to their places: a search for the bits takes three times as
    # long.
    found = jnp.full(capacity, nowhere, jnp.int32).at[place].set(lists, mode="drop")
    return found, place


def is_ascending(ids: jax.Array, nowhere: int) -> jax.Array:
    """Returns whether ids are distinct and ascending, with sentinels `nowhere` last."""
    return jnp.all((ids[1:] > ids[:-1]) | (ids[1:] == nowhere))


def _has_each_once(ids, nowhere):
    """Returns whether ids are distinct and precede sentinels; False if unknown.

    It is unknown where ids do not ascend and finding out would take a sort.
    """
    ascending = is_ascending(ids, nowhere)
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
    """Returns the sum of one bit for each key; a key that occurs twice carries over."""
    return bits.bitmaps_of(lists, lists < nowhere, nowhere // bits.WORD + 1)
