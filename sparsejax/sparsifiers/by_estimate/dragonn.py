"""DRAGONN: writes selected indices to the slots of their hashes, without a prefix sum.

The threshold is from a sample, as in DGC. The index of each element that reaches it is
written to the slot of a hash of the index, all at once and in no order. If two indices have
the same slot, one of them is overwritten, and its element stays in the residual. With l
elements and m slots the expected share that is sent is (m / l) (1 - exp(-l / m)), which is
88% with the usual four slots for each element. A further table, with another hash, takes
elements that were overwritten in earlier tables.

The hash changes in every step, so no element is overwritten in every step. Empty slots are
-1, so index 0 needs no special treatment.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import hashing
from pallas_kernels.operations.threshold_hash import threshold_hash
from sparsejax import arguments
from sparsejax.sparsifiers import base
from sparsejax.sparsifiers.by_estimate.dgc import BySample
from sparsejax.units.selection import magnitudes


@dataclasses.dataclass(frozen=True)
class Dragonn(BySample):
    """Selects the elements that reach a sampled threshold and a free slot of a hash table.

    Each element that reaches the threshold writes its index into the slot that a hash of
    the index names. If two have the same slot, one is overwritten and stays in the
    residual. Of l elements and m slots, the expected share that is sent is

        (m / l) (1 - exp(-l / m))

    which is 88% with four slots an element. The hash changes at every step.

    Attributes:
        density: The share of elements to send, k of the size: a number, a `Warmup` or a
            `Schedule`.
        slots: The number of slots of all tables together, as a multiple of k.
        tables: The number of tables, each with a hash of its own.
        sample: The share of elements in the sample that gives the threshold.

    Example:
        >>> dragonn = sparsejax.sparsify(sparsejax.sparsifiers.Dragonn(0.001, slots=4.0))
        >>> tx = optax.chain(dragonn, sparsejax.zen_sync(), optax.sgd(0.1))

    References:
        Wang et al., DRAGONN: Distributed Randomized Approximate Gradients of Neural
        Networks, ICML 2022
    """

    slots: float = 4.0
    tables: int = 1
    sample: float = 0.01

    def __post_init__(self):
        super().__post_init__()
        arguments.check_positive("slots", self.slots)
        arguments.check_density("sample", self.sample)
        arguments.check_whole("tables", self.tables, 1)

    @property
    def room(self):
        return self.slots

    def capacity(self, size):
        return max(super().capacity(size), self.tables)

    def take_all(self, arrays, levels, draws, capacities):
        each = zip(arrays, levels, draws, capacities, strict=True)
        places, counts = zip(*(self.take(*one) for one in each), strict=True)
        return list(places), jnp.stack(counts)

    def take(
        self, x: jax.Array, level: jax.Array, draw: base.Draw, capacity: int
    ) -> tuple[jax.Array, jax.Array]:
        """Selects the elements that reach the threshold and keep a slot.

        Args:
            x: [size], the accumulated gradient: the gradient plus the residual, in float32
                or wider.
            level: The threshold, as a key.
            draw: The step, a seed and k.
            capacity: The largest number of indices.

        Returns:
            The indices, and their number.
        """
        # Comparisons with NaN are false, so it would never be selected: it is replaced by
        # infinity. The threshold is at least the smallest normal number, since a denormal
        # one would select zeros where denormals are flushed to zero.
        x = jnp.where(jnp.isnan(x), jnp.inf, x)
        level = jnp.minimum(level, magnitudes.key_of(jnp.inf, x.dtype))
        least = magnitudes.magnitude_of(level, x.dtype)
        least = jnp.maximum(least, jnp.finfo(x.dtype).tiny)
        # A leaf may have fewer elements than there are tables, and a table needs a slot.
        number_of_tables = min(self.tables, capacity)
        each = capacity // number_of_tables
        tables, sizes, seeds = [], [], []
        for number in range(number_of_tables):
            size = capacity - each * (number_of_tables - 1) if number == 0 else each
            seed = hashing.mix32(draw.seed, 0x2545F491 + number)
            table = threshold_hash(x, least, seed, slots=size)
            new = table >= 0
            for before, width, its_seed in zip(tables, sizes, seeds, strict=True):
                slot = hashing.place(jnp.maximum(table, 0), its_seed, width)
                new &= before[slot] != table
            tables.append(jnp.where(new, table, -1))
            sizes.append(size)
            seeds.append(seed)
        memory = jnp.concatenate(tables)
        count = jnp.sum(memory >= 0, dtype=jnp.int32)
        return jnp.where(memory >= 0, memory, x.size), count
