"""DeMo and FlexDeMo: five steps on three ranks are those of the formulas, in float64."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax.chunked.message import message_bytes
from tests import helpers
from tests.chunked import reference, runs
from tests.rounds import given
from tests.rounds.given import RANKS, STEPS


BLOCKS = {"k": runs.K, "chunk": runs.CHUNK}
DECAY, WEIGHT_DECAY = 0.9, 0.1
# Sides that 8 does not divide, and matrices of their own.
SHAPES = {name: runs.SHAPES[name] for name in ("odd", "prime", "scalar", "stack")}
LARGE = {"w": (256, 257), "b": (7,)}  # the second is sent whole
SHARE = 0.1


def rate(step):
    return 0.02 - 0.003 * step


def accumulated(grads):
    """What DeMo sends of gradients, the mean of its senders, and what is left."""
    options = {"values": "float32", "over": "senders", "decay": DECAY, "transform": "dct"}
    weights = np.ones((RANKS, STEPS))
    return reference.rounds(grads, weights, **BLOCKS, **options)


def assert_signs(found, start, totals, rates, weight_decay=0.0):
    """Parameters after each step, but for signs of what is zero within float32."""
    p, sure = start.astype(np.float64), np.ones(start.shape, bool)
    # By the formula there is nothing in the middle of a block of odd length.
    for step, total in enumerate(np.where(np.abs(totals) < 1e-12, 0, totals)):
        sure &= (np.abs(total) > 1e-6) | (total == 0)
        p = p * (1 - rates[step] * weight_decay) - rates[step] * np.sign(total)
        np.testing.assert_allclose(found[step][sure], p[sure], rtol=1e-5, atol=1e-6)
    assert sure.mean() > 0.99


@functools.cache
def demo(check_vma=True):
    tx = sparsejax.rounds.demo(rate, DECAY, weight_decay=WEIGHT_DECAY, **BLOCKS)
    grads, params = given.drawn(SHAPES), given.parameters(SHAPES)
    return params, grads, *given.trained(tx, params, grads, check_vma)


@pytest.mark.slow
def test_demo_is_that_of_the_formulas():
    params, grads, found, state = demo()
    rates = np.array([rate(step) for step in range(STEPS)])
    scaled = lambda x: x * rates.reshape(STEPS, *[1] * (x.ndim - 2))
    totals, left = accumulated({name: scaled(x) for name, x in grads.items()})
    helpers.assert_same_on_all_ranks(found)
    residuals = given.held(state)
    for name, x in found.items():
        assert_signs(x[0], params[name], totals[name], rates, WEIGHT_DECAY)
        np.testing.assert_allclose(residuals[name], left[name][-1], rtol=1e-4, atol=1e-7)
    message = message_bytes(list(SHAPES.values()), **BLOCKS, values="float32")
    sent = sparsejax.metrics(jax.tree.map(lambda x: x[0], state))["sync/total_wire_bytes"]
    assert float(sent) == STEPS * (RANKS - 1) * message
    # Every block sends, so every parameter moves.
    assert all((x[0, -1] != params[name]).all() for name, x in found.items() if x.size > 9)


@pytest.mark.slow
def test_demo_is_the_same_whether_types_are_checked_or_not():
    *_, found, _ = demo(check_vma=False)
    helpers.assert_same_on_all_ranks(found)
    assert helpers.octets(found) == helpers.octets(demo()[2])


def flex(replicator, **options):
    """By plain SGD of rate 1, so that what moves is what was exchanged."""
    options = {"decay": DECAY, "share": SHARE, "sign": False, **BLOCKS} | options
    tx = sparsejax.rounds.flex_demo(optax.sgd(1.0), replicator, **options)
    grads, params = given.drawn(LARGE), given.parameters(LARGE)
    return params, grads, *given.trained(tx, params, grads)


def moves(params, found, name):
    """What each step has taken from a parameter."""
    before = np.concatenate([params[name][None], found[name][0, :-1]])
    return before.astype(np.float64) - found[name][0]


@pytest.mark.parametrize("replicator", ["striding", *helpers.slow("random")])
def test_a_share_of_the_numbers_is_the_same_on_all_ranks(replicator):
    params, grads, found, state = flex(replicator)
    helpers.assert_same_on_all_ranks(found)
    size = params["w"].size
    k = int(np.ceil(SHARE * size))
    stride = -(-size // k)
    left, seen = np.zeros((RANKS, size)), np.zeros(size, int)
    for step, moved in enumerate(moves(params, found, "w").reshape(STEPS, -1)):
        left = DECAY * left + grads["w"][:, step].reshape(RANKS, -1)
        sent = np.arange(size) % stride == step % stride
        if replicator == "random":
            sent = np.abs(moved) > 1e-7  # drawn: which, these tell
            assert k - 10 < sent.sum() <= k
        wanted = np.where(sent, left.mean(0), 0)
        np.testing.assert_allclose(moved, wanted, atol=2e-6)
        left, seen = np.where(sent, 0, left), seen + sent
    np.testing.assert_allclose(
        given.held(state)["w"].reshape(RANKS, -1), left, rtol=1e-5, atol=1e-5
    )
    # Another part in every step: of random ones some come again. No indices travel.
    assert (seen > 0).mean() > 1 - (1 - SHARE) ** STEPS - 0.01
    sent = sparsejax.metrics(jax.tree.map(lambda x: x[0], state))["sync/total_wire_bytes"]
    wanted = STEPS * 2 * (RANKS - 1) / RANKS * 4 * (k + params["b"].size)
    assert float(np.max(sent)) == pytest.approx(wanted, rel=1e-3)
    np.testing.assert_allclose(
        moves(params, found, "b"), grads["b"].mean(0), rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
def test_full_is_a_mean_and_signs_are_of_it():
    params, grads, found, _ = flex("full", sign=True)
    for name, x in found.items():
        total = grads[name].astype(np.float64).mean(0)
        assert_signs(x[0], params[name], total, np.ones(STEPS))


SHARDED = {"w": (26, 6), "b": (5,)}  # shards of 13 rows, which no side of a block divides
SPECS = {"w": P("fsdp", None), "b": P()}


def shards(x):
    """The shards of a gradient [ranks, steps, ...]."""
    return np.split(x, 2, axis=2)


@pytest.mark.slow
def test_under_jit_each_shard_is_exchanged_across_replicas():
    """On explicit axes; on Auto ones owners are, in `test_owners`."""
    mesh = helpers.KINDS["explicit"](helpers.grid(replica=RANKS, fsdp=2))
    tx = sparsejax.rounds.flex_demo(
        optax.sgd(0.01), decay=DECAY, axis_name="replica", **BLOCKS
    )
    start, grads = given.parameters(SHARDED), given.drawn(SHARDED)
    params = helpers.placed(start, mesh, SPECS)
    state = sparsejax.init(tx, params)

    @jax.jit
    def step(params, state, grads):
        stacked = {
            name: sparsejax.transforms.PerReplica(x, "replica", SPECS[name], mesh)
            for name, x in grads.items()
        }
        updates, state = tx.update(stacked, state, params)
        return optax.apply_updates(params, updates), state

    placed, found = {name: P("replica", *spec) for name, spec in SPECS.items()}, []
    for i in range(STEPS):
        now = {name: x[:, i] for name, x in grads.items()}
        params, state = step(params, state, helpers.placed(now, mesh, placed))
        found.append(jax.tree.map(np.asarray, params))
    sparsejax.check_replicas((params, state))
    totals, left = accumulated({"b": grads["b"]})
    halves = [accumulated({"w": x}) for x in shards(grads["w"])]
    totals["w"] = np.concatenate([of[0]["w"] for of in halves], axis=1)
    left["w"] = np.concatenate([of[1]["w"] for of in halves], axis=2)
    residuals = sparsejax.residuals(state)
    for name, total in totals.items():
        of_steps = [one[name] for one in found]
        assert_signs(of_steps, start[name], total, np.full(STEPS, 0.01))
        np.testing.assert_allclose(residuals[name], left[name][-1], rtol=1e-4, atol=1e-5)
