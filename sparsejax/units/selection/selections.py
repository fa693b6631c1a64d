"""Selections from several arrays at once, by one program for all of them.

A program that selects from one array holds a search for a key, loops for what seldom
happens, and a search for the bits that are set. Written once for each array of a model, it
takes many times as long to compile as the model's step. So selections lie end to end here,
as packed bits. What reads an array is written for each of them: the flags of what is
selected, and a copy of it as long as the longest, by a `lax.switch`. All else is written
once: a loop over the arrays whose selection has to change, and one search for the bits.

Results are those that one array at a time would give.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.operations.bitmap import bitmap_decode
from pallas_kernels.types import as_varying, varying_axes
from sparsejax.branches import at_number
from sparsejax.units import bits
from sparsejax.units.selection import magnitudes


# An array that must be cut is searched in the room of the longest beside it.
_UNLIKE = 32
# Samples are laid out in rows of this length.
_ROW = 512


class Selection(NamedTuple):
    """What is selected from several arrays.

    Attributes:
        words: uint32, the arrays' packed bits, end to end, and zeros: after the first word
            of any of them there is room for the longest.
        counts: int32 [arrays], how many elements are selected from each.
    """

    words: jax.Array
    counts: jax.Array


def groups(arrays: Sequence[jax.Array]) -> Iterator[list[int]]:
    """The places of arrays that can be selected from together, a list for each program.

    They are of one dtype, vary over the same mesh axes, differ in length by a factor of 32
    at most, and have fewer than 2^31 elements in all, were the last as long as the first.
    """
    kinds: dict[Any, list[int]] = {}
    for i, x in enumerate(arrays):
        kinds.setdefault((x.dtype, varying_axes(x)), []).append(i)
    for places in kinds.values():
        group, room = [], 0
        for i in sorted(places, key=lambda i: -arrays[i].size):
            # After the first word of each there is room for the longest, the first.
            longest = arrays[group[0]] if group else arrays[i]
            is_full = room + bits.WORD * _words(longest) >= 2**31
            if group and (is_full or arrays[i].size * _UNLIKE < longest.size):
                yield group
                group, room = [], 0
            group.append(i)
            room += bits.WORD * _words(arrays[i])
        yield group


def _words(x):
    """How many words the flags of an array have; see `bits.pack_all`."""
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
        """Selects all elements from a threshold on, one for each array."""
        pairs = zip(self.arrays, keys, strict=True)
        words, counts = zip(*(magnitudes.at_least(x, key) for x, key in pairs), strict=True)
        behind = jnp.zeros(max(self.words) - self.words[-1], jnp.uint32)
        return Selection(jnp.concatenate([*words, behind]), jnp.stack(counts))

    def corrected(
        self,
        selected: Selection,
        state: Any,
        pending: Callable[[Any], jax.Array],
        key: Callable[[Any, jax.Array], tuple[jax.Array, Any]],
        counted: Callable[[Any, jax.Array, jax.Array], Any],
    ) -> tuple[Selection, Any]:
        """Selects again, by other thresholds, while that is needed, one array at a time.

        Args:
            selected: What is selected.
            state: What decides, and changes.
            pending: From the state to booleans [arrays]: which must be selected from again.
            key: From the state and an array's number to the new threshold and state.
            counted: From the state, the array's number, and how many elements are from its
                threshold on, to the next state.
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
        """Selects fewer where more are selected than fit.

        Args:
            selected: What is selected.
            limits: int32 [arrays], how many fit.
            cut: From an array, zeros after it, and its number to as many as fit, as packed
                bits.
        """

        def fewer(i, done):
            x = lax.switch(i, [self._padded(x) for x in self.arrays])
            words = cut(x, i)
            return words, bits.members(words), done.at[i].set(True)

        pending = lambda done: (selected.counts > limits) & ~done
        done = jnp.zeros(len(self.arrays), bool)
        return self._loop(selected, done, pending, fewer)[0]

    def indices(self, selected: Selection, rooms: Sequence[int]) -> list[jax.Array]:
        """The indices of what is selected from each array.

        Args:
            selected: What is selected, from no array more than there is room for.
            rooms: How many indices of each array are returned.

        Returns:
            int32 [room] for each, ascending, padded with the array's size.
        """
        found, _ = bitmap_decode(selected.words, sum(rooms))
        ends = jnp.cumsum(selected.counts)
        places = []
        for i, room in enumerate(rooms):
            first = ends[i] - selected.counts[i]
            own = lax.dynamic_slice(found, (first,), (room,))
            own = own - np.int32(bits.WORD * self.starts[i])
            there = lax.iota(jnp.int32, room) < selected.counts[i]
            places.append(jnp.where(there, own, np.int32(self.sizes[i])))
        return places

    def _from(self, x):
        """From a threshold to an array's selection, in as many words as the longest has."""

        def selection(key):
            words, count = magnitudes.at_least(x, key)
            return jnp.pad(words, (0, max(self.words) - words.size)), count

        return selection

    def _padded(self, x):
        """An array, zeros after it: as long as the longest."""
        return lambda: jnp.pad(x, (0, int(max(self.sizes)) - x.size))

    def _loop(self, selected, state, pending, again):
        """Changes the selection of one pending array after the other."""
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
    """The k-th largest key of each of several short arrays; see `magnitudes.kth_by_bits`.

    Args:
        samples: Vectors of one dtype.
        k: int32 [arrays].
    """
    if len(samples) == 1:
        return magnitudes.kth_by_bits(samples[0], k[0])[None]
    # Zeros after an array are below any key that is tried.
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
