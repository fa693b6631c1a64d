"""Which numbers are largest, with no sort: their bits, counted.

The bits of a floating number without its sign, read as an integer, order as the magnitudes
do: zero first, NaN above infinity. How many keys are at least t is one read of them and no
write, so the k-th largest is found by halving. Of a long array a sample first tells between
which two keys it lies; the few that lie there are taken out and halved among themselves. It
is exact for any data, two or three reads for most, at worst one for each bit.

A sharded tensor has one k-th largest: counts are added up over its shards by `total`.

Functions take the numbers and make keys of them where they are read. Keys that were made
once would be written out, wherever a loop or a branch comes in between.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_kernels
from pallas_kernels import hashing, rank_select
from sparsejax.axes import as_varying, varying_axes
from sparsejax.units import bits


SHORT = 1 << 14  # so few keys are halved as they are
SPARE = 4.0  # standard deviations to either side of what a sample tells


def keys(x: jax.Array) -> jax.Array:
    """The magnitudes of floating x as unsigned integers of its width."""
    return (rank_select.unsigned(x) << 1) >> 1


def key_of(magnitude: jax.typing.ArrayLike, dtype: Any) -> jax.Array:
    """The key of a magnitude; zero is no magnitude, so at least 1."""
    return jnp.maximum(keys(jnp.asarray(magnitude, dtype)), 1)


def magnitude_of(key: jax.Array, dtype: Any) -> jax.Array:
    """Inverse of `key_of`."""
    return lax.bitcast_convert_type(key, jnp.dtype(dtype))


def itself(x: Any) -> Any:
    """The total of what is not sharded."""
    return x


def count(x: jax.Array, least: jax.Array) -> jax.Array:
    """How many keys are at least so large."""
    return bits.count(keys(x) >= least)


def halved(x: jax.Array, k: jax.Array, total: Callable = itself) -> jax.Array:
    """The k-th largest of a few keys, by halving: a read for each bit. 0 if k is more."""
    dtype = keys(x).dtype
    width = dtype.itemsize * 8
    one = dtype.type(1)

    def settle(i, found):
        tried = found | (one << (width - 2 - i).astype(dtype))
        return jnp.where(total(count(x, tried)) >= k, tried, found)

    return lax.fori_loop(0, width - 1, settle, _typed(dtype.type(0), x, k, total))


def by_digits(x: jax.Array, k: jax.Array, total: Callable = itself) -> jax.Array:
    """`halved` in a fourth of the sums: four bits at a time, fifteen counts in one.

    For few keys of which many ranks have a part, where a sum is a message.
    """
    of = keys(x)
    digits = jnp.arange(1, 16, dtype=of.dtype)

    def settle(turn, found):
        shift = (of.dtype.itemsize * 8 - 4 - 4 * turn).astype(of.dtype)
        tried = found | (digits << shift)
        counts = jnp.sum(of[None] >= tried[:, None], axis=1, dtype=jnp.int32)
        # The counts fall from digit to digit.
        digit = jnp.sum(total(counts) >= k, dtype=jnp.int32).astype(of.dtype)
        return found | (digit << shift)

    start = _typed(of.dtype.type(0), x, k, total)
    return lax.fori_loop(0, of.dtype.itemsize * 2, settle, start)


def by_digits_bytes(dtype: Any, sum_bytes: Callable[[int], float]) -> float:
    """What the sums of `by_digits` send, where one of so many bytes sends `sum_bytes`."""
    return jnp.dtype(dtype).itemsize * 2 * sum_bytes(15 * 4)


def sample(x: jax.Array, size: int, seed: jax.Array) -> jax.Array:
    """About as many elements, an odd number apart, from a place that the seed says.

    Strides are odd, so that a pattern in the columns of a matrix is not met every time.
    """
    if size >= x.size:
        return x
    stride = (x.size // size) | 1
    start = hashing.mix32(jnp.uint32(x.size), seed) % jnp.uint32(stride)
    places = start.astype(jnp.int32) + stride * lax.iota(jnp.int32, x.size // stride)
    return x.at[places].get(mode="clip", indices_are_sorted=True)


def kth_largest(
    x: jax.Array,
    k: jax.Array,
    seed: jax.Array,
    total: Callable = itself,
    gathered: Callable = itself,
) -> jax.Array:
    """The k-th largest key, exactly; 0 if there are fewer.

    Args:
        x: The numbers.
        k: int32, at least 1.
        seed: Which elements to look at first.
        total: Adds up a count over the shards of a tensor.
        gathered: Puts the samples of the shards together.
    """
    if x.size <= SHORT:
        return halved(x, k, total)
    looked_at = gathered(sample(x, max(SHORT // 4, x.size // 100), seed))
    share = looked_at.size / total(jnp.float32(x.size))
    likely = k * share
    room = max(SHORT // 2, x.size // 128)
    far = SPARE * jnp.sqrt(likely) + SPARE
    few, many = jnp.maximum(likely - far, 1), jnp.minimum(likely + far, looked_at.size)
    low = halved(looked_at, jnp.ceil(many).astype(jnp.int32))
    high = halved(looked_at, jnp.floor(few).astype(jnp.int32))
    above_all = ~low.dtype.type(0)
    # The sample may be wrong, and says nothing beyond its largest.
    at_low, at_high = total(count(x, low)), total(count(x, high))
    everything = total(jnp.int32(x.size))
    low, at_low = _where(at_low >= k, (low, at_low), (jnp.zeros_like(low), everything))
    none = jnp.zeros_like(at_high)
    unknown = (at_high >= k) | (likely <= far)
    high, at_high = _where(unknown, (jnp.full_like(high, above_all), none), (high, at_high))

    def wide(state):
        low, at_low, high, at_high = state
        return (at_low - at_high > room) & (high - low > 1)

    def halve(state):
        low, at_low, high, at_high = state
        middle = low + (high - low) // 2
        here = total(count(x, middle))
        enough = here >= k
        low, at_low = _where(enough, (middle, here), (low, at_low))
        high, at_high = _where(enough, (high, at_high), (middle, here))
        return low, at_low, high, at_high

    start = _typed((low, at_low, high, at_high), x, k, total)
    low, at_low, high, at_high = loop(wide, halve, start)
    words = bits.pack_all((keys(x) >= low) & (keys(x) < high))
    found, held = pallas_kernels.bitmap_decode(words, room)
    among = x.at[jnp.minimum(found, x.size - 1)].get(mode="clip")
    among = jnp.where(lax.iota(jnp.int32, room) < held, among, 0)
    exact = halved(among, k - at_high, total)
    # Keys that are all the same are not taken out one by one.
    return jnp.where(high - low > 1, exact, low)


def largest(x: jax.Array, k: jax.Array, seed: jax.Array) -> jax.Array:
    """The k largest keys as packed bits; of equal ones a run whose start changes.

    Zeros are never among them.
    """
    least = jnp.maximum(kth_largest(x, k, seed), 1)
    return filled(x, least + 1, least, k, seed)


def filled(
    x: jax.Array,
    above: jax.Array,
    least: jax.Array,
    k: jax.Array,
    seed: jax.Array,
) -> jax.Array:
    """All keys from `above` on, and of those from `least` on as many as make k.

    They follow one another in the array, around its end, from a place that the seed says.
    """
    whole = bits.pack_all(keys(x) >= least)
    have = bits.members(whole)

    def cut():
        certain = bits.pack_all(keys(x) >= above)
        rest = whole & ~certain
        index = bits.rank_index(rest, 2)
        there = index.row_end[-1]
        need = k - bits.members(certain)
        need = jnp.clip(need, 0, there)
        first = hashing.mix32(seed, 0x51ED270B) % jnp.maximum(there, 1).astype(jnp.uint32)
        first = first.astype(jnp.int32)
        end = first + need
        around = end > there
        cuts = jnp.stack([first, jnp.where(around, end - there, end)])
        place = rank_select.select(index, jnp.sort(cuts), 1)[:, 0]
        # A cut behind the last bit is behind the last word.
        place = jnp.where(jnp.sort(cuts) >= there, rest.size * bits.WORD, place)
        inside = _below(place[1], rest.size) & ~_below(place[0], rest.size)
        return certain | (rest & jnp.where(around, ~inside, inside))

    axes = varying_axes(whole) | varying_axes(k)
    return lax.cond(
        have > k, lambda: as_varying(cut(), axes), lambda: as_varying(whole, axes)
    )


def loop(condition: Callable, body: Callable, state: Any) -> Any:
    """`lax.while_loop`, for one that seldom runs at all but reads something large.

    XLA copies what a loop reads before it is known whether it will run.
    """
    again = condition(state)
    return lax.cond(
        again, lambda state: lax.while_loop(condition, body, state), lambda x: x, state
    )


def _below(place, words):
    """Words of which the bits before a place are set."""
    return bits.low_ones(place - bits.WORD * lax.iota(jnp.int32, words))


def _where(condition, yes, no):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def _typed(tree, x, k, total):
    """With the types of what counts of these numbers decide."""
    like = jax.eval_shape(lambda: total(count(x, keys(x).dtype.type(0))))
    return as_varying(tree, varying_axes(like) | varying_axes(k))
