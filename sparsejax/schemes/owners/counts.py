"""The counts of entries by owner, on which all ranks agree before entries are sent.

On the wire: one pmax of three numbers, which are the entries of the fullest part of any
rank, the most entries of any rank, and the largest imbalance of any rank's parts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.units.bits import Slots
from sparsejax.units.ownership.memory import Filled
from sparsejax.wire.collectives import Wire, at_once


class Counts(NamedTuple):
    """A rank's units by owner, and the counts on which all ranks agreed.

    Attributes:
        sets: This rank's units by owner.
        agreed: int32 [3], the counts and the bits of the imbalance. They stay one array: a
            branch reads one of them from it without a kernel of its own.
        sent: Bytes that one rank sent to agree.
        units: int32 [parts, room], the units of places in part memories, where the sets are
            sets of such places; else None.
    """

    sets: Slots
    agreed: jax.Array
    sent: float
    units: jax.Array | None = None

    @property
    def fullest(self) -> jax.Array:
        """The entries of the fullest part of all ranks."""
        return self.agreed[0]

    @property
    def most(self) -> jax.Array:
        """The entries of the rank that has most."""
        return self.agreed[1]

    @property
    def imbalance(self) -> jax.Array:
        """The largest ratio, of all ranks, of a rank's fullest part to its mean part."""
        return lax.bitcast_convert_type(self.agreed[2], jnp.float32)


def count(sets: Slots, wire: Wire) -> Counts:
    """Agrees on the counts of units by owner.

    Args:
        sets: This rank's units, a part for each owner.
        wire: The ranks.
    """
    by_part = sets.counts
    if at_once():
        # Without the barrier XLA would sum the bits again, in kernels of their own.
        by_part = lax.optimization_barrier(by_part)
    total = jnp.sum(by_part, dtype=jnp.int32)
    return _agree(sets, by_part, jnp.max(by_part), total, wire)


def count_filled(filled: Filled, size: int, wire: Wire) -> Counts:
    """Agrees on the counts of units in the memories of their owners.

    Args:
        filled: This rank's part memories.
        size: The number of units of the array. If any rank has a unit without a place, it
            is used as the count of the fullest part, so that all ranks send densely.
        wire: The ranks.
    """
    fullest = jnp.where(filled.left, size, jnp.max(filled.places.counts))
    known = _agree(filled.places, filled.counts, fullest, filled.total, wire)
    return known._replace(units=filled.units)


def _agree(sets, by_part, fullest, total, wire):
    # Positive floats order like their bits, so one pmax serves for all three.
    ratio = imbalance(jnp.max(by_part), jnp.sum(by_part), len(by_part))
    as_int = lax.bitcast_convert_type(ratio.astype(jnp.float32), jnp.int32)
    agreed, sent = wire.maximum(jnp.stack([fullest, total, as_int]))
    return Counts(sets, agreed, sent)


def imbalance(fullest: jax.Array, total: jax.Array, parts: int) -> jax.Array:
    """Returns the entries of the fullest part over those of the mean; 1 for no entries."""
    mean = total.astype(jnp.float32) / parts
    return jnp.where(total > 0, fullest / jnp.maximum(mean, 1e-6), 1.0)
