"""From a dense vector to the indices of what is in it."""

import jax

from pallas_kernels import backends, checks
from pallas_kernels.reference import indices as reference


def compact(
    x: jax.Array,
    capacity: int,
    *,
    threshold: jax.typing.ArrayLike | None = None,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Finds the non-zero elements of a vector, or those of at least a magnitude.

    Non-zero is what has any bit set but the sign: denormals and NaN count, -0.0 does not.
    A NaN has no magnitude, so with a threshold it does not count.

    Args:
        x: Floating, of n elements.
        capacity: How many indices to return at most.
        threshold: The least magnitude, a scalar, rounded to x's dtype; None for all that is
            not zero.
        backend: See `backends`.

    Returns:
        int32 [capacity], the indices in ascending order, n where there are no more, and
        the number of elements found, which may exceed the capacity.

    Example:
        >>> x = jnp.array([0.0, 2.0, 0.0, 1.0])
        >>> indices, count = pallas_kernels.compact(x, capacity=3)
        >>> indices.tolist(), int(count)
        ([1, 3, 4], 2)
    """
    checks.floats("x", x)
    checks.positive("capacity", capacity)
    kernels = backends.kernels(
        reference.compact, pallas="bitmap", triton="bitmap", capacity=capacity
    )
    return backends.run_on_chosen("compact", backend, kernels, threshold, x)
