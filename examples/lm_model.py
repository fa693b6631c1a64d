"""A small LSTM language model under a sampled softmax.

Its two tables hold nearly all of its numbers, and a step touches few of their rows: the
embedding's rows of the words that are read, and the output's rows of the words that come
next and of the negatives drawn for the step. All other rows have a gradient of zero.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def init(vocabulary: int, width: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Makes the parameters: two tables of [vocabulary, width], a bias, and an LSTM."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return (rng.standard_normal(shape) / np.sqrt(width)).astype(np.float32)

    return {
        "input_embedding": normal(vocabulary, width),
        "lstm": normal(2 * width, 4 * width),
        "output_embedding": normal(vocabulary, width),
        "output_bias": np.zeros(vocabulary, np.float32),
    }


def batches(
    tokens: np.ndarray,
    vocabulary: int,
    ranks: int,
    seed: int = 0,
    *,
    windows: int = 16,
    length: int = 20,
    negatives: int = 256,
):
    """Yields batches for ever: windows of tokens for each rank, and its negatives."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(tokens) - length, ranks * windows)
        text = tokens[starts[:, None] + np.arange(length + 1)]
        # Words are in the order of their frequency, so this is near to how often they come.
        drawn = np.exp(rng.random((ranks, negatives)) * np.log(vocabulary + 1)) - 1
        yield {
            "tokens": text[:, :-1],
            "targets": text[:, 1:],
            "negatives": np.minimum(drawn, vocabulary - 1).astype(np.int32),
        }


def loss_fn(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """The mean sampled softmax loss of one rank's windows."""
    inputs = params["input_embedding"][batch["tokens"]]  # [windows, length, width]
    hidden = _lstm(params["lstm"], inputs.swapaxes(0, 1)).swapaxes(0, 1)
    targets, negatives = batch["targets"], batch["negatives"][0]
    right = jnp.einsum("wld,wld->wl", hidden, params["output_embedding"][targets])
    right += _bias(params, targets)
    wrong = jnp.einsum("wld,nd->wln", hidden, params["output_embedding"][negatives])
    wrong += _bias(params, negatives)
    # A negative that happens to be the right word is none.
    wrong = jnp.where(targets[..., None] == negatives, -jnp.inf, wrong)
    scores = jnp.concatenate([right[..., None], wrong], axis=-1)
    return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - right)


def _bias(params, words):
    """The bias of a word's score, less the log of how often it is drawn."""
    vocabulary = len(params["output_bias"])
    share = jnp.log1p(1 / (words + 1.0)) / np.log(vocabulary + 1)
    return params["output_bias"][words] - jnp.log(share)


def _lstm(kernel, inputs):
    """Runs over inputs [length, windows, width]; returns the state after each."""

    def cell(state, x):
        hidden, memory = state
        gates = jnp.concatenate([x, hidden], axis=-1) @ kernel
        enter, forget, leave, new = jnp.split(gates, 4, axis=-1)
        # Off to a better start if it first remembers.
        memory = jax.nn.sigmoid(forget + 1) * memory + jax.nn.sigmoid(enter) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(leave) * jnp.tanh(memory)
        return (hidden, memory), hidden

    nothing = jnp.zeros_like(inputs[0])
    return lax.scan(cell, (nothing, nothing), inputs)[1]
