"""Indices by their owner: Zen's Algorithm 1."""

import jax
import jax.numpy as jnp

from pallas_kernels import backends, checks
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
    """Distributes indices to parts by a hash, each to a place of its own.

    A first hash gives the part. A second one gives a slot of the part's parallel memory; if
    another index holds that, a third, and so on. An index without a slot goes to the part's
    serial memory, which is filled from the front, as far as it goes. With `hashes=0` and
    `slots=0` all go there: an append, the rival of hashing.

    Which of several indices gets a slot depends on the backend, and on a GPU on the run;
    that each gets one place, in its part, in a slot that one of its hashes names or in the
    serial memory, does not.

    Args:
        indices: int32 [capacity], each once; negative ones are left out.
        count: How many of them count, from the front.
        seeds: uint32, from `draw_seeds`: one for the part and one a slot; the same on all
            ranks.
        memory: How much memory parts have, and how many slots to try.
        backend: See `backends`.

    Returns:
        `Partitioned`: memory [parts, slots + serial] with the serial memory last, how
        many went to each serial memory, exact where that is full, and which of the indices
        found no place. Nothing is lost: what is left can go in a further round.

    Example:
        >>> seeds = pallas_kernels.draw_seeds(3)  # one for the part, two for slots
        >>> memory = pallas_kernels.HashMemory(parts=2, slots=16, serial=8)
        >>> parts = pallas_kernels.partition(jnp.arange(8), 8, seeds, memory)
        >>> sorted(i for i in parts.memory.ravel().tolist() if i >= 0)
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    checks.integers("indices", indices)
    seeds, memory = checks.memory(indices.size, seeds, memory)
    kernels = backends.kernels(
        reference.partition, pallas="partition", triton="partition", memory=memory
    )
    operands = (indices, jnp.asarray(count, jnp.int32), seeds)
    return backends.run("partition", backend, kernels, indices.size, *operands)
