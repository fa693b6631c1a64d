"""Models have hundreds of leaves: what a transformation takes grows as they do, no faster.

One transformation of each kind makes the state of 48 leaves, and its update is traced
once, on two ranks. Time is the processor time of this process, and bounds are ratios of
times from the same run, so neither a busy machine nor a slow one matters.
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


def seconds(make, leaves):
    """Processor time of `init`, and of a trace of a step."""
    tx, p, mesh = make(), params(leaves), helpers.mesh_of(2)
    jax.clear_caches()
    start = time.process_time()
    state = sparsejax.init(tx, p, mesh)
    made = time.process_time()
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
    traced = time.process_time()
    jax.jit(run).trace(p, state, x)
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
