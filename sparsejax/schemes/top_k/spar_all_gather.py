"""SparDL's second phase: Spar-All-Gather, which synchronizes the teams (section III.D).

After Spar-Reduce-Scatter the ranks of one place in all d teams have the same block, each
with the sum of its team. There are two algorithms to add up these sums:

    R-SAG  log2 d meetings, where d is a power of two (`meetings`)
    B-SAG  an all-gather of each rank's h largest elements by Bruck's algorithm; then all
           ranks select from the sum

With both all ranks of one place have the same elements. Algorithm 2 adapts h from step to
step, so that the number of non-zero elements of the sum is close to k.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.schemes import base, doubling
from sparsejax.schemes.top_k import base as top_k, meetings
from sparsejax.schemes.top_k.teams import Member, Teams
from sparsejax.units import bits
from sparsejax.wire import gathers


class TopH(NamedTuple):
    """B-SAG's number of elements that each team sends, and its change.

    Attributes:
        value: float32 [], h of the paper's Algorithm 2.
        step: float32 [], the last change of h.
        doubles: Boolean [], whether the next step, if in the same direction, is doubled.
    """

    value: jax.Array
    step: jax.Array
    doubles: jax.Array


def first_h(teams: Teams | None) -> TopH:
    """Returns h for the first step; `teams` is None for an array without elements."""
    least, step = 1, 1.0
    if teams is not None:
        least, step = teams.least_h, max(1.0, 0.01 * (teams.k - teams.least_h))
    return TopH(jnp.float32(least), jnp.float32(step), jnp.bool_(False))


def next_h(h: TopH, teams: Teams, total: jax.Array) -> TopH:
    """Returns the next h, from the total of a step, which all ranks have (Algorithm 2)."""
    rows = bits.nonzero(total).reshape(teams.blocks.number, teams.blocks.width)
    counts = jnp.sum(rows, axis=1)
    # The paper counts one block. The ranks of a team have different blocks, so here the
    # majority of blocks decides.
    too_many = 2 * jnp.sum(counts >= teams.k) >= teams.blocks.number
    same_direction = too_many != (h.step > 0)
    step = jnp.where(same_direction, h.step * jnp.where(h.doubles, 2.0, 1.0), -h.step / 2)
    # A step of less than one element would have no effect. At a bound, where all steps have
    # the same direction, steps would grow without limit.
    most = max(1.0, float(teams.k - teams.least_h))
    step = jnp.sign(step) * jnp.clip(jnp.abs(step), 1.0, most)
    value = jnp.clip(h.value + step, teams.least_h, teams.k)
    return TopH(value, step, same_direction & ~h.doubles)


def synchronize_teams(block: jax.Array, member: Member, h: TopH) -> meetings.PartialSum:
    """Adds up the blocks of one place in all teams, and selects from the sum.

    Args:
        block: [width], this rank's block.
        member: This rank in its team.
        h: The number of elements that B-SAG sends.

    Returns:
        The selected elements, the same on all ranks of one place.
    """
    selected = meetings.start(block, member.teams.k, member.seed)
    if member.teams.number == 1:
        return selected
    if member.teams.recursive:
        return _r_sag(selected, member)
    return _b_sag(selected, member, h)


def _r_sag(selected, member):
    """Meets by recursive doubling (R-SAG): 2, 4, ... teams have the same selection."""
    teams, q = member.teams, member.teams.within.size
    distance = 1
    while distance < teams.number:
        pairs = tuple(
            (rank, (rank // q ^ distance) * q + rank % q)
            for rank in range(teams.within.ranks)
        )
        holders = 2 * distance
        keeper = meetings.keepers(selected.kept.size, member.team % holders, holders)
        selected = meetings.meet(
            selected, pairs, teams.k, member.seed, member.code, member.wire, keeper
        )
        distance = holders
    return selected


def _b_sag(selected, member, h):
    """Gathers each team's h largest elements, and selects from their sum (B-SAG)."""
    teams = member.teams
    count = jnp.round(h.value).astype(jnp.int32)
    count = member.wire.same_elsewhere(count)
    words = member.select(selected.kept[None], count)
    outgoing = selected.then(selected.kept, words, True, selected.stage)
    total, sent = top_k.send_and_add(
        teams.ladder(selected.kept.dtype, member.code, teams.least_h),
        gathers.ring_channel(member.wire, teams.across),
        words,
        top_k.source_of(outgoing.kept[None]),
        jnp.zeros(teams.number, jnp.int32),
        jnp.zeros_like(outgoing.kept),
        count,
    )
    total = doubling.one_nan(total)
    words = member.select(total[None])
    keeper = meetings.keepers(teams.blocks.width, member.team, teams.number)
    stage = base.add_stages(outgoing.stage, base.stage_of(sent))
    return outgoing.then(total, words, keeper, stage)
