"""SparDL: a reduce-scatter that selects before it sends, then an all-gather.

The n ranks are d teams of q = n / d, and an array is cut into q blocks, from each of which
L = d k / n elements are selected. On the wire, in messages of L entries for each block:

    SRS     Spar-Reduce-Scatter in each team, ceil(log2 q) messages: each rank sends the
            blocks of one step in one message to the rank 2**i ahead, q - 1 blocks in all
    SAG     Spar-All-Gather between the ranks of one place in all teams, of the one block
            that each of them has: R-SAG in log2 d messages of L entries, or B-SAG, which
            gathers h of L entries from each
    gather  Bruck's all-gather in each team, ceil(log2 q) messages: q - 1 blocks

With one team that is 2 ceil(log2 n) messages and 4 k (n - 1)/n words, one index and one
value for each entry. Index codes take fewer words, and each block has one more word, its
count.

What a selection leaves out is added to the residual of the rank that selected
(`spar_reduce_scatter`). What is left out of a sum that several ranks have is added to the
residual of one of them, a different one from element to element (`meetings`).

All ranks of one place add the same numbers in the same order, so they have the same sum,
which the other ranks copy. So all ranks end with the same bits.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import arguments
from sparsejax.errors import ArgumentError
from sparsejax.schemes import base
from sparsejax.schemes.forecast import Forecast, Load, Network, merged
from sparsejax.schemes.top_k import base as top_k
from sparsejax.schemes.top_k.spar_all_gather import TopH, first_h, next_h, synchronize_teams
from sparsejax.schemes.top_k.spar_reduce_scatter import all_gather, spar_reduce_scatter
from sparsejax.schemes.top_k.teams import Member, Teams
from sparsejax.units import bits
from sparsejax.units.units import wide
from sparsejax.wire import channels, gathers, index_codes


BETWEEN = ("auto", "swaps", "gather")
# The network for teams="auto": 25 Gbit/s, and the latency of a message with NCCL.
NETWORK = Network(gbit_per_s=25, latency_us=20)


class SparDLState(NamedTuple):
    """State of `SparDL`, the same on all ranks.

    Attributes:
        step: int32 [], the number of earlier calls.
        h: The number of elements that each team sends in B-SAG.
    """

    step: jax.Array
    h: TopH


@dataclasses.dataclass(frozen=True)
class SparDL(top_k.TopKScheme):
    """Sums the largest elements by a reduce-scatter that selects before it sends.

    This is SparDL. The n ranks are `teams` teams. In each team a Spar-Reduce-Scatter sums
    one block of the array on each rank, and keeps the largest elements of each partial sum.
    A Spar-All-Gather sums blocks over the teams. An all-gather in each team sends the sums
    to all.

    Attributes:
        density: The share of elements that are not zero in the sum; smaller sends less.
        code: How indices are sent: "coo32" (the paper's), "coo16", "coo8", "bitmap", or
            "auto" for the cheapest.
        teams: The number of teams, a divisor of the number of ranks. More teams send fewer
            messages and more bytes. "auto" takes the fastest by `forecast`.
        between: How teams exchange blocks: "swaps" (R-SAG, for powers of two), "gather"
            (B-SAG), or "auto": R-SAG for powers of two.
        network: The network for teams="auto"; or a pair of the seconds of a message and the
            bytes a second.

    Example:
        >>> tx = sparsejax.sync(sparsejax.schemes.SparDL(density=0.01, teams=2))
        >>> opt_state = sparsejax.init(tx, params, mesh)

    References:
        Zhao et al., SparDL: Distributed Deep Learning Training with Efficient Sparse
        Communication, ICDE 2024
    """

    teams: int | str = 1
    between: str = "auto"
    network: Network | tuple[float, float] = NETWORK

    def __post_init__(self):
        super().__post_init__()
        index_codes.parse(self.code)
        arguments.check_one_of("between", self.between, BETWEEN)
        object.__setattr__(self, "network", _network(self.network))
        teams: Any = self.teams
        arguments.check_static("teams", teams)
        if teams == "auto":
            return
        arguments.check_whole("teams", teams, 1, " or 'auto'")
        if self.between == "swaps" and teams & (teams - 1):
            raise ArgumentError(
                "between='swaps' (R-SAG) needs a power of two as the number of teams, got "
                f"teams={teams}. Use between='gather' (B-SAG)."
            )

    def fastest_teams(self, size: int, ranks: int) -> int:
        """Returns the number of teams with the shortest forecast time on `network`.

        Args:
            size: The number of elements of the array.
            ranks: The number of ranks.
        """
        network = _network(self.network)
        times = {}
        for teams in (d for d in range(1, ranks + 1) if ranks % d == 0):
            if self.between == "swaps" and teams & (teams - 1):
                continue
            load = Load(ranks, size, 1, "float32", (0.0,) * len(merged(ranks)))
            forecast = dataclasses.replace(self, teams=teams).forecast(load)
            times[teams] = forecast.seconds(network)
        return min(times, key=lambda teams: times[teams])

    def teams_of(self, size: int, ranks: int) -> Teams:
        """Divides the ranks, and an array, among teams.

        Args:
            size: The number of elements of the array.
            ranks: The number of ranks.
        """
        number: Any = self.teams
        if number == "auto":
            number = self.fastest_teams(size, ranks)
        if ranks % number:
            fitting = [d for d in range(1, ranks + 1) if ranks % d == 0]
            raise ArgumentError(
                f"teams={number} does not divide the {ranks} ranks into teams of one size. "
                f"Use one of {fitting}."
            )
        within = gathers.Rings(ranks, ranks // number)
        blocks = top_k.cut(size, within.size)
        k = min(blocks.width, -(-self.k(size) // within.size))
        power_of_two = number & (number - 1) == 0
        recursive = power_of_two if self.between == "auto" else self.between == "swaps"
        return Teams(within, number, blocks, k, recursive)

    def init(self, like, wire):
        size, ranks = math.prod(like.shape), base.known_ranks(self, wire).ranks
        teams = self.teams_of(size, ranks) if size else None
        return SparDLState(jnp.int32(0), first_h(teams))

    def __call__(self, x, state, wire):
        base.check_state(self, state, SparDLState)
        if x.size == 0:
            return base.nothing_to_send(x, state, wire)
        accumulated = x.dense().reshape(-1)
        base.check_units(accumulated)
        size = accumulated.size
        teams = self.teams_of(size, wire.ranks)
        member = Member(teams, wire, self.code, top_k.seed_of(state.step))
        left_out, push = spar_reduce_scatter(teams.blocks.pad(accumulated), member)
        start = member.place * teams.blocks.width
        block = lax.dynamic_slice_in_dim(left_out, start, teams.blocks.width)
        selected = synchronize_teams(block, member, state.h)
        left_out = lax.dynamic_update_slice_in_dim(left_out, selected.left_out, start, 0)
        padded_total, pull = all_gather(selected.kept, member)
        total = padded_total[:size]
        left = top_k.residual(accumulated, left_out[:size], total)
        h = state.h
        if teams.number > 1 and not teams.recursive:
            h = next_h(h, teams, padded_total)
        traffic = base.traffic(
            base.add_stages(push, selected.stage),
            pull,
            dense=wire.dense_bytes(x.size, x.dtype),
            before=self.k(size) / size,
            after=bits.density(total),
        )
        state = SparDLState(state.step + 1, h)
        return base.Reduced(total.reshape(x.shape), left.reshape(x.shape), state, traffic)

    def forecast(self, load):
        """Forecasts what one rank sends; for B-SAG an upper bound, since h is not known."""
        teams = self.teams_of(load.size, load.ranks)
        sizes = teams.ladder(wide(load.dtype), self.code)
        block, _, _ = sizes.sent(sizes.top, channels.Route(1))
        others = teams.within.size - 1
        hops, rounds = others.bit_length(), (teams.number - 1).bit_length()
        between = rounds if teams.recursive else teams.number - 1
        push = (others + between) * block
        rounds += 2 * hops
        return Forecast(push, others * block, rounds, teams.k, rounds=rounds)


def _network(network: Any) -> Network:
    """Returns the network; a pair is seconds for a message and bytes for a second."""
    if isinstance(network, Network):
        return network
    pair = isinstance(network, Sequence) and len(network) == 2
    if not pair or not all(isinstance(x, (int, float)) and x > 0 for x in network):
        raise ArgumentError(
            "network must be a sparsejax.Network(gbit_per_s, latency_us), or seconds a "
            f"message and bytes a second, both positive, got {network!r}."
        )
    seconds, bytes_per_second = network
    return Network(bytes_per_second * 8 / 1e9, seconds * 1e6)
