"""The k entries of largest magnitude of each block, by place.

Exact, and the same on every run: of equal magnitudes those at the lowest places are taken.
NaN counts as larger than infinity, as in all that selects here, so it is sent at once.

On GPUs it is `lax.top_k`. On CPUs XLA may make a sort of that, and cutting a matrix into
blocks is slow, too. So there blocks stay where they are in their leaf, and are read a few
times:

    1. For each block a key is found from which on there are k to 2 k entries: guessed as if
       the block were normal, then by what the counts say, at last by halving.
    2. These candidates are packed as bits and listed, 2 k a block.
    3. Among them the k-th key is found by one bit after another.

A key is the bits of a magnitude, see `units.selection.magnitudes`. No key may have k to 2 k
entries, as in a block of mostly zeros; of equal entries the first are then the candidates.
A view is a leaf as [matrices, blocks down, height, blocks across, width], which is no copy.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import rank_select
from pallas_kernels.operations.bitmap import bitmap_decode
from pallas_kernels.platforms import is_elsewhere
from sparsejax import axes
from sparsejax.axes import as_varying, varying_axes
from sparsejax.units import bits
from sparsejax.units.selection import magnitudes


_FEW = 1 << 16  # numbers; of fewer all are candidates
# Probes that are laid out one after another: what a loop reads is copied first.
_LAID_OUT = 2
# The number of a probe at the smallest key, and from which on the range is halved.
_ZERO_AT = 2
_HALVED_FROM = 8
_SAMPLED = 16  # rows of a block by which the first probe is guessed
_ABOVE_ALL = np.uint32(1 << 31)


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
    if is_elsewhere():
        rows = jnp.concatenate([_rows(view) for view in views])
        return jnp.sort(lax.top_k(jnp.abs(rows), k)[1], axis=1)
    if 2 * k >= length or count * length < _FEW:
        keys = magnitudes.keys(jnp.concatenate([_rows(view) for view in views]))
        slots = lax.broadcasted_iota(jnp.int32, keys.shape, 1)
        return _of_candidates(keys, slots, k)
    words, counts = _candidates(views, k)
    slots = bits.slots_of(words, jnp.int32(0), 2 * k, counts)[0]
    is_one = lax.broadcasted_iota(jnp.int32, slots.shape, 1) < counts[:, None]
    slots = jnp.clip(slots, 0, length - 1)
    # Entries that are there have keys from 1 on.
    keys = jnp.where(is_one, _keys_at(views, slots) + 1, 0)
    return _of_candidates(keys, slots, k)


class _Probes(NamedTuple):
    """Two keys for each block of a view, between which the wanted key lies.

    All are [matrices, blocks down, blocks across].

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
    """Candidates of each block, k to 2 k, as bits [blocks, words], and how many."""
    found = list(map(_first, views))
    for turn in range(_LAID_OUT):
        found = [_probed(*pair, k, turn) for pair in zip(views, found, strict=True)]

    def pending(state):
        return ~jnp.all(jnp.stack([jnp.all(_settled(one, k)) for one in state[1]]))

    def again(state):
        turn, found = state
        pairs = zip(views, found, strict=True)
        return turn + 1, [_probed(*pair, k, turn) for pair in pairs]

    over = frozenset().union(*map(varying_axes, jax.tree.leaves(found)))
    start = as_varying((jnp.int32(_LAID_OUT), found), over)
    _, found = magnitudes.rare_loop(pending, again, start)
    words = _packed(views, lambda view, one: _from(view, one.low), found)
    counts = jnp.concatenate([one.entries.reshape(-1) for one in found])

    def few():
        return words, counts

    def first_of_equal():
        above = _packed(views, lambda view, one: _from(view, one.low + 1), found)
        many = counts > 2 * k
        fewer = jnp.where(many[:, None], _filled(above, words & ~above, k), words)
        return fewer, jnp.where(many, k, counts)

    return axes.cond(jnp.any(counts > 2 * k), first_of_equal, few)


def _settled(found, k):
    """Whether `low` has k to 2 k entries, or no key has."""
    return (found.entries <= 2 * k) | (found.high - found.low <= 1)


def _first(view):
    """The keys of a view before the first probe: the smallest, and one above all."""
    shape = *view.shape[:2], view.shape[3]
    full = lambda value, dtype: jnp.full(shape, value, dtype)
    found = _Probes(
        full(0, jnp.uint32),
        full(_ABOVE_ALL, jnp.uint32),
        full(view.shape[2] * view.shape[4], jnp.int32),
        full(0, jnp.int32),
    )
    return as_varying(found, varying_axes(view))


def _probed(view, found, k, turn):
    """The keys of a view after one more probe of the blocks that need it."""
    length = view.shape[2] * view.shape[4]
    if isinstance(turn, int) and turn == 0:
        # The multiple of a normal distribution's deviation that sqrt(2) k entries exceed.
        times = statistics.NormalDist().inv_cdf(1 - math.sqrt(2) * k / length / 2)
        key = magnitudes.keys(jnp.sqrt(_mean_square(view)) * times)
    else:
        key = _next_key(found, math.sqrt(2) * k, length, turn)
    half = found.low + (found.high - found.low) // 2
    is_between = (key > found.low) & (key < found.high) & (turn < _HALVED_FROM)
    key = jnp.where(is_between, key, half)
    count = _counts(view, key)
    done = _settled(found, k)
    better, fewer = (count >= k) & ~done, (count < k) & ~done
    return _Probes(
        jnp.where(better, key, found.low),
        jnp.where(fewer, key, found.high),
        jnp.where(better, count, found.entries),
        jnp.where(fewer, count, found.above),
    )


def _next_key(found, aim, length, turn):
    """The key from which on there may be `aim` entries."""
    numbers = (found.entries, found.above)
    more, fewer = (jnp.maximum(x.astype(jnp.float32), 0.5) for x in numbers)
    # Between two keys, by the logarithms of their counts.
    share = jnp.log(more / aim) / jnp.log(more / fewer)
    span = (found.high - found.low).astype(jnp.float32)
    key = found.low + (jnp.clip(share, 0.1, 0.9) * span).astype(jnp.uint32)
    # Beyond the only one, as if exp(-a t^2) were above t; further with every turn.
    least = jnp.where(turn < 4, 0.5, 1 / 16)
    law = lambda count: jnp.sqrt(math.log(length / aim) / jnp.log(length / count))
    down = _magnitude(found.high) * jnp.clip(law(fewer), least, 0.95)
    up = _magnitude(found.low) * jnp.clip(law(more), 1.05, 1 / least)
    key = jnp.where(found.high == _ABOVE_ALL, magnitudes.keys(up), key)
    key = jnp.where(found.low <= 1, magnitudes.keys(down), key)
    # A block may have fewer than k entries that are not zero.
    is_blank = (found.low == 0) & (turn == _ZERO_AT)
    return jnp.where(is_blank, jnp.uint32(1), key)


def _magnitude(key):
    return lax.bitcast_convert_type(key, jnp.float32)


def _from(view, key):
    """Whether the key of each entry is at least its block's."""
    return magnitudes.keys(view) >= key[:, :, None, :, None]


def _counts(view, key):
    """How many entries of each block have at least this key."""
    flags = _from(view, key)
    # Down the columns first, in bytes: that is done many at a time.
    narrow = jnp.uint8 if view.shape[2] < 256 else jnp.int32
    columns = jnp.sum(flags, axis=2, dtype=narrow)
    return jnp.sum(columns, axis=-1, dtype=jnp.int32)


def _mean_square(view):
    """About the mean of the squares of each block, from a few of its rows."""
    sample = view[:, :, :: max(1, view.shape[2] // _SAMPLED)]
    return jnp.mean(jnp.mean(jnp.square(sample), axis=2), axis=-1)


def _packed(views, flag: Callable[..., jax.Array], found):
    """Flags of entries as bits of blocks, [blocks, words]."""
    pairs = zip(views, found, strict=True)
    packed = [_bits_of_blocks(flag(view, one)) for view, one in pairs]
    return packed[0] if len(packed) == 1 else jnp.concatenate(packed)


def _bits_of_blocks(flags):
    """Flags like a view as bits, [blocks, words]."""
    *_, height, _, width = flags.shape
    if width % bits.WORD == 0:
        words = bits.pack(flags).swapaxes(2, 3)
        return words.reshape(-1, height * width // bits.WORD)
    rows = _rows(flags)
    return bits.pack(jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % bits.WORD))))


def _filled(above, equal, k):
    """The bits of `above`, and the first of `equal` until there are k in each row."""
    missing = k - bits.members_of_each(above)
    there = bits.members_of_each(equal)
    starts = rank_select.running_sum(there) - there
    index = bits.rank_index(equal.reshape(-1), lanes=there.size)
    last = starts + jnp.clip(missing - 1, 0, jnp.maximum(there - 1, 0))
    place = bits.select(index, last, length=1)
    row = above.shape[1] * bits.WORD
    place = place - row * lax.broadcasted_iota(jnp.int32, place.shape, 0)
    upto = place + 1 - bits.WORD * lax.broadcasted_iota(jnp.int32, above.shape, 1)
    return above | jnp.where((missing > 0)[:, None], equal & bits.low_ones(upto), 0)


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
    """The slots of the k largest keys of each row; of equal ones the first."""
    columns = keys.T
    least = _kth(columns, jnp.int32(k), 32)
    above = columns > least
    missing = k - jnp.sum(above, axis=0, dtype=jnp.int32)
    # Of those that equal it the first: the places count down.
    room = keys.shape[1]
    down = room - lax.broadcasted_iota(jnp.uint32, columns.shape, 0)
    down = jnp.where(columns == least, down, 0)
    chosen = above | (down >= jnp.maximum(_kth(down, missing, room.bit_length()), 1))
    rows = jnp.pad(chosen.T, ((0, 0), (0, -room % bits.WORD)))
    found, _ = bitmap_decode(bits.pack(rows).reshape(-1), keys.shape[0] * k)
    row = lax.div(found, jnp.int32(rows.shape[1]))
    at = found - row * (rows.shape[1] - room)
    return slots.reshape(-1).at[at].get(mode="clip").reshape(-1, k)


def _kth(columns, k, width):
    """The k-th largest of each column of uint32 [room, columns], one bit after another."""
    narrow = jnp.uint8 if columns.shape[0] < 256 else jnp.int32

    def settle(i, key):
        tried = key | (jnp.uint32(1) << (width - 1 - i).astype(jnp.uint32))
        count = jnp.sum(columns >= tried, axis=0, dtype=narrow).astype(jnp.int32)
        return jnp.where(count >= k, tried, key)

    start = jnp.zeros(columns.shape[1], jnp.uint32)
    start = as_varying(start, varying_axes(columns))
    return lax.fori_loop(0, width, settle, start)


def _rows(view):
    """A view as [blocks, numbers of a block]: a copy, where blocks lie side by side."""
    return view.swapaxes(2, 3).reshape(-1, view.shape[2] * view.shape[4])


def _blocks(view):
    return view.shape[0] * view.shape[1] * view.shape[3]
