"""Top-k by magnitude without sorting: binary search over bit patterns.

The key of a floating-point number is its bits without the sign, read as an unsigned
integer. Keys are ordered as magnitudes are: zero has key 0, and the keys of NaN are above
that of infinity. A threshold is a key, too. Counting the elements whose keys are at least a
threshold reads the array once and writes nothing, so a binary search finds the k-th largest
key. In a long array a sample first gives a lower and an upper bound of that key; the few
elements between them are extracted and searched alone. The result is exact for any data.
Most arrays are read two or three times, the worst case once for each bit of a key.

A sharded array has one k-th largest key: `Shards` adds up counts over the shards.

Functions are given numbers and compute keys where they read them. Keys that were computed
beforehand would be written to memory before each loop or branch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import hashing, rank_select
from pallas_kernels.operations.bitmap import bitmap_decode
from pallas_kernels.types import as_varying, varying_axes
from sparsejax import branches
from sparsejax.units import bits


SHORT = 1 << 14  # Arrays of up to this many elements are searched without a sample.
SPARE = 4.0  # The standard deviations between the key of a sample and its bounds.


def _itself(x: Any) -> Any:
    return x


@dataclasses.dataclass(frozen=True)
class Shards:
    """The shards of an array whose elements are ranked together, one on each rank.

    Attributes:
        add: Adds up an array of numbers over the shards.
        join: Concatenates the shards' vectors.
        count: The number of shards.
    """

    add: Callable[[Any], Any] = _itself
    join: Callable[[Any], Any] = _itself
    count: int = 1


WHOLE = Shards()  # An array that is not sharded.


def keys(x: jax.Array) -> jax.Array:
    """Returns the keys of floating-point x: unsigned integers of the same width."""
    return (rank_select.unsigned(x) << 1) >> 1


def key_of(magnitude: jax.typing.ArrayLike, dtype: Any) -> jax.Array:
    """Returns the key of a threshold: at least 1, so that no zero is selected."""
    return jnp.maximum(keys(jnp.asarray(magnitude, dtype)), 1)


def magnitude_of(key: jax.Array, dtype: Any) -> jax.Array:
    """Returns the number that has a key; the inverse of `key_of`."""
    return lax.bitcast_convert_type(key, jnp.dtype(dtype))


def converted(key: jax.Array, dtype: Any, other: Any) -> jax.Array:
    """Converts the key of a threshold on numbers of one dtype to one for another dtype."""
    if jnp.dtype(dtype) == jnp.dtype(other):
        return key
    return key_of(magnitude_of(key, dtype).astype(other), other)


def count(x: jax.Array, least: jax.Array) -> jax.Array:
    """Counts the elements of x whose keys are at least `least`."""
    return bits.count(keys(x) >= least)


def at_least(x: jax.Array, least: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Selects the elements of x whose keys are at least `least`.

    Returns:
        The selection as packed bits, and the number of selected elements.
    """
    words = bits.pack_all(keys(x) >= least)
    return words, bits.members(words)


def sample(x: jax.Array, size: int, seed: jax.Array) -> jax.Array:
    """Returns about `size` elements of x at an odd stride, from a start drawn by the seed.

    An odd stride does not stay in one column of a matrix whose width is even.
    """
    if size >= x.size:
        return x
    stride = (x.size // size) | 1
    start = hashing.mix32(jnp.uint32(x.size), seed) % jnp.uint32(stride)
    places = start.astype(jnp.int32) + stride * lax.iota(jnp.int32, x.size // stride)
    return x.at[places].get(mode="clip", indices_are_sorted=True)


def kth_by_bits(x: jax.Array, k: jax.Array, shards: Shards = WHOLE) -> jax.Array:
    """Finds the k-th largest key of a short array; 0 if the array has fewer elements.

    Binary search, one bit of the key at a time; each reads the array once.
    """
    dtype = keys(x).dtype
    width = dtype.itemsize * 8
    one = dtype.type(1)

    def settle(i, key):
        tried = key | (one << (width - 2 - i).astype(dtype))
        return jnp.where(shards.add(count(x, tried)) >= k, tried, key)

    return lax.fori_loop(0, width - 1, settle, _typed(dtype.type(0), x, k, shards))


def kth_by_digits(x: jax.Array, k: jax.Array, shards: Shards = WHOLE) -> jax.Array:
    """Finds the k-th largest key as `kth_by_bits`, with a quarter of the sums over shards.

    It finds four bits of the key at a time, from fifteen counts that are added up together:
    for short arrays with many shards, where each sum is a message.
    """
    all_keys = keys(x)
    digits = jnp.arange(1, 16, dtype=all_keys.dtype)

    def settle(turn, key):
        shift = (all_keys.dtype.itemsize * 8 - 4 - 4 * turn).astype(all_keys.dtype)
        tried = key | (digits << shift)
        counts = jnp.sum(all_keys[None] >= tried[:, None], axis=1, dtype=jnp.int32)
        # Counts fall from digit to digit, so this finds the last one that is large enough.
        digit = jnp.sum(shards.add(counts) >= k, dtype=jnp.int32).astype(all_keys.dtype)
        return key | (digit << shift)

    start = _typed(all_keys.dtype.type(0), x, k, shards)
    return lax.fori_loop(0, all_keys.dtype.itemsize * 2, settle, start)


def kth_by_digits_bytes(dtype: Any, sum_bytes: Callable[[int], float]) -> float:
    """Returns the bytes that `kth_by_digits` sends.

    Args:
        dtype: The dtype of the numbers.
        sum_bytes: A function of the bytes of an array that returns the bytes that are sent
            to sum it over the shards.
    """
    return jnp.dtype(dtype).itemsize * 2 * sum_bytes(15 * 4)


def kth_largest(
    x: jax.Array, k: jax.Array, seed: jax.Array, shards: Shards = WHOLE
) -> jax.Array:
    """Finds the k-th largest key exactly; 0 if there are fewer elements.

    Args:
        x: The numbers, or this rank's shard of them.
        k: int32, at least 1.
        seed: The seed of the sample that bounds the search.
        shards: The shards of the array.
    """
    if x.size <= SHORT:
        return kth_by_bits(x, k, shards)
    sampled = shards.join(sample(x, max(SHORT // 4, x.size // 100), seed))
    share = sampled.size / shards.add(jnp.float32(x.size))
    likely = k * share
    room = max(SHORT // 2, x.size // 128)
    far = SPARE * jnp.sqrt(likely) + SPARE
    few, many = jnp.maximum(likely - far, 1), jnp.minimum(likely + far, sampled.size)
    low = kth_by_bits(sampled, jnp.ceil(many).astype(jnp.int32))
    high = kth_by_bits(sampled, jnp.floor(few).astype(jnp.int32))
    above_all = ~low.dtype.type(0)
    # The bounds of the sample may be wrong, and there is none above its largest element.
    from_low, from_high = shards.add(count(x, low)), shards.add(count(x, high))
    everything = shards.add(jnp.int32(x.size))
    low, from_low = _where(
        from_low >= k, (low, from_low), (jnp.zeros_like(low), everything)
    )
    none = jnp.zeros_like(from_high)
    unbounded = (from_high >= k) | (likely <= far)
    high, from_high = _where(
        unbounded, (jnp.full_like(high, above_all), none), (high, from_high)
    )

    def too_wide(state):
        low, from_low, high, from_high = state
        return (from_low - from_high > room) & (high - low > 1)

    def halve(state):
        low, from_low, high, from_high = state
        middle = low + (high - low) // 2
        from_middle = shards.add(count(x, middle))
        enough = from_middle >= k
        low, from_low = _where(enough, (middle, from_middle), (low, from_low))
        high, from_high = _where(enough, (high, from_high), (middle, from_middle))
        return low, from_low, high, from_high

    start = _typed((low, from_low, high, from_high), x, k, shards)
    low, from_low, high, from_high = rare_loop(too_wide, halve, start)
    between = bits.pack_all((keys(x) >= low) & (keys(x) < high))
    places, real = bitmap_decode(between, room)
    extracted = x.at[jnp.minimum(places, x.size - 1)].get(mode="clip")
    extracted = jnp.where(lax.iota(jnp.int32, room) < real, extracted, 0)
    exact = kth_by_bits(extracted, k - from_high, shards)
    # If only one key is left, its elements may exceed the room for extracted ones.
    return jnp.where(high - low > 1, exact, low)


def threshold(
    x: jax.Array, k: jax.Array, seed: jax.Array, shards: Shards = WHOLE
) -> jax.Array:
    """Finds the least key of the k largest elements; at least 1, which excludes zeros."""
    return jnp.maximum(kth_largest(x, k, seed, shards), 1)


def largest(x: jax.Array, k: jax.Array, seed: jax.Array) -> jax.Array:
    """Selects the k largest elements, or all non-zeros if fewer, as packed bits.

    Which of equal elements are selected changes with the seed; see `with_ties`.
    """
    least = threshold(x, k, seed)
    return with_ties(x, least + 1, least, k, seed)


def with_ties(
    x: jax.Array, above: jax.Array, least: jax.Array, k: jax.Array, seed: jax.Array
) -> jax.Array:
    """Selects all keys of at least `above`, and of those between as many as make k.

    Those between have keys of at least `least`. They are consecutive among these in the
    array, wrapping around its end, from a start drawn by the seed: in the order of indices
    the last of equal elements would be left out in every step.
    """
    candidates = bits.pack_all(keys(x) >= least)
    count = bits.members(candidates)

    def cut():
        certain = bits.pack_all(keys(x) >= above)
        ties = candidates & ~certain
        index = bits.rank_index(ties, lanes=2)
        there = index.row_end[-1]
        need = k - bits.members(certain)
        need = jnp.clip(need, 0, there)
        first = hashing.mix32(seed, 0x51ED270B) % jnp.maximum(there, 1).astype(jnp.uint32)
        first = first.astype(jnp.int32)
        end = first + need
        around = end > there
        cuts = jnp.stack([first, jnp.where(around, end - there, end)])
        place = rank_select.select(index, jnp.sort(cuts), length=1)[:, 0]
        # A cut after the last set bit is set to the end of the last word.
        place = jnp.where(jnp.sort(cuts) >= there, ties.size * bits.WORD, place)
        inside = _below(place[1], ties.size) & ~_below(place[0], ties.size)
        return certain | (ties & jnp.where(around, ~inside, inside))

    return branches.cond(count > k, cut, lambda: candidates)


def fit(
    x: jax.Array, words: jax.Array, count: jax.Array, capacity: int, seed: jax.Array
) -> jax.Array:
    """Returns a selection if it fits, else the `capacity` largest elements, as packed bits.

    Args:
        x: The array.
        words: The selection from it, as packed bits.
        count: int32 [], the number of selected elements.
        capacity: The most elements that fit.
        seed: The seed of the choice among equal elements.
    """
    if capacity >= x.size:
        return words
    cut = lambda: largest(x, jnp.int32(capacity), seed)
    return branches.cond(count > capacity, cut, lambda: words)


def indices(words: jax.Array, size: int, capacity: int) -> jax.Array:
    """Returns the indices of the set bits, int32 [capacity], padded with `size`."""
    places, _ = bitmap_decode(words, capacity)
    return jnp.minimum(places, size)


def rare_loop(condition: Callable, body: Callable, state: Any) -> Any:
    """Runs a `lax.while_loop` that rarely runs but reads large arrays.

    XLA copies what a loop reads before it knows whether the loop runs; a `lax.cond` around
    it avoids these copies.
    """
    return lax.cond(
        condition(state),
        lambda state: lax.while_loop(condition, body, state),
        lambda state: state,
        state,
    )


def _below(place, words):
    """Returns packed bits, uint32 [words], in which all bits before a place are set."""
    return bits.low_ones(place - bits.WORD * lax.iota(jnp.int32, words))


def _where(condition, yes, no):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def _typed(tree, x, k, shards):
    """Makes a loop's first state vary over the axes over which its counts and k vary."""
    like = jax.eval_shape(lambda: shards.add(count(x, keys(x).dtype.type(0))))
    return as_varying(tree, varying_axes(like) | varying_axes(k))
