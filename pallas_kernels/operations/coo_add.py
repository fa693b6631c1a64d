"""A server's sum of the entries that it received."""

import jax
import jax.numpy as jnp

from pallas_kernels import backends, checks
from pallas_kernels.reference import indices as reference


def coo_add(
    indices: jax.Array,
    values: jax.Array,
    size: int,
    *,
    first: jax.typing.ArrayLike = 0,
    backend: str | None = None,
) -> jax.Array:
    """Sums the entries (index, value) of each unit of a range.

    Args:
        indices: int32 [k]. Entries outside the range are left out, so -1 marks none.
        values: [k] or [k, ...], a value or a row for each entry.
        size: The number of units of the range.
        first: The first unit of the range.
        backend: The backend: "auto", "reference", "pallas" or "triton"; see
            `sparsejax.use_kernels`.

    Returns:
        [size, ...], the sum of the entries of each unit.

    Example:
        >>> indices, values = jnp.array([1, 3, 1, -1]), jnp.array([1.0, 2.0, 3.0, 9.0])
        >>> pallas_kernels.coo_add(indices, values, size=4).tolist()
        [0.0, 4.0, 0.0, 2.0]
    """
    checks.integers("indices", indices)
    checks.positive("size", size)
    checks.places("the range", size)
    checks.entries(values, indices, "indices")
    kernels = backends.kernels(reference.coo_add, size=size)
    operands = (indices, values, jnp.asarray(first, jnp.int32))
    return backends.run("coo_add", backend, kernels, indices.size, *operands)
