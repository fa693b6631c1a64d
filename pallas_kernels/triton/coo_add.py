"""A server's sum in Triton: an atomic addition for each number of each entry.

The order of additions to one unit is that of the threads, so its last bits may differ from
run to run. A scheme's replicas stay equal all the same: a sum is made in one place.
"""

import math

import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels.triton.launch import launch


_BLOCK = 1024


def coo_add(indices, values, first, *, size):
    """See `pallas_kernels.coo_add`."""
    width = math.prod(values.shape[1:])
    (total,) = launch(
        coo_add_kernel,
        triton.cdiv(values.size, _BLOCK),
        (indices, values.reshape(-1), first.reshape(1)),
        in_place=(jnp.zeros(size * width, values.dtype),),
        NUMBERS=values.size,
        WIDTH=width,
        SIZE=size,
        BLOCK=_BLOCK,
    )
    return total.reshape(size, *values.shape[1:])


@triton.jit
def coo_add_kernel(
    indices_ptr,
    values_ptr,
    first_ptr,
    _total,
    total_ptr,
    NUMBERS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program adds a run of numbers."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < NUMBERS
    index = tl.load(indices_ptr + lane // WIDTH, mask=inside, other=-1)
    value = tl.load(values_ptr + lane, mask=inside, other=0)
    at = index.to(tl.int64) - tl.load(first_ptr)
    meant = inside & (at >= 0) & (at < SIZE)
    tl.atomic_add(total_ptr + at * WIDTH + lane % WIDTH, value, mask=meant, sem="relaxed")
