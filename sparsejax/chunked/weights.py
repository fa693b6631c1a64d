"""The weights of ranks: each has its own, and sends it behind its message."""

import jax
import jax.numpy as jnp
from jax import lax


def with_weight(words: jax.Array, weight: jax.Array | None) -> jax.Array:
    """Words with the weight of the rank that sends them, if there is one."""
    if weight is None:
        return words
    word = lax.bitcast_convert_type(weight, jnp.uint32)
    return jnp.concatenate([words, jnp.broadcast_to(word, (*words.shape[:-1], 1))], -1)


def apart(words: jax.Array, weight: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """The words of all ranks without their weights, and these, if there are any."""
    if weight is None:
        return words, None
    return words[:, :-1], lax.bitcast_convert_type(words[:, -1], jnp.float32)
