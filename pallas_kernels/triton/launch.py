"""The one place that calls jax-triton: what differs between its versions stays here.

A kernel's arguments are the operands, then what it works on in place, then its results,
then sizes as Python numbers, compiled in. What is in place comes twice, as operand and as
result: two pointers to the same memory.
"""

from collections.abc import Sequence

import jax

from pallas_kernels import backends


def launch(
    kernel,
    programs: int,
    operands: Sequence[jax.Array],
    *,
    in_place: Sequence[jax.Array] = (),
    results: Sequence[jax.ShapeDtypeStruct] = (),
    warps: int = 4,
    zeroed: bool = False,
    **sizes: int,
) -> list[jax.Array]:
    """Runs a kernel in as many programs; what it left in place, then its other results.

    Args:
        kernel: Of `triton.jit`.
        programs: How many there are.
        operands: What it reads.
        in_place: What it reads and writes.
        results: The shapes and dtypes of what it only writes.
        warps: Of 32 threads, for a program.
        zeroed: Whether results are zero before it runs; else they may hold anything.
        **sizes: Python numbers that the kernel was written for.
    """
    import jax_triton  # pyright: ignore[reportMissingImports]  # it needs a GPU's jaxlib

    first = len(operands)
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in in_place]
    return list(
        jax_triton.triton_call(
            *operands,
            *in_place,
            kernel=kernel,
            out_shape=[*like, *results],
            grid=(programs,),
            num_warps=warps,
            compute_capability=backends.compute_capability(),
            zeroed_outputs=tuple(range(len(like), len(like) + len(results)))
            if zeroed
            else (),
            input_output_aliases={first + i: i for i in range(len(in_place))},
            **sizes,
        )
    )
