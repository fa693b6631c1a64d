"""What is looked up in messages that were received: their headers, and where bits are."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import rank_select
from pallas_kernels.rank_select import WORD
from pallas_kernels.reference.messages import Run, cut_strings, padded, row_ends


def index_message(message, numbers, *, spec):
    """See `pallas_kernels.index_message`."""
    places = Run.of(numbers, spec).places
    heads = lax.bitcast_convert_type(message[:, 0], jnp.int32)
    words = cut_strings(padded(message, 1 + spec.longest), places, spec.longest)
    if not spec.bitmaps:
        return heads, row_ends(words)
    return heads, word_ranks(words)


def bitmaps_of(slots: jax.Array, is_there: jax.Array, words: int) -> jax.Array:
    """The bitmaps of lists of slots [senders, k], uint32 [senders, words].

    Args:
        slots: int32, of a sender different ones.
        is_there: Booleans, which of them count.
        words: How many words a bitmap has.
    """
    senders = len(slots)
    sender = lax.broadcasted_iota(jnp.int32, slots.shape, 0)
    word = jnp.where(is_there, sender * words + (slots >> 5), senders * words)
    one = jnp.uint32(1) << (slots & (WORD - 1)).astype(jnp.uint32)
    found = jnp.zeros(senders * words, jnp.uint32).at[word.reshape(-1)]
    found = found.add(one.reshape(-1), mode="drop", wrap_negative_indices=False)
    return found.reshape(senders, words)


def word_ranks(words: jax.Array) -> jax.Array:
    """Each word of bitmaps and the bits before it: int32 [words, senders, 2]."""
    counts = lax.population_count(words).astype(jnp.int32)
    before = rank_select.running_sum(counts) - counts
    pairs = jnp.stack([lax.bitcast_convert_type(words, jnp.int32), before], axis=-1)
    return pairs.swapaxes(0, 1)
