"""DRAGONN's selection: the indices of large elements, in slots of a hash."""

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
    """Selects elements of at least a given magnitude, at most one for each slot of a hash.

    Of the elements that hash to one slot, one is selected. Of l elements and m slots, the
    expected share that is selected is

        (m / l) (1 - exp(-l / m))

    which is 79% for m = 2 l. Another seed selects others.

    Args:
        x: Floating [n].
        threshold: The least magnitude. NaN is not selected.
        seed: uint32 [], one of `draw_seeds`, or one that depends on the step. With the same
            seed in all steps, the same elements would collide each time.
        slots: The number of slots.
        backend: The backend: "auto", "reference", "pallas" or "triton"; see
            `sparsejax.use_kernels`.

    Returns:
        int32 [slots], the indices; -1 where a slot is empty.

    Example:
        >>> x, seed = jnp.array([0.1, -3.0, 0.2, 0.0]), jnp.uint32(7)
        >>> slots = pallas_kernels.threshold_hash(x, 1.0, seed, slots=4)
        >>> [i for i in slots.tolist() if i >= 0]
        [1]

    References:
        Wang et al., DRAGONN: Distributed Randomized Approximate Gradients of Neural
        Networks, ICML 2022

    See Also:
        `pallas_kernels.compact`: all elements that are not zero.
    """
    checks.floats("x", x)
    checks.positive("slots", slots)
    files = {"pallas": "threshold_hash", "triton": "threshold_hash"}
    kernels = backends.kernels(reference.threshold_hash, **files, slots=slots)
    operands = (x, jnp.asarray(threshold, x.dtype), jnp.asarray(seed, jnp.uint32))
    return backends.run("threshold_hash", backend, kernels, x.size, *operands)
