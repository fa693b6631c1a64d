"""Indices by their owner, with no hash memory: the striped hash on packed bits."""

import jax

from pallas_kernels import backends, checks
from pallas_kernels.errors import KernelArgumentError
from pallas_kernels.reference import partitions as reference
from pallas_kernels.reference.partitions import Partitioned


def partition_by_bits(
    x: jax.Array,
    *,
    parts: int,
    capacity: int,
    seed: int = 0,
    threshold: jax.typing.ArrayLike | None = None,
    backend: str | None = None,
) -> Partitioned:
    """Distributes the elements of a vector that count to parts, by the striped hash.

    What `compact` and `partition` do together, in one read of x: a bit for each element,
    the bits split by part as words, then each part's searched by rank. No index collides
    with another, nothing depends on the order of threads, and each part is sorted by slot.

    Args:
        x: Floating [n].
        parts: How many parts.
        capacity: Room for indices in each.
        seed: Which striped hash; all ranks need the same.
        threshold: As of `compact`.
        backend: See `backends`.

    Returns:
        `Partitioned`: memory [parts, capacity], how many elements each part has, and which
        elements found no room.

    Example:
        >>> x = jnp.zeros(100).at[jnp.array([3, 50, 99])].set(1.0)
        >>> parts = pallas_kernels.partition_by_bits(x, parts=2, capacity=3)
        >>> sorted(i for i in parts.memory.ravel().tolist() if i >= 0)
        [3, 50, 99]
    """
    checks.floats("x", x)
    checks.positive("parts", parts)
    checks.positive("capacity", capacity)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise KernelArgumentError(f"seed must be an int, got {seed!r}.")
    if parts > max(x.shape[0], 1):
        raise KernelArgumentError(
            f"x has {x.shape[0]} elements for {parts} parts; use as many parts as ranks, "
            "and send short vectors densely."
        )
    kernels = backends.kernels(
        reference.partition_by_bits, parts=parts, capacity=capacity, seed=seed
    )
    return backends.run_on_chosen("partition_by_bits", backend, kernels, threshold, x)
