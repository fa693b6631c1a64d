"""Lists of rows, some of them at a time, until all are done.

A list has room for all rows that there may be. What is done to it tile by tile costs what
is in it, and its intermediate results stay in the cache and need no memory of their own:
on a CPU most of the time of a step would else go into pages that are touched first.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax.axes import as_varying, varying_axes
from sparsejax.branches import alone_on_cpus, cond


# Lists of fewer rows are worked on at once.
_SHORT = 4096
# Into how many tiles a list is cut at most, and about how many numbers are in those of all
# lists: half a megabyte.
_MOST, _NUMBERS = 64, 1 << 17


def room(n: int) -> int:
    """How many places a list of at most n rows has, so that it can be cut into tiles."""
    return n if n < _SHORT else -(-n // _MOST) * _MOST


def is_long(n: int) -> bool:
    """Whether a list with `n` places can be cut into tiles."""
    return n >= _SHORT


def tiles_of(numbers: int) -> int:
    """Into how many tiles lists are cut that have room for `numbers` numbers."""
    tiles = 1
    while tiles < _MOST and numbers > tiles * _NUMBERS:
        tiles *= 2
    return tiles


class Tile:
    """A tile of each of some lists.

    Args:
        number: Which tile.
        lengths: How many rows it has of each list.
    """

    def __init__(self, number: jax.Array, lengths: Mapping[int, int]):
        self._number, self._lengths = number, lengths

    def cut(self, at: int, arrays: Any) -> Any:
        """The tile of arrays that belong to a list."""
        start, length = self._number * self._lengths[at], self._lengths[at]
        of = lambda x: lax.dynamic_slice_in_dim(x, start, length)
        return jax.tree.map(of, arrays)

    def put(self, at: int, arrays: Any, tile: Any) -> Any:
        """The arrays with another tile in its place."""
        # A slice that is written would be one kernel with all that computes it.
        start, length = self._number * self._lengths[at], self._lengths[at]
        places = start + lax.iota(jnp.int32, length)
        known = {"indices_are_sorted": True, "unique_indices": True, "mode": "drop"}
        of = lambda x, y: x.at[places].set(y.astype(x.dtype), **known)
        return jax.tree.map(of, arrays, tile)

    def apart(self, function: Callable[[], Any]) -> Any:
        """Computes a function in kernels of its own on CPUs.

        See `branches.alone_on_cpus`: a tile is gathered separately from its uses.
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
    """Works on lists, a tile of each at a time.

    Args:
        lists: How many places each list has, and how many rows are in it.
        tiles: Into how many tiles they are cut.
        one: Works on a tile of each list: `one(tile, carry)` returns what is carried on.
        carry: What is carried on at first.
        types: The mesh axes over which what is carried on varies.
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
    """The mesh axes over which any of these arrays varies."""
    return frozenset().union(*map(varying_axes, jax.tree.leaves(trees)))
