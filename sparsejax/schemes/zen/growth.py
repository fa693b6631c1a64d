"""How full sums get as they are added up: the curve by which a scheme is chosen.

A curve holds the share of units that are non-zero in one rank's array, after each hop of a
recursive doubling (so in sums over 2, 4, 8, ... ranks), and in the total. Hierarchical
Centralization sees all of it. Balanced Parallelism sees its two ends: then the curve keeps
the form it had, in logarithms. A curve of which nothing was seen is a straight line in the
number of ranks. Real ones are above it, as a set adds less to a sum the more are in it
already: so if hierarchy is not worth trying by that line, it is not worth trying, and if it
is, the true form is known once it was tried. Zen's densification ratio (definition 4) is
a share over the first share.
"""

import jax
import jax.numpy as jnp

from sparsejax.schemes.forecast import merged


MOST_HOPS = 31  # enough for any number of ranks, so that a state has one shape


def unknown() -> jax.Array:
    """The curve of which nothing was seen: float32 [MOST_HOPS + 1], zeros."""
    return jnp.zeros(MOST_HOPS + 1, jnp.float32)


def measured(shares: jax.Array) -> jax.Array:
    """The curve through the shares before each hop and at the end, float32 [hops + 1]."""
    return unknown().at[: len(shares)].set(shares)


def stretched(
    curve: jax.Array, ranks: int, before: jax.Array, after: jax.Array
) -> jax.Array:
    """The curve with other ends and the same form.

    Args:
        curve: The curve so far.
        ranks: How many ranks there are.
        before: The share of one rank.
        after: The share of the total.
    """
    tiny = jnp.float32(1e-12)
    sums = jnp.array(merged(ranks), jnp.float32)
    logs = jnp.log(jnp.maximum(curve[: len(sums)], tiny))
    span = logs[-1] - logs[0]
    # Where sums did not grow there is no form to keep.
    known = (curve[0] > 0) & (span > 1e-3)
    form = (logs - logs[0]) / jnp.where(known, span, 1)
    low, high = jnp.log(jnp.maximum(before, tiny)), jnp.log(jnp.maximum(after, tiny))
    line = before + (sums - 1) / max(ranks - 1, 1) * (after - before)
    shares = jnp.where(known, jnp.exp(low + form * (high - low)), line)
    return measured(jnp.where(before > 0, shares, 0))
