"""Ranks that count differently in a round: the weighted mean, and what it sends."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from tests import helpers
from tests.rounds import model
from tests.rounds.model import RANKS


EVERY, LR, OUTER = 2, 0.05, 0.5
# Of each round: all count, one has no result, no rank has one.
WEIGHTS = np.array([[1, 2, 5], [3, 1, 0], [0, 0, 0], [7, 0, 1]], np.float32)
STEPS = EVERY * len(WEIGHTS)


def program(tx, given, weights):
    """A run of all steps: the anchors of all ranks after each, [steps, ranks, ...]."""
    mesh = helpers.mesh_of(RANKS)
    params = helpers.placed(model.first(given["x"].dtype), mesh, P())
    state = sparsejax.init(tx, params, mesh)

    def on_rank(carry, given, weights):
        def step(carry, given):
            (params, state), (batch, weight) = carry, given
            own = sparsejax.local(params, "data", state)
            extra = {} if weight is None else {"weight": weight}
            grads = jax.grad(model.loss_fn)(own, batch)
            updates, state = tx.update(grads, state, params, **extra)
            params = optax.apply_updates(params, updates)
            return (params, state), helpers.WIRE.per_rank(params)

        _, seen = jax.lax.scan(step, carry, (given, weights))
        return jax.tree.map(lambda x: x[:, None], seen)

    specs = (P(), sparsejax.state_specs(state))
    of = {"in_specs": (specs, P(None, "data"), P(None, "data"))}
    mapped = helpers.shard_map(on_rank, mesh=mesh, out_specs=P(None, "data"), **of)
    return mapped, ((params, state), given, weights)


def run(weights, given, **options):
    given = jax.tree.map(lambda *x: np.stack(x), *given)
    tx = sparsejax.local_steps(optax.sgd(LR), every=EVERY, **options)
    mapped, operands = program(tx, given, weights)
    return jax.tree.map(np.asarray, jax.jit(mapped)(*operands))


def each_step(weights):
    return np.repeat(weights, EVERY, axis=0)


def test_rounds_are_weighted_means_in_numpy_and_a_rank_of_none_may_have_a_nan():
    outer = optax.sgd(OUTER, momentum=0.9)
    with jax.enable_x64(True):
        given = model.batches(STEPS, np.float64)
        for number, rank in zip(*np.nonzero(WEIGHTS == 0), strict=True):
            rows = given[number * EVERY]["x"]
            rows[rank * len(rows) // RANKS] = np.nan
        found = run(each_step(WEIGHTS), given, outer=outer)
    helpers.assert_same_on_all_ranks(jax.tree.map(lambda x: np.swapaxes(x, 0, 1), found))
    anchor, trace = model.first(np.float64), {name: 0.0 for name in model.SHAPES}
    for number, weights in enumerate(WEIGHTS.astype(np.float64)):
        plain = [lambda name, x, g: x - LR * g] * RANKS
        steps = given[number * EVERY : (number + 1) * EVERY]
        left = model.inner_round(anchor, plain, steps)
        for name in anchor:
            counted = [w * one[name] for w, one in zip(weights, left, strict=True) if w]
            mean = sum(counted) / max(weights.sum(), 1)
            trace[name] = mean + 0.9 * trace[name]
            anchor[name] = anchor[name] - OUTER * trace[name]
            wanted = found[name][(number + 1) * EVERY - 1, 0]
            np.testing.assert_allclose(wanted, anchor[name], rtol=1e-12)


def test_weights_of_one_are_no_weights_bit_for_bit():
    ones, given = np.ones((STEPS, RANKS), np.float32), model.batches(STEPS)
    assert helpers.octets(run(ones, given)) == helpers.octets(run(None, given))


def test_weights_are_one_number_more_on_the_wire():
    def sent(weights):
        given = jax.tree.map(lambda *x: np.stack(x), *model.batches(2))
        tx = sparsejax.local_steps(optax.sgd(LR), every=EVERY)
        mapped, operands = program(tx, given, weights)
        traced = helpers.collectives(jax.make_jaxpr(mapped)(*operands))
        assert all("cond[1]" in one.path for one in traced)  # at the end of a round
        return [(one.name, one.bytes) for one in traced]

    plain = sent(None)
    assert [name for name, _ in plain] == ["psum"]
    assert sent(np.ones((2, RANKS), np.float32)) == [("psum", 4), *plain]


def test_a_negative_weight_shows():
    found = run(each_step(np.where(WEIGHTS == 5, -1, WEIGHTS)), model.batches(STEPS))
    assert np.isnan(found["w"][EVERY - 1]).all()


@pytest.mark.parametrize("kind", helpers.mostly_slow(helpers.KINDS, "explicit"))
def test_weights_under_jit_are_an_array_of_all_ranks(kind):
    """Rank 1 has no result in either round, and a NaN in the first."""
    weights, steps = np.array([1, 0, 3], np.float32), model.batches(4)
    specs = {"w": P("fsdp", None), "b": P()}
    tx = sparsejax.local_steps(optax.sgd(LR), every=2, axis_name="replica")
    mesh = helpers.KINDS[kind](helpers.grid(replica=RANKS, fsdp=2))
    params = helpers.placed(model.first(), mesh, specs)

    def loss_fn(params, batch):
        w = jax.reshard(params["w"], P()) if kind == "explicit" else params["w"]
        return model.loss_fn({**params, "w": w}, batch)

    of = jax.value_and_grad(loss_fn)
    value_and_grad = sparsejax.per_replica(of, "replica", specs)

    @jax.jit
    def step(params, state, batch, weight):
        own = sparsejax.local(params, "replica", state)
        _, grads = value_and_grad(own, batch)
        updates, state = tx.update(grads, state, params, weight=weight)
        return optax.apply_updates(params, updates), state

    steps[0]["x"][len(steps[0]["x"]) // RANKS] = np.nan
    with jax.set_mesh(mesh):
        state = sparsejax.init(tx, params)
        weight = helpers.placed(weights, mesh, P())
        for batch in helpers.placed(steps, mesh, P(("replica", "fsdp"))):
            params, state = step(params, state, batch, weight)
    alone = run(np.stack(4 * [weights]), steps)
    for name, x in params.items():
        np.testing.assert_allclose(x, alone[name][-1, 0], rtol=1e-5, atol=1e-6)
    sparsejax.check_replicas(params)
