"""What `explain` says of a transformation is what the transformation sends.

Gradients are drawn with as many non-zeros as the explanation is told, and what `metrics`
counts, bytes and rounds, lies between two explanations: of a little less, and of a little
more. How much is settled by what is random. A part of m entries that a hash picks has a
standard deviation of sqrt(m), and the fullest of some parts half of it; three of these are
1.5 / sqrt(m) of m. What a sampled threshold selects is within the bounds that it corrects
to. Where nothing is random, the two are one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import schemes, sparsifiers
from tests import helpers


ROWS, WIDTH = 16_384, 8
SMALL = {"scale": (48,), "zero/bias": (100,)}
TABLE = {"embedding": (ROWS, WIDTH), **SMALL}
KERNEL = {"kernel": (512, 256), **SMALL}
KERNELS = {"kernel": (512, 256), "other": (256, 512), **SMALL}
MODEL = {"embedding": (ROWS, WIDTH), "kernel": (512, 256), **SMALL}
NETWORK = sparsejax.Network(gbit_per_s=25, latency_us=20)
# Of the few numbers of a row on which ranks agree, which `metrics` counts, too.
AGREED = 150


def levels(**options):
    return sparsejax.zen_sync(("hosts", "devices"), **options)


def chain(sparsifier):
    return optax.chain(sparsifier, sparsejax.zen_sync())


# By name: the leaves, and from a factor on what is selected to the transformation.
PROGRAMS: dict[str, tuple[dict[str, Any], Callable[[float], Any]]] = {
    "dense": (KERNEL, lambda f: sparsejax.dense_sync()),
    "zen": (KERNEL, lambda f: sparsejax.zen_sync()),
    "zen_table": (TABLE, lambda f: sparsejax.zen_sync()),
    "every": (TABLE, lambda f: sparsejax.accumulate(sparsejax.zen_sync(), 2)),
    "dgc": (KERNEL, lambda f: chain(sparsejax.dgc(0.02 * f))),
    "dgc_table": (MODEL, lambda f: chain(sparsejax.dgc(0.02 * f))),
    "rounds": (
        TABLE,
        lambda f: sparsejax.sync(
            schemes.BalancedParallelism(push_capacity=64, pull_capacity=256)
        ),
    ),
    "hierarchical": (
        KERNEL,
        lambda f: sparsejax.sync(schemes.HierarchicalCentralization()),
    ),
    "ag_sparse_every": (
        TABLE,
        lambda f: sparsejax.accumulate(sparsejax.sync(schemes.AGSparse()), 2),
    ),
    "sparse_ps": (TABLE, lambda f: sparsejax.sync(schemes.SparsePS())),
    "narrow": (KERNEL, lambda f: sparsejax.zen_sync(wire_dtype=jnp.bfloat16)),
    "inside": (
        KERNEL,
        lambda f: optax.chain(sparsejax.top_k(0.02 * f), sparsejax.zen_sync()),
    ),
    "random": (KERNELS, lambda f: chain(sparsejax.sparsify(sparsifiers.RandomK(0.02)))),
    "accumulated": (
        KERNEL,
        lambda f: sparsejax.accumulate(
            optax.chain(sparsejax.top_k(0.02 * f), sparsejax.sync(schemes.AGSparse())), 2
        ),
    ),
    "spardl": (KERNEL, lambda f: sparsejax.spardl_sync(0.02)),
    "gtopk": (KERNEL, lambda f: sparsejax.transforms.gtopk_sync(0.02)),
    "ok_topk": (KERNEL, lambda f: sparsejax.ok_topk_sync(0.02 * f)),
    "power_sgd": (KERNELS, lambda f: sparsejax.transforms.power_sgd_sync(2)),
    "levels": (TABLE, lambda f: levels()),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A program, the density of its gradients, and the bounds of what is selected."""

    program: str
    density: float | None
    selected: tuple[float, float] = (1.0, 1.0)


CASES = {
    "dense": Case("dense", None),
    "zen": Case("zen", 0.02),
    "zen_of_dense_gradients": Case("zen_table", 1.0),
    "ag_sparse_every_second_step": Case("ag_sparse_every", 0.05),
    "zen_every_second_step": Case("every", 0.05),
    "dgc": Case("dgc", None, (0.8, 1.3)),
    "dgc_of_a_table_and_a_kernel": Case("dgc_table", None, (0.8, 1.3)),
    "rounds": Case("rounds", 0.05),
    "zen_table": Case("zen_table", 0.05),
    "hierarchical": Case("hierarchical", 0.02),
    "sparse_ps": Case("sparse_ps", 0.05),
    "narrow": Case("narrow", 0.02),
    "top_k_inside": Case("inside", None),
    "top_k_of_sparser_gradients": Case("inside", 0.01),
    "random_k": Case("random", None),
    "accumulated": Case("accumulated", None),
    "spardl": Case("spardl", None),
    "gtopk": Case("gtopk", None),
    "ok_topk": Case("ok_topk", None),
    "power_sgd": Case("power_sgd", None),
    "two_levels": Case("levels", 0.05),
}
# These five programs are the cheapest to compile.
AT_ONCE = ("dense", "zen_of_dense_gradients", "random_k")


def mesh_of(program):
    if program == "levels":
        return helpers.grid(hosts=2, devices=2), ("hosts", "devices"), (2, 2)
    return helpers.mesh_of(4), "data", 4


@functools.cache
def compiled(program):
    """From gradients [ranks, steps, ...] to the metrics after the last step."""
    leaves, make = PROGRAMS[program]
    tx, (mesh, axes, _) = make(1.0), mesh_of(program)
    params = {name: jnp.zeros(shape) for name, shape in leaves.items()}

    def run(grads):
        def step(state, grad):
            return tx.update(grad, state, params)[1], ()

        grads = jax.tree.map(lambda x: x[0], grads)
        state, _ = jax.lax.scan(step, tx.init(params), grads)
        return jax.tree.map(lambda x: x[None], sparsejax.metrics(state))

    run = helpers.shard_map(run, mesh=mesh, in_specs=P(axes), out_specs=P(axes))
    return jax.jit(run)


def drawn(leaves, density, steps):
    """Gradients of four ranks: so many units of large leaves, all numbers of the others."""
    rng = np.random.default_rng(7)
    grads = {}
    for name, shape in leaves.items():
        x = rng.standard_normal((4, steps, *shape)).astype(np.float32)
        if density is not None and name not in SMALL:
            units = shape[0] if name == "embedding" else math.prod(shape)
            flat = x.reshape(4 * steps, units, -1)
            for row in flat:
                row[rng.permutation(units)[round(density * units) :]] = 0
        grads[name] = x
    return grads


def explained(case, factor=1.0):
    """The rows of a case, with so many times as much to send."""
    leaves, make = PROGRAMS[case.program]
    density = case.density
    if density is not None:
        density = {name: min(1.0, density * factor) for name in leaves if name not in SMALL}
    params = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in leaves.items()}
    told = sparsejax.explain(
        make(factor),
        params,
        ranks=mesh_of(case.program)[2],
        density=density,
        network=NETWORK,
    )
    return told.rows


def noise(case):
    """Three standard deviations of the fullest part, of parts of four ranks."""
    row = max(explained(case), key=lambda row: math.prod(row.shape))
    units = math.prod(row.shape[:1] if row.unit == "row" else row.shape)
    return 1.5 / math.sqrt(row.density * units / 4)


@pytest.mark.parametrize(
    "name", [*AT_ONCE, *helpers.slow(*(name for name in CASES if name not in AT_ONCE))]
)
def test_what_is_explained_is_what_is_sent(name):
    case = CASES[name]
    every = explained(case)[0].every
    told = compiled(case.program)(drawn(PROGRAMS[case.program][0], case.density, every))
    told = {key: float(np.max(value)) for key, value in told.items()}
    least, most = case.selected
    low = explained(case, least * (1 - noise(case)))
    high = explained(case, most * (1 + noise(case)))

    def between(below, value, above, what):
        assert min(below, above) <= value <= max(below, above), (what, below, value, above)

    def total(rows, what):
        return sum(getattr(row, what) for row in rows)

    rounds = sum(value for key, value in told.items() if key.endswith("/rounds"))
    between(total(low, "rounds"), rounds, total(high, "rounds"), "rounds")
    sent = total(low, "sent_bytes"), total(high, "sent_bytes") + AGREED * len(low)
    between(sent[0], told["sync/wire_bytes"], sent[1], "bytes")
    for below, above in zip(low, high, strict=True):
        if f"sync/{below.name}/rounds" in told and len(low) == told_buckets(told):
            bytes_ = told[f"sync/{below.name}/wire_bytes"]
            between(below.sent_bytes, bytes_, above.sent_bytes + AGREED, below.name)
            between(below.rounds, told[f"sync/{below.name}/rounds"], above.rounds, "rounds")


def told_buckets(told):
    return sum(key.endswith("/rounds") for key in told)


def test_small_leaves_are_one_row_as_they_are_one_sum():
    for name in ("dense", "zen_table"):
        rows, leaves = explained(CASES[name]), PROGRAMS[CASES[name].program][0]
        told = compiled(CASES[name].program)(drawn(leaves, CASES[name].density, 1))
        names = {key.split("/rounds")[0] for key in told if key.endswith("/rounds")}
        assert names == {f"sync/{row.name}" for row in rows}
        assert [len(row.paths) for row in rows] == [1, 2]


@pytest.mark.slow
def test_there_are_twenty_configurations_and_the_bounds_are_narrow():
    assert len(CASES) >= 20
    for name, case in CASES.items():
        assert noise(case) < 0.15, name


# --- Rows. A rank lists so many ids of each table, of which so many are distinct.

IDS, DISTINCT = 512, 300
TABLES = {"a_embedding": (ROWS, WIDTH), "b_embedding": (9_000, WIDTH), "c": (16, WIDTH)}
OF_ROWS = {
    "zen": lambda: sparsejax.zen_sync(),
    "owners": lambda: sparsejax.sync(schemes.BalancedParallelism()),
    "sparse_ps": lambda: sparsejax.sync(schemes.SparsePS(), wire_dtype=jnp.bfloat16),
    "levels": levels,
}


@pytest.mark.parametrize("name", ["zen", *helpers.slow("owners", "sparse_ps", "levels")])
def test_what_is_explained_of_rows_is_what_is_sent(name):
    tx, (mesh, axes, ranks) = OF_ROWS[name](), mesh_of(name)
    both = "a_embedding", "b_embedding"
    params = {path: jnp.zeros(shape) for path, shape in TABLES.items()}

    def run(ids):
        grads = {
            path: sparsejax.RowGrads(ids[path][0], jnp.ones((IDS, WIDTH)), leaf.shape)
            for path, leaf in params.items()
        }
        grads = sparsejax.local(grads, axes)
        return sparsejax.metrics(tx.update(grads, tx.init(params))[1])

    rng = np.random.default_rng(5)
    draw = lambda height: np.resize(rng.permutation(height)[:DISTINCT], IDS)
    ids = {
        path: np.stack([draw(height) for _ in range(4)]).astype(np.int32)
        for path, (height, _) in TABLES.items()
    }
    told = jax.jit(helpers.shard_map(run, mesh=mesh, in_specs=P(axes), out_specs=P()))(ids)
    wire = {k: float(v) for k, v in told.items() if k.endswith("/wire_bytes")}
    rounds = {k: float(v) for k, v in told.items() if k.endswith("/rounds")}

    def explained(factor):
        density = {path: factor * DISTINCT / TABLES[path][0] for path in both}
        options = {"density": density, "ids": {"embed|c": IDS}}
        return sparsejax.explain(tx, params, ranks=ranks, network=NETWORK, **options)

    of_parts = 1.5 / math.sqrt(2 * DISTINCT / 4)
    low, high = explained(1 - of_parts), explained(1 + of_parts)
    if name == "zen":  # every rank sends its list, and there are no parts
        low = high = explained(1.0)
    (row, small) = low.rows
    assert (row.paths, row.ids, row.unit) == (both, 2 * IDS, "row")
    # Too small to be sent by rows.
    assert (small.paths, small.ids, small.scheme) == (("c",), 0, "AllReduce")
    name = "sync/a_embedding and 1 more"
    assert row.sent_bytes <= wire[f"{name}/wire_bytes"]
    assert wire[f"{name}/wire_bytes"] <= high.rows[0].sent_bytes + AGREED
    assert row.rounds == high.rows[0].rounds == rounds[f"{name}/rounds"]
    assert row.sent_bytes < row.dense_bytes / 4
    assert not row.verdict


def test_rows_that_are_dearer_than_an_array_are_said_to_be():
    params = {"embedding": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)}
    options = {"ranks": 16, "network": NETWORK, "ids": {"embedding": 2 * ROWS}}
    (row,) = sparsejax.explain(sparsejax.zen_sync(), params, **options).rows
    assert row.sources == ("uniform",)
    assert row.density == pytest.approx(1 - (1 - 1 / ROWS) ** (2 * ROWS))
    assert row.verdict == "dense is better here"
    assert row.fastest == "AllReduce"
