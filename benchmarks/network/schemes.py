"""One host of `benchmarks.network.communication`: every scheme of the library, and psum."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh

import sparsejax
from benchmarks.data import workloads
from benchmarks.network.jax_side import AXIS, JaxSide
from benchmarks.network.measure import Settings, measure
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


def side(name: str, shape: tuple[int, ...], mesh: Mesh) -> JaxSide:
    """A scheme on arrays of one shape, compiled as an optax transformation."""
    scheme = SCHEMES[name]
    if scheme is None:
        return JaxSide(name, shape, mesh, lambda x, state: (lax.psum(x, AXIS), state), ())
    tx = sparsejax.sync(scheme, AXIS, reduce="sum")
    # Rows travel as rows where a table's name says that it is one.
    leaf = "embedding" if len(shape) == 2 else "numbers"

    def step(x, state):
        total, state = tx.update({leaf: x}, state)
        return total[leaf], state

    state = sparsejax.init(tx, {leaf: jnp.zeros(shape, jnp.float32)}, mesh)
    return JaxSide(name, shape, mesh, step, state)


def rank(settings: Settings) -> None:
    """Checks and times the schemes on this host."""
    with host.join() as here:
        host.share_compiled()
        mesh = Mesh(np.array(jax.devices()), (AXIS,), axis_types=(AxisType.Auto,))
        by_name = workloads.all_workloads()
        by_shape: dict[tuple[int, ...], list] = {}
        for name in settings.workloads:
            by_shape.setdefault(by_name[name].shape, []).append(by_name[name])
        for shape, group in by_shape.items():
            compiled = []
            for name in settings.schemes:
                compiled.append(side(name, shape, mesh))
                seconds = compiled[-1].compiled
                here.say(
                    f"  {name:15} {list(shape)} traced and compiled in {seconds:.1f} s"
                )
            measure(here, settings, compiled, group)
