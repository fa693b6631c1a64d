"""A model of a few blocks, which does not use them in the order of their names."""

import jax
import jax.numpy as jnp
import numpy as np


WIDTH, SHARE, VOCABULARY = 8, 4, 12
ORDER = ("words", "layers/0", "layers/1", ("norm", "head"))


def params():
    """Words, two layers, a norm and a head: the last used first, and the first last."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 2, jnp.float32)
    layer = lambda: {"w": draw(WIDTH, WIDTH), "b": draw(WIDTH)}
    return {
        "head": {"kernel": draw(WIDTH, 1)},
        "layers": [layer(), layer()],
        "norm": {"scale": draw(WIDTH)},
        "words": draw(VOCABULARY, WIDTH),
    }


def forward(params, ids):
    hidden = params["words"][ids]
    for layer in params["layers"]:
        hidden = jnp.tanh(hidden @ layer["w"] + layer["b"])
    return (hidden * params["norm"]["scale"]) @ params["head"]["kernel"]


def loss_fn(params, batch):
    return jnp.mean(jnp.square(forward(params, batch["ids"])[:, 0] - batch["y"]))


def batch_of(step, n):
    rng = np.random.default_rng(step)
    ids = rng.integers(0, VOCABULARY, n * SHARE).astype(np.int32)
    return {"ids": ids, "y": rng.normal(size=n * SHARE).astype(np.float32)}


def same(one, other):
    """Whether two trees have the same bytes."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)
