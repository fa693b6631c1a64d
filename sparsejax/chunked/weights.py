"""The weights of ranks: how they travel, and what a rank keeps by its own."""

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.state import tree


def with_weight(words: jax.Array, weight: jax.Array | None) -> jax.Array:
    """Words, and after them the weight of the rank that sends them, if it has one."""
    if weight is None:
        return words
    word = lax.bitcast_convert_type(weight, jnp.uint32)
    return jnp.concatenate([words, jnp.broadcast_to(word, (*words.shape[:-1], 1))], -1)


def split(words: jax.Array, weight: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """The words of all ranks without their weights, and the weights, if any."""
    if weight is None:
        return words, None
    return words[:, :-1], lax.bitcast_convert_type(words[:, -1], jnp.float32)


def left(
    x: jax.Array, at: jax.Array, values: jax.Array, weight: jax.Array | None
) -> jax.Array:
    """A leaf without what was sent of it; all that is finite where its weight is 0."""
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
    """What a rank keeps where everything is sent: all that is finite if its weight is 0."""
    return jnp.where((weight == 0) & jnp.isfinite(x), x, 0)
