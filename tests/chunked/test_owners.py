"""Owners of blocks: their rounds are those of the formulas, and nothing is lost."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import errors
from sparsejax.chunked.exchange import ChunkedExchange
from sparsejax.state.by_owner import ByOwner
from sparsejax.state.per_rank import find
from tests import helpers
from tests.chunked import owned, runs
from tests.transforms import test_entry


# Ranks, codes, what is divided by, decay, whether weighted.
CASES = [
    (3, "2bit", "senders", 0.9, True),
    *helpers.slow((2, "float32", "ranks", 1.0, True), (8, "2bit", "senders", 1.0, False)),
]
OPTIONS = ("ranks", "values", "over", "decay", "weighted")
SMALL: dict[str, Any] = {"k": 4, "chunk": 64, "via": "owners"}


@pytest.mark.slow
@pytest.mark.parametrize(OPTIONS, CASES)
def test_rounds_are_those_of_the_formulas(ranks, values, over, decay, weighted):
    grads, weights, updates, _, owners = owned.rounds(*_case(locals()))
    options = {"values": values, "over": over, "decay": decay, "ranks": ranks}
    totals, held = owned.wanted(grads, weights, **options)
    for name, total in totals.items():
        np.testing.assert_allclose(updates[name], total, rtol=2e-5, atol=4e-6)
        np.testing.assert_allclose(owners[name], held[name], rtol=2e-5, atol=4e-6)


@pytest.mark.parametrize(OPTIONS, CASES)
def test_nothing_is_lost(ranks, values, over, decay, weighted):
    """What ranks have sent is what comes back and what owners hold, in float64."""
    grads, weights, updates, held, owners = owned.rounds(*_case(locals()))
    for name, given in grads.items():
        left = held[name].astype(np.float64)
        sent = decay * _before(left) + np.swapaxes(given, 0, 1) - left
        weight = weights.T.reshape(*weights.T.shape, *[1] * (sent.ndim - 2))
        counted = weight * (np.abs(sent) > 1e-5) if over == "senders" else weight
        divisor = np.broadcast_to(counted, sent.shape).sum(1)
        mean = (weight * sent).sum(1) / np.where(divisor == 0, 1, divisor)
        owner = owners[name]
        moved = updates[name].astype(np.float64)
        handed = decay * _before(owner) + mean
        np.testing.assert_allclose(moved + owner, handed, rtol=1e-6, atol=4e-6)
    assert any(np.abs(owner).any() for owner in owners.values())


def _case(given):
    return tuple(given[name] for name in OPTIONS)


def _before(x):
    return np.concatenate([np.zeros_like(x[:1]), x[:-1]])


@pytest.mark.slow
def test_a_sum_that_all_comes_back_is_that_of_one_all_gather():
    """The same bytes: ranks send the same codes, and owners add them in the same order."""
    grads, weights = owned.gradients(3), owned.uneven(3)
    blocks: dict[str, Any] = {"k": runs.K, "chunk": runs.CHUNK, "values": "float32"}
    gathered, _ = runs.ran(sparsejax.chunked_sync(**blocks), grads, weights)
    options: dict[str, Any] = {"pull_k": runs.CHUNK, "via": "owners"}
    updates, states = runs.ran(sparsejax.chunked_sync(**blocks, **options), grads, weights)
    assert helpers.octets(updates) == helpers.octets(gathered)
    (held,) = find(states, ByOwner)
    assert all((x == 0).all() for x in held.value)


@pytest.mark.slow
def test_what_is_not_finite_shows_at_once_and_does_not_stay():
    grads = owned.gradients(3)
    grads["whole"][1, 1, 5, 7], grads["whole"][2, 1, 20, 3] = np.nan, np.inf
    updates, states = runs.ran(sparsejax.chunked_sync(**SMALL, pull_k=4), grads)
    helpers.assert_same_on_all_ranks(updates)
    finite = lambda x: np.isfinite(x.reshape(3, runs.ROUNDS, -1)).all(-1)
    assert (finite(updates["whole"]) == [True, False, True, True, True]).all()
    assert finite(updates["stack"]).all()
    (held,) = find(states, ByOwner)
    assert all(np.isfinite(x).all() for x in held.value)


def formula(ranks, values_bits, table, pull_k):
    """Bytes of a piece on both ways, with k=64 of 4096, spelled out.

    "w" has 32 blocks of 4096 and "stack" 6: together 38. "bias" has two blocks of 50.
    """
    words = lambda bits: -(-bits // 32)
    share, of_bias = -(-38 // ranks), -(-2 // ranks)
    # The first block of "stack" in the order of the tree is the first of all.
    tables = 2 if any(r * share < 6 < (r + 1) * share for r in range(ranks)) else 1
    push = 6 * words(64 * share) + words(128 * share) + values_bits * words(64 * share)
    push += 6 * words(of_bias) + values_bits * words(of_bias) + table * (tables + 1)
    whole = min(pull_k, 64 * ranks)
    kept = min(round(50 * pull_k / 4096), ranks)  # 2 or 3 places of 50, of 6 bits
    low, string = {128: (5, 128 + 128), 192: (4, 192 + 256), 256: (4, 256 + 256)}[whole]
    pull = low * words(whole * share) + words(string * share)
    pull += values_bits * words(whole * share)
    pull += 6 * words(kept * of_bias)
    pull += values_bits * words(kept * of_bias) + table * (tables + 1)
    return 4 * push, 4 * pull


MODEL = {"w": (512, 256), "stack": (3, 64, 128), "bias": (100,)}


@pytest.mark.parametrize("ranks", [2, 9, 16, 64])
@pytest.mark.parametrize("pull_k", [128, 256])
def test_a_piece_has_the_bytes_of_the_formula(ranks, pull_k):
    exchange = ChunkedExchange(via="owners", pull_k=pull_k)
    shapes = [MODEL[name] for name in sorted(MODEL)]
    push, pull = formula(ranks, 2, 2, pull_k)
    cost = exchange.cost(shapes, ranks)
    assert (cost.push, cost.pull) == ((ranks - 1) * push, (ranks - 1) * pull)


def test_bytes_do_not_grow_with_the_ranks():
    cost = lambda ranks: ChunkedExchange().cost([(4096, 4096)], ranks)
    sent = {ranks: sum(cost(ranks)[:2]) for ranks in (8, 9, 16, 64, 256)}
    assert sent[8] == 7 * sparsejax.chunked.message.message_bytes([(4096, 4096)])
    bits = lambda ranks: 8 * sent[ranks] / 4096**2
    assert bits(16) < 0.65625
    assert bits(256) < 0.65625 * 1.01
    assert sent[16] < 0.57 * sent[8]


@pytest.mark.slow
def test_two_collectives_of_that_size_are_sent():
    ranks = 3
    tx = sparsejax.chunked_sync(via="owners")
    grads = {name: np.zeros((ranks, *shape), np.float32) for name, shape in MODEL.items()}

    def update(grads):
        params = helpers.parameters(grads)
        updates, state = tx.update(grads, tx.init(params))
        return updates, state.inner.exchange.traffic

    program = jax.make_jaxpr(helpers.stacked(update, ranks))(grads)
    found = helpers.collectives(program)
    names = [one.name for one in found]
    assert sorted(names) == ["all_gather", "all_to_all", "psum"]
    push, pull = formula(ranks, 2, 2, 256)
    sizes = {one.name: one.bytes for one in found}
    assert sizes["all_to_all"] == ranks * push
    assert sizes["all_gather"] == pull


def test_metrics_and_a_forecast_say_what_is_sent():
    options: dict[str, Any] = {"k": runs.K, "chunk": runs.CHUNK, "pull_k": owned.PULL_K}
    tx = optax.chain(sparsejax.chunked_sync(via="owners", **options), optax.sgd(0.1))
    params = {name: jnp.zeros(shape) for name, shape in owned.SHAPES.items()}
    network = sparsejax.Network(gbit_per_s=1, latency_us=20)
    told = sparsejax.explain(tx, params, ranks=3, network=network)
    exchange = ChunkedExchange(k=runs.K, chunk=runs.CHUNK, via="owners", pull_k=8)
    cost = exchange.cost([owned.SHAPES[name] for name in sorted(owned.SHAPES)], 3)
    assert told.step_bytes == cost.push + cost.pull
    *_, states = owned.ran(*CASES[0])
    numbers = sparsejax.metrics(jax.tree.map(lambda x: x[0, -1], states))
    # A piece is a word longer with a weight in it.
    assert numbers["sync/wire_bytes"] == cost.push + 2 * 4 + cost.pull


@pytest.mark.slow
def test_under_jit_each_shard_has_owners_of_its_own():
    """Of gradients that are stacked by replica."""
    mesh, spec = helpers.grid(replica=4, fsdp=2), P("fsdp", None)
    tx = sparsejax.chunked_sync("replica", **SMALL, reduce="sum", decay=0.95)
    rng = np.random.default_rng(0)
    x = rng.integers(-50, 51, (mesh.size, *test_entry.SHAPE)).astype(np.float32)
    wanted, state = test_entry.in_shard_map(tx, mesh, spec, x)
    found, after = test_entry.stacked(tx, mesh, spec, x)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    ours, others = (sparsejax.metrics(s)["sync/wire_bytes"] for s in (after, state))
    assert float(ours) == float(others) > 0
    for (own,), (other,) in [(find(after, ByOwner), find(state, ByOwner))]:
        for a, b in zip(own.value, other.value, strict=True):
            assert a.shape[:2] == (4, 2)
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
            assert np.abs(a).max() > 0


def state_of(tx, params, ranks, seed=0):
    """A state whose owners hold random numbers, where there are blocks."""
    state = sparsejax.init(tx, params, helpers.mesh_of(ranks))
    (node,) = find(state, ByOwner)
    rng, drawn = np.random.default_rng(seed), []
    for x, blocks in zip(node.value, (5, 6), strict=True):
        own = np.zeros((x.shape[0] * x.shape[2], x.shape[3]), np.float32)
        own[:blocks] = rng.standard_normal((blocks, x.shape[3]))
        drawn.append(own.reshape(x.shape))
    held = state[0].inner._replace(held=(node.with_value(drawn),))
    return (state[0]._replace(inner=held), *state[1:]), drawn


@pytest.mark.parametrize(("before", "after"), [(4, 2), (3, 4)])
def test_blocks_change_owners_with_the_ranks(before, after, tmp_path):
    tx = optax.chain(sparsejax.chunked_sync(**SMALL), optax.sgd(0.1))
    params = {"w": jnp.zeros((16, 24)), "b": jnp.zeros(40)}
    state, drawn = state_of(tx, params, before)
    sparsejax.save(tmp_path / "state", state)
    fresh = sparsejax.init(tx, params, helpers.mesh_of(after))
    for moved in (
        sparsejax.resized(state, like=fresh),
        sparsejax.restore(tmp_path / "state", fresh),
    ):
        (node,) = find(moved, ByOwner)
        assert int(node.ranks) == after
        for x, old in zip(node.value, drawn, strict=True):
            length = x.shape[-1]
            flat, wanted = np.asarray(x).reshape(-1, length), old.reshape(-1, length)
            count = min(len(flat), len(wanted))
            np.testing.assert_array_equal(flat[:count], wanted[:count])
            assert (flat[count:] == 0).all()
            assert (wanted[count:] == 0).all()


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2)])
def test_owners_of_other_shards_are_refused(sizes, tmp_path):
    """Blocks of the same number and length may be of other elements."""
    tx = sparsejax.chunked_sync("replica", **SMALL)

    def first(spec, sizes):
        mesh = helpers.grid(replica=sizes[0], fsdp=sizes[1])
        with jax.set_mesh(mesh):
            return sparsejax.init(tx, {"w": helpers.placed(np.zeros((16, 16)), mesh, spec)})

    state, fresh = first(P("fsdp"), (2, 2)), first(P(None, "fsdp"), sizes)
    sparsejax.save(tmp_path / "state", state)
    shapes = r"\[\[8, 16\]\].*\[\[16, 8\]\].*shard the parameters as before"
    with pytest.raises(errors.StateError, match=shapes):
        sparsejax.resized(state, like=fresh)
    with pytest.raises(errors.CheckpointError, match=shapes):
        sparsejax.restore(tmp_path / "state", fresh)


def test_densely_owners_send_what_they_hold_too():
    params = {"w": jnp.zeros((16, 24)), "b": jnp.zeros(40)}
    tx = sparsejax.chunked_sync(**SMALL)
    (state,), drawn = state_of(optax.chain(tx), params, 4)
    specs = sparsejax.state_specs(state)
    grads = {
        name: np.random.default_rng(2).standard_normal((4, *x.shape)).astype(np.float32)
        for name, x in params.items()
    }
    weight = np.array([1, 0, 2, 3], np.float32)

    def step(grads, weight, state):
        own = jax.tree.map(lambda x: x[0], grads)
        return tx.update(own, state, weight=weight[0], dense=True)

    each = P(helpers.AXIS)
    program = helpers.shard_map(
        step, mesh=helpers.mesh_of(4), in_specs=(each, each, specs), out_specs=(P(), specs)
    )
    updates, after = jax.jit(program)(grads, weight, state)
    sizes = [5, 6]
    rows = [x.reshape(-1, x.shape[-1])[:n] for x, n in zip(drawn, sizes, strict=True)]
    held = dict(zip(sorted(params), rows, strict=True))
    for name, x in grads.items():
        mean = np.tensordot(weight.astype(np.float64), x, 1) / weight.sum()
        flat = np.zeros(mean.size)
        places = owned.blocks_of(mean.shape)
        for at, block in zip(places, held[name], strict=True):
            flat[at] = block
        np.testing.assert_allclose(
            updates[name], mean + flat.reshape(mean.shape), rtol=1e-5, atol=1e-6
        )
    (node,) = find(after, ByOwner)
    assert all((np.asarray(x) == 0).all() for x in node.value)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"via": "ring"}, "via must be one of 'all_gather', 'owners', got 'ring'"),
        ({"via": "all_gather", "pull_k": 8}, 'pull_k=8 is for owners.*via="all_gather"'),
        ({"pull_k": 0}, "pull_k must be a positive int, got 0"),
        ({"pull_k": 5000}, "pull_k must be at most chunk=4096.*got 5000"),
        ({"via": "owners", "clip_to_median": True}, "clip_to_median compares the norms"),
    ],
)
def test_bad_options_are_named(options, wanted):
    with pytest.raises(errors.ArgumentError, match=wanted):
        sparsejax.chunked_sync(**options)


def test_owners_are_taken_above_eight_ranks():
    exchange = ChunkedExchange()
    assert not exchange.by_owners(8)
    assert exchange.by_owners(9)
    assert not ChunkedExchange(clip_to_median=True).by_owners(9)
    assert not ChunkedExchange(via="all_gather").by_owners(9)
