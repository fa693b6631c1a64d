"""How full sums get as they are added up: the curve by which a scheme is chosen.

A curve holds the share of units that are non-zero in one rank's array, after each hop of a
recursive doubling (so in sums over 2, 4, 8, ... ranks), and in the total. Hierarchical
Centralization sees all of it. Balanced Parallelism sees its two ends: then the curve keeps
the form it had, in logarithms, and a curve of which nothing was seen is a power of the
number of ranks. Zen's densification ratio (definition 4) is a share over the first share.
"""

import jax
import jax.numpy as jnp


MOST_HOPS = 31  # enough for any number of ranks, so that a state has one shape


def unknown() -> jax.Array:
    """The curve of which nothing was seen: float32 [MOST_HOPS + 1], zeros."""
    return jnp.zeros(MOST_HOPS + 1, jnp.float32)


def measured(shares: jax.Array) -> jax.Array:
    """The curve through the shares before each hop and at the end, float32 [hops + 1]."""
    return unknown().at[: len(shares)].set(shares)


def stretched(curve: jax.Array, hops: int, before: jax.Array, after: jax.Array):
    """The curve with other ends and the same form.

    Args:
        curve: The curve so far.
        hops: How many hops there are.
        before: The share of one rank.
        after: The share of the total.
    """
    tiny = jnp.float32(1e-12)
    logs = jnp.log(jnp.maximum(curve[: hops + 1], tiny))
    even = jnp.arange(hops + 1, dtype=jnp.float32) / max(hops, 1)
    span = logs[-1] - logs[0]
    # Where sums did not grow there is no form to keep.
    known = (curve[0] > 0) & (span > 1e-3)
    form = jnp.where(known, (logs - logs[0]) / jnp.where(known, span, 1), even)
    low, high = jnp.log(jnp.maximum(before, tiny)), jnp.log(jnp.maximum(after, tiny))
    shares = jnp.exp(low + form * (high - low))
    shares = jnp.where(before > 0, shares, 0)
    return measured(shares)
