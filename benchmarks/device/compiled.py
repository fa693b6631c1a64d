"""Steps of each scheme, traced for devices that are there or only described."""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import sparsejax
from benchmarks.device import hlo, turns
from benchmarks.device.loads import RANKS, Load
from benchmarks.device.walk import Counts, Walk
from sparsejax import schemes


AXIS = "data"
SCHEMES = {
    "zen": schemes.Zen(),
    "ragged": schemes.BalancedParallelism(channel="ragged"),
    "agsparse": schemes.AGSparse(),
    "all-reduce": schemes.AllReduce(),
}


class Step(NamedTuple):
    """A step that sums one array.

    Attributes:
        tx: The transformation.
        run: The step, jitted: from [ranks, ...] and a state to the total and a state.
        state: The state that it begins with: arrays without values.
    """

    tx: Any
    run: Any
    state: Any


class Counted(NamedTuple):
    """A step that was compiled for a GPU, and what it does.

    Attributes:
        counts: What one step does.
        temporary: Bytes of temporaries beside gradient and sum.
        seconds: That it took to compile.
        turns: The turns that were reckoned with.
    """

    counts: Counts
    temporary: int
    seconds: float
    turns: turns.Turns


def step(scheme: str, load: Load, mesh: Mesh) -> Step:
    """A step of a scheme."""
    tx = sparsejax.sync(SCHEMES[scheme], AXIS, reduce="sum")
    like = {load.leaf: jax.ShapeDtypeStruct(load.shape, jnp.float32)}

    def run(x, state):
        total, state = tx.update({load.leaf: x[0]}, state)
        return total[load.leaf], state

    state = jax.eval_shape(tx.init, like)
    specs = sparsejax.state_specs(state)
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(P(AXIS), specs), out_specs=(P(), specs)
    )
    return Step(tx, jax.jit(mapped), state)


def counted(scheme: str, load: Load, mesh: Mesh) -> Counted:
    """Compiles a step for these devices and counts what it does for a load."""
    one = step(scheme, load, mesh)
    everywhere = NamedSharding(mesh, P())
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), one.state
    )
    x = jax.ShapeDtypeStruct(
        (RANKS, *load.shape), jnp.float32, sharding=NamedSharding(mesh, P(AXIS))
    )
    # Programs that were traced before do not pass by here.
    jax.clear_caches()
    with turns.watched(load) as known, jax.set_mesh(mesh):
        lowered = one.run.lower(x, state)
    start = time.perf_counter()
    program = lowered.compile()
    seconds = time.perf_counter() - start
    text = hlo.parse(program.as_text())
    walk = Walk(text, known.turns, known.taken, RANKS, known.ragged)
    temporary = program.memory_analysis().temp_size_in_bytes
    return Counted(walk(), temporary, seconds, known)
