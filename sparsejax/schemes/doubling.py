"""Recursive doubling: partners swap all they have, log2 n times.

What `HierarchicalCentralization` and SparCML are made of, and how disjoint parts can be
gathered while they are few. On the wire, with n ranks:

    fold    ranks beyond the largest power of two p send their entries to a partner
    swap    log2 p times: each rank sends its partial sum to the rank 2**k away
    unfold  the folded ranks are sent the total

One rank sends at most two of fold, swaps and unfold; what is reported as sent is the way
that an entry may have to go, one after another: all of them.

Before each message one pmax agrees on the fullest partial sum. The first is left out where
the caller knows it and the first hop is no turn of a loop: between two ranks, and where
partial sums are wider than the array. A partial sum that takes more bytes as entries than
as a dense array travels densely.

Every rank ends with the same bits: in each swap both partners add the same two numbers, and
addition commutes. What each keeps is first rounded as what it sends. A NaN may carry
either partner's payload, so NaNs are made one. No collective has declared the result equal,
so the caller declares it (`axes.assume_same`).

All hops of one dtype are turns of one loop, whose body is compiled once; which partner a
turn has is looked up.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax.axes import as_varying, varying_axes
from sparsejax.schemes import base
from sparsejax.schemes.forecast import Forecast, merged
from sparsejax.schemes.or_dense import or_dense
from sparsejax.units import bits
from sparsejax.units.bits import Slots
from sparsejax.units.units import unit_bytes, wide
from sparsejax.wire import channels, collectives, gathers, ladder, messages
from sparsejax.wire.collectives import Permutation, Wire


_HALF_TO_EVEN = lax.RoundingMethod.TO_NEAREST_EVEN


class DoublingResult(NamedTuple):
    """The result of a recursive doubling.

    Attributes:
        total: The sum, equal on all ranks and not typed so.
        push: The fold and the swaps.
        pull: The unfold.
        scalars: Bytes of what was agreed on.
        counts: int32 [hops]: entries of the fullest partial sum before each hop.
    """

    total: jax.Array
    push: base.Stage
    pull: base.Stage
    scalars: jax.Array
    counts: jax.Array


def hops(n: int) -> int:
    """How many hops there are, the unfold left out."""
    fold, swaps, _ = gathers.doubling_schedule(n)
    return len(swaps) + bool(fold)


def held(n: int) -> list[int]:
    """Over how many ranks the fullest partial sum is before each message.

    After a fold the ranks below have those of their partners too.
    """
    fold, swaps, unfold = gathers.doubling_schedule(n)
    sums = [(1 << k) + min(1 << k, len(fold)) for k in range(len(swaps))]
    return [1] * bool(fold) + sums + [n] * bool(unfold)


def dtypes_of(
    n: int, dtype: jnp.dtype, wire_dtype: jax.typing.DTypeLike | None
) -> list[jnp.dtype]:
    """In which dtype each message is.

    Without one for the wire the first message and the unfold have the array's, and partial
    sums float32 or wider.
    """
    narrow = collectives.travelling(dtype, wire_dtype)
    sums = jnp.dtype(wide(dtype)) if wire_dtype is None else narrow
    return [narrow if k in (0, hops(n)) else sums for k in range(len(held(n)))]


@dataclasses.dataclass(frozen=True)
class DoublingPlan:
    """What one rank would send: bytes by the entries of the fullest partial sums.

    Attributes:
        ranks: How many ranks there are.
        units: Units of the array.
        sizes: Bytes of a unit's value in each message.
        dense_bytes: Bytes that one rank sends where all goes densely.
        code: How indices travel.
        ratio: The ratio of successive message sizes.
        by_bound: Whether a partial sum goes densely as soon as twice the entries of its
            two halves would not pay, and then for good, as SparCML does; else where its
            own entries do not pay.
    """

    ranks: int
    units: int
    sizes: tuple[int, ...]
    dense_bytes: float
    code: str
    ratio: float
    by_bound: bool = False

    def steps(self, size: int) -> ladder.Ladder:
        """The message sizes where a unit's value has `size` bytes."""
        width = -(-self.units // bits.WORD) * bits.WORD
        return ladder.Message(self.code, self.ratio).ladder(width, size, 1)

    def array_bytes(self, size: int) -> float:
        """Bytes of a partial sum as a dense array."""
        return float(self.units * size)

    def is_full(self, size: int, most: Any) -> Any:
        """Whether twice the entries of a partial sum, as float32, would not pay."""
        # A slot of 32 bits an entry, as SparCML computes it.
        return 2 * (size + 4.0) * most >= self.array_bytes(size)

    def entry_bytes(self, most: ladder.Count) -> Any:
        """Bytes of all messages if each were as long as the first."""
        return len(self.sizes) * self.steps(self.sizes[0]).bytes(most)

    def most_bytes(self, fullest: ladder.Count) -> Any:
        """Bytes at most where ranks have disjoint parts of up to `fullest` entries."""
        xp, total = ladder.numpy_of(fullest), np.float32(0)
        for size, held in zip(self.sizes, merged(self.ranks), strict=False):
            # Each part is cut first: int32 may not hold that many entries of uneven ones.
            most = held * xp.minimum(fullest, -(-self.units // held))
            total += self.steps(size).bytes(xp.minimum(most, self.units))
        return total

    def expected_bytes(self, counts: jax.Array) -> jax.Array:
        """Bytes that one rank sends where partial sums have `counts`.

        Args:
            counts: int32 [hops + 1]: entries before each hop, and in the total.
        """
        total = jnp.float32(0)
        for k, size in enumerate(self.sizes):
            as_entries = self.steps(size).bytes(counts[k])
            total += jnp.minimum(as_entries, self.array_bytes(size))
        pays = collectives.pays(self.entry_bytes(counts[0]), self.dense_bytes)
        return jnp.where(pays, total, self.dense_bytes)

    def forecast(self, needs: Sequence[int]) -> Forecast:
        """What one rank sends where the fullest partial sums have `needs` entries."""
        total, capacity, rounds, full = 0.0, 0, 0, False
        for size, need in zip(self.sizes, needs, strict=True):
            steps, as_array = self.steps(size), self.array_bytes(size)
            sent, turns, room = steps.sent(need, channels.Route(1))
            if full or steps.bytes(need) >= as_array:
                sent, turns, room = as_array, 1, 0
            full = full or (self.by_bound and self.is_full(size, np.float32(need)))
            total, rounds, capacity = total + sent, rounds + turns, max(capacity, room)
        return Forecast(total, 0.0, rounds, capacity, rounds=rounds)


class AgreedCounts(NamedTuple):
    """Counts of an array that ranks agreed on before its first hop.

    Attributes:
        present: Booleans, which units have anything.
        most: The most units that any rank has, agreed upon.
    """

    present: jax.Array
    most: jax.Array


def add_up(
    x: jax.Array, wire: Wire, plan: DoublingPlan, known: AgreedCounts | None = None
) -> DoublingResult:
    """Adds up x, a unit a row, over the axis.

    Args:
        x: [units, ...].
        wire: The ranks, and the dtype in which values travel; see `dtypes_of`.
        plan: The message sizes, for arrays like x.
        known: What is known of it, if it is, and need not be looked for again.
    """
    narrow = wire.travelling(x.dtype)
    fold, swaps, unfold = gathers.doubling_schedule(wire.ranks)
    pairs = tuple(p for p in (fold, *swaps, unfold) if p)
    dtypes = dtypes_of(wire.ranks, x.dtype, wire.dtype)
    before = len(pairs) - bool(unfold)
    run = _Hops(wire, plan, pairs, bool(fold), before, varying_axes(x))
    state = run.start(x.astype(wide(x.dtype)))
    first = 0
    while first < len(pairs):
        last = first
        while last + 1 < len(pairs) and dtypes[last + 1] == dtypes[first]:
            last += 1
        if first == before:
            state = state._replace(total=rounded_to(state.total, dtypes[first]))
        state = run(state, first, last + 1, dtypes[first], known)
        first, known = last + 1, None
    total = one_nan(rounded_to(state.total, narrow).astype(x.dtype))
    counts = state.counts[:before]
    return DoublingResult(total, state.push, state.pull, state.scalars, counts)


class _State(NamedTuple):
    total: jax.Array
    push: base.Stage
    pull: base.Stage
    scalars: jax.Array
    counts: jax.Array
    full: jax.Array  # whether the bound on the entries of the next sum does not pay


@dataclasses.dataclass(frozen=True)
class _Hops:
    wire: Wire
    plan: DoublingPlan
    pairs: tuple[Permutation, ...]
    folds: bool
    before: int  # hops before the unfold
    axes: frozenset[str]

    def start(self, total):
        push, pull = as_varying((base.stage(), base.stage()), self.axes)
        counts = jnp.zeros(len(self.pairs), jnp.int32)
        return _State(total, push, pull, jnp.float32(0), counts, jnp.bool_(False))

    def __call__(self, state, first, stop, dtype, known):
        if stop - first == 1:
            return self._hop(first, state, self.pairs[first : first + 1], 0, dtype, known)

        def turn(k, state):
            return self._hop(k, state, self.pairs[first:stop], k - first, dtype)

        return lax.fori_loop(first, stop, turn, state)

    def _hop(self, k, state, pairs, which, dtype, known=None):
        """Sends the partial sum to the partner and adds what arrives."""
        sum_dtype = state.total.dtype
        total = rounded_to(state.total, dtype)
        rounded = total.astype(dtype)
        plan, size = self.plan, unit_bytes(rounded, dtype)
        as_array, steps = plan.array_bytes(size), plan.steps(size)
        flags = bits.nonzero_units(rounded) if known is None else known.present
        flags = jnp.pad(flags, (0, steps.width - total.shape[0]))
        sent_slots = Slots.of(bits.pack(flags)[None])
        if known is None:
            most, cost = self.wire.maximum(sent_slots.counts[0])
        else:
            most, cost = known.most, 0.0
        channel = channels.swap(self.wire, pairs, which)

        def add(total, sender, slots, values):
            del sender
            return total.at[slots].add(values.astype(sum_dtype), mode="drop")

        def sparse(total):
            total, sent = messages.transmit(
                steps,
                channel,
                sent_slots,
                messages.Source(rounded),
                most,
                messages.Fold(total, add, into=messages.Into()),
                typical=most.astype(jnp.float32)[None],
            )
            return total, base.stage_of(sent)

        def dense(total):
            arrived = channel.send(rounded)
            total = total + arrived.astype(sum_dtype)
            return total, base.stage(as_array, as_array, 1)

        full = state.full
        if plan.by_bound:
            full = full | plan.is_full(size, most.astype(jnp.float32))
        pays = (steps.bytes(most) < as_array) & ~state.full
        total, stage = or_dense(self.wire, pays, sparse, dense, total)
        if self.folds:
            # What the folded ranks had is with their partners now.
            core = 1 << (self.wire.ranks.bit_length() - 1)
            gone = (k == 0) & (self.wire.rank >= core)
            total = jnp.where(gone, 0, total)
        none = jax.tree.map(jnp.zeros_like, stage)
        pushing = k < self.before
        choose = lambda a, b: jax.tree.map(lambda a, b: jnp.where(pushing, a, b), a, b)
        return _State(
            total,
            base.add_stages(state.push, choose(stage, none)),
            base.add_stages(state.pull, choose(none, stage)),
            state.scalars + cost,
            state.counts.at[k].set(most),
            full,
        )


def rounded_to(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Rounds x as a narrower dtype will, and leaves it in its own.

    Not a cast there and back: compilers may take that for nothing (XLA does on GPUs), and
    then partners would keep different bits.
    """
    own, narrow = jnp.finfo(x.dtype), jnp.finfo(dtype)
    if narrow.bits >= own.bits:
        return x
    y = lax.reduce_precision(x, own.nexp, narrow.nmant)
    if narrow.nexp < own.nexp:
        # Below its smallest normal number it has fixed steps; above its largest, nothing.
        least = float(narrow.smallest_normal)
        step = least * 2.0**-narrow.nmant
        y = jnp.where(jnp.abs(x) < least, lax.round(x / step, _HALF_TO_EVEN) * step, y)
        most = float(narrow.max)
        y = jnp.where(jnp.abs(y) > most, jnp.sign(y) * jnp.inf, y)
    return y


def one_nan(x: jax.Array) -> jax.Array:
    """One bit pattern for NaN and one for zero, whatever the order of the additions."""
    x = jnp.where(jnp.isnan(x), jnp.full_like(x, jnp.nan), x)
    return jnp.where(bits.nonzero(x), x, jnp.zeros_like(x))
