"""From a dense vector to its indices by owner, in one read: `compact` and Algorithm 1."""

import jax

from pallas_kernels import backends, checks
from pallas_kernels.reference import partitions as reference
from pallas_kernels.reference.partitions import HashMemory, Partitioned


def partition_dense(
    x: jax.Array,
    seeds: jax.typing.ArrayLike,
    memory: HashMemory,
    *,
    threshold: jax.typing.ArrayLike | None = None,
    backend: str | None = None,
) -> Partitioned:
    """Distributes the elements of a vector that count to parts, each to a place of its own.

    What `compact` and `partition` do together, without a list in between: x is read once,
    and there is no capacity that the elements have to fit but that of the parts.

    Args:
        x: Floating [n].
        seeds: As of `partition`.
        memory: As of `partition`.
        threshold: As of `compact`.
        backend: See `backends`.

    Returns:
        `Partitioned`, as of `partition`; but which elements found no place is marked by a
        bit each, uint32 [max(1, ceil(n / 32))].

    Example:
        >>> x = jnp.zeros(100).at[jnp.array([3, 50, 99])].set(1.0)
        >>> seeds = pallas_kernels.draw_seeds(3)
        >>> memory = pallas_kernels.HashMemory(parts=2, slots=8, serial=4)
        >>> parts = pallas_kernels.partition_dense(x, seeds, memory)
        >>> sorted(i for i in parts.memory.ravel().tolist() if i >= 0)
        [3, 50, 99]
    """
    checks.floats("x", x)
    seeds, memory = checks.memory(x.size, seeds, memory)
    kernels = backends.kernels(
        reference.partition_dense, triton="partition_dense", memory=memory
    )
    return backends.run_on_chosen("partition_dense", backend, kernels, threshold, x, seeds)
