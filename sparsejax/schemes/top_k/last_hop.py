"""Ok-Topk's last hop: what was chosen of all regions, on all ranks.

On the wire, each rank's entries to all, in messages as long as the longest. Where one rank
has many times its share that would be mostly padding: then each rank writes its run into
one list, zeros elsewhere, and an all-reduce of that, as integers, is what balances it (its
reduce-scatter) and what gathers it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import wire
from sparsejax.axes import as_varying, assume_same, varying_axes
from sparsejax.schemes import base
from sparsejax.schemes.top_k import base as top_k
from sparsejax.schemes.top_k.regions import Regions
from sparsejax.units import bits
from sparsejax.wire import ladder


def gather(
    layout: Regions,
    steps: ladder.Ladder,
    region: jax.Array,
    words: jax.Array,
    counts: jax.Array,
    starts: jax.Array,
    balance_at: float,
    axis_name: wire.AxisName,
) -> tuple[jax.Array, base.Stage]:
    """What was chosen of all regions: [size], the same on all ranks, and what was sent.

    Args:
        layout: The regions.
        steps: Message sizes.
        region: The sum of this rank's region.
        words: What was chosen of it, packed.
        counts: int32 [ranks], how many each rank has, equal on all of them.
        starts: Of the regions.
        balance_at: From how many times its share a rank is relieved.
        axis_name: The axis.
    """
    need = wire.same_elsewhere(jnp.max(counts), axis_name)
    # Made in each branch: what a branch is given it would copy.
    zeros = lambda: jnp.zeros(layout.words * bits.WORD, region.dtype)
    axes = varying_axes(region) | varying_axes(words) | varying_axes(starts)

    def directly():
        channel = wire.pull_channel(axis_name)
        source = top_k.of_rows(region[None])
        total, sent = top_k.deliver(
            steps, channel, words[None], source, starts * bits.WORD, zeros(), need
        )
        return as_varying((total, base.stage_of(sent)), axes)

    def by_list():
        ranks = lax.iota(jnp.int32, layout.most)
        here, _ = bits.listed(bits.rank_index(words, layout.most), layout.most)
        me = wire.rank(axis_name)
        mine = counts[me]
        first = jnp.sum(jnp.where(jnp.arange(layout.ranks) < me, counts, 0))
        place = (starts[me] * bits.WORD + here + 1).astype(jnp.uint32)
        values = bits.as_words(region.at[here].get(mode="clip"))
        at = bits.apart(first + ranks, ranks < mine, layout.most)
        rows = jnp.concatenate([place[:, None], values], axis=1)
        listed = jnp.zeros_like(rows).at[at].set(rows, mode="drop", unique_indices=True)
        listed, sent = wire.psum(wire.per_rank(listed, axis_name), axis_name)
        values = bits.of_words(listed[:, 1:], region.dtype)
        place = listed[:, 0].astype(jnp.int32) - 1
        total = zeros()
        place = jnp.where(place >= 0, place, total.size)
        total = total.at[place].set(values, mode="drop")
        return as_varying((total, base.stage(sent, sent, 2)), axes)

    mean = jnp.sum(counts).astype(jnp.float32) / layout.ranks
    fits = (need <= balance_at * mean) & (need <= steps.top)
    fits = wire.same_elsewhere(fits.astype(jnp.int32), axis_name) > 0
    total, stage = lax.cond(fits, directly, by_list)
    total = assume_same(total[: layout.size], axis_name)
    return total, jax.tree.map(lambda y: assume_same(y, axis_name), stage)
