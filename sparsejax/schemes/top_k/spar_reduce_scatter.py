"""SparDL's first and last phase: Spar-Reduce-Scatter, and the all-gather of blocks.

Spar-Reduce-Scatter (SRS, section III.B) takes ceil(log2 q) steps in a team of q ranks. In
each step a rank sends one bag of blocks to the rank 2**i ahead of it, the farthest first,
and adds the bag that arrives to its own blocks. In the end it has sent all blocks but one.

The selection from a block is made right before it is sent, not after each addition (the
paper's "Optimization for SRS"). What the selection leaves out stays in the sender's copy of
the block. So at the end that copy has all that this rank's selections have left out: the
paper's global residual collection (section III.C) without a second copy.
"""

import jax
import jax.numpy as jnp

from sparsejax.axes import as_varying, varying_axes
from sparsejax.schemes import base
from sparsejax.schemes.top_k import base as top_k
from sparsejax.schemes.top_k.teams import Member
from sparsejax.units import bits
from sparsejax.wire import gathers


# The blocks of a bag are distinct and in range. One gather or scatter handles all of them,
# for any number of ranks.
_APART = {"unique_indices": True, "mode": "promise_in_bounds"}


def spar_reduce_scatter(x: jax.Array, member: Member) -> tuple[jax.Array, base.Stage]:
    """Sends all blocks but this rank's own to the ranks of its team that sum them.

    Args:
        x: [blocks.size], the accumulated gradient, padded.
        member: This rank in its team.

    Returns:
        The blocks, and the stage. This rank's own block has the sum of its team, from which
        nothing has been selected yet. The others have what this rank's selections left out.
    """
    blocks, ring = member.teams.blocks, member.teams.within
    stage, q = base.stage(), ring.size
    place = member.place
    x = as_varying(x, varying_axes(place))
    distance = 1 << (q - 1).bit_length() >> 1
    while distance:
        # The first bag is not full if q is no power of two.
        bag = min(distance, q - distance)
        offsets = jnp.arange(bag, dtype=jnp.int32)
        outgoing = (place + distance + offsets) % q
        rows = x.reshape(q, blocks.width).at[outgoing].get(**_APART)
        words = member.select(rows)
        left_out = jnp.where(top_k.unpacked(words, blocks.width), 0, rows)
        x = x.reshape(q, blocks.width).at[outgoing].set(left_out, **_APART).reshape(-1)
        incoming = (place + offsets) % q * blocks.width
        x, sent = top_k.send_and_add(
            member.teams.ladder(x.dtype, member.code),
            gathers.shift_channel(member.wire, ring, distance, bag),
            words,
            top_k.source_of(rows),
            incoming,
            x,
        )
        stage = base.add_stages(stage, base.stage_of(sent))
        distance //= 2
    return x, stage


def all_gather(block: jax.Array, member: Member) -> tuple[jax.Array, base.Stage]:
    """Gathers the selected elements of all blocks by Bruck's algorithm in each team.

    Args:
        block: [width], the selected elements of this rank's block, zeros elsewhere.
        member: This rank in its team.

    Returns:
        All blocks, [blocks.size], the same on all ranks, and the stage.
    """
    blocks = member.teams.blocks
    total, sent = top_k.send_and_add(
        member.teams.ladder(block.dtype, member.code),
        gathers.ring_channel(member.wire, member.teams.within),
        bits.pack_all(bits.nonzero(block))[None],
        top_k.source_of(block[None]),
        jnp.arange(blocks.number, dtype=jnp.int32) * blocks.width,
        jnp.zeros(blocks.size, block.dtype),
    )
    return member.wire.assume_same(total), base.stage_of(sent)
