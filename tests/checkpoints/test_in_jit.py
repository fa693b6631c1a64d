"""A run under `jit` on replicas of shards goes on from a checkpoint on another mesh."""

import itertools

import jax
import numpy as np
import optax
import pytest

import sparsejax
from tests import helpers
from tests.helpers import exact_model


pytest.importorskip("orbax.checkpoint")

SAVED_ON, STEPS = (4, 2), 3
RATE, MOMENTUM = 0.25, 0.5  # powers of two, so that parameters are exact
LOSSLESS = {
    "sgd": lambda: optax.sgd(RATE, momentum=MOMENTUM),
    "adam": lambda: optax.adam(0.01),
}
FIRST, LATER = (
    list(itertools.islice(exact_model.batches(2 * STEPS), *between))
    for between in ((STEPS,), (STEPS, None))
)


def chain(name):
    if name == "dgc":
        return optax.chain(exact_model.dgc(0.01), exact_model.sync(), optax.sgd(RATE))
    return optax.chain(exact_model.sync(), LOSSLESS[name]())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder and the run of each chain, trained and saved once."""
    found = {}

    def run_of(name):
        if name not in found:
            run = exact_model.Run(chain(name), exact_model.mesh_of(*SAVED_ON)).train(FIRST)
            path = tmp_path_factory.mktemp("in jit") / name
            sparsejax.save(path, {"params": run.params, "opt_state": run.state})
            found[name] = path, run
        return found[name]

    return run_of


def restored(path, name, sizes):
    """The run on another mesh, as a script goes on with it."""
    run = exact_model.Run(chain(name), exact_model.mesh_of(*sizes))
    like = {"params": run.params, "opt_state": run.state}
    found = sparsejax.restore(path, like)
    places = lambda tree: [x.sharding for x in jax.tree.leaves(tree)]
    assert places(found) == places(like)
    run.params, run.state = found["params"], found["opt_state"]
    return run


def dense(name):
    """The parameters after all batches, by dense gradients on one device."""
    tx = LOSSLESS[name]()
    params = {k: np.zeros(shape, np.float32) for k, shape in exact_model.SHAPES.items()}
    state = tx.init(params)
    for batch in FIRST + LATER:
        updates, state = tx.update(exact_model.gradient(batch), state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("sgd", (1, 1)),
        *helpers.slow(("sgd", (2, 4)), ("adam", SAVED_ON)),
    ],
)
def test_a_lossless_run_goes_on_as_dense_training(saved, name, sizes):
    run = restored(saved(name)[0], name, sizes).train(LATER)
    for path, wanted in dense(name).items():
        found, tolerance = np.asarray(run.params[path]), 1e-6 if name == "adam" else 0
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)
    assert int(sparsejax.metrics(run.state)["sync/exchanges"]) == len(FIRST + LATER)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 4), (1, 1)])
def test_what_replicas_hold_back_is_kept_where_their_number_changes(saved, sizes):
    """What was sent, and what is held, are the sum of all gradients, before and after."""
    path, before = saved("dgc")
    run = restored(path, "dgc", sizes)
    held = lambda run: jax.tree.map(
        lambda x: np.asarray(x).sum(0), sparsejax.residuals(run.state)
    )
    for name, wanted in held(before).items():
        np.testing.assert_array_equal(held(run)[name], wanted)
        assert wanted.any() or name == "bias"
    run.train(LATER)
    for name, rest in held(run).items():
        given = sum(exact_model.gradient(batch)[name] for batch in FIRST + LATER)
        sent = -np.asarray(run.params[name]) / RATE
        np.testing.assert_array_equal(sent + rest, given)
        assert rest.any() or name == "bias"
