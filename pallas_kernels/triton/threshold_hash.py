"""DRAGONN's hash write in Triton: one launch, one read of the gradient."""

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels.reference.bitmap import EMPTY
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.words import count_bits, elements, lowest, packed, place


_BLOCK = 4096


def threshold_hash(x, threshold, seed, slots):
    """See `pallas_kernels.threshold_hash`."""
    (memory,) = launch(
        threshold_hash_kernel,
        triton.cdiv(x.size, _BLOCK),
        (
            x,
            jnp.asarray(threshold, x.dtype).reshape(1),
            jax.lax.bitcast_convert_type(seed, jnp.int32).reshape(1),
        ),
        in_place=(jnp.full(slots, EMPTY, jnp.int32),),
        SIZE=x.size,
        SLOTS=slots,
        BLOCK=_BLOCK,
    )
    return memory


@triton.jit
def threshold_hash_kernel(
    x_ptr,
    level_ptr,
    seed_ptr,
    _memory,
    memory_ptr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Hashes the large of consecutive elements in each program, by a thread for a word."""
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK // 32) * 32
    lane, inside = elements(word, SIZE)
    x = tl.load(x_ptr + lane, mask=inside, other=0)
    words = packed(inside & (tl.abs(x) >= tl.load(level_ptr)))
    seed = tl.load(seed_ptr)
    rounds = tl.max(count_bits(words), 0)
    while rounds > 0:
        index = word + lowest(words)
        tl.store(memory_ptr + place(index, seed, SLOTS), index, mask=words != 0)
        words = words & (words - 1)
        rounds -= 1
