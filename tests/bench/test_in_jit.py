"""A model under `jit` on an explicit mesh is the one that a rank has in `shard_map`."""

import itertools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax
from benchmarks.training.explicit_models import Activations, Decoder
from benchmarks.training.in_jit_steps import Model, Run
from tests import helpers


WORDS, RANKS = 200, 4
MODELS = {
    "language": lambda: Model.of_language(WORDS, 4),
    "decoder": lambda: Model.of_decoder(Decoder(words=WORDS, width=8, layers=1)),
}
AXES = ("replica", "fsdp")


def batches(model, count):
    tokens = np.random.default_rng(0).zipf(1.2, 5000) % WORDS
    return list(itertools.islice(model.batches(tokens, RANKS, windows=2), count))


@pytest.mark.parametrize("name", helpers.mostly_slow(MODELS, "language"))
def test_the_gradients_under_jit_are_those_of_the_ranks(name):
    model, mesh = MODELS[name](), helpers.grid(replica=2, fsdp=2)
    (batch,) = batches(model, 1)
    of_rank, own = jax.jit(jax.value_and_grad(model.of_rank)), model.params
    of_ranks = [
        of_rank(own, {key: x[rank : rank + 1] for key, x in batch.items()})
        for rank in range(RANKS)
    ]
    wanted = jax.tree.map(lambda *x: np.mean(x, axis=0), *of_ranks)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    params = jax.tree.map(put, model.params, model.specs)
    placed = {key: put(x, P(AXES)) for key, x in batch.items()}

    @jax.jit
    def found(params, batch):
        loss_fn = model.loss(Activations(AXES))
        cast = sparsejax.local(params, AXES)
        loss, grads = jax.value_and_grad(loss_fn)(cast, batch)
        whole = lambda x: jax.reshard(x, P(*[None] * x.ndim))
        return loss, jax.tree.map(whole, grads)

    with jax.set_mesh(mesh):
        loss, grads = found(params, placed)
    np.testing.assert_allclose(loss, wanted[0], rtol=1e-5)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_steps_of_both_forms_agree():
    model = MODELS["language"]()
    given = batches(model, 3)
    rules = {"input_embedding|output_embedding": "sparse"}  # though they are small
    runs = []
    for form in ("jit", "shard_map", "rows"):
        axis, reduce = (AXES, "mean") if form == "shard_map" else ("replica", "sum")
        sync = sparsejax.zen_sync(axis, reduce=reduce, rules=rules)
        lazy = sparsejax.lazy(optax.sgd(0.1)) if form == "rows" else None
        tx = optax.chain(sync, lazy or optax.sgd(0.1))
        mesh, in_jit = helpers.grid(replica=2, fsdp=2), form != "shard_map"
        run = Run(model, tx, mesh, given, in_jit=in_jit, by_rows=lazy)
        run.compile()
        runs.append((run, [float(run()) for _ in given]))
    np.testing.assert_allclose(runs[0][1], runs[1][1], rtol=1e-5)
    np.testing.assert_allclose(runs[2][1], runs[1][1], rtol=1e-5)
    assert runs[0][1][0] != runs[0][1][-1]
    for name, x in runs[0][0].params.items():
        np.testing.assert_allclose(x, runs[1][0].params[name], atol=1e-5)
        assert np.any(np.asarray(x) != model.params[name])
    assert jax.typeof(runs[0][0].params["lstm"]).sharding.spec == P(None, "fsdp")
