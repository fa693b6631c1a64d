"""How full the parts are, which all ranks agree on before anything is sent.

On the wire: one pmax of three numbers, the fullest part of any rank, the most units that
any rank has, and the imbalance of the rank whose parts are least even.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.units.slots import Slots
from sparsejax.wire.collectives import Wire


class Counts(NamedTuple):
    """A rank's units by owner, and the counts that all ranks agreed on.

    Attributes:
        sets: This rank's units by owner.
        fullest: Entries of the fullest part of all ranks.
        most: Entries of the rank that has most.
        imbalance: Of the rank whose parts are least even.
        sent: Bytes that one rank sent to agree.
        told: What else ranks told one another, where a way of sending needs more.
    """

    sets: Slots
    fullest: jax.Array
    most: jax.Array
    imbalance: jax.Array
    sent: float
    told: Any = None


def count(sets: Slots, wire: Wire) -> Counts:
    """Agrees on the counts of units by owner.

    Args:
        sets: This rank's units, a part for each owner.
        wire: The ranks.
    """
    total = jnp.sum(sets.counts, dtype=jnp.int32)
    fullest = jnp.max(sets.counts)
    # Positive floats order like their bits, so one pmax serves for all three.
    ratio = imbalance(fullest, total, len(sets.counts)).astype(jnp.float32)
    as_int = lax.bitcast_convert_type(ratio, jnp.int32)
    agreed, sent = wire.maximum(jnp.stack([fullest, total, as_int]))
    worst = lax.bitcast_convert_type(agreed[2], jnp.float32)
    return Counts(sets, agreed[0], agreed[1], worst, sent)


def imbalance(fullest: jax.Array, total: jax.Array, parts: int) -> jax.Array:
    """Entries of the fullest part over those of the mean one; 1 where there are none."""
    mean = total.astype(jnp.float32) / parts
    return jnp.where(total > 0, fullest / jnp.maximum(mean, 1e-6), 1.0)
