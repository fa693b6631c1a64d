"""The k entries of largest magnitude of each block, by place.

Exact, and the same on every run: of equal magnitudes those at the lowest places are taken.
NaN counts as larger than infinity, as in all that selects here, so it is sent at once.

On GPUs it is `lax.top_k`. On CPUs XLA may make a sort of that, and cutting a matrix into
blocks is slow, too. So there blocks stay where they are in their leaf, and are read twice:

    1. A block is cut into 2 k groups or more, and of each the largest magnitude is found.
       The k-th of these is a magnitude that k entries have. Where large entries are
       anywhere in the block, about 1.4 k have it.
    2. Entries from there on are packed as bits. Where they are more than 2 k, keys are
       tried until there are k to 2 k.
    3. These candidates are listed, and among them the k-th key is found by one bit after
       another.

A key is the bits of a magnitude, see `units.selection.magnitudes`. No key may have k to 2 k
entries, as in a block of mostly zeros; of equal entries the first are then the candidates.
A view is a leaf as [matrices, blocks down, height, blocks across, width], which is no copy.
What is known of blocks has a column for each, those of all views side by side.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.platforms import policy
from sparsejax import branches
from sparsejax.axes import as_varying, varying_axes
from sparsejax.chunked import listing
from sparsejax.units import bits
from sparsejax.units.selection import magnitudes


_FEW = 1 << 16  # numbers; of fewer all are candidates
_ZERO_AT = 0  # the turn at which the smallest key is tried where all are candidates
_HALVED_FROM = 6  # the turn from which on the range is halved
_DROPPED = 15  # bits of a key that a first guess does without


def largest(views: Sequence[jax.Array], k: int) -> jax.Array:
    """The places of the k largest magnitudes of each block, ascending.

    Args:
        views: float32 [matrices, blocks down, height, blocks across, width], the last and
            the height of the same blocks.
        k: How many, at most the numbers of a block.

    Returns:
        int32 [blocks of all views, k].
    """
    _, _, height, _, width = views[0].shape
    length, count = height * width, sum(map(_blocks, views))
    if k == length:
        return lax.broadcasted_iota(jnp.int32, (count, k), 1)
    if policy().at_once:
        rows = jnp.concatenate([_rows(view) for view in views])
        return jnp.sort(lax.top_k(jnp.abs(rows), k)[1], axis=1)
    if 2 * k >= length or count * length < _FEW:
        keys = magnitudes.keys(jnp.concatenate([_rows(view) for view in views])).T
        return _of_candidates(keys, lax.broadcasted_iota(jnp.int32, keys.shape, 0), k).T
    words, counts = _candidates(views, k)
    row = words.shape[0] // height * bits.WORD
    slots = _alone(views, lambda: listing.listed(words, 2 * k).T)
    slots = jnp.clip(slots - slots // row * (row - width), 0, length - 1)
    is_one = lax.broadcasted_iota(jnp.int32, slots.shape, 1) < counts[:, None]
    # Entries that are there have keys from 1 on.
    keys = jnp.where(is_one, _keys_at(views, slots) + 1, 0)
    return _of_candidates(keys.T, slots.T, k).T


class _Probes(NamedTuple):
    """Two keys for each block, between which the wanted key lies; all are [blocks].

    Attributes:
        low: uint32, a key from which on there are at least k entries.
        high: uint32, a key from which on there are fewer.
        entries: int32, how many there are from `low` on.
        above: int32, how many there are from `high` on.
    """

    low: jax.Array
    high: jax.Array
    entries: jax.Array
    above: jax.Array


def _candidates(views, k):
    """Candidates of each block, k to 2 k, as bits [words, blocks], and how many."""
    height = views[0].shape[2]
    low, high = _guessed(views, k)
    marks = _marked(views, low)
    entries = listing.count(marks)
    few = lambda: (listing.turned(marks, height), entries)
    many = lambda: _narrowed(views, k, _Probes(low, high, entries, jnp.zeros_like(entries)))
    return branches.cond(jnp.any(entries > 2 * k), many, few)


def _guessed(views, k):
    """Keys that at least k entries of each block have, and keys that none has."""
    *_, height, _, width = views[0].shape
    rows = max(1, min(height, height * width // (2 * k)))

    def tops(view):
        keys = magnitudes.keys(view)
        if height % rows:
            keys = jnp.pad(keys, [(0, 0), (0, 0), (0, -height % rows), (0, 0), (0, 0)])
        groups = keys.reshape(*keys.shape[:2], -1, rows, *keys.shape[3:])
        # Half the bits are enough, and read faster.
        return (jnp.max(groups, axis=3) >> _DROPPED).astype(jnp.uint16)

    found = _alone(views, lambda: [tops(view) for view in views])
    pairs = zip(views, found, strict=True)
    columns = [x.transpose(2, 4, 0, 1, 3).reshape(-1, _blocks(view)) for view, x in pairs]
    columns = jnp.concatenate(columns, axis=1)
    low = _kth_short(columns, k).astype(jnp.uint32)
    high = jnp.max(columns, axis=0).astype(jnp.uint32) + 1
    return low << _DROPPED, high << _DROPPED


def _narrowed(views, k, found):
    """Candidates where a guess has more than 2 k."""
    height = views[0].shape[2]

    def pending(state):
        return jnp.any(~_settled(state[1], k))

    def again(state):
        turn, found = state
        # What is the same at each turn XLA would keep: all keys, as large as the leaves.
        read = lax.optimization_barrier((turn, list(views)))[1]
        return turn + 1, _probed(read, found, k, turn)

    over = frozenset().union(*map(varying_axes, (*views, *found)))
    start = as_varying((jnp.int32(0), found), over)
    _, found = lax.while_loop(pending, again, start)
    words = listing.turned(_marked(views, found.low), height)

    def first_of_equal():
        above = listing.turned(_marked(views, found.low + 1), height)
        many = found.entries > 2 * k
        fewer = jnp.where(many, _filled(above, words & ~above, k), words)
        return fewer, jnp.where(many, k, found.entries)

    is_any = jnp.any(found.entries > 2 * k)
    return branches.cond(is_any, first_of_equal, lambda: (words, found.entries))


def _settled(found, k):
    """Whether `low` has k to 2 k entries, or no key has."""
    return (found.entries <= 2 * k) | (found.high - found.low <= 1)


def _probed(views, found, k, turn):
    """The keys after one more probe of the blocks that need it."""
    key = _next_key(found, math.sqrt(2) * k, turn)
    half = found.low + (found.high - found.low) // 2
    is_between = (key > found.low) & (key < found.high) & (turn < _HALVED_FROM)
    key = jnp.where(is_between, key, half)
    count = listing.count(_marked(views, key))
    done = _settled(found, k)
    better, fewer = (count >= k) & ~done, (count < k) & ~done
    return _Probes(
        jnp.where(better, key, found.low),
        jnp.where(fewer, key, found.high),
        jnp.where(better, count, found.entries),
        jnp.where(fewer, count, found.above),
    )


def _next_key(found, aim, turn):
    """The key from which on there may be `aim` entries, by the logarithms of counts."""
    numbers = (found.entries, found.above)
    more, fewer = (jnp.maximum(x.astype(jnp.float32), 0.5) for x in numbers)
    share = jnp.log(more / aim) / jnp.log(more / fewer)
    span = (found.high - found.low).astype(jnp.float32)
    key = found.low + (jnp.clip(share, 0.1, 0.9) * span).astype(jnp.uint32)
    # A block may have fewer than k entries that are not zero.
    is_blank = (found.low == 0) & (turn == _ZERO_AT)
    return jnp.where(is_blank, jnp.uint32(1), key)


def _marked(views, key):
    """Which entries have at least the key of their block, as `listing.by_blocks`."""

    def of_views():
        found, start = [], 0
        for view in views:
            own = lax.slice_in_dim(key, start, start + _blocks(view))
            own = own.reshape(*view.shape[:2], 1, view.shape[3], 1)
            found.append(listing.packed(magnitudes.keys(view) >= own))
            start += _blocks(view)
        return found

    found = _alone(views, of_views)
    return jnp.concatenate(list(map(listing.by_blocks, found)), axis=-1)


def _alone(views, function):
    """What is computed of all entries, before it is turned around.

    XLA:CPU would compute each number where it is moved to, without vectors.
    """
    count = magnitudes.keys(views[0][0, 0, 0, 0, 0]).astype(jnp.int32)
    return branches.alone(count, function, branches.cond)


def _filled(above, equal, k):
    """The bits of `above`, and the first of `equal` until there are k in each column."""
    there = lax.population_count(equal).astype(jnp.int32)
    missing = k - listing.count(above) - (listing.running(there) - there)
    upto = bits.bit_of_rank(equal, jnp.clip(missing, 1, jnp.maximum(there, 1)) - 1) + 1
    return above | jnp.where(missing > 0, equal & bits.low_ones(upto), 0)


def _keys_at(views, slots):
    """The keys of entries by their places in blocks, [blocks, slots]."""
    found, start = [], 0
    for view in views:
        own = lax.slice_in_dim(slots, start, start + _blocks(view))
        at = indices_in(view.shape, own)
        found.append(view.reshape(-1).at[at].get(mode="promise_in_bounds"))
        start += _blocks(view)
    return magnitudes.keys(jnp.concatenate(found))


def indices_in(shape: Sequence[int], places: jax.Array) -> jax.Array:
    """The indices in a flat view of places in its blocks, int32 [blocks, places]."""
    _, _, height, across, width = shape
    block = lax.broadcasted_iota(jnp.int32, places.shape, 0)
    row = block // across * height + places // width
    return (row * across + block % across) * width + places % width


def _of_candidates(keys, slots, k):
    """The slots of the k largest keys of each column; of equal ones the first."""
    least = _kth(keys, k)
    above, equal = keys > least, keys == least
    missing = k - listing.added(above, lambda flags: flags.astype(jnp.int32))
    chosen = above | (equal & (listing.running(equal) <= missing))
    found = listing.listed(listing.of_columns(chosen), k)
    at = found * keys.shape[1] + lax.broadcasted_iota(jnp.int32, found.shape, 1)
    return slots.reshape(-1).at[at].get(mode="clip")


def _kth(columns, k):
    """The k-th largest of each column of uint32 [room, columns]."""
    high = (columns >> 16).astype(jnp.uint16)
    # Half a key at a time: twice as many are compared at once.
    first = _kth_short(high, k)
    above = listing.added(high, lambda x: (x > first).astype(jnp.int32))
    low = jnp.where(high == first, columns.astype(jnp.uint16), 0)
    second = _kth_short(low, k - above)
    return (first.astype(jnp.uint32) << 16) | second.astype(jnp.uint32)


def _kth_short(columns, k):
    """The k-th largest of each column of uint16, one bit after another."""
    # As wide as a key where it can be: vectors of flags are not narrowed then.
    counted = jnp.uint16 if columns.shape[0] < 1 << 16 else jnp.int32

    def settle(i, key):
        tried = key | (jnp.uint16(1) << (15 - i).astype(jnp.uint16))
        count = listing.added(columns, lambda x: (x >= tried).astype(counted))
        return jnp.where(count.astype(jnp.int32) >= k, tried, key)

    start = jnp.zeros(columns.shape[1], jnp.uint16)
    start = as_varying(start, varying_axes(columns))
    return lax.fori_loop(0, 16, settle, start)


def _rows(view):
    """A view as [blocks, numbers of a block]: a copy, where blocks lie side by side."""
    return view.swapaxes(2, 3).reshape(-1, view.shape[2] * view.shape[4])


def _blocks(view):
    return view.shape[0] * view.shape[1] * view.shape[3]
