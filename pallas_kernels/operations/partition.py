"""Divides indices among owners: Zen's Algorithm 1."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import backends, checks
from pallas_kernels.errors import KernelArgumentError
from pallas_kernels.reference import partitions as reference
from pallas_kernels.reference.partitions import HashMemory, Partitioned


def partition(
    indices: jax.Array,
    count: jax.typing.ArrayLike,
    seeds: jax.typing.ArrayLike,
    memory: HashMemory,
    *,
    backend: str | None = None,
) -> Partitioned:
    """Distributes indices over parts by a hash, each to a slot of its own.

    A first hash gives the part. A second one gives a slot of the part's parallel memory. If
    another index has that slot, a third hash gives another slot, and so on. An index that
    finds no slot is appended to the part's serial memory, while there is room. With
    `hashes=0` and `slots=0` all indices are appended.

    Which of several indices gets a slot depends on the backend, and on a GPU on the run. In
    all cases an index gets at most one slot of its part, which is that of one of its hashes
    or in the serial memory.

    Args:
        indices: int32 [capacity], distinct. Negative ones are left out.
        count: The number of indices that count, from the front.
        seeds: uint32, from `draw_seeds`: one for the part, and one for each slot that is
            tried. The same on all ranks.
        memory: The sizes of the memory of a part.
        backend: The backend: "auto", "reference", "pallas" or "triton"; see
            `sparsejax.use_kernels`.

    Returns:
        A `Partitioned`. Its memory is [parts, slots + serial], the serial memory last; its
        counts are the numbers of indices for each serial memory; and `left` are the indices
        that found no slot, which can be partitioned in another round.

    Example:
        >>> seeds = pallas_kernels.draw_seeds(3)  # one for the part, two for slots
        >>> memory = pallas_kernels.HashMemory(parts=2, slots=16, serial=8)
        >>> parts = pallas_kernels.partition(jnp.arange(8), 8, seeds, memory)
        >>> sorted(i for i in parts.memory.ravel().tolist() if i >= 0)
        [0, 1, 2, 3, 4, 5, 6, 7]

    References:
        Wang et al., Zen: Empowering Distributed Training with Sparsity-driven Data
        Synchronization, OSDI 2025, Algorithm 1

    See Also:
        `pallas_kernels.partition_dense`: the same from a dense vector.
    """
    checks.integers("indices", indices)
    seeds, memory = check_memory(indices.size, seeds, memory)
    kernels = backends.kernels(
        reference.partition, pallas="partition", triton="partition", memory=memory
    )
    operands = (indices, jnp.asarray(count, jnp.int32), seeds)
    return backends.run("partition", backend, kernels, indices.size, *operands)


def check_memory(
    size: int, seeds: jax.typing.ArrayLike, memory: HashMemory
) -> tuple[jax.Array, HashMemory]:
    """Raises unless the sizes of a memory, and the seeds, suit a number of indices.

    Returns:
        The seeds; and the memory, with its number of hashes.
    """
    parts, slots, serial, hashes = dataclasses.astuple(memory)
    checks.positive("parts", parts)
    checks.positive("serial", serial, " Without it what collides would have no place.")
    seeds = jnp.asarray(seeds)
    if seeds.ndim != 1 or seeds.dtype != jnp.uint32 or seeds.size < 1:
        raise KernelArgumentError(
            "seeds must be uint32, one for the part and one for each slot, got "
            f"{seeds.dtype}{list(seeds.shape)}; see draw_seeds."
        )
    hashes = seeds.size - 1 if hashes is None else hashes
    if hashes != 0:
        why = " Its r1 is how many indices a part can take at once."
        checks.positive("hashes", hashes)
        checks.positive("slots", slots, why)
    elif slots != 0:
        raise KernelArgumentError(
            f"without hashes nothing gets to the {slots!r} slots: use slots=0, and serial "
            "for everything; or draw_seeds(4) for three hashes."
        )
    if hashes >= seeds.size:
        raise KernelArgumentError(
            f"{hashes} hashes need {hashes + 1} seeds, one more for the part, got "
            f"{seeds.size}: draw_seeds({hashes + 1})."
        )
    if parts > size:
        raise KernelArgumentError(
            f"{size} indices cannot fill {parts} parts; use as many parts as ranks, and "
            "send few indices whole."
        )
    checks.places("the parts together", parts * (slots + serial))
    return seeds, dataclasses.replace(memory, hashes=hashes)
