"""Chunks of an array on disk: which process writes which, and how they are encoded.

A chunk is the shard of one device. If several devices have the same shard, it is divided
into one chunk for each, so that processes share the work. The process that writes a chunk
also reads it back.

Each chunk ends with the checksum of a zstd frame: 32 bits of the XXH64 of its bytes. The
process that writes the chunk computes it, and each process that reads the chunk compares
it, on any number of hosts. TensorStore's tables of where chunks are have checksums, too.
"""

import math
from types import EllipsisType
from typing import Any, NamedTuple

import jax
import numpy as np


# Codecs of zarr 3, with which each array is written. An array with others is not opened.
CODECS = (
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "zstd", "configuration": {"level": 1, "checksum": True}},
)

Index = tuple[slice, ...]


class Chunk(NamedTuple):
    """A chunk that this process writes.

    Attributes:
        where: Its slices in the array; () for the whole array.
        shard: The array of this process that contains it.
        part: Its slices in `shard`.
    """

    where: Index
    shard: Any
    part: Index | EllipsisType

    def numbers(self) -> np.ndarray:
        """Returns its elements, in host memory."""
        return np.asarray(self.shard)[self.part]


def shape_of(x: Any) -> tuple[int, ...]:
    """Returns the shape of each chunk of an array."""
    if not isinstance(x, jax.Array):
        return x.shape
    shape, axis, copies = _shares(x)
    return tuple(n // copies if i == axis else n for i, n in enumerate(shape))


def own(x: Any) -> list[Chunk]:
    """Returns the chunks of an array that this process writes, and reads back."""
    if not isinstance(x, jax.Array):  # no global array: process 0 alone writes its own
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
    """Returns how a shard is divided among the devices that have a copy of it.

    Returns:
        The shape of a shard; the axis along which it is divided, or None if the number of
        copies divides the length of no axis, so that one device writes all of it; and the
        number of copies.
    """
    shape = x.sharding.shard_shape(x.shape)
    copies = x.sharding.num_devices * math.prod(shape) // x.size
    axis = next((i for i, n in enumerate(shape) if n % copies == 0), None)
    return shape, axis, copies
