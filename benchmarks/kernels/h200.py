"""A described H200, and the operations that `benchmarks.kernels.aot` compiles for it."""

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

import pallas_kernels as kernels
from pallas_kernels import striping
from pallas_kernels.reference import messages as in_reference
from pallas_kernels.reference.layout import SINGLE


SIZE = 1 << 24
CAPACITY = SIZE // 50
PARTS = 16
# Bytes that a program may have without asking for more.
SHARED = 49152
# XLA's description of a device, with the figures of an H200 SXM.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  driver_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def devices(count: int):
    """Descriptions of H200s in one host, which can be compiled for and nothing else."""
    # Slices, hosts of each, devices of each host.
    described = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", target_config=H200, topology=f"1x1x{count}"
    )
    return np.array(described.devices)


def mesh(count: int) -> Mesh:
    return Mesh(devices(count), ("data",), axis_types=(AxisType.Auto,))


def operations() -> dict:
    """By name: the function of a backend, its arguments, and bytes of temporaries."""
    floats = ((SIZE,), jnp.float32)
    words = ((SIZE // 32,), jnp.uint32)
    indices = ((CAPACITY,), jnp.int32)
    seeds = ((4,), jnp.uint32)
    scalar = ((), jnp.int32)
    slots = 2 * CAPACITY // PARTS
    memory = kernels.HashMemory(PARTS, slots, slots // 10)
    of = functools.partial
    return {
        "compact": (of(kernels.compact, capacity=CAPACITY), [floats], SIZE),
        "bitmap_encode": (kernels.bitmap_encode, [floats], SIZE // 4),
        "bitmap_decode": (of(kernels.bitmap_decode, capacity=CAPACITY), [words], SIZE),
        "partition": (
            of(kernels.partition, memory=memory),
            [indices, scalar, seeds],
            4 * SIZE,
        ),
        "partition, append": (
            lambda indices, count, seeds, backend: kernels.partition(
                indices,
                count,
                seeds,
                kernels.HashMemory(PARTS, slots=0, serial=slots, hashes=0),
                backend=backend,
            ),
            [indices, scalar, seeds],
            4 * SIZE,
        ),
        "partition_dense": (
            of(kernels.partition_dense, memory=memory),
            [floats, seeds],
            8 * SIZE,
        ),
        "threshold_hash": (
            lambda x, backend: kernels.threshold_hash(
                x, 0.1, 7, slots=CAPACITY, backend=backend
            ),
            [floats],
            SIZE,
        ),
        **messages(),
        **bitmap_messages(),
    }


ROOM = 1 << 16  # entries of a part in the longest message
PLACES = SINGLE + 4  # numbers of a row of places for a code of one byte, or two

MESSAGES = (
    ("numbers", (), jnp.float32),
    ("rows", (512,), jnp.float32),
    ("rows of three halves", (3,), jnp.bfloat16),
)


def messages() -> dict:
    """Messages of numbers and of rows, from a striped hash and back; see `operations`.

    One program for all codes: which of them a message has is data.
    """
    calls = {}
    for name, shape, dtype in MESSAGES:
        size = SIZE if not shape else SIZE // 16
        units = striping.Striping(size, PARTS, 0)
        width = striping.width(size, PARTS)
        half = jnp.dtype(dtype).itemsize == 2
        words = 1 + width // 32 + ROOM + ROOM * math.prod(shape) // (1 + half)
        spec = kernels.MessageSpec(ROOM, words, width // 32, planes=2, dtype=dtype)
        mapped = dataclasses.replace(spec, units=units)
        row = [((PLACES + 2,), jnp.int32)]
        array = [((size, *shape), jnp.float32)]
        sets = [((PARTS, width // 32), jnp.uint32), ((PARTS,), jnp.int32)]
        calls[f"pack_message, {name}"] = (
            _of_bits(mapped),
            sets + array + row,
            8 * words * PARTS,
        )
        received = [((PARTS, words), jnp.uint32)]
        owner = [((width, *shape), jnp.float32)]
        # Beside the sums, which are copied where they are given, and not made.
        calls[f"unpack_message, {name}, added"] = (
            _of_whole(spec, kernels.Unpacking()),
            owner + received + row,
            4 * width * math.prod(shape) + 8 * words * PARTS,
        )
        calls[f"unpack_message, {name}, set"] = (
            _of_whole(mapped, kernels.Unpacking(replaces=True)),
            array + received + row,
            4 * size * math.prod(shape) + 8 * words * PARTS,
        )
    return calls


def _of_bits(spec):
    def pack(slots, counts, array, numbers, **how):
        return kernels.pack_message(
            kernels.SlotSets(slots, counts), array, numbers, spec, **how
        )

    return pack


def _of_whole(spec, does):
    def unpack(into, message, numbers, **how):
        received = kernels.Received(message)
        return kernels.unpack_message(into, received, numbers, spec, does, **how)

    return unpack


def bitmap_messages() -> dict:
    """Numbers whose slots are bitmaps: what is looked up, and the array in its order."""
    units = striping.Striping(SIZE, PARTS, 0)
    longest = striping.width(SIZE, PARTS) // 32
    words = 1 + longest + ROOM
    spec = kernels.MessageSpec(ROOM, words, longest, 2, units=units, bitmaps=True)
    received, row = ((PARTS, words), jnp.uint32), ((PLACES + 2,), jnp.int32)
    ends, values = ((longest, PARTS, 2), jnp.int32), ((PARTS, ROOM // 2), jnp.uint32)

    def unpack(into, message, numbers, *pieces, first=0, **how):
        received, does = (
            kernels.Received(message, *pieces),
            kernels.Unpacking(True, first=first),
        )
        return kernels.unpack_message(into, received, numbers, spec, does, **how)

    array, moved = ((SIZE,), jnp.float32), 4 * SIZE + 8 * longest * PARTS
    whole = [array, received, row, ends]
    return {
        "index_message, bitmaps": (
            functools.partial(kernels.index_message, spec=spec),
            [received, row],
            12 * longest * PARTS,
        ),
        "unpack_message, bitmaps": (unpack, whole, moved + 4 * ROOM * PARTS),
        "unpack_message, a piece of bitmaps": (
            functools.partial(unpack, first=ROOM // 2),
            [*whole, values],
            moved + 2 * ROOM * PARTS,
        ),
    }


SECTOR = 32  # bytes that come with a number from a place of its own


def shares(filled: float) -> dict[str, float]:
    """Bytes that messages must move over bytes that their kernels do move, by the name.

    Of messages that are filled so far, from sets and into sums that are spread at random:
    what must be moved are the sets, the values where they are, in sectors, and the message;
    beside these kernels move the counts of rows of words, and what is cleared first.

    Args:
        filled: The share of the longest message that there is to send.
    """
    found = {}
    for name, shape, dtype in MESSAGES:
        size = SIZE if not shape else SIZE // 16
        width = striping.width(size, PARTS)
        entries = filled * ROOM
        travels = jnp.dtype(dtype).itemsize * math.prod(shape)
        lies = max(SECTOR, 4 * math.prod(shape))
        string = (ROOM + width / 256) / 8
        # Rows of words, one a word as long as they are few; read and written once.
        ends = 8 * min(width // 32, in_reference.MOST_ROWS)
        message = string + entries * (1 + travels)
        must = width / 8 + entries * lies + message
        # The sets are read where they are counted, too.
        does = must + width / 8 + ends + string + entries
        found[f"pack_message, {name}"] = must / does
        for how, times in (("added", 2), ("set", 1)):
            must = message + times * entries * lies
            does = must + string + 8 * min(string / 4, in_reference.MOST_ROWS)
            found[f"unpack_message, {name}, {how}"] = must / does
    return found


HAS_PALLAS = {
    "compact",
    "bitmap_encode",
    "bitmap_decode",
    "partition",
    "threshold_hash",
}
HAS = {"reference": set(operations()), "pallas": HAS_PALLAS}
HAS["triton"] = HAS_PALLAS | {
    *messages(),
    *bitmap_messages(),
    "partition, append",
    "partition_dense",
}
