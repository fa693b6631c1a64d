"""Divides the rows of a gradient into those sent now, and those sent in the next step.

Each rank does so for all ranks, from ids that all have gathered: nothing is sent here.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.platforms import policy
from sparsejax.units.merging import merged


class Chosen(NamedTuple):
    """Lists of chosen rows of each rank.

    Attributes:
        ids: int32 [n, room], equal on all ranks, padded with the height of the table.
        places: int32 [n, room], the position of each in the rank's full list, padded with
            the length of that list.
        counts: int32 [n], the number of chosen rows.
    """

    ids: jax.Array
    places: jax.Array
    counts: jax.Array

    @classmethod
    def of(cls, flags: jax.Array, ids: jax.Array, height: int, room: int) -> "Chosen":
        """Lists the rows that are flagged, at most `room` of each rank.

        Args:
            flags: bool [n, k].
            ids: int32 [n, k].
            height: The number of rows of the table.
            room: The capacity of the lists.
        """
        n, k = ids.shape
        place = jnp.where(flags, jnp.cumsum(flags, axis=1, dtype=jnp.int32) - 1, room)
        rank = lax.broadcasted_iota(jnp.int32, (n, k), 0)
        at = lax.broadcasted_iota(jnp.int32, (n, k), 1)
        put = lambda x, fill: (
            jnp.full((n, room), fill, jnp.int32).at[rank, place].set(x, mode="drop")
        )
        return cls(put(ids, height), put(at, k), flags.sum(1, dtype=jnp.int32))

    def rows_of(self, rows: jax.Array, rank: jax.Array) -> jax.Array:
        """Gathers a rank's chosen rows [room, columns] from its full list [k, columns]."""
        places = lax.dynamic_index_in_dim(self.places, rank, keepdims=False)
        return rows.at[places].get(mode="fill", fill_value=0)


def split(
    ids: jax.Array, next_ids: jax.Array | None, height: int, room: int
) -> tuple[jax.Array, jax.Array]:
    """Flags the rows of each rank that are sent now, and those that are delayed.

    A row is delayed if no rank reads it in the next step, and if it is among the first
    `room` such rows of each rank that has it. So it is of one kind on all ranks.

    Args:
        ids: int32 [n, k], the ids of the rows that have a gradient on each rank, distinct
            on it; ids out of range are padding.
        next_ids: int32 of any shape, the ids that any rank reads in the next step, equal on
            all ranks. None if there is no next step: no rows are delayed.
        height: The number of rows of the table.
        room: The capacity of a rank for delayed rows.

    Returns:
        Two arrays bool [n, k].
    """
    real = (ids >= 0) & (ids < height)
    if next_ids is None or not room:
        return real, jnp.zeros_like(real)
    may_wait = real & ~among(ids, next_ids, height)
    over = may_wait & (jnp.cumsum(may_wait, axis=1, dtype=jnp.int32) > room)
    waits = may_wait & ~among(ids, jnp.where(over, ids, height), height)
    return real & ~waits, waits


def among(ids: jax.Array, others: jax.Array, height: int) -> jax.Array:
    """Returns for each id whether it is among others; False for ids out of range."""
    if not others.size or not ids.size:
        return jnp.zeros(ids.shape, bool)
    inside, others = (ids >= 0) & (ids < height), others.reshape(-1)
    if height <= policy().flags * others.size:
        others = jnp.where(others < 0, height, others)
        flags = jnp.zeros(height, bool).at[others].set(True, mode="drop")
        return inside & flags.at[ids].get(mode="clip")
    # If the list is much shorter than the table, a binary search is faster than flags for
    # all rows. `policy` has the ratio: on a GPU a search is many small kernels.
    found = merged(others, height).ids
    place = jnp.searchsorted(found, ids.reshape(-1)).reshape(ids.shape)
    return inside & (found.at[place].get(mode="clip") == ids)
