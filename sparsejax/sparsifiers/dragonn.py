"""DRAGONN: large elements write their index where they hash to, and nothing is counted.

The threshold comes from a sample, as in DGC. Each element that is as large writes its index
into a memory at the place that its hash says, all at once; where two meet one is
overwritten, and waits. There is no prefix sum and no order. With l elements and m slots a
share of (m / l) (1 - exp(-l / m)) stays: 88% with the four slots an element that are usual.
A further table, with another hash, gives what was overwritten another chance.

The hash is another at every step, so nobody loses every time. The memory starts as -1, so
element 0 is as good as any.
"""

import dataclasses

import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import hashing
from sparsejax import errors
from sparsejax.sparsifiers import base
from sparsejax.sparsifiers.dgc import sampled
from sparsejax.units import magnitudes


@dataclasses.dataclass(frozen=True)
class Dragonn(base.ByMagnitude):
    """As many of the large elements as find a slot.

    Attributes:
        slots: How many there are for each element wanted, in all tables.
        tables: How many tables, each with its hash.
        sample: The share of elements that is looked at for the threshold.

    References:
        Wang et al., DRAGONN: Distributed Randomized Approximate Gradients of Neural
        Networks, ICML 2022
    """

    slots: float = 4.0
    tables: int = 1
    sample: float = 0.01

    def __post_init__(self):
        super().__post_init__()
        errors.check_positive("slots", self.slots)
        errors.check_density("sample", self.sample)
        errors.check_whole("tables", self.tables, 1)

    @property
    def room(self):
        return self.slots

    def capacity(self, size):
        return max(super().capacity(size), self.tables)

    def level(self, x, state, draw):
        return sampled(x, draw, self.sample, self.density), state

    def take(self, x, level, draw, capacity):
        # A NaN has no magnitude and would never go: it counts as infinite. And no zero may
        # be as large as a denormal, as it is to code that takes denormals for zero.
        x = jnp.where(jnp.isnan(x), jnp.inf, x)
        level = jnp.minimum(level, magnitudes.key_of(jnp.inf, x.dtype))
        least = magnitudes.magnitude_of(level, x.dtype)
        least = jnp.maximum(least, jnp.finfo(x.dtype).tiny)
        each = capacity // self.tables
        found, sizes, seeds = [], [], []
        for table in range(self.tables):
            size = capacity - each * (self.tables - 1) if table == 0 else each
            seed = hashing.mix32(draw.seed, 0x2545F491 + table)
            memory = pallas_kernels.threshold_hash(x, least, seed, slots=size)
            written = memory >= 0
            for other, width, own in zip(found, sizes, seeds, strict=True):
                place = hashing.place(jnp.maximum(memory, 0), own, width)
                written &= other[place] != memory
            memory = jnp.where(written, memory, -1)
            found.append(memory)
            sizes.append(size)
            seeds.append(seed)
        memory = jnp.concatenate(found)
        count = jnp.sum(memory >= 0, dtype=jnp.int32)
        return jnp.where(memory >= 0, memory, x.size), count
