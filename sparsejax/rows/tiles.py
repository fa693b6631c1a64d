"""Works on lists of rows tile by tile, until all of their rows are done.

A list has the capacity for the most rows that are possible. The cost of work tile by tile
depends on the number of rows that are in it, and intermediate results stay in the cache
and need no large buffers: on a CPU most of the time of a step would otherwise be spent on
the first access to their pages.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax.axes import as_varying, varying_axes
from sparsejax.branches import alone_on_cpus, cond


# The capacity below which a list is not cut into tiles.
_SHORT = 4096
# The upper bound of the number of tiles, and the wanted number of elements in one tile of
# each list together: half a megabyte of float32.
_MOST, _NUMBERS = 64, 1 << 17


def room(n: int) -> int:
    """Returns the capacity of a list of at most n rows, padded to be cut into tiles."""
    return n if n < _SHORT else -(-n // _MOST) * _MOST


def is_long(n: int) -> bool:
    """Returns whether a list with capacity `n` can be cut into tiles."""
    return n >= _SHORT


def tiles_of(numbers: int) -> int:
    """Returns the number of tiles of lists with `numbers` elements in all, with padding."""
    tiles = 1
    while tiles < _MOST and numbers > tiles * _NUMBERS:
        tiles *= 2
    return tiles


class Tile:
    """One tile of each of some lists.

    Args:
        number: int32 [], the number of the tile.
        lengths: The number of rows in a tile of each list.
    """

    def __init__(self, number: jax.Array, lengths: Mapping[int, int]):
        self._number, self._lengths = number, lengths

    def cut(self, at: int, arrays: Any) -> Any:
        """Returns the tile of arrays that belong to list `at`."""
        start, length = self._number * self._lengths[at], self._lengths[at]
        of = lambda x: lax.dynamic_slice_in_dim(x, start, length)
        return jax.tree.map(of, arrays)

    def put(self, at: int, arrays: Any, tile: Any) -> Any:
        """Returns the arrays with the tile replaced."""
        # A scatter, because XLA would fuse dynamic_update_slice with all that computes it.
        start, length = self._number * self._lengths[at], self._lengths[at]
        places = start + lax.iota(jnp.int32, length)
        known = {"indices_are_sorted": True, "unique_indices": True, "mode": "drop"}
        of = lambda x, y: x.at[places].set(y.astype(x.dtype), **known)
        return jax.tree.map(of, arrays, tile)

    def apart(self, function: Callable[[], Any]) -> Any:
        """Computes a function in kernels of its own on CPUs.

        See `branches.alone`: XLA does not fuse work on a tile with the gather of the tile.
        """
        types = axes_of(self._number)
        return as_varying(alone_on_cpus(self._number, function, cond), types)


def each(
    lists: Mapping[int, tuple[int, Any]],
    tiles: int,
    one: Callable[["Tile", Any], Any],
    carry: Any,
    types: frozenset[str],
) -> Any:
    """Works on lists, one tile of each at a time, until the rest of all is padding.

    Args:
        lists: For each list its capacity, and the number of rows in it, int32 [].
        tiles: The number of tiles of each list.
        one: A function `one(tile, carry)` that works on one tile of each list and returns
            the next carry.
        carry: The initial carry, a pytree of arrays.
        types: The mesh axes over which the carry varies.
    """
    lengths = {at: places // tiles for at, (places, _) in lists.items()}
    turns = [
        lax.div(count + (lengths[at] - 1), np.int32(lengths[at]))
        for at, (_, count) in lists.items()
    ]

    def turn(number, carry):
        return as_varying(one(Tile(number, lengths), carry), types)

    if tiles == 1:
        return turn(jnp.int32(0), as_varying(carry, types))
    last = as_varying(jnp.max(jnp.stack(as_varying(turns, types))), types)
    first = as_varying(jnp.int32(0), types)
    return lax.fori_loop(first, last, turn, as_varying(carry, types))


def axes_of(*trees: Any) -> frozenset[str]:
    """Returns the mesh axes over which any array of some pytrees varies."""
    return frozenset().union(*map(varying_axes, jax.tree.leaves(trees)))
