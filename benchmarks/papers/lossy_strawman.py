"""The strawman of Zen's appendix A, which loses gradients, for the study of how many.

Algorithm 3 writes every index into a memory at the place that its hash says, all at once,
and where two meet one is overwritten. The indices left in the memory are sent; the others
are lost, and with them the law that a total is the sum. Do not train with it.

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
from sparsejax.units.dense import Dense
from sparsejax.wire import Wire


def survivors(flags: jax.Array, memory: float, seed: int = 0) -> jax.Array:
    """Flags of the units that are still in the memory after all were written.

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
    """Balanced Parallelism of the units that survive a hash memory; loses the others.

    Attributes:
        memory: Places in the memory, in multiples of the number of units.
        seed: Of the hash.
    """

    memory: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not isinstance(self.memory, (int, float)) or not 0 < self.memory <= 64:
            raise ArgumentError(f"memory must lie in (0, 64], got {self.memory!r}.")

    def __call__(self, x, state, wire):
        if x.size == 0:
            return base.nothing_to_send(x, state, wire)
        flags = survivors(x.present(), self.memory, self.seed)
        x = x.dense()
        left = jnp.where(flags.reshape(-1, *[1] * (x.ndim - 1)), x, 0)
        return BalancedParallelism()(Dense(left, flags), state, wire)

    def forecast(self, load):
        return BalancedParallelism().forecast(load)


def total_of(scheme: base.Scheme, x: jax.Array, axis_name: str) -> jax.Array:
    """The total of all ranks' arrays by a scheme without a state, inside `shard_map`.

    Args:
        scheme: A scheme that remembers nothing.
        x: This rank's gradient.
        axis_name: The mesh axis of the ranks.
    """
    return scheme(Dense(x), (), Wire(axis_name)).total
