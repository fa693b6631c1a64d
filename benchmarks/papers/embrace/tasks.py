"""What is trained: a language model and a translator, and the rows that batches read.

language     An LSTM under a sampled softmax, on docstrings, as EmbRace trains that of
             Jozefowicz et al. with LM1B: a table of the words that are read, and one of the
             words that come next and of those drawn against them. They hold over 90% of its
             numbers.
translation  English to German, from the gettext catalogues of the system: a Transformer
             with a block on each side, one table a language, and a dense softmax over the
             German words, as GNMT and Transformer have it.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.papers.embrace import translator


Batch = dict[str, Any]


class Task(NamedTuple):
    """A model and its data.

    Attributes:
        name: Its name in tables.
        init: Makes the parameters: "tables", arrays [rows, dim], and "rest".
        ids: From a batch to the ids of each table.
        loss: From the vectors of the ids, the rest, and a rank's batch to its mean loss.
        batches: From a number of ranks and a seed to batches of all of them, for ever.
        rate: The learning rate of Adam.
    """

    name: str
    init: Callable[[], dict[str, Any]]
    ids: Callable[[Batch], dict[str, jax.Array]]
    loss: Callable[[dict[str, jax.Array], Any, Batch], jax.Array]
    batches: Callable[..., Iterator[Batch]]
    rate: float

    def share_of_tables(self) -> float:
        """The share of the parameters that is in tables."""
        params = jax.eval_shape(self.init)
        count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
        return count(params["tables"]) / count(params)


def of_rank(batch: Batch, rank: int, ranks: int) -> Batch:
    """A rank's part of a batch."""
    size = lambda x: len(x) // ranks
    return {k: x[rank * size(x) : (rank + 1) * size(x)] for k, x in batch.items()}


def distinct(task: Task, batch: Batch, ranks: int) -> list[dict[str, np.ndarray]]:
    """The different rows of each table that each rank reads."""
    parts = [task.ids(of_rank(batch, rank, ranks)) for rank in range(ranks)]
    return [{k: np.unique(ids) for k, ids in part.items()} for part in parts]


def rooms(task: Task, batches: list[Batch], ranks: int) -> dict[str, int]:
    """The most different rows of each table that a rank reads in these, and a twentieth."""
    reads = [own for batch in batches for own in distinct(task, batch, ranks)]
    return {k: round(1.05 * max(len(own[k]) for own in reads)) for k in reads[0]}


# --- The language model.

LENGTH, NEGATIVES, WORDS = 20, 256, 20_000


def language(
    words: int = 10_000, width: int = 256, hidden: int = 64, windows: int = 16
) -> Task:
    """The language model.

    Args:
        words: Rows of its two tables.
        width: Numbers of a row.
        hidden: Of the LSTM's state, which a matrix brings to the width.
        windows: A rank's, of 20 words each.
    """

    def init():
        rng = np.random.default_rng(0)
        normal = functools.partial(_normal, rng)
        tables = {"input": normal(words, width), "output": normal(words, width)}
        kernel = normal(width + hidden, 4 * hidden)
        return {
            "tables": tables,
            "rest": {"kernel": kernel, "out": normal(hidden, width)},
        }

    def ids(batch):
        scored = jnp.concatenate(
            [batch["targets"].reshape(-1), batch["negatives"].reshape(-1)]
        )
        return {"input": batch["tokens"], "output": scored}

    def loss(vectors, rest, batch):
        targets, negatives = batch["targets"], batch["negatives"].reshape(-1)
        inputs = vectors["input"].swapaxes(0, 1)
        states = _lstm(rest["kernel"], inputs, hidden).swapaxes(0, 1) @ rest["out"]
        output = vectors["output"]
        right = jnp.sum(states * output[: targets.size].reshape(states.shape), axis=-1)
        wrong = jnp.einsum("wld,nd->wln", states, output[targets.size :])
        right, wrong = right - _drawn(targets, words), wrong - _drawn(negatives, words)
        # A negative that happens to be the right word is none.
        wrong = jnp.where(targets[..., None] == negatives, -jnp.inf, wrong)
        scores = jnp.concatenate([right[..., None], wrong], axis=-1)
        return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - right)

    def batches(ranks, seed=0):
        from examples import lm_model
        from examples.data import docstrings

        # By frequency: fewer words are the first of more, and one corpus is kept for all.
        tokens = docstrings.load(max(words, WORDS)).tokens
        tokens = np.where(tokens < words, tokens, 0)
        sizes = {"windows": windows, "length": LENGTH, "negatives": NEGATIVES}
        return lm_model.batches(tokens, words, ranks, seed, **sizes)

    return Task("language", init, ids, loss, batches, 5e-3)


def _normal(rng, *shape):
    return (rng.standard_normal(shape, np.float32) / np.sqrt(shape[-1])).astype(np.float32)


def _drawn(places, words):
    """The log of how often a word is drawn."""
    return jnp.log(jnp.log1p(1 / (places + 1.0)) / np.log(words + 1))


def _lstm(kernel, inputs, hidden):
    """Runs over inputs [length, windows, width]; the state after each."""

    def cell(state, x):
        before, memory = state
        gates = jnp.concatenate([x, before], axis=-1) @ kernel
        enter, forget, leave, new = jnp.split(gates, 4, axis=-1)
        memory = jax.nn.sigmoid(forget + 1) * memory + jax.nn.sigmoid(enter) * jnp.tanh(new)
        before = jax.nn.sigmoid(leave) * jnp.tanh(memory)
        return (before, memory), before

    # As the inputs vary over ranks, so does the first state.
    nothing = jnp.zeros_like(inputs[0, :, :1]) * jnp.zeros(hidden)
    return jax.lax.scan(cell, (nothing, nothing), inputs)[1]


# --- The translator.


def translation(
    words: int = 6_000, width: int = 256, hidden: int = 64, sentences: int = 64
) -> Task:
    """The translator.

    Args:
        words: Rows of the table of each language.
        width: Numbers of a row.
        hidden: Width of the blocks; a matrix brings rows to it.
        sentences: A rank's.
    """

    def init():
        return translator.init(words, width, hidden)

    def ids(batch):
        return {"source": batch["source"], "target": batch["before"]}

    def batches(ranks, seed=0):
        source, target, _ = translator.sentences(words, False)
        rng = np.random.default_rng(seed)
        while True:
            drawn = rng.integers(0, len(source), ranks * sentences)
            before, after = target[drawn, :-1], target[drawn, 1:]
            yield {"source": source[drawn], "before": before, "after": after}

    return Task("translation", init, ids, translator.loss, batches, 3e-3)


TASKS = {"language": language, "translation": translation}
