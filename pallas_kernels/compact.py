"""From a dense vector to the indices of what is in it."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import backends, checks, reference
from pallas_kernels.pallas import bitmap


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
    """
    checks.floats("x", x)
    checks.positive("capacity", capacity)
    kernels = {
        name: functools.partial(kernel, capacity=capacity)
        for name, kernel in {
            "reference": reference.compact,
            "pallas": bitmap.compact,
            "triton": backends.in_triton("bitmap", "compact"),
        }.items()
    }
    if threshold is None:
        return backends.run("compact", backend, kernels, x.size, x)
    by_magnitude = {
        name: lambda x, level, kernel=kernel, **how: kernel(x, threshold=level, **how)
        for name, kernel in kernels.items()
    }
    level = jnp.asarray(threshold, x.dtype)
    return backends.run("compact", backend, by_magnitude, x.size, x, level)
