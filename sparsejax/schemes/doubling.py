"""Recursive doubling: partners swap their partial sums, log2 n times.

`HierarchicalCentralization` and SparCML are made of it, and it can gather disjoint parts
with few entries. On the wire, with n ranks:

    fold    ranks beyond the largest power of two p send their entries to a partner
    swap    log2 p times: each rank sends its partial sum to the rank 2**k away
    unfold  the folded ranks receive the total

One rank sends at most two of fold, swaps and unfold. The bytes reported are those of all
three, since they follow one another on the longest path of an entry.

Before each message one pmax agrees on the fullest partial sum. The first pmax is omitted
where the caller knows the count and the first hop is not part of a loop: between two ranks,
and where partial sums are wider than the array. A partial sum that takes more bytes as
entries than as a dense array is sent densely.

Every rank ends with the same bits: in each swap both partners add the same two numbers, and
addition commutes. Each rank first rounds the sum that it keeps to the dtype in which it
sends it. A NaN may have the payload of either partner, so all NaNs are replaced by one bit
pattern. JAX cannot infer that the result is equal on all ranks, so the caller types it as
such (`axes.assume_same`).

All hops of one dtype are turns of one loop, whose body is compiled once. The permutation of
each turn is looked up.
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
        total: The sum, equal on all ranks, but typed as varying.
        push: The stage of the fold and the swaps.
        pull: The stage of the unfold.
        scalars: The bytes of the numbers on which ranks agreed.
        counts: int32 [hops], the entries of the fullest partial sum before each hop.
    """

    total: jax.Array
    push: base.Stage
    pull: base.Stage
    scalars: jax.Array
    counts: jax.Array


def hops(n: int) -> int:
    """Returns the number of hops: the fold, if any, and the swaps, but not the unfold."""
    folded, swaps = gathers.doubling_counts(n)
    return swaps + bool(folded)


def held(n: int) -> list[int]:
    """Returns the number of ranks in the fullest partial sum before each message.

    After a fold, the entries of folded ranks are in the partial sums of their partners.
    """
    folded, swaps = gathers.doubling_counts(n)
    sums = [(1 << k) + min(1 << k, folded) for k in range(swaps)]
    return [1] * bool(folded) + sums + [n] * bool(folded)


def dtypes_of(
    n: int, dtype: jnp.dtype, wire_dtype: jax.typing.DTypeLike | None
) -> list[jnp.dtype]:
    """Returns the dtype of the values of each message.

    If `wire_dtype` is None, the first message and the unfold have the array's dtype, and
    partial sums have float32 or wider.
    """
    narrow = collectives.travelling(dtype, wire_dtype)
    sums = jnp.dtype(wide(dtype)) if wire_dtype is None else narrow
    return [narrow if k in (0, hops(n)) else sums for k in range(len(held(n)))]


@dataclasses.dataclass(frozen=True)
class DoublingPlan:
    """The bytes that one rank would send, from the entries of the fullest partial sums.

    Attributes:
        ranks: The number of ranks.
        units: The number of units of the array.
        sizes: The bytes of a unit's value in each message.
        dense_bytes: The bytes that one rank sends in an all-reduce.
        code: The name of the index code, or "auto".
        ratio: The ratio of successive message sizes.
        by_bound: Whether a partial sum is sent densely as soon as an upper bound of its
            entries, twice those of its fullest half, does not pay, and so are all later
            ones, as in SparCML. Otherwise it is where its own entries do not pay.
    """

    ranks: int
    units: int
    sizes: tuple[int, ...]
    dense_bytes: float
    code: str
    ratio: float
    by_bound: bool = False

    def steps(self, size: int) -> ladder.Ladder:
        """Returns the message sizes for values of `size` bytes a unit."""
        width = -(-self.units // bits.WORD) * bits.WORD
        return ladder.Message(self.code, self.ratio).ladder(width, size, 1)

    def array_bytes(self, size: int) -> float:
        """Returns the bytes of a partial sum as a dense array."""
        return float(self.units * size)

    def is_full(self, size: int, most: Any) -> Any:
        """Returns whether twice the entries of a partial sum, `most`, would not pay.

        `most` is float32.
        """
        # Each entry has a slot of 32 bits, as SparCML computes it.
        return 2 * (size + 4.0) * most >= self.array_bytes(size)

    def entry_bytes(self, most: ladder.Count) -> Any:
        """Returns the bytes of all messages if each were as long as the first."""
        return len(self.sizes) * self.steps(self.sizes[0]).bytes(most)

    def most_bytes(self, fullest: ladder.Count) -> Any:
        """Returns an upper bound of the bytes for disjoint parts of `fullest` entries."""
        xp, total = ladder.numpy_of(fullest), np.float32(0)
        for size, held in zip(self.sizes, merged(self.ranks), strict=False):
            # Each part is bounded before the product, which else could exceed int32.
            most = held * xp.minimum(fullest, -(-self.units // held))
            total += self.steps(size).bytes(xp.minimum(most, self.units))
        return total

    def expected_bytes(self, counts: jax.Array) -> jax.Array:
        """Returns the bytes that one rank sends for given counts of the partial sums.

        Args:
            counts: int32 [hops + 1], the entries before each hop, and of the total.
        """
        total = jnp.float32(0)
        for k, size in enumerate(self.sizes):
            as_entries = self.steps(size).bytes(counts[k])
            total += jnp.minimum(as_entries, self.array_bytes(size))
        pays = collectives.pays(self.entry_bytes(counts[0]), self.dense_bytes)
        return jnp.where(pays, total, self.dense_bytes)

    def forecast(self, needs: Sequence[int]) -> Forecast:
        """Forecasts what one rank sends, for partial sums of up to `needs` entries."""
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
    """The non-zero units of an array, and the count on which ranks agreed before hops.

    Attributes:
        present: Booleans [units], which units are not zero.
        most: int32 [], the largest number of such units of any rank.
    """

    present: jax.Array
    most: jax.Array


def add_up(
    x: jax.Array, wire: Wire, plan: DoublingPlan, known: AgreedCounts | None = None
) -> DoublingResult:
    """Sums x over the axis by recursive doubling.

    Args:
        x: [units, ...].
        wire: The ranks, and the dtype in which values travel; see `dtypes_of`.
        plan: The message sizes, for arrays like x.
        known: The counts of x, if ranks have already agreed on them; else None.
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
        """Sends the partial sum to the partner, and adds the partner's to it."""
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
        total, stage = or_dense(pays, sparse, dense, total)
        if self.folds:
            # The partners of the folded ranks have added their entries.
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
    """Rounds x to the values of a narrower dtype, without changing its dtype.

    Casting to that dtype and back is not enough: compilers may remove both casts (XLA does
    on GPUs), and then partners would keep different bits.
    """
    own, narrow = jnp.finfo(x.dtype), jnp.finfo(dtype)
    if narrow.bits >= own.bits:
        return x
    y = lax.reduce_precision(x, own.nexp, narrow.nmant)
    if narrow.nexp < own.nexp:
        # Below the smallest normal number the narrow dtype has fixed steps; above its
        # largest number it has infinity.
        least = float(narrow.smallest_normal)
        step = least * 2.0**-narrow.nmant
        y = jnp.where(jnp.abs(x) < least, lax.round(x / step, _HALF_TO_EVEN) * step, y)
        most = float(narrow.max)
        y = jnp.where(jnp.abs(y) > most, jnp.sign(y) * jnp.inf, y)
    return y


def one_nan(x: jax.Array) -> jax.Array:
    """Replaces all NaNs by one bit pattern, and all zeros by another.

    So the result does not depend on the order of the additions.
    """
    x = jnp.where(jnp.isnan(x), jnp.full_like(x, jnp.nan), x)
    return jnp.where(bits.nonzero(x), x, jnp.zeros_like(x))
