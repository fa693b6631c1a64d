"""A server's sum of the entries that it received."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import backends, checks, reference


def coo_add(
    indices: jax.Array,
    values: jax.Array,
    size: int,
    *,
    first: jax.typing.ArrayLike = 0,
    backend: str | None = None,
) -> jax.Array:
    """Adds up entries of a range of units.

    Args:
        indices: int32 [k]; entries outside the range are left out, so -1 marks none.
        values: [k] or [k, ...], a row an entry.
        size: How many units the range has.
        first: Where it begins.
        backend: See `backends`.

    Returns:
        [size, ...], the sum of the entries of each unit.
    """
    checks.integers("indices", indices)
    checks.positive("size", size)
    checks.slots("the range", size)
    checks.entries(values, indices, "indices")
    kernels = {
        "reference": functools.partial(reference.coo_add, size=size),
        "triton": functools.partial(_in_triton, size=size),
    }
    operands = (indices, values, jnp.asarray(first, jnp.int32))
    return backends.run("coo_add", backend, kernels, indices.size, *operands)


def _in_triton(indices, values, first, *, size):
    from pallas_kernels.triton import coo_add

    return coo_add.coo_add(indices, values, first, size=size)
