"""SparDL: a reduce-scatter that chooses before it sends, then an all-gather.

The n ranks are d teams of q = n / d, and an array is cut into q blocks; of a block
K = d k / n elements are chosen. On the wire, in messages of K entries a block:

    reduce  ceil(log2 q) steps: each rank sends blocks, all of a step in one message, to
            the rank 2**i ahead in its team, which adds them to its own: q - 1 blocks
    teams   one block is left to each rank; ranks of the same place in all teams add theirs
            up, by log2 d swaps (R-SAG) or by gathering h of K entries of each (B-SAG)
    gather  Bruck's all-gather in each team, ceil(log2 q) messages: q - 1 blocks

With one team that is 2 ceil(log2 n) messages and 4 k (n - 1)/n words, one index and one
value an entry; index codes make it less, and each block has one more word, its count.

A block is chosen from right before it is sent, and not each time that something was added
to it. What a choice leaves out stays in the chooser's copy of the block, so in the end that
copy is what this rank has left out of the total, and the law follows (`selecting`). What
teams leave out of a sum that all of them have is kept by one of them, another for each
element (`swapping`).

All ranks of a team place hold the same sum after the teams have met, because they add the
same numbers in the same order; everybody copies it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import errors, wire
from sparsejax.axes import as_varying, assume_same, varying_axes
from sparsejax.errors import ArgumentError
from sparsejax.schemes import base, doubling
from sparsejax.schemes.forecast import Forecast, Load, merged
from sparsejax.schemes.top_k import base as top_k, meetings
from sparsejax.units import bits
from sparsejax.wire import gathers, index_codes


BETWEEN = ("auto", "swaps", "gather")
# What "auto" reckons with: 25 Gbit/s, and what a message takes with NCCL.
NETWORK = (20e-6, 25e9 / 8)


class SparDLState(NamedTuple):
    """State of `SparDL`; all alike on all ranks.

    Attributes:
        step: int32: calls before this one.
        wanted: float32: h of the paper's algorithm 2: entries of a block that each team
            sends to the others.
        change: float32: by how much it is changed.
        again: Whether the last change went the same way.
    """

    step: jax.Array
    wanted: jax.Array
    change: jax.Array
    again: jax.Array


@dataclasses.dataclass(frozen=True)
class SparDL(top_k.Selecting):
    """SparDL's sparse all-reduce; see `selecting.Selecting` for what it has in common.

    Attributes:
        teams: How many teams; it divides the number of ranks. "auto" takes what the
            scheme's forecast says is fastest on `network`.
        between: How teams add up: "swaps" (R-SAG, for powers of two), "gather" (B-SAG) or
            "auto": swaps where they can be.
        network: Seconds a message and bytes a second, for "auto".
    """

    teams: int | str = 1
    between: str = "auto"
    network: tuple[float, float] = NETWORK

    def __post_init__(self):
        super().__post_init__()
        index_codes.parse(self.code)
        base.check_choice("between", self.between, BETWEEN)
        pair = isinstance(self.network, Sequence) and len(self.network) == 2
        number = lambda x: isinstance(x, (int, float)) and x > 0
        if not pair or not all(map(number, self.network)):
            raise ArgumentError(
                "network must be seconds a message and bytes a second, both positive, got "
                f"{self.network!r}."
            )
        object.__setattr__(self, "network", tuple(self.network))
        teams: Any = self.teams
        errors.check_static("teams", teams)
        if teams == "auto":
            return
        errors.check_whole("teams", teams, 1, " or 'auto'")
        if self.between == "swaps" and teams & (teams - 1):
            raise ArgumentError(
                "between='swaps' (R-SAG) needs a power of two as the number of teams, got "
                f"teams={teams}. Use between='gather' (B-SAG)."
            )

    def fastest_teams(self, size: int, ranks: int) -> int:
        """The number of teams that is fastest on `network`, as `forecast` reckons it."""
        seconds, bytes_per_second = self.network
        times = {}
        for teams in (d for d in range(1, ranks + 1) if ranks % d == 0):
            if self.between == "swaps" and teams & (teams - 1):
                continue
            load = Load(ranks, size, 1, "float32", (0.0,) * len(merged(ranks)))
            forecast = dataclasses.replace(self, teams=teams).forecast(load)
            times[teams] = forecast.seconds(bytes_per_second * 8e-9, seconds * 1e6)
        return min(times, key=lambda teams: times[teams])

    def layout(self, size: int, ranks: int) -> "Layout":
        """Teams, blocks and messages for an array on so many ranks."""
        teams: Any = self.teams
        if teams == "auto":
            teams = self.fastest_teams(size, ranks)
        if ranks % teams:
            fitting = [d for d in range(1, ranks + 1) if ranks % d == 0]
            raise ArgumentError(
                f"teams={teams} does not divide the {ranks} ranks into teams of one size. "
                f"Use one of {fitting}."
            )
        within = gathers.Rings(ranks, ranks // teams)
        cut = top_k.blocks(size, within.size)
        k = min(cut.width, -(-self.k(size) // within.size))
        return Layout(within, teams, cut, k, self._swaps(teams))

    def _swaps(self, teams):
        if self.between == "auto":
            return teams & (teams - 1) == 0
        return self.between == "swaps"

    def init(self, like, ranks):
        # Of a state for no ranks in particular nothing is used.
        d = self.layout(math.prod(like.shape), ranks) if math.prod(like.shape) else None
        least, step = (d.least, max(1.0, 0.01 * (d.k - d.least))) if d else (1, 1.0)
        number = lambda x: jnp.float32(x)
        return SparDLState(jnp.int32(0), number(least), number(step), jnp.bool_(False))

    @property
    def needs_ranks(self):
        return True

    def __call__(self, x, state, axis_name, *, present=None):
        if x.size == 0:
            return base.nothing_to_send(x, state, axis_name)
        flat = x.reshape(-1)
        base.check_units(flat)
        n = wire.ranks(axis_name)
        layout = self.layout(flat.size, n)
        seed = top_k.Counted(state.step).seed
        run = _Run(self, layout, axis_name, seed)
        left, push = run.reduce(layout.cut.of(flat))
        own, left, between = run.choose(left, state)
        total, pull = run.gather(own)
        residual = top_k.left_over(flat, left[: flat.size], total[: flat.size])
        state = self._after(state, layout, total)
        total = total[: flat.size].reshape(x.shape)
        share = self.k(flat.size) / flat.size
        traffic = base.traffic(
            base.add_stages(push, between),
            pull,
            dense=wire.all_reduce_cost(x.size, x.dtype, None, n),
            before=share,
            after=bits.density(total.reshape(-1)),
        )
        return base.Reduced(total, residual.reshape(x.shape), state, traffic)

    def _after(self, state, layout, total):
        """Algorithm 2, from what all ranks see: how many blocks are full."""
        state = state._replace(step=state.step + 1)
        if layout.swaps or layout.teams == 1:
            return state
        cut = layout.cut
        counts = jnp.sum(bits.nonzero(total).reshape(cut.number, cut.width), axis=1)
        many = 2 * jnp.sum(counts >= layout.k) >= cut.number
        onward = many != (state.change > 0)
        change = jnp.where(
            onward, state.change * jnp.where(state.again, 2.0, 1.0), -state.change / 2
        )
        # Entries are counted, so less than one is no change; and at a bound, where it is
        # onward for ever, it would grow for ever.
        most = max(1.0, float(layout.k - layout.least))
        change = jnp.sign(change) * jnp.clip(jnp.abs(change), 1.0, most)
        wanted = jnp.clip(state.wanted + change, layout.least, layout.k)
        again = onward & ~state.again
        return state._replace(wanted=wanted, change=change, again=again)

    def forecast(self, load):
        layout = self.layout(load.size, load.ranks)
        dtype = jnp.promote_types(load.dtype, jnp.float32)
        block = 4.0 * layout.steps(1, dtype, self.code).rungs[-1].words
        inside, hops = layout.within.size - 1, (layout.within.size - 1).bit_length()
        met = (layout.teams - 1).bit_length()
        between = met if layout.swaps else layout.teams - 1
        push = (inside + between) * block
        return Forecast(push, inside * block, 2 * hops + met, layout.k)


class Layout(NamedTuple):
    """How ranks and elements are divided.

    Attributes:
        within: Each team as a ring.
        teams: How many teams.
        cut: The blocks.
        k: How many elements of a block are chosen.
        swaps: Whether teams meet by swaps.
    """

    within: gathers.Rings
    teams: int
    cut: top_k.Blocks
    k: int
    swaps: bool

    @property
    def across(self) -> gathers.Rings:
        """The ranks of one place in all teams as a ring."""
        return gathers.Rings(self.within.ranks, self.teams, self.within.size)

    @property
    def least(self) -> int:
        """Entries that each team sends where no two teams have the same."""
        return max(1, self.k // self.teams)

    def steps(self, parts, dtype, code, least=None):
        """The message sizes for so many blocks."""
        return self.cut.ladder(parts, self.k, dtype, code, least)


@dataclasses.dataclass(frozen=True)
class _Run:
    """One call."""

    scheme: SparDL
    layout: Layout
    axis_name: wire.AxisName
    seed: jax.Array

    def reduce(self, left):
        """Sends all blocks but this rank's own; what is left of them, and what was sent."""
        layout, cut = self.layout, self.layout.cut
        stage, q = base.stage(), layout.within.size
        me = layout.within.place(wire.rank(self.axis_name))
        left = as_varying(left, varying_axes(me))
        distance = 1 << (q - 1).bit_length() >> 1
        while distance:
            # The last blocks are fewer, where q is no power of two.
            m = min(distance, q - distance)
            ahead = jnp.arange(m, dtype=jnp.int32)
            going = (me + distance + ahead) % q * cut.width
            rows = _rows(left, going, cut.width)
            words = top_k.largest(rows, layout.k, self.seed)
            steps = layout.steps(m, left.dtype, self.scheme.code)
            channel = gathers.shift_channel(self.axis_name, layout.within, distance, m)
            left = _without(left, rows, words, going)
            coming = (me + ahead) % q * cut.width
            source = top_k.of_rows(rows)
            left, sent = top_k.deliver(steps, channel, words, source, coming, left)
            stage = base.add_stages(stage, base.stage_of(sent))
            distance //= 2
        return left, stage

    def choose(self, left, state):
        """What goes of this rank's own block, what is left of all, and what was sent."""
        layout, cut, axis_name = self.layout, self.layout.cut, self.axis_name
        at = layout.within.place(wire.rank(axis_name)) * cut.width
        own = lax.dynamic_slice_in_dim(left, at, cut.width)
        held = meetings.start(own, layout.k, self.seed)
        if layout.teams > 1:
            held = self._swapped(held) if layout.swaps else self._gathered(held, state)
        left = lax.dynamic_update_slice_in_dim(left, held.left, at, 0)
        return held.kept, left, held.stage

    def _team(self):
        return self.layout.across.place(wire.rank(self.axis_name))

    def _swapped(self, held):
        """R-SAG: teams swap, two, four, ... of them having the same."""
        layout, q = self.layout, self.layout.within.size
        distance = 1
        while distance < layout.teams:
            pairs = tuple(
                (rank, (rank // q ^ distance) * q + rank % q)
                for rank in range(layout.within.ranks)
            )
            holders = 2 * distance
            mine = meetings.keepers(held.kept.size, self._team() % holders, holders)
            held = meetings.meet(
                held, pairs, layout.k, self.seed, self.scheme.code, self.axis_name, mine
            )
            distance = holders
        return held

    def _gathered(self, held, state):
        """B-SAG: each team's h largest go to all teams; the sum's largest are kept."""
        layout, cut, axis_name = self.layout, self.layout.cut, self.axis_name
        wanted = jnp.round(state.wanted).astype(jnp.int32)
        wanted = wire.same_elsewhere(wanted, axis_name)
        words = top_k.largest(held.kept[None], wanted, self.seed)
        going = meetings.split(held.kept, words, held.left, True, held.stage)
        steps = layout.steps(1, held.kept.dtype, self.scheme.code, layout.least)
        channel = gathers.ring_channel(self.axis_name, layout.across)
        starts = jnp.zeros(layout.teams, jnp.int32)
        into = jnp.zeros_like(going.kept)
        source = top_k.of_rows(going.kept[None])
        both, sent = top_k.deliver(steps, channel, words, source, starts, into, wanted)
        both = doubling.one_nan(both)
        chosen = top_k.largest(both[None], layout.k, self.seed)
        mine = meetings.keepers(cut.width, self._team(), layout.teams)
        stage = base.add_stages(going.stage, base.stage_of(sent))
        return meetings.split(both, chosen, going.left, mine, stage)

    def gather(self, own):
        """All blocks [size], the same on all ranks, and what was sent."""
        layout, cut = self.layout, self.layout.cut
        steps = layout.steps(1, own.dtype, self.scheme.code)
        channel = gathers.ring_channel(self.axis_name, layout.within)
        starts = jnp.arange(cut.number, dtype=jnp.int32) * cut.width
        words = bits.pack_all(bits.nonzero(own))[None]
        zeros = jnp.zeros(cut.size, own.dtype)
        source = top_k.of_rows(own[None])
        total, sent = top_k.deliver(steps, channel, words, source, starts, zeros)
        total = assume_same(total, self.axis_name)
        return total, base.stage_of(sent)


def _rows(x, starts, width):
    """Slices of one width."""
    cut = lambda start: lax.dynamic_slice_in_dim(x, start, width)
    return jnp.stack([cut(starts[i]) for i in range(len(starts))])


def _without(x, rows, words, starts):
    """x, zero where elements of its slices were chosen."""
    width = rows.shape[1]
    rest = jnp.where(top_k.flags(words, width), 0, rows)
    for i in range(len(rows)):
        x = lax.dynamic_update_slice_in_dim(x, rest[i], starts[i], 0)
    return x
