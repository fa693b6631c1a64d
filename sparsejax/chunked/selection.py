"""Selects the k entries of largest magnitude of each block; returns their places.

The selection is exact and deterministic: of equal magnitudes those at the lowest places are
selected. NaN counts as larger than infinity, as in all selections, so it is sent at once.

On GPUs it is `lax.top_k`. On CPUs XLA may compile that to a sort, and the transposition
of a matrix into blocks is slow, too. So there blocks stay in place, and are read twice:

    1. A block is cut into 2 k groups or more, and the largest magnitude of each is found.
       At least k entries are at least as large as the k-th of these; about 1.4 k are, if
       large entries are spread over the block.
    2. Entries of at least that magnitude are marked by bits. If they are more than 2 k,
       other keys are tried until there are k to 2 k.
    3. These candidates are listed, and the k-th largest key among them is found bit by
       bit.

A key is the bits of a magnitude, see `units.selection.magnitudes`. Possibly no key has k to
2 k entries, as in a block of mostly zeros; of equal entries the first are candidates then.
A view is a leaf in the shape [matrices, blocks down, height, blocks across, width], which
is no copy. Arrays about blocks have one column per block, those of all views concatenated.
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


_FEW = 1 << 16  # elements; if there are fewer, all are candidates
_ZERO_AT = 0  # the turn that tries the smallest non-zero key if all are candidates
_HALVED_FROM = 6  # the turn from which on the range is bisected
_DROPPED = 15  # the low bits of a key that a first guess ignores


def largest(views: Sequence[jax.Array], k: int) -> jax.Array:
    """Returns the places of the k largest magnitudes of each block, ascending.

    Args:
        views: float32 [matrices, blocks down, height, blocks across, width] each, with
            equal height and width.
        k: The number of entries, at most that of the elements of a block.

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
    # Candidates have keys of at least 1, so that padding, 0, is never preferred to them.
    keys = jnp.where(is_one, _keys_at(views, slots) + 1, 0)
    return _of_candidates(keys.T, slots.T, k).T


class _Probes(NamedTuple):
    """Bounds of the wanted key of each block; all arrays are [blocks].

    Attributes:
        low: uint32, the lower bound: at least k entries have this key or a larger one.
        high: uint32, the upper bound: fewer than k entries have this key or a larger one.
        entries: int32, the number of entries with a key of at least `low`.
        above: int32, the number of entries with a key of at least `high`.
    """

    low: jax.Array
    high: jax.Array
    entries: jax.Array
    above: jax.Array


def _candidates(views, k):
    """Marks k to 2 k candidates of each block; returns bits [words, blocks], and counts."""
    height = views[0].shape[2]
    low, high = _guessed(views, k)
    marks = _marked(views, low)
    entries = listing.count(marks)
    few = lambda: (listing.turned(marks, height), entries)
    many = lambda: _narrowed(views, k, _Probes(low, high, entries, jnp.zeros_like(entries)))
    return branches.cond(jnp.any(entries > 2 * k), many, few)


def _guessed(views, k):
    """Returns a lower bound of the wanted keys of blocks, and keys above all entries."""
    *_, height, _, width = views[0].shape
    rows = max(1, min(height, height * width // (2 * k)))

    def tops(view):
        keys = magnitudes.keys(view)
        if height % rows:
            keys = jnp.pad(keys, [(0, 0), (0, 0), (0, -height % rows), (0, 0), (0, 0)])
        groups = keys.reshape(*keys.shape[:2], -1, rows, *keys.shape[3:])
        # 16 bits are enough for a guess, and faster to compare.
        return (jnp.max(groups, axis=3) >> _DROPPED).astype(jnp.uint16)

    found = _alone(views, lambda: [tops(view) for view in views])
    pairs = zip(views, found, strict=True)
    columns = [x.transpose(2, 4, 0, 1, 3).reshape(-1, _blocks(view)) for view, x in pairs]
    columns = jnp.concatenate(columns, axis=1)
    low = _kth_short(columns, k).astype(jnp.uint32)
    high = jnp.max(columns, axis=0).astype(jnp.uint32) + 1
    return low << _DROPPED, high << _DROPPED


def _narrowed(views, k, found):
    """Marks k to 2 k candidates if the guess has more than 2 k in some block."""
    height = views[0].shape[2]

    def pending(state):
        return jnp.any(~_settled(state[1], k))

    def again(state):
        turn, found = state
        # Without the barrier XLA hoists the keys, as large as the leaves, out of the loop.
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
    """Flags blocks where k to 2 k entries have keys of at least `low`, or no key fits."""
    return (found.entries <= 2 * k) | (found.high - found.low <= 1)


def _probed(views, found, k, turn):
    """Probes one more key of the blocks that are not settled; returns the new bounds."""
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
    """Interpolates log counts for a key that about `aim` entries have at least."""
    numbers = (found.entries, found.above)
    more, fewer = (jnp.maximum(x.astype(jnp.float32), 0.5) for x in numbers)
    share = jnp.log(more / aim) / jnp.log(more / fewer)
    span = (found.high - found.low).astype(jnp.float32)
    key = found.low + (jnp.clip(share, 0.1, 0.9) * span).astype(jnp.uint32)
    # A block may have fewer than k non-zero entries.
    is_blank = (found.low == 0) & (turn == _ZERO_AT)
    return jnp.where(is_blank, jnp.uint32(1), key)


def _marked(views, key):
    """Marks the entries with at least the key of their block, as `listing.by_blocks`."""

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
    """Computes a function of all entries in kernels of its own, before a transposition.

    Otherwise XLA:CPU would fuse both, and compute in transposed order without vectors.
    """
    count = magnitudes.keys(views[0][0, 0, 0, 0, 0]).astype(jnp.int32)
    return branches.alone(count, function, branches.cond)


def _filled(above, equal, k):
    """Adds the first bits of `equal` to those of `above`, up to k bits in each column."""
    there = lax.population_count(equal).astype(jnp.int32)
    missing = k - listing.count(above) - (listing.running(there) - there)
    upto = bits.bit_of_rank(equal, jnp.clip(missing, 1, jnp.maximum(there, 1)) - 1) + 1
    return above | jnp.where(missing > 0, equal & bits.low_ones(upto), 0)


def _keys_at(views, slots):
    """Gathers the keys of entries at places [blocks, slots] in their blocks."""
    found, start = [], 0
    for view in views:
        own = lax.slice_in_dim(slots, start, start + _blocks(view))
        at = indices_in(view.shape, own)
        found.append(view.reshape(-1).at[at].get(mode="promise_in_bounds"))
        start += _blocks(view)
    return magnitudes.keys(jnp.concatenate(found))


def indices_in(shape: Sequence[int], places: jax.Array) -> jax.Array:
    """Converts places in blocks to indices of the flat view, int32 [blocks, places]."""
    _, _, height, across, width = shape
    block = lax.broadcasted_iota(jnp.int32, places.shape, 0)
    row = block // across * height + places // width
    return (row * across + block % across) * width + places % width


def _of_candidates(keys, slots, k):
    """Returns the slots of the k largest keys of each column; of equal ones the first."""
    least = _kth(keys, k)
    above, equal = keys > least, keys == least
    missing = k - listing.added(above, lambda flags: flags.astype(jnp.int32))
    chosen = above | (equal & (listing.running(equal) <= missing))
    found = listing.listed(listing.of_columns(chosen), k)
    at = found * keys.shape[1] + lax.broadcasted_iota(jnp.int32, found.shape, 1)
    return slots.reshape(-1).at[at].get(mode="clip")


def _kth(columns, k):
    """Returns the k-th largest element of each column of uint32 [room, columns]."""
    high = (columns >> 16).astype(jnp.uint16)
    # One half of the bits after the other: vectors compare twice as many at once.
    first = _kth_short(high, k)
    above = listing.added(high, lambda x: (x > first).astype(jnp.int32))
    low = jnp.where(high == first, columns.astype(jnp.uint16), 0)
    second = _kth_short(low, k - above)
    return (first.astype(jnp.uint32) << 16) | second.astype(jnp.uint32)


def _kth_short(columns, k):
    """Returns the k-th largest element of each column of uint16, found bit by bit."""
    # Counts are as wide as keys if possible, so that vectors of flags need no conversion.
    counted = jnp.uint16 if columns.shape[0] < 1 << 16 else jnp.int32

    def settle(i, key):
        tried = key | (jnp.uint16(1) << (15 - i).astype(jnp.uint16))
        count = listing.added(columns, lambda x: (x >= tried).astype(counted))
        return jnp.where(count.astype(jnp.int32) >= k, tried, key)

    start = jnp.zeros(columns.shape[1], jnp.uint16)
    start = as_varying(start, varying_axes(columns))
    return lax.fori_loop(0, 16, settle, start)


def _rows(view):
    """Returns a view as [blocks, length], a copy if blocks are side by side."""
    return view.swapaxes(2, 3).reshape(-1, view.shape[2] * view.shape[4])


def _blocks(view):
    return view.shape[0] * view.shape[1] * view.shape[3]
