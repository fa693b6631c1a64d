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
    """Distributes the non-zero elements of a vector over parts by the striped hash.

    It does what `compact` and `partition` do, in one read of x. Each element becomes a bit,
    the bits are divided among parts as words, and each part's indices are found by rank. No
    indices collide, the result does not depend on the order of threads, and each part is
    sorted by slot.

    Args:
        x: Floating [n].
        parts: The number of parts.
        capacity: The largest number of indices of a part.
        seed: Which striped hash; the same on all ranks.
        threshold: As for `compact`.
        backend: The backend: "auto", "reference", "pallas" or "triton"; see
            `sparsejax.use_kernels`.

    Returns:
        A `Partitioned`. Its memory is [parts, capacity], its counts are the number of
        elements of each part, and `left` are the elements that found no room.

    Example:
        >>> x = jnp.zeros(100).at[jnp.array([3, 50, 99])].set(1.0)
        >>> parts = pallas_kernels.partition_by_bits(x, parts=2, capacity=3)
        >>> sorted(i for i in parts.memory.ravel().tolist() if i >= 0)
        [3, 50, 99]

    See Also:
        `pallas_kernels.partition`: from a list of indices, by Zen's Algorithm 1.
        `pallas_kernels.partition_dense`: from a dense vector, by Zen's Algorithm 1.
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
