"""Divides the non-zero elements of a vector among owners, in one read: Algorithm 1."""

import jax

from pallas_kernels import backends, checks
from pallas_kernels.operations.partition import check_memory
from pallas_kernels.reference import partitions as reference
from pallas_kernels.reference.partitions import HashMemory, Partitioned


def partition_dense(
    x: jax.Array,
    seeds: jax.typing.ArrayLike,
    memory: HashMemory,
    *,
    backend: str | None = None,
) -> Partitioned:
    """Distributes the non-zero elements of a vector over parts by a hash.

    It does what `compact` and `partition` do, in one read of x and without a list of
    indices.

    Args:
        x: Floating [n].
        seeds: As for `partition`.
        memory: As for `partition`.
        backend: The backend: "auto", "reference", "pallas" or "triton"; see
            `sparsejax.use_kernels`.

    Returns:
        A `Partitioned`, as from `partition`, except that `left` has a bit for each element,
        uint32 [max(1, ceil(n / 32))].

    Example:
        >>> x = jnp.zeros(100).at[jnp.array([3, 50, 99])].set(1.0)
        >>> seeds = pallas_kernels.draw_seeds(3)
        >>> memory = pallas_kernels.HashMemory(parts=2, slots=8, serial=4)
        >>> parts = pallas_kernels.partition_dense(x, seeds, memory)
        >>> sorted(i for i in parts.memory.ravel().tolist() if i >= 0)
        [3, 50, 99]

    References:
        Wang et al., Zen: Empowering Distributed Training with Sparsity-driven Data
        Synchronization, OSDI 2025, Algorithm 1

    See Also:
        `pallas_kernels.partition`: the same from a list of indices.
    """
    checks.floats("x", x)
    seeds, memory = check_memory(x.size, seeds, memory)
    kernels = backends.kernels(
        reference.partition_dense, triton="partition_dense", memory=memory
    )
    return backends.run("partition_dense", backend, kernels, x.size, x, seeds)
