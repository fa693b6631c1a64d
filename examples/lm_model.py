"""A small LSTM language model under a sampled softmax.

Its two tables have nearly all of its parameters, and a step reads few of their rows: the
embedding's rows of the words that are read, and the output's rows of the words that come
next and of the negatives drawn for the step. All other rows have a gradient of zero.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from examples.common.losses import draw_words, sampled_softmax


def init(
    vocabulary: int, width: int, seed: int = 0, hidden: int | None = None
) -> dict[str, np.ndarray]:
    """Makes the parameters: two tables of [vocabulary, width], a bias, and an LSTM.

    Args:
        vocabulary: The number of words.
        width: Numbers of a row.
        seed: Of the random numbers.
        hidden: Numbers of the LSTM's memory, if its output is projected to the width.
    """
    rng = np.random.default_rng(seed)
    state = hidden or width

    def normal(*shape):
        return (rng.standard_normal(shape) / np.sqrt(width)).astype(np.float32)

    params = {
        "input_embedding": normal(vocabulary, width),
        "lstm": normal(2 * width, 4 * state),
        "output_embedding": normal(vocabulary, width),
        "output_bias": np.zeros(vocabulary, np.float32),
    }
    return params | ({"projection": normal(hidden, width)} if hidden else {})


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
    """Yields batches without end: windows of tokens for each rank, and its negatives."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(tokens) - length, ranks * windows)
        text = tokens[starts[:, None] + np.arange(length + 1)]
        yield {
            "tokens": text[:, :-1],
            "targets": text[:, 1:],
            "negatives": draw_words(rng, vocabulary, ranks, negatives),
        }


def loss_fn(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """The mean sampled softmax loss of one rank's windows."""
    inputs = params["input_embedding"][batch["tokens"]]  # [windows, length, width]
    hidden = _lstm(params, inputs.swapaxes(0, 1)).swapaxes(0, 1)
    output = params["output_embedding"], params["output_bias"]
    return jnp.mean(
        sampled_softmax(hidden, *output, batch["targets"], batch["negatives"][0])
    )


def _lstm(params, inputs):
    """Runs over inputs [length, windows, width]; returns the state after each."""
    kernel, projection = params["lstm"], params.get("projection")

    def cell(state, x):
        hidden, memory = state
        gates = jnp.concatenate([x, hidden], axis=-1) @ kernel
        enter, forget, leave, new = jnp.split(gates, 4, axis=-1)
        # Off to a better start if it first remembers.
        memory = jax.nn.sigmoid(forget + 1) * memory + jax.nn.sigmoid(enter) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(leave) * jnp.tanh(memory)
        if projection is not None:
            hidden = hidden @ projection
        return (hidden, memory), hidden

    # As the inputs vary over ranks, so does the first state.
    nothing = jnp.zeros_like(inputs[0])
    memory = nothing[:, :1] * jnp.zeros(kernel.shape[1] // 4)
    return lax.scan(cell, (nothing, memory), inputs)[1]
