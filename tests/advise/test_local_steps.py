"""What is said of local steps: one exchange a round, of what ranks have moved."""

import re

import jax
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax import errors
from tests import helpers


RANKS, EVERY = 8, 30
NETWORK = sparsejax.Network(1, 100)
SHAPES = {
    "embedding": jax.ShapeDtypeStruct((20_000, 64), np.float32),
    "kernel": jax.ShapeDtypeStruct((512, 512), jax.numpy.bfloat16),
}
SIZE = 20_000 * 64 + 512 * 512


def told(sync=None, inner=None, **options):
    inner = optax.adamw(1e-3) if inner is None else inner
    tx = sparsejax.local_steps(inner, every=EVERY, sync=sync)
    return sparsejax.explain(tx, SHAPES, ranks=RANKS, network=NETWORK, **options)


def test_an_exchange_is_counted_once_in_a_round():
    found = told()
    once = 2 * (RANKS - 1) / RANKS * SIZE * 4  # float32 or wider, whatever parameters are
    assert sum(row.sent_bytes for row in found.rows) == pytest.approx(once)
    assert found.step_bytes == pytest.approx(once / EVERY)
    assert "An exchange is at every 30 steps" in str(found)
    plain = sparsejax.explain(
        sparsejax.dense_sync(),
        {**SHAPES, "kernel": jax.ShapeDtypeStruct((512, 512), np.float32)},
        ranks=RANKS,
        network=NETWORK,
    )
    assert found.step_milliseconds == pytest.approx(plain.step_milliseconds / EVERY)


def test_what_optimizers_move_is_dense_also_of_a_table():
    """A gradient of 1% of the rows says nothing of what AdamW moves."""
    found = told(sparsejax.zen_sync())
    assert {row.density for row in found.rows} == {1.0}
    assert {source for row in found.rows for source in row.sources} == {"moved"}
    assert "added up" not in str(found)
    assert "a rank touches" not in str(found)


def test_a_density_that_is_given_is_that_of_what_was_moved():
    found = told(density={"embedding": 0.02})
    shares = {row.name: row.density for row in found.rows}
    assert shares == {"embedding": 0.02, "kernel": 1.0}
    assert re.search(r"Advice: use sync=sparsejax.zen_sync\(\)", found.advice)


@pytest.mark.parametrize("sync", [None, sparsejax.zen_sync()])
def test_nobody_is_told_to_sparsify_gradients_of_a_round(sync):
    advice = told(sync).advice
    assert "dgc" not in advice
    verb = "keep" if sync is None else "use"
    assert f"Advice: {verb} sync=sparsejax.dense_sync()" in advice
    assert "sparsejax.rounds.sparse_loco" in advice


def test_what_parameters_decide_is_asked_for():
    """Nothing in a shape says how much of an offset a cast of the parameter shows."""
    tx = sparsejax.rounds.pulse_loco(optax.adamw(1e-6), every=EVERY)
    asked = sparsejax.explain(tx, SHAPES, ranks=RANKS, network=NETWORK)
    assert "Advice: say first what share of embedding" in asked.advice
    assert "density_before" in str(asked)
    known = sparsejax.explain(tx, SHAPES, ranks=RANKS, network=NETWORK, density=0.01)
    assert "Advice: keep the exchange of a round, sparsejax.zen_sync()" in known.advice
    assert "density_before" not in str(known)


def test_a_preset_that_sends_less_is_kept():
    tx = sparsejax.rounds.sparse_loco(optax.adamw(1e-3), every=EVERY)
    found = sparsejax.explain(tx, SHAPES, ranks=RANKS, network=NETWORK)
    assert found.advice.startswith(
        "Advice: keep the exchange of a round, sparsejax.chunked_sync(...): "
    )


def test_a_part_outside_of_rounds_is_told_as_before():
    parts = {
        "rounds": sparsejax.local_steps(optax.sgd(0.1), every=EVERY),
        "each": optax.chain(sparsejax.zen_sync(), optax.sgd(0.1)),
    }
    tx = optax.partition(parts, {"embedding": "each", "kernel": "rounds"})
    found = sparsejax.explain(tx, SHAPES, ranks=RANKS, network=NETWORK)
    rows = {row.name: (row.every, row.sources) for row in found.rows}
    assert rows == {"embedding": (1, ("assumed",)), "kernel": (EVERY, ("moved",))}
    assert "Advice: keep sparsejax.zen_sync()" in found.advice


def test_rows_are_refused_by_the_name_of_local_steps():
    with pytest.raises(errors.ArgumentError, match="'embedding', and local_steps takes"):
        told(sparsejax.zen_sync(), ids={"embedding": 100})


def test_the_doctor_counts_one_exchange_a_round():
    tx = sparsejax.rounds.diloco(optax.adamw(1e-3), every=EVERY)
    report = sparsejax.doctor(tx, SHAPES, mesh=helpers.mesh_of(4), network=NETWORK)
    assert not report.wrong
    (found,) = [one for one in report.findings if one.about == "sync"]
    sent = 2 * 3 / 4 * SIZE * 4 / EVERY
    assert f"a step, of 30 to an exchange and on average, sends {sent / 1e3:.3g} kB" in (
        found.text
    )
    assert f"By rank, and not sent, are offsets, {SIZE * 4 / 1e6:.3g} MB" in found.text
