"""A compiled way to add up arrays over all ranks in JAX, as a side of a comparison."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import sparsejax


AXIS = "data"


class JaxSide:
    """A step over the mesh, from an array of each rank and a state to the sum and a state.

    Attributes:
        name: Its name in tables.
        compiled: Seconds that it took to trace and compile.
        program: The compiled step.
        global_shape: The shape of all ranks' arrays together.
        state: The state; empty where the step has none.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        mesh: Mesh,
        step: Callable[[jax.Array, Any], tuple[jax.Array, Any]],
        state: Any,
    ):
        self.name, self.global_shape, self.state = name, (mesh.size, *shape), state
        self._sharding = NamedSharding(mesh, P(AXIS))
        specs = sparsejax.state_specs(state)
        mapped = jax.shard_map(
            lambda x, state: step(x[0], state),
            mesh=mesh,
            in_specs=(P(AXIS), specs),
            out_specs=(P(), specs),
        )
        like = jax.ShapeDtypeStruct(self.global_shape, jnp.float32, sharding=self._sharding)
        start = time.perf_counter()
        self.program = jax.jit(mapped, donate_argnums=1).lower(like, state).compile()
        self.compiled = time.perf_counter() - start

    def load(self, *given: np.ndarray) -> None:
        """Takes this process's arrays, one for each step, over and over.

        A process of several ranks has one for each of them, [ranks, ...].
        """
        shape = (-1, *self.global_shape[1:])
        arrays = [
            jax.make_array_from_process_local_data(
                self._sharding, x.reshape(shape), self.global_shape
            )
            for x in given
        ]
        self._given = itertools.cycle(arrays)

    def run(self) -> None:
        """Adds up once, and waits for the sum."""
        self._total, self.state = self.program(next(self._given), self.state)
        jax.block_until_ready((self._total, self.state))

    def total(self) -> np.ndarray:
        """The sum of the last run."""
        return np.asarray(self._total.addressable_data(0))

    def wire(self) -> float:
        """Bytes that a rank sent in the last run."""
        if not self.state:  # an all-reduce
            ranks, *shape = self.global_shape
            return 2 * (ranks - 1) / ranks * 4 * int(np.prod(shape))
        return float(sparsejax.metrics(self.state)["sync/wire_bytes"])
