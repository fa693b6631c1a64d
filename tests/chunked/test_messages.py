"""Bytes: one collective of the size that a formula says, and metrics that say so."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax.chunked.message import message_bytes
from tests import helpers
from tests.chunked import runs


MODEL = {"w": (512, 256), "stack": (3, 64, 128), "odd": (17, 12), "bias": (100,), "s": ()}


def formula(values_bits, table):
    """Bytes of the message for MODEL with k=64 and chunk=4096, spelled out.

    Of 4096 numbers, 32 blocks of "w" and 6 of "stack": 64 entries each. "odd" is a block of
    204 with 3 entries, "bias" two blocks of 50 with one, the scalar a block of 1.
    """
    words = lambda bits: -(-bits // 32)
    entries = 38 * 64, 3, 2, 1
    places = 6 * words(38 * 64) + words(38 * 128), 8 * words(3), 6 * words(2), 0
    if values_bits < 8:
        values = [values_bits * words(count) for count in entries]
    else:
        values = [words(count * values_bits) for count in entries]
    return 4 * (sum(places) + sum(values) + 5 * table)


@pytest.mark.parametrize(
    ("values", "bits", "table"),
    [
        ("2bit", 2, 2),
        ("sign", 1, 1),
        ("2bit-bins", 2, 4),
        ("fp8", 8, 1),
        ("float32", 32, 0),
    ],
)
def test_a_message_has_the_bytes_of_the_formula(values, bits, table):
    assert message_bytes(MODEL.values(), values=values) == formula(bits, table)


def test_two_bits_of_64_in_4096_are_an_eighth_and_a_32nd_of_a_bit():
    size = 4096 * 256
    sent = message_bytes([(4096, 256)]) - 8  # without the table
    assert 8 * sent / size == 0.15625
    assert 4 * size / sent > 204


@pytest.mark.parametrize("ranks", [4, *helpers.slow(1)])
def test_one_collective_of_that_size_is_sent(ranks):
    tx = sparsejax.chunked_sync()
    grads = {name: np.zeros((ranks, *shape), np.float32) for name, shape in MODEL.items()}

    def update(grads):
        params = helpers.parameters(grads)
        updates, state = tx.update(grads, tx.init(params))
        return updates, state.inner.traffic

    program = jax.make_jaxpr(helpers.stacked(update, ranks))(grads)
    found = helpers.collectives(program)
    # The other is the norm of the residual.
    assert [one.name for one in found] == ["all_gather", "psum"]
    assert found[0].bytes == message_bytes(MODEL.values())
    assert found[1].bytes == 4


@pytest.mark.slow
def test_metrics_say_what_was_sent():
    tx = optax.chain(sparsejax.chunked_sync(k=runs.K, chunk=runs.CHUNK), optax.sgd(0.1))
    _, states = runs.ran(tx, runs.gradients())
    state = jax.tree.map(lambda x: x[0, -1], states)
    numbers = sparsejax.metrics(state)
    sent = message_bytes(runs.SHAPES.values(), runs.K, runs.CHUNK)
    assert numbers["sync/wire_bytes"] == (runs.RANKS - 1) * sent
    assert numbers["sync/total_wire_bytes"] == runs.ROUNDS * (runs.RANKS - 1) * sent
    size = sum(int(np.prod(shape)) for shape in runs.SHAPES.values())
    assert numbers["sync/dense_bytes"] == pytest.approx(2 * 2 / 3 * 4 * size)
    assert numbers["sync/residual_norm"] > 0


def test_a_forecast_is_what_is_sent():
    params = {name: jnp.zeros(shape) for name, shape in MODEL.items()}
    network = sparsejax.Network(gbit_per_s=1, latency_us=20)
    tx = optax.chain(sparsejax.chunked_sync(), optax.sgd(0.1))
    told = sparsejax.explain(tx, params, ranks=8, network=network)
    assert told.step_bytes == 7 * message_bytes(MODEL.values())
    assert "chunked_sync" in told.advice
    assert "Chunks" in str(told)
    (row,) = told.rows
    size, entries = sum(int(np.prod(shape)) for shape in MODEL.values()), 38 * 64 + 6
    assert row.density == pytest.approx(entries / size)
    assert row.density_after == pytest.approx(8 * entries / size)


@pytest.mark.slow
def test_densely_all_is_sent_by_one_sum():
    tx = sparsejax.warm_up(sparsejax.chunked_sync(k=runs.K, chunk=runs.CHUNK), steps=3)
    grads, weights = runs.gradients(), runs.uneven()
    updates, states = runs.ran(tx, grads, weights)
    helpers.assert_same_on_all_ranks(updates)
    for name, given in grads.items():
        weight = weights.reshape(*weights.shape, *[1] * (given.ndim - 2))
        held = np.where(weight == 0, given, 0)
        # Of the rank that had no weight before.
        given = given + np.concatenate([np.zeros_like(held[:, :1]), held[:, :-1]], axis=1)
        mean = (weight * given).sum(0) / weight.sum(0)
        np.testing.assert_allclose(updates[name][0][:3], mean[:3], rtol=1e-5, atol=1e-6)
        left = states.inner.residual.value[name][:, :3, 0]
        np.testing.assert_allclose(left[:, 1], held[:, 1], rtol=1e-6)
        assert (left[:, 2] == 0).all()
    sent = states.inner.inner.traffic["chunks"][0, :, 0]
    assert sent[0] > 4 * sent[-1]


def test_leaves_that_are_sharded_otherwise_have_a_message_of_their_own():
    """What is whole on each shard comes out typed so, with checking on."""
    mesh = helpers.grid(data=2, model=2)
    tx = sparsejax.chunked_sync("data", k=4, chunk=64)
    specs = {"w": P("model"), "b": P()}
    rng = np.random.default_rng(0)
    grads = {
        name: rng.standard_normal((2, *shape)).astype(np.float32)
        for name, shape in {"w": (32, 8), "b": (40,)}.items()
    }

    def update(grads):
        own = jax.tree.map(lambda x: x[0], grads)
        updates, state = tx.update(own, tx.init(helpers.parameters(own)))
        return updates, state.inner.traffic

    step = helpers.shard_map(
        update,
        mesh=mesh,
        in_specs=({"w": P("data", "model"), "b": P("data")},),
        out_specs=(specs, P()),
    )
    found = helpers.collectives(jax.make_jaxpr(step)(grads), "cpu")
    assert [one.name for one in found].count("all_gather") == 2
    updates, _ = jax.jit(step)(grads)
    assert np.abs(updates["b"]).max() > 0
