"""Steps of each scheme, traced for devices that are there or only described."""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import sparsejax
from benchmarks.device import graphs, hlo, turns
from benchmarks.device.graphs import Graphs
from benchmarks.device.loads import RANKS, Load
from benchmarks.device.walk import Counts, Walk
from sparsejax import schemes
from sparsejax.units import ownership


AXIS = "data"
SCHEMES = {
    "zen": schemes.Zen(),
    "agsparse": schemes.AGSparse(),
    "all-reduce": schemes.AllReduce(),
}
# The paper's own system: its hash, its tables, and Algorithm 1 in one launch of Triton. On
# CPU devices that is a loop over tiles, whose turns are another program's: use `--trust`.
ALGORITHM_1 = "zen, Algorithm 1"
_PAPERS = schemes.Zen(ownership=ownership.MurmurHash(memory=0.02))
# Zen whose owners add in any order, by atomic additions: what an ordered sum costs.
IN_ANY_ORDER = "zen, in any order"


class Step(NamedTuple):
    """A step that sums one gradient.

    Attributes:
        tx: The transformation.
        run: The step, jitted: from the gradients of all ranks, stacked, and a state to the
            total and a state.
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
        graphs: What is captured in CUDA graphs, of the thunks that were asked for.
    """

    counts: Counts
    temporary: int
    seconds: float
    turns: turns.Turns
    graphs: Graphs


def transformation(scheme: str) -> Any:
    """What sums by a scheme."""
    others = {ALGORITHM_1: _PAPERS, IN_ANY_ORDER: SCHEMES["zen"]}
    one = others[scheme] if scheme in others else SCHEMES[scheme]
    how = False if scheme == IN_ANY_ORDER else None
    return sparsejax.sync(one, AXIS, reduce="sum", deterministic=how)


def step(scheme: str, load: Load, mesh: Mesh) -> Step:
    """A step of a scheme."""
    tx = transformation(scheme)
    like = {load.leaf: jax.ShapeDtypeStruct(load.shape, jnp.float32)}

    def run(x, state):
        own = jax.tree.map(lambda x: x[0], x)
        total, state = tx.update({load.leaf: own}, state)
        return total[load.leaf], state

    state = jax.eval_shape(sparsejax.bind(tx, mesh).init, like)
    specs = sparsejax.state_specs(state)
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(P(AXIS), specs), out_specs=(P(), specs)
    )
    return Step(tx, jax.jit(mapped), state)


def counted(
    scheme: str,
    load: Load,
    mesh: Mesh,
    commands: tuple[str, ...] = graphs.USUAL,
    kernels: str = "auto",
) -> Counted:
    """Compiles a step for these devices and counts what it does for a load.

    Args:
        scheme: By its name.
        load: What is summed.
        mesh: The devices.
        commands: The types of thunks that are captured in CUDA graphs.
        kernels: Which backend computes the kernels.
    """
    one = step(scheme, load, mesh)
    everywhere = NamedSharding(mesh, P())
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), one.state
    )
    by_rank = NamedSharding(mesh, P(AXIS))
    x = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((RANKS, *x.shape), x.dtype, sharding=by_rank),
        load.like,
    )
    # Programs that were traced before do not pass by here.
    jax.clear_caches()
    backend = "triton" if scheme == ALGORITHM_1 else kernels
    asked = sparsejax.use_kernels(backend, compile_only=True)
    with turns.watched(load) as known, jax.set_mesh(mesh), asked:
        lowered = one.run.lower(x, state)
    start = time.perf_counter()
    with graphs.printed(commands) as (options, found):
        program = lowered.compile(compiler_options=options)
    seconds = time.perf_counter() - start
    text = hlo.parse(program.as_text())
    walk = Walk(text, known.turns, known.taken, RANKS, known.kernel)
    temporary = program.memory_analysis().temp_size_in_bytes
    return Counted(walk(), temporary, seconds, known, found[0])
