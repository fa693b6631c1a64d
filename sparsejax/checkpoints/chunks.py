"""Chunks of an array on disk: who writes which, and how they are encoded.

A chunk is what one device has of an array. Where several have the same, each has a share of
it, so that processes share the work. Whoever writes a chunk reads it back, too.

Each chunk ends in the checksum that zstd has: 32 bits of the XXH64 of its numbers. It is
computed by the process that writes the chunk, and compared by each that reads it, on as
many hosts or on others. TensorStore's tables of where chunks lie have checksums already.
"""

import math
from types import EllipsisType
from typing import Any, NamedTuple

import jax
import numpy as np


# Of zarr 3. With them an array is written, and no array that has others is opened.
CODECS = (
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "zstd", "configuration": {"level": 1, "checksum": True}},
)

Index = tuple[slice, ...]


class Chunk(NamedTuple):
    """A chunk that this process writes.

    Attributes:
        where: Where it is in the array; () for all of it.
        shard: What this process has that holds it.
        part: Where it is in the shard.
    """

    where: Index
    shard: Any
    part: Index | EllipsisType

    def numbers(self) -> np.ndarray:
        """Its numbers, in memory of the host."""
        return np.asarray(self.shard)[self.part]


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of each chunk of an array."""
    if not isinstance(x, jax.Array):
        return x.shape
    shape, axis, copies = _shares(x)
    return tuple(n // copies if i == axis else n for i, n in enumerate(shape))


def own(x: Any) -> list[Chunk]:
    """The chunks of an array that this process writes, and reads back."""
    if not isinstance(x, jax.Array):  # of these, process 0's is written
        return [Chunk((), x, ...)] if jax.process_index() == 0 else []
    shape, axis, copies = _shares(x)
    chunks = []
    for shard in x.addressable_shards:
        if axis is None and shard.replica_id > 0:
            continue
        where, part = list(shard.index), [slice(None)] * len(shape)
        if axis is not None:
            size = shape[axis] // copies
            low, start = shard.replica_id * size, where[axis].start or 0
            part[axis] = slice(low, low + size)
            where[axis] = slice(start + low, start + low + size)
        chunks.append(Chunk(tuple(where), shard.data, tuple(part)))
    return chunks


def _shares(x):
    """The shape of a shard, the axis by which those that have it share it, and how many.

    No axis where none has a multiple of their number: then one has all of it.
    """
    shape = x.sharding.shard_shape(x.shape)
    copies = x.sharding.num_devices * math.prod(shape) // x.size
    axis = next((i for i, n in enumerate(shape) if n % copies == 0), None)
    return shape, axis, copies
