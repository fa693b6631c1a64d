"""Which rows of a step's gradient are sent now, and which with the next step.

Every rank finds it for all of them, from ids that all have gathered: nothing is sent here.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.platforms import policy
from sparsejax.units.merging import merged


class Chosen(NamedTuple):
    """Some of the rows of each rank, at the beginnings of lists.

    Attributes:
        ids: int32 [n, room], the same on all ranks; the height of the table after the
            last.
        places: int32 [n, room], where each is in its rank's list; past its end for those
            after the last.
        counts: int32 [n], how many there are.
    """

    ids: jax.Array
    places: jax.Array
    counts: jax.Array

    @classmethod
    def of(cls, flags: jax.Array, ids: jax.Array, height: int, room: int) -> "Chosen":
        """Those that are flagged, at most `room` of each rank.

        Args:
            flags: [n, k].
            ids: int32 [n, k].
            height: How many rows the table has.
            room: How long the lists are.
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
        """These rows [room, columns] of a rank, of its whole list [k, columns]."""
        places = lax.dynamic_index_in_dim(self.places, rank, keepdims=False)
        return rows.at[places].get(mode="fill", fill_value=0)


def split(
    ids: jax.Array, next_ids: jax.Array | None, height: int, room: int
) -> tuple[jax.Array, jax.Array]:
    """Flags of the rows of each rank that are sent now, and of those that wait.

    A row waits if no rank reads it in the next step, and if each rank that has it has room:
    the first `room` of those that might wait do. It is of one kind on all ranks.

    Args:
        ids: int32 [n, k], the rows that ranks have gradients of, distinct on each; what is
            no row of the table marks a place without one.
        next_ids: int32 of any shape, those that any rank reads in the next step, the same
            on all; None if there is no next step: all go now.
        height: How many rows the table has.
        room: How many may wait on a rank.
    """
    real = (ids >= 0) & (ids < height)
    if next_ids is None or not room:
        return real, jnp.zeros_like(real)
    may_wait = real & ~among(ids, next_ids, height)
    over = may_wait & (jnp.cumsum(may_wait, axis=1, dtype=jnp.int32) > room)
    waits = may_wait & ~among(ids, jnp.where(over, ids, height), height)
    return real & ~waits, waits


def among(ids: jax.Array, others: jax.Array, height: int) -> jax.Array:
    """Whether each of some rows is among others; False for what is no row."""
    if not others.size or not ids.size:
        return jnp.zeros(ids.shape, bool)
    inside, others = (ids >= 0) & (ids < height), others.reshape(-1)
    if height <= policy().flags * others.size:
        others = jnp.where(others < 0, height, others)
        flags = jnp.zeros(height, bool).at[others].set(True, mode="drop")
        return inside & flags.at[ids].get(mode="clip")
    # Much smaller than the table: a search is many small kernels on a GPU.
    found = merged(others, height).ids
    place = jnp.searchsorted(found, ids.reshape(-1)).reshape(ids.shape)
    return inside & (found.at[place].get(mode="clip") == ids)
