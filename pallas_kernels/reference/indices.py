"""Lists of indices in plain XLA: merged, and added up.

Ids are merged by a flag for each row of the table, where these are few for the list, or by
a sort.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import platforms
from pallas_kernels.platforms import alone_on_cpus
from pallas_kernels.rank_select import pack, rank_index, rank_of
from pallas_kernels.reference.bitmap import padded
from pallas_kernels.types import untyped


def coo_add(indices, values, first, size):
    """The sum [size, ...] of the entries of `size` units from `first` on."""
    at = indices - first
    at = jnp.where((indices >= first) & (at < size), at, size)
    return (
        jnp.zeros((size, *values.shape[1:]), values.dtype).at[at].add(values, mode="drop")
    )


class MergedRows(NamedTuple):
    """The distinct ids of a list, and the position of each id among them.

    Attributes:
        ids: int32 [room], the distinct ids, ascending; after the last, the number of rows
            of the table.
        places: int32 [k], the position of each id in `ids`; `room` if it is out of range.
        found: int32, the number of distinct ids.

    Example:
        >>> ids, places, found = pallas_kernels.merge_rows(jnp.array([7, 2, 7]), rows=10)
        >>> ids.tolist(), places.tolist(), int(found)
        ([2, 7, 10], [1, 0, 1], 2)
    """

    ids: jax.Array
    places: jax.Array
    found: jax.Array


@untyped
def merge_rows(ids, *, rows, room):
    """The distinct ids of a list, and where each is among them: by flags, or by a sort."""
    if not ids.size:
        return MergedRows(jnp.full(room, rows, jnp.int32), ids, jnp.int32(0))
    inside = (ids >= 0) & (ids < rows)
    ids = jnp.where(inside, ids, rows)
    if rows > platforms.policy().flags * ids.size:
        found, places = distinct(ids, room, rows)
        return MergedRows(found, places, jnp.sum(found < rows, dtype=jnp.int32))
    flags = jnp.zeros(rows, bool).at[ids].set(True, mode="drop")
    index = rank_index(pack(padded(flags)))
    count = index.row_end[-1]
    find = lambda: jnp.where(inside, rank_of(index, jnp.where(inside, ids, 0)), room)
    places = alone_on_cpus(count, find)
    # Written where they belong: to search for the flags takes three times as long.
    found = jnp.full(room, rows, jnp.int32).at[places].set(ids, mode="drop")
    return MergedRows(found, places, count)


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
