"""Partners swap what they have chosen, add it up, and keep the largest of the sum.

Recursive doubling with a selection at each meeting: the messages stay as long as the first.
gTopk is made of it, and SparDL's R-SAG between teams. Both partners add the same two
numbers and choose by the same rule, so both go on with the same bits, and after the last
swap all ranks have them.

What a choice leaves out is then known to every rank that has the sum: two after the first
swap, four after the second. One of them keeps it, another one for each element. (SparDL's
paper has partners keep half each. After the second swap four have the sum, so that would
count twice; and a third of a number three times is not that number.)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import wire
from sparsejax.schemes import base, doubling
from sparsejax.schemes.top_k import base as top_k
from sparsejax.units import bits


class Merged(NamedTuple):
    """What meetings leave behind.

    Attributes:
        kept: [width], what is chosen of the sum, zeros elsewhere.
        left: [width], what this rank keeps of what was left out.
        stage: What was sent.
    """

    kept: jax.Array
    left: jax.Array
    stage: base.Stage


def start(x: jax.Array, k: int, seed: jax.Array) -> Merged:
    """The k largest elements of x [width], and what they leave."""
    words = top_k.largest(x[None], k, seed)
    return split(x, words, jnp.zeros_like(x), True, base.stage())


def split(x, words, left, mine, stage) -> Merged:
    """A sum as what is chosen of it and, where it is this rank's to keep, the rest."""
    chosen = top_k.flags(words, x.size)[0]
    zero = jnp.zeros_like(x)
    kept = jnp.where(chosen, x, zero)
    return Merged(kept, left + jnp.where(chosen | ~jnp.asarray(mine), zero, x), stage)


def meet(
    before: Merged,
    pairs: wire.Permutation,
    k: int,
    seed: jax.Array,
    code: str,
    axis_name: wire.AxisName,
    mine: jax.Array | bool,
) -> Merged:
    """One meeting: partners send what they have, add it up and choose k.

    Args:
        before: What was chosen so far.
        pairs: Who sends to whom.
        k: How many are chosen.
        seed: Which of equal ones, the same on all ranks.
        code: How indices travel.
        axis_name: The axis.
        mine: Booleans [width]: of which elements this rank keeps what is left out.
    """
    kept = before.kept
    cut = top_k.Blocks(1, kept.size)
    steps = cut.ladder(1, k, kept.dtype, code)
    channel = wire.swap_channel(axis_name, [pairs])
    words = bits.pack_all(bits.nonzero(kept))[None]
    # Added to zeros first, so that partners add the same two numbers.
    source, start = top_k.of_rows(kept[None]), jnp.zeros(1, jnp.int32)
    arrived, sent = top_k.deliver(
        steps, channel, words, source, start, jnp.zeros_like(kept)
    )
    both = doubling.one_nan(kept + arrived)
    chosen = top_k.largest(both[None], k, seed)
    stage = base.add_stages(before.stage, base.stage_of(sent))
    return split(both, chosen, before.left, mine, stage)


def keepers(width: int, holder: jax.Array, holders: int) -> jax.Array:
    """Booleans [width]: the elements of which one of so many ranks keeps the rest."""
    # Neighbours go to different ranks, of any stride that is not a multiple of many.
    return lax.iota(jnp.int32, width) % holders == holder
