"""DRAGONN's selection: large elements write their index where they hash to."""

import jax
import jax.numpy as jnp

from pallas_kernels import backends, checks
from pallas_kernels.reference import partitions as reference


def threshold_hash(
    x: jax.Array,
    threshold: jax.typing.ArrayLike,
    seed: jax.typing.ArrayLike,
    *,
    slots: int,
    backend: str | None = None,
) -> jax.Array:
    """Selects elements of at least a magnitude, as many as find a slot.

    Of those that hash to one slot one stays. With l elements and m slots a share of
    (m / l) (1 - exp(-l / m)) stays, 79% for m = 2 l; with another seed, others.

    Args:
        x: Floating [n].
        threshold: The least magnitude; a NaN has none.
        seed: uint32, one of `draw_seeds` or of the step: with a seed for all steps the same
            elements would lose each time.
        slots: How many.
        backend: See `backends`.

    Returns:
        int32 [slots]: indices, -1 where there is none; element 0 is as good as any.

    Example:
        >>> x, seed = jnp.array([0.1, -3.0, 0.2, 0.0]), jnp.uint32(7)
        >>> slots = pallas_kernels.threshold_hash(x, 1.0, seed, slots=4)
        >>> [i for i in slots.tolist() if i >= 0]
        [1]
    """
    checks.floats("x", x)
    checks.positive("slots", slots)
    files = {"pallas": "threshold_hash", "triton": "threshold_hash"}
    kernels = backends.kernels(reference.threshold_hash, **files, slots=slots)
    operands = (x, jnp.asarray(threshold, x.dtype), jnp.asarray(seed, jnp.uint32))
    return backends.run("threshold_hash", backend, kernels, x.size, *operands)
