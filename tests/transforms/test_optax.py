"""What people compose with optax: equal to dense training, or refused with what to write.

One row a composition. A synchronization takes the place of optax.identity(), and nothing
else changes; it trains on four ranks as the dense script does on all examples.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax import contrib

import sparsejax
from sparsejax import schemes
from tests import helpers


RANKS, EXAMPLES, HEIGHT, WIDTH, STEPS = 4, 16, 40, 4, 3


def params():
    rng = np.random.default_rng(0)
    return {
        "embedding": rng.normal(size=(HEIGHT, WIDTH)).astype(np.float32),
        "w": rng.normal(size=(WIDTH, 3)).astype(np.float32),
        "b": np.zeros(3, np.float32),
    }


def loss(p, ids):
    logits = jnp.tanh(p["embedding"][ids]) @ p["w"] + p["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids % 3).mean()


def batches():
    rng = np.random.default_rng(1)
    return [rng.integers(0, HEIGHT, EXAMPLES).astype(np.int32) for _ in range(STEPS)]


class Refused(NamedTuple):
    """A composition that does not work, and what is said."""

    make: Any
    match: str


SCHEDULE = optax.warmup_cosine_decay_schedule(0, 3e-2, 2, 20)
TABLE = {"embedding": "table", "w": "rest", "b": "rest"}
NOT_TABLE = {"embedding": False, "w": True, "b": True}
WORKS = {
    "inject_hyperparams of the whole chain": lambda z: optax.inject_hyperparams(
        lambda learning_rate: optax.chain(z, optax.adam(learning_rate))
    )(learning_rate=1e-2),
    "a clip by the global norm and a schedule": lambda z: optax.chain(
        z, optax.clip_by_global_norm(0.1), optax.adamw(SCHEDULE, weight_decay=0.1)
    ),
    "two synchronizations in a partition": lambda z: optax.partition(
        {
            "table": optax.chain(z, optax.adagrad(0.1)),
            "rest": optax.chain(z, optax.adam(1e-2)),
        },
        TABLE,
    ),
    "apply_if_finite after it": lambda z: optax.chain(
        z, optax.apply_if_finite(optax.adam(1e-2), 3)
    ),
    "frozen in front": lambda z: optax.chain(
        optax.masked(optax.set_to_zero(), {"embedding": True, "w": False, "b": False}),
        z,
        optax.adam(1e-2),
    ),
    "muon": lambda z: optax.chain(z, contrib.muon(1e-2)),
    "schedule_free": lambda z: contrib.schedule_free(
        optax.chain(z, optax.adam(1e-2, b1=0.0)), 1e-2
    ),
    "sam": lambda z: optax.chain(
        z, contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2)
    ),
}
BY_THE_TRAINER = ["muon"]
REFUSED = {
    "a part is masked out": Refused(
        lambda z: optax.chain(optax.masked(z, NOT_TABLE), optax.adam(1e-2)),
        r"update of 'embedding' still differs by rank.*sparsejax.dense_sync",
    ),
    "frozen by a partition": Refused(
        lambda z: optax.partition(
            {"rest": optax.chain(z, optax.adam(1e-2)), "table": optax.set_to_zero()}, TABLE
        ),
        r"update of 'embedding' still differs by rank.*optax.masked\(optax.set_to_zero\(\)",
    ),
}


def sync():
    """What compiles fastest of what sends rows."""
    return sparsejax.sync(schemes.AGSparse(), rules={"": "sparse"})


@functools.cache
def dense(name):
    tx, p, losses = WORKS[name](optax.identity()), params(), []
    state = tx.init(p)

    @jax.jit
    def step(p, state, ids):
        value, grads = jax.value_and_grad(loss)(p, ids)
        updates, state = tx.update(grads, state, p)
        return optax.apply_updates(p, updates), state, value

    for ids in batches():
        p, state, value = step(p, state, ids)
        losses.append(float(value))
    return losses, p


def same(found, name):
    losses, p = found
    want, q = dense(name)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    for key in p:
        np.testing.assert_allclose(p[key], q[key], rtol=1e-4, atol=2e-5, err_msg=key)
        copies = [np.asarray(shard.data).tobytes() for shard in p[key].addressable_shards]
        assert len(set(copies)) == 1, key


@pytest.mark.slow
@pytest.mark.parametrize("name", [x for x in WORKS if x not in BY_THE_TRAINER])
def test_it_trains_as_the_dense_script_does(name):
    """In a `shard_map` of one's own, checking on, the state made by `init`."""
    tx, mesh = WORKS[name](sync()), helpers.mesh_of(RANKS)
    p, losses = params(), []
    state = sparsejax.init(tx, p, mesh)
    specs = sparsejax.state_specs(state)

    def step(p, state, ids):
        value, grads = jax.value_and_grad(loss)(sparsejax.local(p), ids)
        updates, state = tx.update(grads, state, p)
        return optax.apply_updates(p, updates), state, jax.lax.pmean(value, "data")

    run = jax.jit(
        helpers.shard_map(
            step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P())
        )
    )
    for ids in batches():
        p, state, value = run(p, state, ids)
        losses.append(float(value))
    same((losses, p), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BY_THE_TRAINER, "frozen in front"])
def test_the_trainer_makes_the_same_step(name):
    trainer = sparsejax.data_parallel(loss, WORKS[name](sync()), helpers.mesh_of(RANKS))
    state, losses = trainer.init(params()), []
    for ids in batches():
        state, value = trainer.step(state, ids)
        losses.append(float(value))
    same((losses, state.params), name)
    sent = float(sparsejax.metrics(state.opt_state)["sync/embedding/payload_bytes"])
    assert (sent == 0) == (name == "frozen in front")


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_work_says_what_to_write(name):
    def traced():
        tx = REFUSED[name].make(sync())
        trainer = sparsejax.data_parallel(loss, tx, helpers.mesh_of(RANKS))
        state = trainer.init(params())
        jax.eval_shape(trainer.compiled(state), state, batches()[0])

    with pytest.raises(sparsejax.errors.SparsejaxError, match=REFUSED[name].match):
        traced()
