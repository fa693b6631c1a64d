"""Fragments, delays and blends: Streaming DiLoCo's formulas, and exchanges beside steps."""

import math

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import errors
from sparsejax.rounds.fragments import Fragments
from tests import helpers
from tests.chunked import reference
from tests.rounds import model
from tests.rounds.model import EVERY, RANKS


LR, BETA = 0.7, 0.9
STREAMS = {"fragments": 2, "delay": 3, "blend": 0.5}
# Leaves by size: "w" is the first fragment, and "b" the second.
ORDER = ("w", "b")


def made(inner=None, **options):
    outer = optax.sgd(LR, momentum=BETA, nesterov=True)
    inner = inner or optax.sgd(0.05, momentum=0.9)
    return sparsejax.local_steps(inner, every=EVERY, outer=outer, **options)


def streaming(given, fragments, delay, blend, code=None):
    """The anchor after each step, from the formulas of Streaming DiLoCo.

    With a code a rank sends what it has moved in that, and keeps what rounding took.
    """
    anchor = model.first(np.float64)
    own = [dict(anchor) for _ in range(RANKS)]
    optimizers = [model.Sgd() for _ in range(RANKS)]
    velocity, on_its_way, anchors = dict.fromkeys(anchor, 0.0), {}, []
    held = [dict.fromkeys(anchor, 0.0) for _ in range(RANKS)]
    for step, batch in enumerate(given, 1):
        for rank, optimizer in enumerate(optimizers):
            rows = len(batch["x"]) // RANKS
            part = slice(rank * rows, (rank + 1) * rows)
            grads = model.gradient(own[rank], batch["x"][part], batch["y"][part])
            own[rank] = {k: optimizer(k, x, grads[k]) for k, x in own[rank].items()}
        for place, name in enumerate(ORDER, 1):
            # Fragments are sent at equal distances, the last one at the end of a round.
            at = EVERY if fragments == 1 else place * EVERY // fragments
            if step % EVERY == at % EVERY:
                sent = [anchor[name] - x[name] for x in own]
                if code:
                    sent = [x + left[name] for x, left in zip(sent, held, strict=True)]
                    rounded = [code(x) for x in sent]
                    for left, x, y in zip(held, sent, rounded, strict=True):
                        left[name] = x - y
                    sent = rounded
                mean = sum(sent) / RANKS
                on_its_way[name, step + delay] = mean
            if (name, step) in on_its_way:
                mean = on_its_way.pop((name, step))
                velocity[name] = mean + BETA * velocity[name]
                anchor[name] = anchor[name] - LR * (mean + BETA * velocity[name])
                for x in own:
                    x[name] = blend * x[name] + (1 - blend) * anchor[name]
        anchors.append(dict(anchor))
    return anchors


@pytest.mark.parametrize("options", [STREAMS, STREAMS | {"fragments": 1, "delay": 2}])
def test_five_rounds_are_those_of_streaming_diloco_in_numpy(options):
    with jax.enable_x64(True):
        given = model.batches(5 * EVERY + 2, np.float64)
        run = model.train(made(**options), given)
        wanted = streaming(given, **options)
        for found, anchor in zip(run.params, wanted, strict=True):
            for name, x in anchor.items():
                np.testing.assert_allclose(found[name][0], x, rtol=1e-10)
        # They move one at a time.
        moved = {name: [] for name in ORDER}
        for step in range(1, len(given)):
            for name in ORDER:
                if (run.params[step][name] != run.params[step - 1][name]).any():
                    moved[name].append((step + 1) % EVERY)
        delay = options["delay"]
        places = {"w": 2 if options["fragments"] == 2 else 0, "b": 0}
        for name, steps in moved.items():
            assert set(steps) == {(places[name] + delay) % EVERY}


def test_a_rule_may_be_of_a_leaf_in_one_fragment():
    sync = sparsejax.zen_sync(rules={"w": "sparse"})
    given = model.batches(EVERY)
    run = model.train(made(fragments=2, sync=sync), given)
    wanted = streaming(given, fragments=2, delay=0, blend=0)[-1]
    for name, x in wanted.items():
        np.testing.assert_allclose(run.params[-1][name][0], x, rtol=1e-5)
    assert {"sync/w/wire_bytes", "sync1/b/wire_bytes"} <= {*sparsejax.metrics(run.state)}


def test_a_rule_of_no_fragment_is_refused():
    sync = sparsejax.zen_sync(rules={"embedding": "sparse"})
    tx, params = made(fragments=2, sync=sync), model.first()
    message = "'embedding' matches no leaf. The leaves are: 'b', 'w'"
    with pytest.raises(errors.RuleError, match=message):
        sparsejax.init(tx, params, helpers.mesh_of(RANKS))
    network = sparsejax.Network(gbit_per_s=1, latency_us=20)
    with pytest.raises(errors.RuleError, match=message):
        sparsejax.explain(tx, params, ranks=RANKS, network=network)


@pytest.mark.slow
def test_the_preset_sends_four_bits_and_keeps_what_they_take():
    given = model.batches(5 * EVERY + 2)
    inner = optax.sgd(0.05, momentum=0.9)
    tx = sparsejax.rounds.streaming_diloco(inner, every=EVERY, lr=LR, **STREAMS)
    run = model.train(tx, given)
    wide = [{k: x.astype(np.float64) for k, x in batch.items()} for batch in given]
    wanted = streaming(wide, **STREAMS, code=reference.powers)
    for found, anchor in zip(run.params, wanted, strict=True):
        for name, x in anchor.items():
            np.testing.assert_allclose(found[name][0], x, rtol=2e-5, atol=2e-6)
    # Four bits a number, and a table, to two other ranks; "b" is on its way once more.
    metrics = sparsejax.metrics(run.state)
    sent = [metrics[f"{sync}/total_wire_bytes"] for sync in ("sync", "sync1")]
    sizes = [math.prod(model.SHAPES[name]) for name in ORDER]
    messages = [4 * (4 * -(-size // 32) + 1) for size in sizes]
    exchanges = zip((5, 4), messages, strict=True)
    assert list(map(float, sent)) == [n * (RANKS - 1) * x for n, x in exchanges]


class Beside:
    """A run whose exchanges are programs of their own."""

    def __init__(self, tx):
        self.mesh = helpers.mesh_of(RANKS)
        self.params = helpers.placed(model.first(), self.mesh, P())
        self.state = sparsejax.init(tx, self.params, self.mesh)
        self.overlap = sparsejax.rounds.Overlap(tx, self.mesh)
        specs = sparsejax.state_specs(self.state)

        def on_rank(params, state, batch):
            own = sparsejax.local(params, "data", state)
            loss, grads = jax.value_and_grad(model.loss_fn)(own, batch)
            updates, state = self.overlap.steps.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss[None]

        by_rank = P("data")
        self.step = jax.jit(
            helpers.shard_map(
                on_rank,
                mesh=self.mesh,
                in_specs=(P(), specs, by_rank),
                out_specs=(P(), specs, by_rank),
            ),
            donate_argnums=(0, 1),
        )

    def train(self, given):
        anchors = []
        for batch in given:
            batch = helpers.placed(batch, self.mesh, P("data"))
            self.params, self.state, _ = self.step(self.params, self.state, batch)
            self.params, self.state = self.overlap.turn(self.params, self.state)
            anchors.append(jax.tree.map(np.asarray, self.params))
        return anchors


@pytest.fixture(scope="module")
def beside():
    """A run of two rounds, with what it had in between, and its anchors."""
    sync = optax.chain(sparsejax.top_k(0.25, min_size=0), sparsejax.zen_sync())
    tx = made(sync=sync, **STREAMS)
    run, given = Beside(tx), model.batches(11)
    anchors = run.train(given[:6])
    # Both fragments are on their way after six steps.
    half = jax.tree.map(lambda x: x + 0, (run.params, run.state))
    return tx, run, given, half, anchors + run.train(given[6:])


@pytest.mark.slow
def test_exchanges_beside_the_steps_are_those_of_an_update(beside):
    tx, run, given, _, anchors = beside
    alone = model.train(tx, given)
    for found, own in zip(anchors, alone.params, strict=True):
        for name, x in found.items():
            np.testing.assert_allclose(x, own[name][0], rtol=1e-5, atol=1e-6)
    pairs = zip(jax.tree.leaves(run.state), jax.tree.leaves(alone.state), strict=True)
    for x, own in pairs:
        np.testing.assert_allclose(x, own, rtol=1e-4, atol=1e-5)
    sparsejax.check_replicas((run.params, run.state))


@pytest.mark.slow
def test_a_step_sends_nothing(beside):
    _, run, given, _, _ = beside
    batch = helpers.placed(given[0], run.mesh, P("data"))
    compiled = run.step.lower(run.params, run.state, batch).compile()
    assert not helpers.compiled_collectives(compiled, run.mesh)


def test_a_run_goes_on_from_a_state_with_exchanges_on_their_way(beside):
    _, run, given, half, anchors = beside
    last = helpers.octets((run.params, run.state))
    copy = lambda tree: jax.tree.map(lambda x: x + 0, tree)
    run.params, run.state = copy(half)
    with pytest.raises(errors.StateError, match=r"after step 11, .*step 7.*restart\(\)"):
        run.train(given[6:7])
    run.params, run.state = copy(half)
    run.overlap.restart()
    again = run.train(given[6:])
    assert helpers.octets(again) == helpers.octets(anchors[6:])
    assert helpers.octets((run.params, run.state)) == last


@pytest.mark.slow
def test_the_trainer_runs_exchanges_beside_its_steps():
    given, mesh = model.batches(9), helpers.mesh_of(RANKS)
    alone = sparsejax.data_parallel(model.loss_fn, made(**STREAMS), mesh)
    other = sparsejax.data_parallel(
        model.loss_fn, made(**STREAMS), mesh, overlap=True, check_every=2
    )
    one, two = alone.init(model.first()), other.init(model.first())
    for batch in given:
        one, loss = alone.step(one, batch)
        two, losses = other.step(two, batch)
        assert losses.shape == (RANKS,)
        np.testing.assert_allclose(np.asarray(losses).mean(), loss, rtol=1e-5)
    for name, x in one.params.items():
        np.testing.assert_allclose(two.params[name], x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        other.evaluate(two, given[0]), alone.evaluate(one, given[0]), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fragments": 3}, "fragments must divide every=4.*got 3: take fragments="),
        ({"fragments": 0}, "fragments must be"),
        ({"delay": 4}, "delay must be less than every=4.*got 4: take 3"),
        ({"delay": -1}, "delay must be"),
        ({"blend": 1.0, "delay": 1}, r"blend must lie in \[0, 1\), got 1.0"),
        ({"blend": 0.5}, "blend=0.5 keeps .* without a delay"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(errors.ArgumentError, match=message):
        made(**options)


def test_refusals_that_need_more_than_the_options():
    mesh = helpers.mesh_of(RANKS)
    params = helpers.placed(model.first(), mesh, P())
    with pytest.raises(errors.ArgumentError, match="fragments=4 is more than the 2 leaves"):
        sparsejax.init(made(fragments=4), params, mesh)
    with pytest.raises(errors.ArgumentError, match=r"takes what sparsejax.local_st"):
        sparsejax.rounds.Overlap(optax.sgd(0.1), mesh)
    with pytest.raises(errors.ArgumentError, match=r"takes a jax.sharding.Mesh, got a str"):
        sparsejax.rounds.Overlap(made(), "data")
    of_three = sparsejax.rounds.Overlap(made(), jax.make_mesh((RANKS,), ("x",)))
    state = sparsejax.init(made(), params, mesh)
    with pytest.raises(errors.AxisError, match="the mesh has no axis 'data'; it has"):
        of_three.turn(params, state)
    for name in ("weight", "dense"):
        with pytest.raises(errors.ArgumentError, match=f"steps was given {name}=.*Overlap"):
            of_three.steps.update(params, state, params, **{name: 1.0})
    trainer = sparsejax.data_parallel(model.loss_fn, made(), mesh, overlap=True)
    with pytest.raises(errors.ArgumentError, match="give it variables='by_rank'"):
        trainer.init(model.first(), variables={"mean": np.zeros(3)})
    for options, message in (
        ({"weight": lambda batch: batch["x"].sum()}, "weight= puts shares together"),
        ({"has_aux": True}, "take aux='stack'"),
    ):
        with pytest.raises(errors.ArgumentError, match=message):
            sparsejax.data_parallel(model.loss_fn, made(), mesh, overlap=True, **options)
    tx = made(sync=sparsejax.chunked_sync(), delay=2)
    state = sparsejax.init(tx, params, mesh)
    with pytest.raises(errors.ArgumentError, match="with delay=2 what is applied"):
        tx.update(params, state, params, weight=1.0)


def test_leaves_are_shared_out_by_size():
    sizes = {"a": 5, "b": 9, "c": 1, "d": 4, "e": 3}
    params = {name: np.zeros(size) for name, size in sizes.items()}
    fragments = Fragments.of(params, 2)
    assert fragments.numbers == (1, 0, 1, 1, 0)
    parts = [fragments.only(n, params) for n in range(2)]
    assert sum(x.size for x in jax.tree.leaves(parts[0])) == 12
    assert helpers.octets(fragments.together(parts)) == helpers.octets(params)
