"""Calls Pallas, and contains all differences between its versions.

Kernels are given whole arrays and compute which part a program processes. In the
interpreter a masked lane of a store writes back the value that it has read, so two lanes
with one address could undo each other's writes. Masked lanes therefore have addresses of
their own, past the end (`spare`).
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.types import invarying


WARPS = 4  # warps of a program, of 32 threads each


def triton_backend():
    """Returns Pallas' module of GPU primitives; raises ImportError if JAX has none."""
    with warnings.catch_warnings():
        # Deprecated since JAX 0.11, as the table in `backends` says.
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas import triton

    return triton


def launch(
    kernel: Callable,
    programs: int,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    in_place: dict[int, int] | None = None,
    interpret: bool = False,
    **sizes: Any,
) -> list[jax.Array]:
    """Runs a kernel in a number of programs.

    Args:
        kernel: A function of one reference for each operand and each result. Its name is
            shown in profiles.
        programs: The number of programs.
        operands: The arrays that it reads.
        results: The shapes and dtypes of the arrays that it writes.
        in_place: A map from the number of an operand to that of the result that reuses its
            memory.
        interpret: Whether to run it in XLA, on any platform and slowly.
        **sizes: Further keyword arguments of the kernel.
    """
    # Inside shard_map Pallas requires the VMA types of results; `backends` casts these.
    typed = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=invarying(operands[0]))
        for x in results
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return pl.pallas_call(
            functools.partial(kernel, **sizes),
            name=kernel.__name__,
            grid=(programs,),
            out_shape=typed,
            input_output_aliases=in_place or {},
            compiler_params=triton_backend().CompilerParams(num_warps=WARPS),
            interpret=interpret,
        )(*operands)


def program() -> jax.Array:
    """Returns the number of this program."""
    return pl.program_id(0)


def lanes(block: int) -> jax.Array:
    """Returns the numbers of this program's elements, int32 [block]."""
    return pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)


def load(ref, at, mask, other):
    """Returns ref[at] where the mask is set, and `other` elsewhere."""
    return triton_backend().load(ref.at[at], mask=mask, other=other)


def store(ref, at, values, mask):
    """Sets ref[at] to values where the mask is set."""
    triton_backend().store(ref.at[at], values, mask=mask)
