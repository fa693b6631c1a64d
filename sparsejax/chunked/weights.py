"""The weights of ranks: packs them into messages, and computes residuals with them."""

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.state import tree


def with_weight(words: jax.Array, weight: jax.Array | None) -> jax.Array:
    """Appends the weight of the sender, if it has one, to words [..., words]."""
    if weight is None:
        return words
    word = lax.bitcast_convert_type(weight, jnp.uint32)
    return jnp.concatenate([words, jnp.broadcast_to(word, (*words.shape[:-1], 1))], -1)


def split(words: jax.Array, weight: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Splits the words of all ranks [ranks, words] from their weights, if any."""
    if weight is None:
        return words, None
    return words[:, :-1], lax.bitcast_convert_type(words[:, -1], jnp.float32)


def left(
    x: jax.Array, at: jax.Array, values: jax.Array, weight: jax.Array | None
) -> jax.Array:
    """Returns a leaf without the entries that were sent; all finite elements at weight 0.

    Args:
        x: The leaf.
        at: int32 [entries], the indices of the entries that were sent.
        values: float32 [entries], the values that were sent.
        weight: float32 [], the weight of this rank, or None.
    """
    flat = x.reshape(-1)
    before = flat.at[at].get(mode="promise_in_bounds")
    after = tree.rounding_error(before, values)
    if weight is not None:
        after = jnp.where(weight == 0, before, after)
    flat = flat.at[at].set(after, mode="promise_in_bounds", unique_indices=True)
    if weight is not None:
        flat = jnp.where((weight == 0) & ~jnp.isfinite(flat), 0, flat)
    return flat.reshape(x.shape)


def kept(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns the residual of a dense exchange: the finite elements at weight 0, else 0."""
    return jnp.where((weight == 0) & jnp.isfinite(x), x, 0)
