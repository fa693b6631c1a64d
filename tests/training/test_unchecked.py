"""Losses that JAX's check of varying values refuses, trained with `check_vma=False`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax.errors import ArgumentError
from tests import helpers


RANKS, EXAMPLES, LENGTH, HEIGHT, WIDTH = 2, 4, 5, 12, 4


def by_scan(params, tokens, begin=lambda zeros: zeros):
    """A scan over time, from zeros, as `flax.linen.RNN` makes one."""
    x = params["table"][tokens]

    def cell(h, x):
        h = jnp.tanh(x + h @ params["w"])
        return h, None

    first = begin(jnp.zeros((len(tokens), WIDTH)))
    h, _ = lax.scan(cell, first, jnp.swapaxes(x, 0, 1))
    return jnp.mean(h**2)


def by_local_scan(params, tokens):
    """The same with a carry that says that it differs by rank."""
    return by_scan(params, tokens, sparsejax.local)


RNN = linen.RNN(linen.LSTMCell(WIDTH))


def by_linen(params, tokens):
    return jnp.mean(RNN.apply(params["rnn"], params["table"][tokens]) ** 2)


def _doubled(x):
    def kernel(x_ref, y_ref):
        y_ref[...] = 2 * x_ref[...]

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=like, interpret=True)(x)


@jax.custom_vjp
def doubled(x):
    return _doubled(x)


doubled.defvjp(lambda x: (_doubled(x), None), lambda _, g: (_doubled(g),))


def by_pallas(params, tokens):
    """A kernel that does not say over which axes its result varies."""
    return jnp.mean(jnp.tanh(doubled(params["table"][tokens]) @ params["w"]) ** 2)


LOSSES = {
    "a scan with a carry of zeros": by_scan,
    "flax.linen.RNN": by_linen,
    "a Pallas kernel": by_pallas,
}


def params():
    rng = np.random.default_rng(0)
    x = np.zeros((1, LENGTH, WIDTH), np.float32)
    return {
        "table": rng.normal(size=(HEIGHT, WIDTH)).astype(np.float32),
        "w": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32),
        "rnn": RNN.init(jax.random.key(0), x),
    }


def batches(steps=3):
    rng = np.random.default_rng(1)
    shape = (RANKS * EXAMPLES, LENGTH)
    return [rng.integers(0, HEIGHT, shape).astype(np.int32) for _ in range(steps)]


@functools.cache
def dense(loss):
    """Losses and parameters of optax on one device."""
    tx, p = optax.adam(0.05), params()
    state, losses = tx.init(p), []
    step = jax.jit(jax.value_and_grad(loss))
    for batch in batches():
        value, grads = step(p, batch)
        updates, state = tx.update(grads, state, p)
        p = optax.apply_updates(p, updates)
        losses.append(float(value))
    return losses, p


def trained(loss, tx, **options):
    trainer = sparsejax.data_parallel(loss, tx, helpers.mesh_of(RANKS), **options)
    state, losses = trainer.init(params()), []
    for batch in batches():
        state, value = trainer.step(state, batch)
        losses.append(float(value))
    return losses, state


SYNCS = {
    "zen": lambda: optax.chain(sparsejax.zen_sync(), optax.adam(0.05)),
    "rows": lambda: optax.chain(sparsejax.zen_sync(), sparsejax.lazy(optax.adam(0.05))),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sync"),
    [
        ("a scan with a carry of zeros", "rows"),
        ("a Pallas kernel", "zen"),
        ("flax.linen.RNN", "zen"),
    ],
)
def test_what_the_check_refuses_trains_without_it(name, sync):
    loss = LOSSES[name]
    losses, state = trained(loss, SYNCS[sync](), check_vma=False)
    want, p = dense(loss)
    np.testing.assert_allclose(losses, want, rtol=1e-4)
    got = state.params
    if sync == "rows":
        rows = sparsejax.lazy(optax.adam(0.05))
        got, _ = sparsejax.rows.settle(got, state.opt_state, rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-3, 1e-4), got, p)


@pytest.mark.parametrize(
    "name", helpers.mostly_slow(LOSSES, "a scan with a carry of zeros")
)
def test_the_check_refuses_them(name):
    """In JAX's words, which *Sharp bits* quotes; else there would be no need for it."""
    trainer = sparsejax.data_parallel(LOSSES[name], SYNCS["zen"](), helpers.mesh_of(RANKS))
    state = trainer.init(params())
    said = "carry input and carry output must have equal types"
    said += "|manual_axis_type.* must not be .?None"
    with pytest.raises((TypeError, ValueError), match=said):
        jax.eval_shape(trainer.compiled(state), state, batches()[0])


@pytest.mark.slow
def test_a_local_carry_needs_no_switch_and_runs_on_one_device():
    losses, _ = trained(by_local_scan, SYNCS["zen"]())
    np.testing.assert_allclose(losses, dense(by_scan)[0], rtol=1e-4)
    np.testing.assert_allclose(
        by_local_scan(params(), batches()[0]), by_scan(params(), batches()[0]), rtol=1e-6
    )


def everything(check_vma):
    """Residuals, variables, auxiliary outputs, weights, evaluation and comparisons."""

    def loss(p, batch, *, variables, key):
        value = jnp.mean(jnp.tanh(p["table"][batch] @ p["w"]) ** 2)
        noise = 1e-3 * jax.random.normal(key)
        return value + noise, ({"value": value}, variables + 1)

    tx = optax.chain(sparsejax.dgc(0.2, min_size=1), sparsejax.zen_sync(), optax.adam(0.05))
    trainer = sparsejax.data_parallel(
        loss,
        sparsejax.skip_nonfinite(tx, report=True),
        helpers.mesh_of(RANKS),
        aux="stack",
        weight=lambda batch: jnp.sum(batch >= 0),
        check_every=1,
        check_vma=check_vma,
    )
    own = {name: x for name, x in params().items() if name != "rnn"}
    state = trainer.init(own, variables=jnp.zeros(2), key=jax.random.key(3))
    for batch in batches():
        state, out = trainer.step(state, batch)
    return helpers.octets(
        (state._replace(key=None), out, trainer.evaluate(state, batches()[0]))
    )


@pytest.mark.slow
def test_all_of_the_trainer_is_the_same_without_the_check():
    assert everything(check_vma=False) == everything(check_vma=True)


def test_specs_of_a_further_axis_need_the_check():
    mesh = helpers.grid(data=2, model=2)
    with pytest.raises(ArgumentError, match=r"check_vma=False .* with param_specs"):
        sparsejax.data_parallel(
            by_scan,
            optax.chain(sparsejax.zen_sync("data"), optax.adam(0.05)),
            mesh,
            axis_name="data",
            param_specs={"table": P("model"), "w": P(), "rnn": P()},
            check_vma=False,
        )
