"""Reads the headers of received messages, and counts the bits of their strings."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import rank_select
from pallas_kernels.reference.layout import Run
from pallas_kernels.reference.messages import cut_strings, padded, row_ends


def index_message(message, numbers, *, spec):
    """See `pallas_kernels.index_message`."""
    places = Run.of(numbers, spec).places
    heads = lax.bitcast_convert_type(message[:, 0], jnp.int32)
    words = cut_strings(padded(message, 1 + spec.longest), places, spec.longest)
    if not spec.bitmaps:
        return heads, row_ends(words)
    return heads, word_ranks(words)


def word_ranks(words: jax.Array) -> jax.Array:
    """Returns each word of bitmaps, and the bits before it: int32 [words, senders, 2]."""
    counts = lax.population_count(words).astype(jnp.int32)
    before = rank_select.running_sum(counts) - counts
    pairs = jnp.stack([lax.bitcast_convert_type(words, jnp.int32), before], axis=-1)
    return pairs.swapaxes(0, 1)
