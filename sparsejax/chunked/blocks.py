"""Cuts leaves into blocks, and determines the number of entries that are sent of each.

A matrix is cut into blocks of height x width, a vector into segments of width. An array
with more axes is a stack of matrices. Each side of a block is the largest divisor of its
dimension that is at most sqrt(chunk), so there is no padding: with a chunk of 4096 most
blocks are 64 x 64. Of a block of `length` elements round(k length / chunk) are sent, at
least one. So the number of entries of a leaf follows from its shape alone.

Blocks are numbered in row-major order, and so are the elements of a block: the number of an
element in its block is its place. Entries are selected together from all blocks of one
shape, whatever their leaves.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.chunked import selection
from sparsejax.errors import ArgumentError
from sparsejax.schemes.base import MOST_UNITS


_LARGE = 1 << 18  # elements; smaller leaves are copied into one array


@dataclasses.dataclass(frozen=True)
class BlockCut:
    """The cut of one leaf into blocks.

    Attributes:
        shape: The shape of the leaf.
        height: The number of rows of a block; 1 for a vector.
        width: The number of columns of a block.
        kept: The number of entries of a block that are sent.
    """

    shape: tuple[int, ...]
    height: int
    width: int
    kept: int

    @classmethod
    def of(cls, shape: Sequence[int], k: int, chunk: int) -> "BlockCut":
        """Returns the cut of a leaf of this shape."""
        side = math.isqrt(chunk)
        rows = shape[-2] if len(shape) > 1 else 1
        columns = shape[-1] if shape else 1
        height, width = _divisor(rows, side), _divisor(columns, side)
        kept = max(1, round(height * width * k / chunk))
        return cls(tuple(shape), height, width, kept)

    @property
    def length(self) -> int:
        """The number of elements of a block."""
        return self.height * self.width

    @property
    def size(self) -> int:
        """The number of elements of the leaf."""
        return math.prod(self.shape)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return self.size // self.length

    @property
    def entries(self) -> int:
        """The number of entries of the leaf that are sent."""
        return self.blocks * self.kept

    @property
    def grid(self) -> tuple[int, int, int, int, int]:
        """A shape of the leaf: (matrices, blocks down, height, blocks across, width)."""
        *stack, rows, columns = (1, 1, *self.shape) if self.shape else (1, 1)
        down, across = rows // self.height, columns // self.width
        return math.prod(stack), down, self.height, across, self.width

    def split(self, x: jax.Array) -> jax.Array:
        """Returns the blocks of the leaf, [blocks, length]."""
        return x.reshape(self.grid).swapaxes(2, 3).reshape(-1, self.length)

    def join(self, blocks: jax.Array) -> jax.Array:
        """Returns the leaf with given blocks: the inverse of `split`."""
        count, down, height, across, width = self.grid
        x = blocks.reshape(count, down, across, height, width)
        return x.swapaxes(2, 3).reshape(self.shape)

    def indices(self, places: jax.Array) -> jax.Array:
        """Converts places in blocks to indices of the flat leaf, int32 [blocks, kept]."""
        return selection.indices_in(self.grid, places)


@dataclasses.dataclass(frozen=True)
class Together:
    """A group of leaves with one shape of blocks, from which entries are selected at once.

    Attributes:
        leaves: The numbers of the leaves.
        cuts: The cut of each leaf.
    """

    leaves: tuple[int, ...]
    cuts: tuple[BlockCut, ...]

    @property
    def length(self) -> int:
        """The number of elements of a block."""
        return self.cuts[0].length

    @property
    def kept(self) -> int:
        """The number of entries of a block that are sent."""
        return self.cuts[0].kept

    @property
    def blocks(self) -> int:
        """The number of blocks of all leaves of the group."""
        return sum(cut.blocks for cut in self.cuts)

    @property
    def entries(self) -> int:
        """The number of entries of all leaves of the group that are sent."""
        return self.blocks * self.kept

    @property
    def members(self) -> list[tuple[int, BlockCut]]:
        """The number and the cut of each leaf."""
        return list(zip(self.leaves, self.cuts, strict=True))

    def largest(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """Selects entries from a list of leaves; returns places, int32 [blocks, kept].

        Large leaves are read in place. Small ones are concatenated, so that the program
        does not grow with their number.
        """
        views, small = [], []
        for i, cut in self.members:
            if cut.size >= _LARGE:
                views += [*_joined(small), leaves[i].reshape(cut.grid)]
                small = []
            else:
                small.append(cut.split(leaves[i]))
        height, width = self.cuts[0].height, self.cuts[0].width
        views = [
            x if x.ndim == 5 else x.reshape(-1, 1, height, 1, width)
            for x in (*views, *_joined(small))
        ]
        return selection.largest(views, self.kept)

    def of_each(self, x: jax.Array) -> list[jax.Array]:
        """Splits an array [blocks, ...] into the parts of the leaves."""
        parts, start = [], 0
        for cut in self.cuts:
            parts.append(lax.slice_in_dim(x, start, start + cut.blocks))
            start += cut.blocks
        return parts


def _joined(rows):
    """Returns a list of the concatenation of some arrays; an empty list for none."""
    return [jnp.concatenate(rows)] if rows else []


def together(cuts: Sequence[BlockCut]) -> tuple[Together, ...]:
    """Groups leaves by the shape of their blocks, and omits empty leaves.

    Leaves with one shape of blocks are split into several groups if they have more elements
    than int32 can index.
    """
    found: dict[tuple[int, int], list[list[int]]] = {}
    sizes: dict[tuple[int, int], int] = {}
    for i, cut in enumerate(cuts):
        if not cut.size:
            continue
        key = cut.height, cut.width
        sizes[key] = sizes.get(key, 0) + cut.size
        if key not in found or sizes[key] > MOST_UNITS:
            found.setdefault(key, []).append([])
            sizes[key] = cut.size
        found[key][-1].append(i)
    return tuple(
        Together(tuple(own), tuple(cuts[i] for i in own))
        for groups in found.values()
        for own in groups
    )


def check_size(path: str, shape: Sequence[int]) -> None:
    """Raises if a leaf has more elements than int32 can index."""
    size = math.prod(shape)
    if size > MOST_UNITS:
        raise ArgumentError(
            f"leaf {path!r} has {size:,} numbers, which int32 cannot index: shard it over "
            "a second mesh axis, or split it into several leaves."
        )


def check_scatter(name: str, paths: Sequence[str], scatter: Sequence[int | None]) -> None:
    """Raises if a parameter is sharded over the mesh axis of the ranks itself.

    Args:
        name: The name of the public function.
        paths: The paths of the leaves.
        scatter: The dimension of each leaf that is sharded over this axis, or None.
    """
    for path, at in zip(paths, scatter, strict=False):
        if at is not None:
            raise ArgumentError(
                f"leaf {path!r} is sharded over the axis of the ranks in its dimension "
                f"{at}, and {name} sends what all ranks have whole: shard it over another "
                "mesh axis, as fsdp of (replica, fsdp), or take sparsejax.zen_sync()."
            )


def _divisor(size: int, most: int) -> int:
    """Returns the largest divisor of `size` up to `most`; 1 for an empty dimension."""
    return max((d for d in range(1, most + 1) if size and size % d == 0), default=1)
