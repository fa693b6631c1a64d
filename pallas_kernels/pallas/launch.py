"""The one place that calls Pallas: what differs between its versions stays here.

Kernels see whole arrays and say themselves which part is theirs. Interpreted, a masked
lane of a store writes back what it read, so two lanes that mean one address undo each
other: masked lanes get addresses of their own, past the end (`spare`).
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.types import invarying


WARPS = 4  # of 32 threads, for a program


def triton_backend():
    """Pallas' module of GPU primitives; ImportError where JAX has none any more."""
    with warnings.catch_warnings():
        # Deprecated since JAX 0.11; `backends` says so to callers that ask for it by name.
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
    """Runs a kernel in as many programs.

    Args:
        kernel: From one reference an operand and one a result to None. Profilers call it by
            its name.
        programs: How many there are.
        operands: What it reads.
        results: The shapes and dtypes of what it writes.
        in_place: Which operand, by number, becomes which result.
        interpret: Runs it in XLA, wherever that is, and slowly.
        **sizes: What else it is called with.
    """
    # Inside shard_map Pallas asks for the types of results; `backends` casts them.
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
    """The number of this program."""
    return pl.program_id(0)


def lanes(block: int) -> jax.Array:
    """The numbers of this program's elements, int32 [block]."""
    return pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)


def load(ref, at, mask, other):
    """ref[at] where the mask says so."""
    return triton_backend().load(ref.at[at], mask=mask, other=other)


def store(ref, at, values, mask):
    """ref[at] = values where the mask says so."""
    triton_backend().store(ref.at[at], values, mask=mask)
