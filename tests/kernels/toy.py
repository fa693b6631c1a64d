"""A kernel of Triton with several results, of which it leaves half as they were."""

import jax
import triton
import triton.language as tl

from pallas_kernels.triton.launch import launch


def by_parity(x, *, zeroed):
    """The even and the odd numbers of x, each at its own place."""
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    sizes = {"SIZE": x.size, "BLOCK": 64}
    programs = triton.cdiv(x.size, 64)
    return launch(
        by_parity_kernel, programs, (x,), results=[like, like], zeroed=zeroed, **sizes
    )


@triton.jit
def by_parity_kernel(x_ptr, even_ptr, odd_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < SIZE, other=0)
    tl.store(even_ptr + at, x, mask=(at < SIZE) & (x % 2 == 0))
    tl.store(odd_ptr + at, x, mask=(at < SIZE) & (x % 2 != 0))
