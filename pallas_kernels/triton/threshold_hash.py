"""DRAGONN's hash write in Triton: one launch, one read of the gradient."""

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels import reference
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.words import place


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
        in_place=(jnp.full(slots, reference.EMPTY, jnp.int32),),
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
    """A program looks at a run of elements."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < SIZE
    x = tl.load(x_ptr + lane, mask=inside, other=0.0)
    large = inside & (tl.abs(x) >= tl.load(level_ptr))
    index = lane.to(tl.int32)
    tl.store(memory_ptr + place(index, tl.load(seed_ptr), SLOTS), index, mask=large)
