"""Selections from several arrays at once, by one program for all of them.

A program that selects from one array has a search for a key, loops for rare cases, and a
search for set bits. Repeated for each array of a model, it would take many times as long to
compile as the model's step. So here the selections of all arrays are one array of packed
bits, end to end. Only what reads an array is compiled for each of them: the flags of the
selected elements, and a copy padded to the longest, by a `lax.switch`. The rest is compiled
once: a loop over the arrays whose selection has to change, and one search for the bits.

The results are equal to those of selections from one array at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.operations.bitmap import bitmap_decode
from pallas_kernels.types import as_varying, varying_axes
from sparsejax.branches import at_number, hidden
from sparsejax.units import bits
from sparsejax.units.selection import magnitudes


# The largest ratio of the lengths of arrays of one group. Where too many elements are
# selected from an array, it is searched padded to the longest of its group.
_UNLIKE = 32
# The length of the rows into which samples are cut.
_ROW = 512


class Selection(NamedTuple):
    """The elements selected from several arrays.

    Attributes:
        words: uint32 [words], the arrays' packed bits, end to end, padded with zeros, so
            that a slice of the longest array's length fits at the start of each array.
        counts: int32 [arrays], the number of elements selected from each.
    """

    words: jax.Array
    counts: jax.Array


def groups(arrays: Sequence[jax.Array]) -> Iterator[list[int]]:
    """Yields groups of arrays for which one program can select, as lists of indices.

    The arrays of a group have one dtype, vary over the same mesh axes, differ in length by
    a factor of at most 32, and have fewer than 2^31 elements in all, with the last padded
    to the longest.
    """
    kinds: dict[Any, list[int]] = {}
    for i, x in enumerate(arrays):
        kinds.setdefault((x.dtype, varying_axes(x)), []).append(i)
    for places in kinds.values():
        group, room = [], 0
        for i in sorted(places, key=lambda i: -arrays[i].size):
            # The first is the longest; each array needs room for it at its own start.
            longest = arrays[group[0]] if group else arrays[i]
            is_full = room + bits.WORD * _words(longest) >= 2**31
            if group and (is_full or arrays[i].size * _UNLIKE < longest.size):
                yield group
                group, room = [], 0
            group.append(i)
            room += bits.WORD * _words(arrays[i])
        yield group


def _words(x):
    """Returns the number of words of an array's flags; see `bits.pack_all`."""
    return x.size // bits.WORD + 1


class Arrays:
    """Vectors of floating-point numbers that are selected from together; see `groups`.

    Args:
        arrays: The vectors.
    """

    def __init__(self, arrays: Sequence[jax.Array]):
        self.arrays = list(arrays)
        self.words = [_words(x) for x in arrays]
        self.starts = np.cumsum([0, *self.words[:-1]])
        self.sizes = np.array([x.size for x in arrays], np.int64)

    def at_least(self, keys: Sequence[jax.Array] | jax.Array) -> Selection:
        """Selects the elements of each array whose keys are at least its threshold's."""
        pairs = zip(self.arrays, keys, strict=True)
        words, counts = zip(*(magnitudes.at_least(x, key) for x, key in pairs), strict=True)
        spare = jnp.zeros(max(self.words) - self.words[-1], jnp.uint32)
        return Selection(jnp.concatenate([*words, spare]), jnp.stack(counts))

    def corrected(
        self,
        selected: Selection,
        state: Any,
        pending: Callable[[Any], jax.Array],
        key: Callable[[Any, jax.Array], tuple[jax.Array, Any]],
        counted: Callable[[Any, jax.Array, jax.Array], Any],
    ) -> tuple[Selection, Any]:
        """Repeats pending selections by other thresholds, one array at a time.

        Args:
            selected: The selection so far.
            state: A tree of arrays, the state of the loop.
            pending: A function of the state that returns booleans [arrays], which arrays
                must be selected from again.
            key: A function of the state and an array's number that returns the new
                threshold, as a key, and the next state.
            counted: A function of the state, an array's number and the count of elements
                that its new threshold selects, which returns the next state.

        Returns:
            The selection and the state.
        """

        def again(i, state):
            least, state = key(state, i)
            words, count = lax.switch(i, [self._from(x) for x in self.arrays], least)
            return words, count, counted(state, i, count)

        return self._loop(selected, state, pending, again)

    def fit(
        self,
        selected: Selection,
        limits: jax.Array,
        cut: Callable[[jax.Array, jax.Array], jax.Array],
    ) -> Selection:
        """Reduces the selections that exceed a limit.

        Args:
            selected: The selection so far.
            limits: int32 [arrays], the most elements to select from each.
            cut: A function of an array, padded with zeros, and its number, which returns a
                selection within its limit, as packed bits.
        """

        def fewer(i, done):
            x = lax.switch(i, [self._padded(x) for x in self.arrays])
            words = cut(x, i)
            return words, bits.members(words), done.at[i].set(True)

        pending = lambda done: (selected.counts > limits) & ~done
        done = jnp.zeros(len(self.arrays), bool)
        return self._loop(selected, done, pending, fewer)[0]

    def indices(self, selected: Selection, rooms: Sequence[int]) -> list[jax.Array]:
        """Returns the indices of the elements selected from each array.

        Args:
            selected: The selection, from each array at most as many as its capacity.
            rooms: The capacity of the indices of each array.

        Returns:
            For each array int32 [room], ascending, padded with the array's size.
        """
        found, _ = bitmap_decode(selected.words, sum(rooms))
        counts, ends = selected.counts, jnp.cumsum(selected.counts)
        starts = jnp.asarray(bits.WORD * self.starts, jnp.int32)
        kinds = list(zip(rooms, self.sizes.tolist(), strict=True))
        numbers = hidden(np.arange(len(rooms), dtype=np.int32), kinds, lambda: ends[0])
        places = []
        for i, (room, size) in zip(numbers, kinds, strict=True):
            count = at_number(counts, i)
            first = at_number(ends, i) - count
            own = lax.dynamic_slice(found, (first,), (room,)) - at_number(starts, i)
            there = lax.iota(jnp.int32, room) < count
            places.append(jnp.where(there, own, np.int32(size)))
        return places

    def _from(self, x):
        """Makes a function that selects from x by a key, padded to the longest array."""

        def selection(key):
            words, count = magnitudes.at_least(x, key)
            return jnp.pad(words, (0, max(self.words) - words.size)), count

        return selection

    def _padded(self, x):
        """Makes a function that returns x, padded with zeros to the longest array."""
        return lambda: jnp.pad(x, (0, int(max(self.sizes)) - x.size))

    def _loop(self, selected, state, pending, again):
        """Changes the selections of pending arrays, one after another."""
        most, starts = max(self.words), jnp.asarray(self.starts, jnp.int32)
        lengths = jnp.asarray(self.words, jnp.int32)

        def change(carry):
            (words, counts), state = carry
            i = jnp.argmax(pending(state)).astype(jnp.int32)
            new, count, state = again(i, state)
            first = (at_number(starts, i),)
            old = lax.dynamic_slice(words, first, (most,), allow_negative_indices=False)
            new = jnp.where(lax.iota(jnp.int32, most) < at_number(lengths, i), new, old)
            words = lax.dynamic_update_slice(
                words, new, first, allow_negative_indices=False
            )
            return Selection(words, counts.at[i].set(count)), state

        over = frozenset().union(*map(varying_axes, jax.tree.leaves((selected, state))))
        start = as_varying((selected, state), over)
        return magnitudes.rare_loop(lambda carry: jnp.any(pending(carry[1])), change, start)


def kth_of_each(samples: Sequence[jax.Array], k: jax.Array) -> jax.Array:
    """Finds the k-th largest key of each of several short arrays: `magnitudes.kth_by_bits`.

    Args:
        samples: Vectors of one dtype.
        k: int32 [arrays].
    """
    if len(samples) == 1:
        return magnitudes.kth_by_bits(samples[0], k[0])[None]
    # The zeros of the padding are below any key that is tried.
    rows = [jnp.pad(x, (0, -x.size % _ROW)).reshape(-1, _ROW) for x in samples]
    of_row = np.repeat(np.arange(len(samples)), [len(part) for part in rows])
    keys = magnitudes.keys(jnp.concatenate(rows))
    width = keys.dtype.itemsize * 8
    one = keys.dtype.type(1)

    def settle(i, found):
        tried = found | (one << (width - 2 - i).astype(keys.dtype))
        counts = jnp.sum(keys >= tried[of_row][:, None], axis=1, dtype=jnp.int32)
        counts = jnp.zeros(len(samples), jnp.int32).at[of_row].add(counts)
        return jnp.where(counts >= k, tried, found)

    start = jnp.zeros(len(samples), keys.dtype)
    start = as_varying(start, varying_axes(keys) | varying_axes(k))
    return lax.fori_loop(0, width - 1, settle, start)
