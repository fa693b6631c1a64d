"""How full the parts are, which all ranks agree on before anything is sent.

On the wire: one pmax of three numbers, the fullest part of any rank, the most units that
any rank has, and the imbalance of the rank whose parts are least even.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.units.bits import Slots
from sparsejax.units.ownership.memory import Filled
from sparsejax.wire.collectives import Wire


class Counts(NamedTuple):
    """A rank's units by owner, and the counts that all ranks agreed on.

    Attributes:
        sets: This rank's units by owner.
        agreed: int32 [3], the counts. They stay one array: a branch that needs one
            reads it there, where it is no kernel of its own.
        sent: Bytes that one rank sent to agree.
        units: int32 [parts, room], the units of places in memories, where the sets are
            of those; else None.
    """

    sets: Slots
    agreed: jax.Array
    sent: float
    units: jax.Array | None = None

    @property
    def fullest(self) -> jax.Array:
        """Entries of the fullest part of all ranks."""
        return self.agreed[0]

    @property
    def most(self) -> jax.Array:
        """Entries of the rank that has most."""
        return self.agreed[1]

    @property
    def imbalance(self) -> jax.Array:
        """Of the rank whose parts are least even: the fullest over the mean one."""
        return lax.bitcast_convert_type(self.agreed[2], jnp.float32)


def count(sets: Slots, wire: Wire) -> Counts:
    """Agrees on the counts of units by owner.

    Args:
        sets: This rank's units, a part for each owner.
        wire: The ranks.
    """
    by_part = sets.counts
    if wire.at_once:
        # Of a sum of counts XLA would make a sum of bits, by kernels of its own.
        by_part = lax.optimization_barrier(by_part)
    total = jnp.sum(by_part, dtype=jnp.int32)
    return _agree(sets, by_part, jnp.max(by_part), total, wire)


def count_filled(filled: Filled, size: int, wire: Wire) -> Counts:
    """Agrees on the counts of units in the memories of their owners.

    Args:
        filled: This rank's memories.
        size: How many units the array has. If any rank has a unit that found no place, the
            fullest part is given that count, so that all ranks send densely.
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
    """Entries of the fullest part over those of the mean one; 1 where there are none."""
    mean = total.astype(jnp.float32) / parts
    return jnp.where(total > 0, fullest / jnp.maximum(mean, 1e-6), 1.0)
