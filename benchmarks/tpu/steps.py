"""Steps, and the described TPUs that they are compiled for."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import sparsejax
from sparsejax import schemes
from sparsejax.units.row_grads import RowGrads


# The chips of a slice as libtpu knows them, and how many slices.
CHIPS = {
    "v5e": ("v5e:2x2", 1),
    "v5p": ("v5p:2x2x1", 1),
    "v6e": ("v6e:2x2", 1),
    "two v5e": ("v5e:2x2", 2),
}
NUMBERS = 1 << 22
ROWS, WIDTH = 65_536, 64
HEIGHT, LANES, LISTED = 1_000_000, 128, 4096


def mesh(chips: str) -> Mesh:
    """Described chips: ranks, or slices of ranks."""
    name, slices = CHIPS[chips]
    several = {"num_slices": slices} if slices > 1 else {}
    described = topologies.get_topology_desc(platform="tpu", topology_name=name, **several)
    devices = np.array(described.devices)
    if slices == 1:
        return Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    names = "slices", "data"
    return Mesh(devices.reshape(slices, -1), names, axis_types=(AxisType.Auto,) * 2)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step, and what its program may have at most.

    Attributes:
        name: What it does.
        chips: What it is compiled for, of `CHIPS`.
        lowered: Traces and lowers it for a mesh.
        updates: The most updates of a scatter; None without a ceiling.
        table: Numbers of a table of which there may be no copy; None without a table.
        code: Bytes of the program; None without a ceiling.
    """

    name: str
    chips: str
    lowered: Callable[[Mesh], Any]
    updates: int | None = None
    table: int | None = None
    code: int | None = None

    def named(self) -> str:
        """The step with its chips."""
        return f"{self.name}, {self.chips}"


def axes_of(where: Mesh) -> Any:
    """The axis of the ranks, or both axes, as two levels."""
    names = where.axis_names
    return names[0] if len(names) == 1 else names


def placed(tree: Any, where: Mesh, specs: Any) -> Any:
    """Arrays without values, with their shardings."""
    place = lambda x, spec: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(where, spec)
    )
    if isinstance(specs, P):
        return jax.tree.map(lambda x: place(x, specs), tree)
    return jax.tree.map(place, tree, specs)


def state_of(tx: Any, params: Any, where: Mesh) -> tuple[Any, Any]:
    """A first state without values, and its specs."""
    state = jax.eval_shape(sparsejax.bind(tx, where, axes_of(where)).init, params)
    specs = sparsejax.state_specs(state)
    return placed(state, where, specs), specs


def summing(scheme: schemes.Scheme, leaf: str, like: Any) -> Callable[[Mesh], Any]:
    """A step that sums one gradient: an array, or `RowGrads`."""

    def lowered(where):
        tx = sparsejax.sync(scheme, axes_of(where), reduce="sum")
        whole = jax.ShapeDtypeStruct(like.shape, jnp.float32)
        state, specs = state_of(tx, {leaf: whole}, where)
        by_rank = P(axes_of(where))
        n = where.size
        each = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype), like)

        def run(x, state):
            own = jax.tree.map(lambda x: x[0], x)
            total, state = tx.update({leaf: own}, state)
            return total[leaf], state

        mapped = jax.shard_map(
            run, mesh=where, in_specs=(by_rank, specs), out_specs=(P(), specs)
        )
        with jax.set_mesh(where):
            return jax.jit(mapped).lower(placed(each, where, by_rank), state)

    return lowered


def array(*shape: int) -> Any:
    """An array without values."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def rows(count: int, height: int, width: int) -> RowGrads:
    """Rows of a table without values."""
    ids = jax.ShapeDtypeStruct((count,), jnp.int32)
    return RowGrads(ids, array(count, width), (height, width))


def training(where: Mesh) -> Any:
    """A step of a table by rows: gradients, their exchange, and a lazy Adam."""
    lazy = sparsejax.lazy(optax.adam(1e-3))
    tx = optax.chain(sparsejax.zen_sync(axes_of(where)), lazy)
    params = {"embedding": array(HEIGHT, LANES), "kernel": array(LANES, 8)}
    state, specs = state_of(tx, params, where)
    ids = jax.ShapeDtypeStruct((where.size, LISTED), jnp.int32)
    by_rank = P(axes_of(where))

    def loss(params, ids):
        return jnp.mean(jnp.tanh(params["embedding"][ids] @ params["kernel"]) ** 2)

    def step(params, state, ids):
        read = lazy.reader(params, state)
        gradient = sparsejax.value_and_grad(loss, read=read)
        _, grads = gradient(sparsejax.local(params), ids[0])
        updates, state = tx.update(grads, state, params, read=read)
        return sparsejax.apply_updates(params, updates), state

    mapped = jax.shard_map(
        step, mesh=where, in_specs=(P(), specs, by_rank), out_specs=(P(), specs)
    )
    given = placed(params, where, P()), state, placed(ids, where, by_rank)
    # Not around all of it: `lazy` runs the optimizer on some numbers, here.
    with jax.set_mesh(where):
        return jax.jit(mapped, donate_argnums=(0, 1)).lower(*given)


_ZEN = schemes.Zen()
_TABLE = array(ROWS, WIDTH)
_LISTED = rows(LISTED, HEIGHT, LANES)
_BY_ROWS = f"zen, {ROWS:,} x {WIDTH}"
# Bytes of code of rows across slices, whether they are of an array or listed.
_MOST = 20_000_000

STEPS = [
    Step("psum, 16 MB", "v5e", summing(schemes.AllReduce(), "kernel", array(NUMBERS))),
    Step("zen, 4M numbers", "v5e", summing(_ZEN, "kernel", array(NUMBERS)), updates=0),
    *(
        Step(_BY_ROWS, chips, summing(_ZEN, "embedding", _TABLE))
        for chips in ("v5e", "v5p", "v6e")
    ),
    Step(
        _BY_ROWS,
        "two v5e",
        summing(_ZEN, "embedding", _TABLE),
        updates=ROWS,
        code=_MOST,
    ),
    Step(
        f"zen, {LISTED:,} listed rows of 1M x {LANES}",
        "two v5e",
        summing(_ZEN, "embedding", _LISTED),
        updates=8 * LISTED,
        table=HEIGHT * LANES,
        code=_MOST,
    ),
    Step(
        f"zen and lazy Adam, {LISTED:,} rows of 1M x {LANES}",
        "v5e",
        training,
        table=HEIGHT * LANES,
    ),
]
