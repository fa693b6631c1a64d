"""Steps of each scheme, traced and compiled for devices, real or only described."""

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
# The paper's own system: its hash, its tables, and Algorithm 1 as one Triton kernel. On CPU
# devices it is a loop over tiles, which a GPU's program does not have: use `--trust`.
ALGORITHM_1 = "zen, Algorithm 1"
_PAPERS = schemes.Zen(ownership=ownership.MurmurHash(memory=0.02))
# Zen whose owners add in any order, by atomic additions: shows what an ordered sum costs.
IN_ANY_ORDER = "zen, in any order"
# The mean of all ranks, where the others are sums: shows what the division costs.
MEAN = "zen, mean"
VARIANTS = (ALGORITHM_1, IN_ANY_ORDER, MEAN)


class Step(NamedTuple):
    """A step that sums one gradient.

    Attributes:
        tx: The transformation.
        run: The jitted step: from the stacked gradients of all ranks, and a state, to the
            total and the next state.
        state: The shapes and dtypes of the first state.
    """

    tx: Any
    run: Any
    state: Any


class Counted(NamedTuple):
    """The counts of a step that was compiled for a GPU.

    Attributes:
        counts: The counts of one step.
        temporary: Bytes of temporary buffers, without the gradient and the sum.
        seconds: The seconds that it took to compile.
        turns: The iterations of loops, and branches taken, that the counts assume.
        graphs: What is captured in CUDA graphs, given the types of thunks to capture.
    """

    counts: Counts
    temporary: int
    seconds: float
    turns: turns.Turns
    graphs: Graphs


def transformation(scheme: str) -> Any:
    """Returns the transformation that sums by a scheme, given its name."""
    zen = dict.fromkeys((IN_ANY_ORDER, MEAN), SCHEMES["zen"])
    one = ({ALGORITHM_1: _PAPERS} | zen | SCHEMES)[scheme]
    how = False if scheme == IN_ANY_ORDER else None
    reduce = "mean" if scheme == MEAN else "sum"
    return sparsejax.sync(one, AXIS, reduce=reduce, deterministic=how)


def step(scheme: str, load: Load, mesh: Mesh) -> Step:
    """Makes the step of a scheme for a load on these devices."""
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
        scheme: The name of the scheme.
        load: The gradient that is summed.
        mesh: The devices.
        commands: The types of thunks that are captured in CUDA graphs.
        kernels: The backend of the kernels.
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
    # `watched` sees a stage only when it is traced, so cached traces are dropped.
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
