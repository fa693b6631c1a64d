"""Models have hundreds of leaves: what a transformation takes grows as they do, no faster.

One transformation of each kind makes the state of 48 leaves, and its update is traced
once, on two ranks. Time is the processor time of this process, and bounds are ratios of
times from the same run, so neither a busy machine nor a slow one matters. Compiling is
bounded by the number of different kernels, which XLA:CPU compiles once each.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import embrace, schemes, transforms
from tests import helpers


FEW, MANY = 12, 48
# Four times as many leaves may take this many times as long.
GROWS = 8.0
# A first state may take as long as this many traces of a step: `init` traces one to check
# the chain, and what `lazy` does to rows it finds by tracing the optimizer.
TRACES = 4.0
# Seconds, beside all factors: what does not grow, and the clock.
CONSTANT = 0.25

zen = sparsejax.zen_sync
sgd = lambda: optax.sgd(0.1)
TRANSFORMATIONS = {
    "zen_sync": zen,
    "embrace_sync": sparsejax.embrace_sync,
    "ok_topk_sync": lambda: sparsejax.ok_topk_sync(0.01),
    "chunked_sync": sparsejax.chunked_sync,
    "spardl_sync": lambda: sparsejax.spardl_sync(0.01),
    "power_sgd_sync": lambda: transforms.power_sgd_sync(2),
    "sync": lambda: sparsejax.sync(schemes.AGSparse(), rules={"": "sparse"}),
    "dgc": lambda: optax.chain(sparsejax.dgc(0.01, min_size=1), zen()),
    "accumulate": lambda: sparsejax.accumulate(optax.chain(zen(), sgd()), 2),
    "skip_nonfinite, report": lambda: sparsejax.skip_nonfinite(
        optax.chain(zen(), sgd()), report=True
    ),
    "lazy": lambda: optax.chain(zen(), sparsejax.lazy(optax.adam(1e-3))),
    "horizontal": lambda: embrace.horizontal(optax.chain(zen(), sgd()), order=["layer"]),
}


def params(leaves):
    return {"layer": {str(at): np.ones((256, 256), np.float32) for at in range(leaves)}}


def step_of(tx, p, state, mesh):
    """Returns the jitted step of a chain, and its operands."""
    specs = sparsejax.state_specs(state)

    def step(p, state, x):
        if hasattr(tx, "begin"):  # of `horizontal`, in two halves
            p, state = tx.begin(p, state)
        grads = jax.tree.map(lambda leaf: leaf * x[0], sparsejax.local(p))
        return tx.update(grads, state, p)

    run = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)
    )
    x = jax.device_put(jnp.ones(2), jax.NamedSharding(mesh, P("data")))
    return jax.jit(run), (p, state, x)


def seconds(make, leaves):
    """Processor time of `init`, and of a trace of a step."""
    tx, p, mesh = make(), params(leaves), helpers.mesh_of(2)
    jax.clear_caches()
    start = time.process_time()
    state = sparsejax.init(tx, p, mesh)
    made = time.process_time()
    run, operands = step_of(tx, p, state, mesh)
    traced = time.process_time()
    run.trace(*operands)
    return made - start, time.process_time() - traced


# One of each kind: by buckets, by leaves, by rows, and what wraps others.
KINDS = ["zen_sync", "chunked_sync", "dgc", "accumulate", "lazy", "horizontal"]


@pytest.mark.parametrize("name", helpers.slow(*KINDS))
def test_four_times_as_many_leaves_take_no_longer_than_they_must(name):
    make = TRANSFORMATIONS[name]
    seconds(make, 2)  # what only the first one pays
    few, many = seconds(make, FEW), seconds(make, MANY)
    print(f"{name}: init {few[0]:.2f} {many[0]:.2f}, trace {few[1]:.2f} {many[1]:.2f}")
    for before, after in zip(few, many, strict=True):
        assert after < CONSTANT + GROWS * before
    assert many[0] < CONSTANT + TRACES * many[1]


OF_EQUAL_LEAVES = {
    "zen_sync": lambda: optax.chain(zen(), optax.adam(1e-3)),
    "dgc": lambda: optax.chain(
        sparsejax.dgc(0.05, min_size=1),
        sparsejax.sync(schemes.AGSparse(), rules={"": "sparse"}),
        sgd(),
    ),
}


@pytest.mark.parametrize("name", ["zen_sync", *helpers.slow("dgc")])
def test_more_leaves_of_one_shape_take_no_more_kernels(name):
    tx, mesh, found = OF_EQUAL_LEAVES[name](), helpers.mesh_of(2), []
    for leaves in (16, 24):
        p = {str(at): jnp.ones((16, 16)) for at in range(leaves)}
        run, operands = step_of(tx, p, sparsejax.init(tx, p, mesh), mesh)
        found.append(helpers.kernels(run.lower(*operands).compile()))
    few, many = map(len, found)
    print(f"{name}: {few} and {many} kernels")
    assert many - few < 8  # further leaves
