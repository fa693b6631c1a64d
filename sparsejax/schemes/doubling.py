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
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.axes import as_varying, varying_axes
from sparsejax.schemes import base
from sparsejax.schemes.forecast import Forecast, Load, agreeing
from sparsejax.schemes.or_dense import or_dense
from sparsejax.units import bits
from sparsejax.units.slots import Slots
from sparsejax.units.units import Units, unit_bytes, wide
from sparsejax.wire import channels, collectives, gathers, ladder, messages
from sparsejax.wire.collectives import Permutation, Wire
from sparsejax.wire.ladder import sent_bytes


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


def forecast(load: Load, code, ratio, wire_dtype, by_bound: bool) -> Forecast:
    """Reckons what one rank would send for a load."""
    n = load.ranks
    sum_dtype = wide(load.dtype)
    narrow = collectives.travelling(jnp.dtype(load.dtype), wire_dtype)
    hop_count = hops(n)
    folded = n & (n - 1) != 0
    # Before hop k a partner has what 2**k ranks had; a fold is a hop of some ranks.
    sums = [min(1 << k, n) for k in range(hop_count)] + [n] * folded
    width = -(-load.units // bits.WORD) * bits.WORD
    # Hierarchical Centralization agrees before the first hop; see the module.
    alone = len(sums) == 1 or (wire_dtype is None and narrow != sum_dtype)
    waits = 0 if alone else agreeing(n)
    total, capacity, rounds, full = 0.0, 0, 0, False
    dense = load.all_reduce(wire_dtype)
    for k, ranks in enumerate(sums):
        last = folded and k == hop_count
        dtype = narrow if wire_dtype or k == 0 or last else sum_dtype
        unit_bytes = load.numbers * dtype.itemsize
        steps = ladder.ladder(width, unit_bytes, 1, code, ratio)
        need = math.ceil(load.count(ranks))
        sent, turns, room = sent_bytes(steps, need, 1)
        if k == 0 and len(sums) * steps.bytes(need) >= dense.bytes:
            return dense
        as_array = load.units * unit_bytes
        if full or steps.bytes(need) >= as_array:
            sent, turns, room = as_array, 1, 0
        full = by_bound and (full or 2 * (unit_bytes + 4) * need >= as_array)
        total, waits = total + sent, waits + turns + agreeing(n)
        capacity, rounds = max(capacity, room), rounds + turns
    return Forecast(total, 0.0, waits, capacity, rounds=rounds)


class AgreedCounts(NamedTuple):
    """Counts of an array that ranks agreed on before its first hop.

    Attributes:
        present: Booleans, which units have anything.
        most: The most units that any rank has, agreed upon.
    """

    present: jax.Array
    most: jax.Array


@dataclasses.dataclass(frozen=True)
class Doubling:
    """How partial sums travel.

    Attributes:
        wire: The ranks, and the dtype in which values travel. If it names none, the first
            message has x's dtype, and partial sums have float32 or wider.
        code: How indices travel.
        ratio: The ratio of successive message sizes.
        by_bound: Whether a partial sum goes densely as soon as twice the entries of its
            two halves would not pay, and then for good, as SparCML does; else where its
            own entries do not pay.
    """

    wire: Wire
    code: str
    ratio: float
    by_bound: bool = False

    def ladder(self, x: Units | jax.Array, dtype: jax.typing.DTypeLike) -> ladder.Ladder:
        """The message sizes for a partial sum like x."""
        width = -(-x.shape[0] // bits.WORD) * bits.WORD
        return ladder.ladder(width, unit_bytes(x, dtype), 1, self.code, self.ratio)

    def expected_bytes(self, x: Units | jax.Array, counts: jax.Array) -> jax.Array:
        """Bytes that one rank sends where partial sums of arrays like x have `counts`.

        Args:
            x: The array.
            counts: int32 [hops + 1]: entries before each hop, and in the total.
        """
        _, dtypes = self._schedule(x)
        total = jnp.float32(0)
        for k, dtype in enumerate(dtypes):
            as_entries = self.ladder(x, dtype).bytes(counts[k])
            total += jnp.minimum(as_entries, float(x.size * dtype.itemsize))
        return total

    def _schedule(self, x):
        """Who sends to whom in each hop, and in which dtype."""
        narrow = self.wire.travelling(x.dtype) if self.wire.dtype else None
        fold, swaps, unfold = gathers.doubling_schedule(self.wire.ranks)
        pairs = tuple(p for p in (fold, *swaps, unfold) if p)
        dtypes = [jnp.dtype(narrow or wide(x.dtype))] * len(pairs)
        dtypes[0] = jnp.dtype(narrow or x.dtype)
        if unfold:
            dtypes[-1] = jnp.dtype(narrow or x.dtype)
        return pairs, dtypes

    def __call__(self, x: jax.Array, known: AgreedCounts | None = None) -> DoublingResult:
        """Adds up x, a unit a row, over the axis.

        Args:
            x: [units, ...].
            known: What is known of it, if it is, and need not be looked for again.
        """
        narrow = self.wire.travelling(x.dtype)
        fold, _, unfold = gathers.doubling_schedule(self.wire.ranks)
        pairs, dtypes = self._schedule(x)
        before = len(pairs) - bool(unfold)
        run = _Hops(self, pairs, bool(fold), before, varying_axes(x))
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
    how: Doubling
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
        as_array = float(rounded.size * dtype.itemsize)
        steps = self.how.ladder(total, dtype)
        flags = bits.nonzero_units(rounded) if known is None else known.present
        flags = jnp.pad(flags, (0, steps.width - total.shape[0]))
        sent_slots = Slots.of(bits.pack(flags)[None])
        if known is None:
            most, cost = self.how.wire.maximum(sent_slots.counts[0])
        else:
            most, cost = known.most, 0.0
        channel = channels.swap(self.how.wire, pairs, which)

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
        if self.how.by_bound:
            # A slot of 32 bits an entry, as SparCML computes it.
            entry = steps.unit_bytes + 4.0
            full = full | (2 * entry * most.astype(jnp.float32) >= as_array)
        total, stage = or_dense(
            self.how.wire,
            steps.bytes(most),
            as_array,
            sparse,
            dense,
            total,
            unless=state.full,
        )
        if self.folds:
            # What the folded ranks had is with their partners now.
            core = 1 << (self.how.wire.ranks.bit_length() - 1)
            gone = (k == 0) & (self.how.wire.rank >= core)
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
