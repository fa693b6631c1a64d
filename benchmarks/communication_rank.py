"""One host of `benchmarks.communication`: every scheme of the library, and psum.

The settings come as JSON in the variable COMMUNICATION.
"""

import json
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import sparsejax
from benchmarks import sides, workloads
from benchmarks.testbed import host
from sparsejax import schemes


SCHEMES = {
    "psum": None,
    "zen": schemes.Zen(),
    "balanced": schemes.BalancedParallelism(),
    "hierarchical": schemes.HierarchicalCentralization(),
    "agsparse": schemes.AGSparse(),
    "sparcml": schemes.SparCML(),
    "omnireduce": schemes.OmniReduce(),
    "sparseps": schemes.SparsePS(),
}
AXIS = "data"


class Side:
    """A scheme on arrays of one shape, compiled as an optax transformation."""

    def __init__(self, name: str, shape: tuple[int, ...], mesh: Mesh):
        self.name = name
        self._sharding = NamedSharding(mesh, P(AXIS))
        self._whole = (mesh.size, *shape)
        step, self._state, specs = self._step(SCHEMES[name], shape, mesh)
        mapped = jax.shard_map(
            step, mesh=mesh, in_specs=(P(AXIS), specs), out_specs=(P(), specs)
        )
        like = jax.ShapeDtypeStruct(self._whole, jnp.float32, sharding=self._sharding)
        start = time.perf_counter()
        self.program = jax.jit(mapped).lower(like, self._state).compile()
        self.compiled = time.perf_counter() - start

    def _step(self, scheme, shape, mesh):
        if scheme is None:
            return (lambda x, state: (lax.psum(x[0], AXIS), state)), (), P()
        tx = sparsejax.sync(scheme, AXIS, reduce="sum")
        # Rows travel as rows where a table's name says that it is one.
        leaf = "embedding" if len(shape) == 2 else "numbers"

        def step(x, state):
            total, state = tx.update({leaf: x[0]}, state)
            return total[leaf], state

        state = sparsejax.init(tx, {leaf: jnp.zeros(shape, jnp.float32)}, mesh)
        return step, state, sparsejax.state_specs(state)

    def load(self, x: np.ndarray) -> None:
        self._x = jax.make_array_from_callback(
            self._whole, self._sharding, lambda index: x[None]
        )

    def run(self) -> None:
        self._total, self._state = self.program(self._x, self._state)
        jax.block_until_ready((self._total, self._state))

    def total(self) -> np.ndarray:
        return np.asarray(self._total.addressable_data(0))

    def wire(self) -> float:
        ranks, *shape = self._whole
        if not self._state:
            return 2 * (ranks - 1) / ranks * 4 * int(np.prod(shape))
        return float(sparsejax.metrics(self._state)["sync/wire_bytes"])


def main() -> None:
    settings = json.loads(os.environ["COMMUNICATION"])
    with host.join() as here:
        host.share_compiled(settings["cache"])
        mesh = Mesh(np.array(jax.devices()), (AXIS,), axis_types=(AxisType.Auto,))
        known = workloads.all_workloads()
        by_shape: dict[tuple[int, ...], list] = {}
        for name in settings["workloads"]:
            by_shape.setdefault(known[name].shape, []).append(known[name])
        for shape, group in by_shape.items():
            compiled = []
            for name in settings["schemes"]:
                compiled.append(Side(name, shape, mesh))
                seconds = compiled[-1].compiled
                here.say(
                    f"  {name:15} {list(shape)} traced and compiled in {seconds:.1f} s"
                )
            sides.measure(here, settings, compiled, group)


if __name__ == "__main__":
    main()
