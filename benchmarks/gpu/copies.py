"""Have sums the same bits always: on copies over a second mesh axis, and in two runs.

With four devices or more, half of them hold copies of what the other half sums, on a mesh
(data, model) whose axis "model" has two: each device's sum is compared as bytes. Sixteen
ranks are also simulated on one device, by `vmap`. In both cases a step runs `RUNS` times on
the same numbers, and all results are compared as bytes.

Sums are ordered by default. Those in any order (`deterministic=False`) run, too, where
there are no copies: how many different results there are is recorded, and is no error.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax
from benchmarks.harness.record import say
from sparsejax.units.row_grads import RowGrads


RUNS, RANKS = 20, 16
# Of numbers, of rows, and of rows that are listed: units, width, and how many a rank has.
LOADS = {
    "numbers": (1 << 18, 1, 0.05),
    "rows": (1 << 13, 64, 0.05),
    "listed rows": (1 << 13, 64, 0.5),
}


def copies(context) -> bool:
    """Compares sums as bytes: copies of them, and those of several runs."""
    devices = jax.devices()
    half = len(devices) // 2
    well = True
    for name in LOADS:
        if half >= 2:
            mesh = jax.make_mesh((half, 2), ("data", "model"), devices=devices[: 2 * half])
            seen = _on_mesh(name, mesh, _runs(context))
            well &= _said(context, name, f"{half} ranks, 2 copies", "default", seen)
        for how in (None, False):
            seen = _simulated(name, how, _runs(context))
            alike = _said(context, name, f"{RANKS} simulated ranks", how, seen)
            well &= alike or how is False
    return well


def _runs(context) -> int:
    return RUNS if context.gpu else 2


def _said(context, name, where, how, seen) -> bool:
    order = "in any order" if how is False else "ordered"
    say(f"{name}, {where}, {order}: {len(seen)} different results")
    context.record.add(
        part="copies", load=name, where=where, order=order, results=len(seen)
    )
    return len(seen) == 1


def _gradients(name, ranks):
    """The numbers of each rank, or its ids and rows, that repeat."""
    units, width, share = LOADS[name]
    rng = np.random.default_rng(0)
    shape = (ranks, units) if width == 1 else (ranks, units, width)
    if name == "listed rows":
        # Many ids repeat, within a rank and among ranks.
        ids = rng.zipf(1.3, (ranks, int(share * units))) % units
        return ids.astype(np.int32), rng.standard_normal((*ids.shape, width), np.float32)
    x = rng.standard_normal(shape, np.float32)
    x[rng.random(shape[:2]) >= share] = 0
    return (x,)


def _step(name, how, axis):
    """A rank's sum of its gradient with those of all others."""
    units, width, _ = LOADS[name]
    shape = (units,) if width == 1 else (units, width)
    rules = {"": "element" if width == 1 else "row", "w": "sparse"}
    scheme = sparsejax.schemes.BalancedParallelism()
    tx = sparsejax.sync(scheme, axis, reduce="sum", rules=rules, deterministic=how)

    def step(*given):
        own = RowGrads(*given, shape) if len(given) == 2 else given[0]
        return tx.update({"w": own}, tx.init({"w": jnp.zeros(shape)}))[0]["w"]

    return step


def _simulated(name, how, runs):
    """The different results of runs whose ranks are all on one device."""
    step = jax.jit(jax.vmap(_step(name, how, "data"), axis_name="data"))
    given = list(map(jnp.asarray, _gradients(name, RANKS)))
    return {one for _ in range(runs) for one in _by_rank(step(*given), RANKS)}


def _on_mesh(name, mesh, runs):
    """The different results of runs, and of devices, on a mesh with copies."""
    step = _step(name, None, "data")

    def on_rank(*given):
        total = step(*(x[0] for x in given))
        return jax.tree.map(lambda x: x[None], total)

    everywhere = P(("data", "model"))
    run = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    run = jax.jit(run(on_rank, in_specs=P("data"), out_specs=everywhere))
    placed = NamedSharding(mesh, P("data"))
    ranks = mesh.shape["data"]
    given = [jax.device_put(x, placed) for x in _gradients(name, ranks)]
    return {one for _ in range(runs) for one in _by_rank(run(*given), mesh.size)}


def _by_rank(total, ranks):
    """The bytes that each rank has."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(total)]
    return [b"".join(leaf[i].tobytes() for leaf in leaves) for i in range(ranks)]
