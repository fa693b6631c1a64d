"""The strawman of Zen's appendix A, which loses gradients. For the study of how many.

Algorithm 3 writes every index into a memory at the place that its hash says, all at once,
and where two meet one is overwritten. What is left in the memory is sent; the rest is lost,
and with it the law that a total is the sum. Do not train with it.

With l indices and m places a share (m / l) (1 - exp(-l / m)) survives: 95.2% at 10% density
in a memory as large as the tensor, 82.4% in one a quarter as large.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import hashing
from sparsejax.errors import ArgumentError
from sparsejax.schemes import base
from sparsejax.schemes.zen.balanced import BalancedParallelism
from sparsejax.units import bits


def survivors(flags: jax.Array, memory: float, seed: int = 0) -> jax.Array:
    """Which of the units flagged are still in the memory after all were written.

    Args:
        flags: Booleans [units].
        memory: Places in the memory, in multiples of the number of units.
        seed: Of the hash.
    """
    places = max(1, round(memory * len(flags)))
    units = lax.iota(jnp.int32, len(flags))
    place = hashing.place(units, seed, places)
    # Of those that meet, the last is left; a parallel machine leaves any.
    written = jnp.full(places, -1, jnp.int32)
    written = written.at[jnp.where(flags, place, places)].max(units, mode="drop")
    return flags & (written[place] == units)


@dataclasses.dataclass(frozen=True)
class LossyStrawman(base.Scheme):
    """Balanced Parallelism of what survives a hash memory; loses the rest.

    Attributes:
        memory: Places in the memory, in multiples of the number of units.
        seed: Of the hash.
    """

    lossless = False
    memory: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not isinstance(self.memory, (int, float)) or not 0 < self.memory <= 64:
            raise ArgumentError(f"memory must lie in (0, 64], got {self.memory!r}.")

    def __call__(self, x, state, axis_name, *, present=None):
        if x.size == 0:
            return base.nothing_to_send(x, state, axis_name)
        flags = bits.nonzero_units(x) if present is None else present
        flags = survivors(flags, self.memory, self.seed)
        left = jnp.where(flags.reshape(-1, *[1] * (x.ndim - 1)), x, 0)
        return BalancedParallelism()(left, state, axis_name, present=flags)

    def forecast(self, load):
        return BalancedParallelism().forecast(load)
