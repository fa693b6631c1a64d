"""Under `jit`: models of flax nnx and linen, and what JAX and flax refuse there."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax
from tests.transforms.in_jit import model
from tests.transforms.in_jit.model import BOTH, CLASSES, WIDTH, WORDS


STEPS = 3
SHARDED = {"out_sharding": ("fsdp", None)}


def linear(rngs, rows, columns, **options):
    options = options or {"kernel_metadata": SHARDED}
    return nnx.Linear(rows, columns, use_bias=False, rngs=rngs, **options)


class Net(nnx.Module):
    def __init__(self, rngs):
        embed = {"embedding_metadata": SHARDED, "rngs": rngs}
        self.words = nnx.Embed(WORDS, WIDTH, **embed)
        self.scale = nnx.Param(jnp.ones(WIDTH), out_sharding=("fsdp",))
        self.inside = linear(rngs, WIDTH, 2 * WIDTH)
        self.head = linear(rngs, 2 * WIDTH, CLASSES)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, ids):
        self.calls[...] += 1
        x = self.words(ids, out_sharding=P(BOTH))
        x = jnp.einsum("btd,d->btd", x, self.scale[...])
        return self.head(jnp.tanh(self.inside(x)))


def loss_of(net, batch):
    return model.entropy(net(batch[0]), batch[1])


def initialized(tx):
    """A transformation for `nnx.Optimizer`, which calls `tx.init` by itself.

    Its state has arrays in place of variables: flax would shard a residual, which has a
    further dimension, as its parameter.
    """
    init = lambda params: sparsejax.init(tx, nnx.as_pure(params), axis_name="replica")
    return optax.GradientTransformationExtraArgs(init, tx.update)


@nnx.jit(donate_argnums=(0, 1))
def nnx_step(net, optimizer, batch):
    graph, params, others = nnx.split(net, nnx.Param, ...)
    local = nnx.merge(graph, sparsejax.local(params, BOTH), others)
    loss, grads = nnx.value_and_grad(loss_of)(local, batch)
    optimizer.update(net, grads)
    nnx.update(net, nnx.state(local, nnx.Not(nnx.Param)))
    return loss


def by_optimizer(sync):
    """The model, its optimizer and the losses after some steps of `nnx.jit`."""
    with jax.set_mesh(model.mesh()):
        net = Net(nnx.Rngs(0))
        tx = initialized(optax.chain(sync, optax.sgd(0.5)))
        optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
        before = model.types((nnx.state(net), nnx.state(optimizer)))
        batches = model.batches(STEPS)
        losses = [float(nnx_step(net, optimizer, batch)) for batch in batches]
    assert model.types((nnx.state(net), nnx.state(optimizer))) == before
    assert int(net.calls[...]) == int(optimizer.step[...]) == STEPS
    return net, optimizer, losses


@pytest.mark.slow
def test_a_model_of_nnx_with_its_optimizer():
    net, optimizer, losses = by_optimizer(model.zen())
    dense, _, wanted = by_optimizer(model.dense())
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    model.assert_equal(nnx.state(net, nnx.Param), nnx.state(dense, nnx.Param))
    assert losses[-1] != losses[0]
    sent = sparsejax.metrics(nnx.as_pure(optimizer.opt_state))
    table = "sync/words/embedding"
    assert 0 < sent[f"{table}/wire_bytes"] < sent[f"{table}/dense_bytes"]


@pytest.mark.slow
def test_residuals_in_an_optimizer_of_nnx_lie_by_rank_and_shard():
    send = sparsejax.zen_sync("replica", reduce="sum")
    sparsifier = sparsejax.dgc(0.05, axis_name="replica", min_size=100)
    _, optimizer, losses = by_optimizer(optax.chain(sparsifier, send))
    residuals = sparsejax.residuals(nnx.as_pure(optimizer.opt_state))
    held = residuals["words"]["embedding"]
    assert jax.typeof(held).sharding.spec.partitions == ("replica", "fsdp", None)
    assert np.isfinite(losses).all()
    assert np.asarray(held).any((1, 2)).all()


ANNOTATIONS = {
    "kernel_metadata": lambda: {"kernel_metadata": SHARDED},
    "with_partitioning": lambda: {
        "kernel_init": nnx.with_partitioning(nnx.initializers.normal(), ("fsdp", None))
    },
    "sharding_names": lambda: {"kernel_metadata": {"sharding_names": ("fsdp", None)}},
}


@pytest.mark.filterwarnings("ignore:'sharding_names' is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ANNOTATIONS)
def test_what_nnx_annotates_is_sharded_and_its_gradient_comes_out_so(name):
    with jax.set_mesh(model.mesh()):
        graph, params = nnx.split(linear(nnx.Rngs(0), 8, 4, **ANNOTATIONS[name]()))
        tx = sparsejax.dense_sync("replica", reduce="sum")
        state = sparsejax.init(tx, params)
        x = model.put(np.arange(64, dtype=np.float32).reshape(8, 8), P(BOTH, None))

        def update(params, state, x):
            loss_fn = lambda params: nnx.merge(graph, params)(x).sum()
            return tx.update(
                jax.grad(loss_fn)(sparsejax.local(params, BOTH)), state, params
            )

        updates, _ = jax.jit(update)(params, state, x)
    (kernel,), (found,) = jax.tree.leaves(params), jax.tree.leaves(updates)
    assert jax.typeof(kernel).sharding.spec.partitions == ("fsdp", None)
    assert jax.typeof(found) == jax.typeof(kernel)
    wanted = np.asarray(x).sum(0)[:, None] * np.ones((1, 4))
    np.testing.assert_array_equal(np.asarray(found), wanted)


class LinenNet(nn.Module):
    """Annotated by `with_partitioning` where no mesh is set, or by logical names.

    So the lookup's sharding names its mesh.
    """

    annotated: Callable[..., Any] = nn.with_partitioning

    @nn.compact
    def __call__(self, ids):
        normal = self.annotated(nn.initializers.normal(0.3), ("fsdp", None))
        table = self.param("embedding", normal, (WORDS, WIDTH))
        out = NamedSharding(model.mesh(), P(BOTH, None, None))
        x = table.at[ids].get(out_sharding=out)
        x = jnp.tanh(nn.Dense(2 * WIDTH, use_bias=False, kernel_init=normal)(x))
        return nn.Dense(CLASSES, use_bias=False, kernel_init=normal)(x)


def by_linen(sync, annotated):
    net = LinenNet(annotated)
    (first,) = model.batches(1)
    boxed = net.init(jax.random.key(0), first[0])["params"]
    params = jax.tree.map(model.put, nn.unbox(boxed), nn.get_partition_spec(boxed))
    tx = optax.chain(sync, optax.sgd(0.5))
    init = lambda params: sparsejax.init(tx, params, axis_name="replica")
    bound = optax.GradientTransformationExtraArgs(init, tx.update)
    state = TrainState.create(apply_fn=net.apply, params=params, tx=bound)

    @jax.jit
    def step(state, batch):
        def loss_fn(params):
            return model.entropy(state.apply_fn({"params": params}, batch[0]), batch[1])

        loss, grads = jax.value_and_grad(loss_fn)(sparsejax.local(state.params, BOTH))
        return state.apply_gradients(grads=grads), loss

    before, losses = model.types(params), []
    # Only new parameters are asserted on where a mesh is set.
    with jax.set_mesh(model.mesh()):
        for batch in model.batches(STEPS):
            state, loss = step(state, batch)
            losses.append(float(loss))
    assert model.types(state.params) == before
    return state.params, losses


@pytest.mark.slow
def test_a_model_of_linen_with_its_train_state():
    with jax.set_mesh(model.mesh()):
        params, losses = by_linen(model.zen(), nn.with_logical_partitioning)
    dense, wanted = by_linen(model.dense(), nn.with_partitioning)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    model.assert_equal(params, dense)
    assert params["embedding"].sharding.spec == P("fsdp", None)


def norm_of_nnx(params, x, ids):
    graph, _ = nnx.split(nnx.RMSNorm(WIDTH, rngs=nnx.Rngs(0)))
    return nnx.merge(graph, {"scale": params["scale"]})(x)


def embed_of_nnx(params, x, ids):
    graph, _ = nnx.split(nnx.Embed(WORDS, WIDTH, rngs=nnx.Rngs(0)))
    return nnx.merge(graph, {"embedding": params["embedding"]})(ids)


# What docs/loss_in_jit.md says that JAX and flax refuse: where one goes, the page changes.
REFUSED = {
    "norm": (norm_of_nnx, "Inputs cannot be sharded/varying on the same axes"),
    # As JAX 0.10, and as JAX 0.12 says it.
    "embed": (embed_of_nnx, "pspec is dangerous|output PartitionSpec for the gather"),
    "linen": (
        lambda params, x, ids: LinenNet().init(jax.random.key(0), ids),
        "`with_sharding_constraint` acts as an assert",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_jax_and_flax_refuse_on_explicit_meshes(name):
    function, message = REFUSED[name]
    params = {
        "scale": model.put(np.ones(WIDTH, np.float32), P("fsdp")),
        "embedding": model.put(np.ones((WORDS, WIDTH), np.float32), P("fsdp", None)),
    }
    (batch,) = model.batches(1)
    with jax.set_mesh(model.mesh()):
        x = model.put(np.ones((16, model.LENGTH, WIDTH), np.float32), P(BOTH, None, None))
        loss_fn = lambda params: jnp.sum(function(params, x, batch[0]))
        with pytest.raises(Exception, match=message):
            jax.eval_shape(jax.grad(loss_fn), sparsejax.local(params, BOTH))


def test_a_cast_over_the_slow_axis_alone_is_refused_by_jax():
    """The batch is sharded over both; docs/loss_in_jit.md has what JAX says of it."""
    params = {"w": model.put(np.ones((WIDTH, 8), np.float32), P("fsdp", None))}
    with jax.set_mesh(model.mesh()):
        x = model.put(np.ones((16, WIDTH), np.float32), P(BOTH, None))
        gradient = jax.grad(lambda params: jnp.sum(x @ params["w"]))
        assert jax.eval_shape(gradient, sparsejax.local(params, BOTH))["w"].shape
        with pytest.raises(Exception, match="unreduced axes should be equal to the contr"):
            jax.eval_shape(gradient, sparsejax.local(params, BOTH[0]))


@pytest.mark.parametrize("kind", ["scale", "bias"])
def test_the_scale_of_a_norm_and_a_bias_are_broadcast(kind):
    """As docs/loss_in_jit.md writes them; the gradient is that of one device."""
    way = {
        "scale": lambda x, own: jnp.einsum("btd,d->btd", x, own),
        "bias": lambda x, own: x + jax.reshard(jnp.broadcast_to(own, x.shape), P(BOTH)),
    }[kind]
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (16, model.LENGTH, WIDTH)).astype(np.float32)
    params = {"w": model.put(np.ones(WIDTH, np.float32), P("fsdp"))}
    tx = sparsejax.dense_sync("replica", reduce="sum")
    state = sparsejax.init(tx, params)

    @jax.jit
    def update(params, state, x):
        loss_fn = lambda params: jnp.sum(way(x, params["w"]))
        grads = jax.grad(loss_fn)(sparsejax.local(params, BOTH))
        return tx.update(grads, state, params)[0]

    with jax.set_mesh(model.mesh()):
        found = update(params, state, model.put(x, P(BOTH, None, None)))["w"]
    wanted = {"scale": x.sum((0, 1)), "bias": np.full(WIDTH, 16.0 * model.LENGTH)}[kind]
    np.testing.assert_array_equal(np.asarray(found), wanted)
