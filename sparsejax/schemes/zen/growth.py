"""The growth of the density of partial sums: the curve by which Zen chooses a scheme.

A curve has the share of units that are non-zero in one rank's array, after each hop of a
recursive doubling (so in sums over 2, 4, 8, ... ranks), and in the total. Hierarchical
Centralization measures all of it. Balanced Parallelism measures its two ends: then the
curve is stretched between them, and keeps its form in logarithms. Without a measurement
between the ends, the curve is a straight line in the number of ranks. True curves are above
that line, since a set adds fewer new units to a fuller sum. So where hierarchy does not pay
by the line, it does not pay; where it does, its first use measures the true curve. Zen's
densification ratio (definition 4) is a share over the first share.
"""

import jax
import jax.numpy as jnp

from sparsejax.schemes.forecast import merged


MOST_HOPS = 31  # enough for any number of ranks, so that a state has one shape


def unknown() -> jax.Array:
    """Returns the curve before any measurement: float32 [MOST_HOPS + 1], zeros."""
    return jnp.zeros(MOST_HOPS + 1, jnp.float32)


def measured(shares: jax.Array) -> jax.Array:
    """Returns the curve of shares, float32 [hops + 1], before each hop and in the total."""
    return unknown().at[: len(shares)].set(shares)


def stretched(
    curve: jax.Array, ranks: int, before: jax.Array, after: jax.Array
) -> jax.Array:
    """Returns the curve with new ends and the same form in logarithms.

    Args:
        curve: float32 [MOST_HOPS + 1], the curve so far.
        ranks: The number of ranks.
        before: float32 [], the share of one rank.
        after: float32 [], the share of the total.
    """
    tiny = jnp.float32(1e-12)
    sums = jnp.array(merged(ranks), jnp.float32)
    logs = jnp.log(jnp.maximum(curve[: len(sums)], tiny))
    span = logs[-1] - logs[0]
    # A curve without growth has no form to keep.
    known = (curve[0] > 0) & (span > 1e-3)
    form = (logs - logs[0]) / jnp.where(known, span, 1)
    low, high = jnp.log(jnp.maximum(before, tiny)), jnp.log(jnp.maximum(after, tiny))
    line = before + (sums - 1) / max(ranks - 1, 1) * (after - before)
    shares = jnp.where(known, jnp.exp(low + form * (high - low)), line)
    return measured(jnp.where(before > 0, shares, 0))
