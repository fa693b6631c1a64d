"""From a dense vector to the indices of what is in it."""

import jax

from pallas_kernels import backends, checks
from pallas_kernels.reference import bitmap as reference


def compact(
    x: jax.Array,
    capacity: int,
    *,
    threshold: jax.typing.ArrayLike | None = None,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Finds the non-zero elements of a vector, or those of at least a given magnitude.

    An element is not zero if any bit but the sign is set: denormals and NaN count, -0.0
    does not. With a threshold NaN does not count.

    Args:
        x: Floating [n].
        capacity: The largest number of indices.
        threshold: The least magnitude, a scalar, rounded to x's dtype. With None all
            non-zero elements count.
        backend: The backend: "auto", "reference", "pallas" or "triton"; see
            `sparsejax.use_kernels`.

    Returns:
        A pair of int32 [capacity], the indices in ascending order, n after the last; and
        the number of elements found, which may exceed the capacity.

    Example:
        >>> x = jnp.array([0.0, 2.0, 0.0, 1.0])
        >>> indices, count = pallas_kernels.compact(x, capacity=3)
        >>> indices.tolist(), int(count)
        ([1, 3, 4], 2)

    See Also:
        `pallas_kernels.threshold_hash`: at most one element for each slot of a hash,
        without a prefix sum.
    """
    checks.floats("x", x)
    checks.positive("capacity", capacity)
    kernels = backends.kernels(
        reference.compact, pallas="bitmap", triton="bitmap", capacity=capacity
    )
    return backends.run_on_chosen("compact", backend, kernels, threshold, x)
