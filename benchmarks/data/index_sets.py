"""Sets of non-zero gradient rows, recorded from the demo's language model as it trains.

The model, the text and the batches are those of `examples.language_model`. Every set comes
from a gradient: the loss of one rank's batch is differentiated, and the rows that are not
zero are kept. Words are numbered by how often they come, most frequent first.
"""

import time
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

import sparsejax
from benchmarks.harness.record import say
from examples import lm_model
from examples.data import docstrings


TABLES = ("input_embedding", "output_embedding")
WIDTH = 64
LEARNING_RATE = 5e-3
WINDOWS, LENGTH = 16, 20  # of a batch of `lm_model.batches`, a rank


class Trained(NamedTuple):
    """The sets and the results of a training run.

    Attributes:
        params: The parameters after the last step.
        steps: int [records], the steps whose sets were kept.
        sets: Booleans [records, ranks, words] for each table.
        losses: Of every step.
    """

    params: dict[str, np.ndarray]
    steps: np.ndarray
    sets: dict[str, np.ndarray]
    losses: list[float]


@jax.jit
def _nonzero(params, batch):
    """Flags of the rows of each table that have a gradient, and counts of their numbers."""
    gradient = jax.grad(lm_model.loss_fn)(params, batch)
    tables = {name: gradient[name] != 0 for name in TABLES}
    rows = {name: jnp.any(table, axis=1) for name, table in tables.items()}
    return rows, {name: jnp.sum(table) for name, table in tables.items()}


def mesh(ranks: int) -> Mesh:
    """Simulated devices, which must be asked for before JAX starts."""
    try:
        jax.config.update("jax_num_cpu_devices", ranks)
    except RuntimeError:
        pass  # JAX has started, maybe with enough of them.
    devices = jax.devices("cpu")
    if len(devices) < ranks:
        raise SystemExit(f"{ranks} ranks were asked for; JAX has started {len(devices)}.")
    return Mesh(np.array(devices[:ranks]), ("data",), axis_types=(AxisType.Auto,))


def train(corpus: docstrings.Corpus, steps: int, ranks: int, every: int = 3) -> Trained:
    """Trains in data parallel, and keeps every rank's sets of some steps."""
    words = len(corpus.words)
    tx = optax.chain(sparsejax.zen_sync(), optax.adam(LEARNING_RATE))
    trainer = sparsejax.data_parallel(lm_model.loss_fn, tx, mesh(ranks))
    state = trainer.init(lm_model.init(words, WIDTH))
    kept, sets, losses = [], {name: [] for name in TABLES}, []
    start = time.perf_counter()
    batches = lm_model.batches(corpus.tokens, words, ranks)
    for step, batch in enumerate(islice(batches, steps), start=1):
        if (step - 1) % every == 0:
            kept.append(step)
            for name, flags in of_ranks(state.params, batch, ranks)[0].items():
                sets[name].append(flags)
        state, loss = trainer.step(state, batch)
        losses.append(float(loss))
        if step == 1 or step % 25 == 0 or step == steps:
            taken = time.perf_counter() - start
            say(f"  step {step:4} of {steps}  loss {losses[-1]:.3f}  {taken:4.0f} s")
    params = jax.device_get(state.params)
    stacked = {name: np.stack(flags) for name, flags in sets.items()}
    return Trained(params, np.array(kept), stacked, losses)


def of_ranks(params, batch, ranks: int) -> tuple[dict[str, np.ndarray], float]:
    """The sets of each rank's share of a batch, one rank at a time.

    Returns:
        Booleans [ranks, words] for each table, and the share of the numbers in these rows
        that are not zero.
    """
    params = jax.device_put(jax.device_get(params), jax.devices("cpu")[0])
    sets = {name: [] for name in TABLES}
    numbers = 0
    windows = len(batch["tokens"]) // ranks
    for rank in range(ranks):
        share = slice(rank * windows, (rank + 1) * windows)
        rows, counts = _nonzero(
            params,
            {
                "tokens": batch["tokens"][share],
                "targets": batch["targets"][share],
                "negatives": batch["negatives"][rank : rank + 1],
            },
        )
        for name in TABLES:
            sets[name].append(np.asarray(rows[name]))
            numbers += int(counts[name])
    flags = {name: np.stack(rows) for name, rows in sets.items()}
    return flags, numbers / (WIDTH * sum(int(rows.sum()) for rows in flags.values()))


def many_ranks(
    params, corpus: docstrings.Corpus, ranks: int, windows: int
) -> tuple[dict[str, np.ndarray], float]:
    """The sets of one batch for many ranks; `windows` each, a multiple of 16."""
    more = windows // WINDOWS
    batches = lm_model.batches(corpus.tokens, len(corpus.words), ranks * more, seed=1)
    batch = next(batches)
    batch["negatives"] = batch["negatives"][::more]
    return of_ranks(params, batch, ranks)


def in_order(
    params, corpus: docstrings.Corpus, steps: int, ranks: int
) -> dict[str, np.ndarray]:
    """The sets of ranks that each read a stretch of the text from front to back.

    Returns:
        Booleans [steps, ranks, words] for each table.
    """
    by_step = [
        of_ranks(params, batch, ranks)[0]
        for batch in islice(_reading(corpus, ranks), steps)
    ]
    return {name: np.stack([sets[name] for sets in by_step]) for name in TABLES}


def _reading(corpus: docstrings.Corpus, ranks: int) -> Iterator[dict[str, np.ndarray]]:
    random = lm_model.batches(corpus.tokens, len(corpus.words), ranks, seed=2)
    stretch = len(corpus.tokens) // ranks
    at = np.arange(ranks)[:, None] * stretch + np.arange(WINDOWS) * LENGTH
    for step, batch in enumerate(random):
        # The 16 windows of a step lie one behind the other; at the end, from the front.
        places = (at + step * WINDOWS * LENGTH).reshape(-1, 1) + np.arange(LENGTH + 1)
        text = corpus.tokens[places % len(corpus.tokens)]
        yield batch | {"tokens": text[:, :-1], "targets": text[:, 1:]}
