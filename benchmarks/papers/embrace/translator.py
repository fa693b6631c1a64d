"""A small Transformer from English to German: its data, its loss, and its translations."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.data.sentences import (
    BEGIN,
    END,
    PAD,
    UNKNOWN,
    held_out as apart,
    numbered,
    short,
)
from examples.data.translations import sentence_pairs


LENGTH, HEADS = 10, 4


@functools.cache
def sentences(words: int, held_out: bool) -> tuple[np.ndarray, np.ndarray, list]:
    """Pairs of short sentences, as numbers.

    Args:
        words: How many of each language have a number.
        held_out: Whether to return those that are not trained on.

    Returns:
        English [pairs, LENGTH], German [pairs, LENGTH + 2] from `BEGIN` to `END`, both
        filled up with `PAD`, and the numbers of the German words of each as a list.
    """
    pairs = short(sentence_pairs()[0], LENGTH)
    source, target = numbered(pairs, words, LENGTH)
    kept = apart(pairs) == held_out
    german = [text[1 : text.index(END)] for text in target[kept].tolist()]
    return source[kept], target[kept], german


def init(words: int, width: int, hidden: int) -> dict[str, Any]:
    """The parameters."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        scale = 1 / np.sqrt(shape[0])
        return (scale * rng.standard_normal(shape, np.float32)).astype(np.float32)

    def attention():
        return {name: normal(hidden, hidden) for name in ("ask", "key", "value", "out")}

    def wide():
        return {"up": normal(hidden, 2 * hidden), "down": normal(2 * hidden, hidden)}

    def table():
        return rng.standard_normal((words, width), np.float32)

    rest = {
        "source": normal(width, hidden),
        "target": normal(width, hidden),
        "encoder": {"self": attention(), "wide": wide()},
        "decoder": {"self": attention(), "cross": attention(), "wide": wide()},
        "words": normal(hidden, words),
        "bias": np.zeros(words, np.float32),
    }
    return {"tables": {"source": table(), "target": table()}, "rest": rest}


def loss(vectors: dict[str, jax.Array], rest: Any, batch: dict[str, Any]) -> jax.Array:
    """The mean cross entropy of a rank's German words, each after those before it."""
    there, after = batch["source"] != PAD, batch["after"]
    meaning = _encoded(rest, vectors["source"], there)
    scores = _scores(rest, vectors["target"], meaning, there)
    right = jnp.take_along_axis(scores, after[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(scores, axis=-1) - right
    counted = after != PAD
    return jnp.sum(jnp.where(counted, losses, 0)) / jnp.sum(counted)


@jax.jit
def _translated(params, source):
    tables, rest = params["tables"], params["rest"]
    there = source != PAD
    meaning = _encoded(rest, tables["source"][source], there)

    def word(at, text):
        scores = _scores(rest, tables["target"][text[:, :-1]], meaning, there)
        scores = scores.at[..., jnp.array([PAD, UNKNOWN, BEGIN])].set(-jnp.inf)
        likeliest = jnp.argmax(scores[:, at], axis=-1).astype(text.dtype)
        return text.at[:, at + 1].set(likeliest)

    text = jnp.zeros((len(source), LENGTH + 2), jnp.int32).at[:, 0].set(BEGIN)
    return jax.lax.fori_loop(0, LENGTH + 1, word, text)


def translated(params: Any, source: np.ndarray) -> list[list[int]]:
    """The likeliest word after the likeliest words before it, to the end."""
    texts = np.asarray(_translated(params, source))[:, 1:].tolist()
    return [text[: text.index(END)] if END in text else text for text in texts]


def _encoded(rest, vectors, there):
    x = _placed(vectors @ rest["source"])
    block, seen = rest["encoder"], there[:, None, :]
    x += _attention(block["self"], _even(x), _even(x), seen)
    x += _wide(block["wide"], _even(x))
    return _even(x)


def _scores(rest, vectors, meaning, there):
    x = _placed(vectors @ rest["target"])
    block, length = rest["decoder"], x.shape[1]
    earlier = jnp.tril(jnp.ones((length, length), bool))[None]
    x += _attention(block["self"], _even(x), _even(x), earlier)
    x += _attention(block["cross"], _even(x), meaning, there[:, None, :])
    x += _wide(block["wide"], _even(x))
    return _even(x) @ rest["words"] + rest["bias"]


def _attention(kernels, x, of, seen):
    """Attention of x [s, l, d] to `of` [s, m, d], where `seen` [s or 1, l or 1, m]."""
    apart = lambda y: y.reshape(*y.shape[:2], HEADS, -1)
    ask, key = apart(x @ kernels["ask"]), apart(of @ kernels["key"])
    value = apart(of @ kernels["value"])
    scores = jnp.einsum("slhd,smhd->shlm", ask, key) / np.sqrt(ask.shape[-1])
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e9), axis=-1)
    return jnp.einsum("shlm,smhd->slhd", weights, value).reshape(x.shape) @ kernels["out"]


def _wide(kernels, x):
    return jax.nn.relu(x @ kernels["up"]) @ kernels["down"]


def _even(x):
    """x with the variance of each vector one."""
    x -= jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def _placed(x):
    """x [s, l, d] with waves that tell places apart."""
    at, dim = np.arange(x.shape[1])[:, None], x.shape[2]
    angle = at / 100 ** (np.arange(0, dim, 2) / dim)
    waves = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
    return x + jnp.asarray(waves, x.dtype)
