"""How a leaf is cut into blocks, and how many entries of each are kept.

A matrix is cut into blocks of height x width, a vector into runs of width. The leading axes
of an array of more than two are a stack of matrices. Each side of a block is the largest
divisor of its dimension that is at most sqrt(chunk), so nothing is padded: with a chunk of
4096 most blocks are 64 x 64. Of a block of `length` numbers round(k length / chunk) are
kept, at least one. So the number of entries of a leaf follows from its shape alone.

Blocks are numbered by rows of blocks, and the numbers of a block by its rows. From blocks
of one shape, of whatever leaves, entries are selected together.
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


_LARGE = 1 << 18  # numbers; smaller leaves are copied


@dataclasses.dataclass(frozen=True)
class BlockCut:
    """How one leaf is cut.

    Attributes:
        shape: Of the leaf.
        height: Rows of a block; 1 for a vector.
        width: Columns of a block.
        kept: How many entries of a block are sent.
    """

    shape: tuple[int, ...]
    height: int
    width: int
    kept: int

    @classmethod
    def of(cls, shape: Sequence[int], k: int, chunk: int) -> "BlockCut":
        """The cut of a leaf of this shape."""
        side = math.isqrt(chunk)
        rows = shape[-2] if len(shape) > 1 else 1
        columns = shape[-1] if shape else 1
        height, width = _divisor(rows, side), _divisor(columns, side)
        kept = max(1, round(height * width * k / chunk))
        return cls(tuple(shape), height, width, kept)

    @property
    def length(self) -> int:
        """Numbers in a block."""
        return self.height * self.width

    @property
    def size(self) -> int:
        """Numbers in the leaf."""
        return math.prod(self.shape)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return self.size // self.length

    @property
    def entries(self) -> int:
        """How many entries of the leaf are sent."""
        return self.blocks * self.kept

    @property
    def grid(self) -> tuple[int, int, int, int, int]:
        """Matrices, blocks down, height, blocks across, width: the leaf, of that shape."""
        *stack, rows, columns = (1, 1, *self.shape) if self.shape else (1, 1)
        down, across = rows // self.height, columns // self.width
        return math.prod(stack), down, self.height, across, self.width

    def split(self, x: jax.Array) -> jax.Array:
        """The leaf as its blocks, [blocks, length]."""
        return x.reshape(self.grid).swapaxes(2, 3).reshape(-1, self.length)

    def join(self, blocks: jax.Array) -> jax.Array:
        """Inverse of `split`."""
        count, down, height, across, width = self.grid
        x = blocks.reshape(count, down, across, height, width)
        return x.swapaxes(2, 3).reshape(self.shape)

    def indices(self, places: jax.Array) -> jax.Array:
        """The indices in the flat leaf of places in its blocks, int32 [blocks, kept]."""
        return selection.indices_in(self.grid, places)


@dataclasses.dataclass(frozen=True)
class Together:
    """Leaves whose blocks are of one shape, and selected from together.

    Attributes:
        leaves: Their numbers.
        cuts: How they are cut.
    """

    leaves: tuple[int, ...]
    cuts: tuple[BlockCut, ...]

    @property
    def length(self) -> int:
        """Numbers in a block."""
        return self.cuts[0].length

    @property
    def kept(self) -> int:
        """Entries of a block that are sent."""
        return self.cuts[0].kept

    @property
    def blocks(self) -> int:
        """Blocks of all these leaves."""
        return sum(cut.blocks for cut in self.cuts)

    @property
    def entries(self) -> int:
        """Entries of all these leaves."""
        return self.blocks * self.kept

    @property
    def members(self) -> list[tuple[int, BlockCut]]:
        """Each leaf's number, and how it is cut."""
        return list(zip(self.leaves, self.cuts, strict=True))

    def largest(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """The places of the entries that are sent, [blocks, kept], of a list of leaves.

        Large leaves are read where they are. Small ones are laid one after another, so that
        a program does not grow with their number.
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
        """The parts of each leaf of an array that has a row for each block."""
        parts, start = [], 0
        for cut in self.cuts:
            parts.append(lax.slice_in_dim(x, start, start + cut.blocks))
            start += cut.blocks
        return parts


def _joined(rows):
    """Arrays of rows as one, in a list; none of none."""
    return [jnp.concatenate(rows)] if rows else []


def together(cuts: Sequence[BlockCut]) -> tuple[Together, ...]:
    """The leaves by the shape of their blocks; those that are empty are left out.

    Leaves of one shape of blocks are several groups where int32 cannot index all of them.
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
    """Raises where the numbers of a leaf are too many for int32."""
    size = math.prod(shape)
    if size > MOST_UNITS:
        raise ArgumentError(
            f"leaf {path!r} has {size:,} numbers, which int32 cannot index: shard it over "
            "a second mesh axis, or split it into several leaves."
        )


def check_scatter(name: str, paths: Sequence[str], scatter: Sequence[int | None]) -> None:
    """Raises where a parameter is sharded over the axis of the ranks itself.

    Args:
        name: The name of the public function.
        paths: The leaves.
        scatter: The dimension of each that is sharded so, or None.
    """
    for path, at in zip(paths, scatter, strict=False):
        if at is not None:
            raise ArgumentError(
                f"leaf {path!r} is sharded over the axis of the ranks in its dimension "
                f"{at}, and {name} sends what all ranks have whole: shard it over another "
                "mesh axis, as fsdp of (replica, fsdp), or take sparsejax.zen_sync()."
            )


def _divisor(size: int, most: int) -> int:
    """The largest divisor that is at most `most`; 1 for an empty dimension."""
    return max((d for d in range(1, most + 1) if size and size % d == 0), default=1)
