"""A small model on replicas of shards, its batches, and its training by dense sums."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec as P

import sparsejax
from tests import helpers


WORDS, WIDTH, LAYERS, CLASSES, LENGTH = 512, 16, 3, 24, 8
BOTH = ("replica", "fsdp")
# Each leaf is sharded over fsdp, those of layers in their second dimension.
SPECS = {
    "embedding": P("fsdp", None),
    "layers": {
        "scale": P(None, "fsdp"),
        "up": P(None, "fsdp", None),
        "down": P(None, "fsdp", None),
    },
    "head": P("fsdp", None),
}


def mesh() -> Mesh:
    return helpers.grid(replica=4, fsdp=2)


def put(x: Any, spec: P) -> Any:
    return helpers.placed(x, mesh(), spec)


def parameters() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: (0.3 * rng.standard_normal(shape)).astype(np.float32)
    params = {
        "embedding": draw(WORDS, WIDTH),
        "layers": {
            "scale": 1 + draw(LAYERS, WIDTH),
            "up": draw(LAYERS, WIDTH, 2 * WIDTH),
            "down": draw(LAYERS, 2 * WIDTH, WIDTH),
        },
        "head": draw(WIDTH, CLASSES),
    }
    return jax.tree.map(put, params, SPECS)


def batches(count: int, *lengths: int) -> Iterator[tuple[Any, Any]]:
    """Words and classes [16, length], sharded over both axes, after further dimensions."""
    rng = np.random.default_rng(1)
    for _ in range(count):
        shape = (*lengths, 16, LENGTH)
        ids = (rng.zipf(1.3, shape) % WORDS).astype(np.int32)
        classes = rng.integers(0, CLASSES, shape).astype(np.int32)
        spec = P(*[None] * len(lengths), BOTH)
        yield put(ids, spec), put(classes, spec)


def block(x: jax.Array, layer: Any) -> jax.Array:
    scaled = jnp.einsum("btd,d->btd", x, layer["scale"])
    return x + jnp.tanh(scaled @ layer["up"]) @ layer["down"]


def entropy(logits: jax.Array, classes: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, classes).mean()


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """The mean loss, by `lax.scan` over the layers."""
    ids, classes = batch
    x = params["embedding"].at[ids].get(out_sharding=P(BOTH))
    each = lambda x, layer: (block(x, layer), None)
    x, _ = jax.lax.scan(each, x, params["layers"])
    return entropy(x @ params["head"], classes)


def zen(**options: Any) -> optax.GradientTransformationExtraArgs:
    return sparsejax.zen_sync(
        "replica", reduce="sum", rules={"embedding": "sparse"}, **options
    )


def dense() -> optax.GradientTransformation:
    """JAX's own sums."""
    as_param = lambda grad, param: jax.reshard(grad, jax.typeof(param).sharding)
    return optax.stateless(lambda grads, params: jax.tree.map(as_param, grads, params))


def make_step(
    value_and_grad: Callable[..., Any],
    tx: optax.GradientTransformation,
    axes: str | tuple[str, ...] = BOTH,
) -> Callable[..., Any]:
    """A step of parameters that are cast by `local`, of which all is donated."""

    def step(params, state, batch):
        loss, grads = value_and_grad(sparsejax.local(params, axes), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def types(tree: Any) -> list[Any]:
    return [jax.typeof(x) for x in jax.tree.leaves(tree)]


def trained(step: Callable[..., Any], tx: Any, given: Any) -> tuple[Any, Any, list[float]]:
    """Parameters, state and losses after a step on each batch; types stay what they are."""
    params = parameters()
    state = sparsejax.init(tx, params, axis_name="replica")
    before, losses = types((params, state)), []
    for batch in given:
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    assert types((params, state)) == before
    assert step._cache_size() == 1
    return params, state, losses


def assert_equal(found: Any, wanted: Any, room: float = 1e-5) -> None:
    """Raises unless trees are equal up to the order of sums."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=room)
