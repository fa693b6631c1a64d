"""Records the rows of embedding tables that have a gradient, from three training models.

    python -m benchmarks.data.record_sets [--out DIRECTORY]

Every set comes from a gradient: the loss of one rank's batch is differentiated, and the
rows that are not all zero are kept, for each of 16 data-parallel ranks at the last step.
The sets are stored in benchmarks/data/recorded/NAME.npz, for `benchmarks.data.workloads`.

language: The language model of the demo, its input table. Text: docstrings.
translation: English to German from the gettext catalogues of the machine. The words of
    both languages share one input table: a source sentence is the mean of its words' rows,
    and the word before is what the next is predicted from. Scored by an output table that
    is not recorded, against words drawn from the text.
clicks: Stands in for the logs behind click-through models. Each call in the source
    of the standard library and of some packages is an impression of five categories, and
    whether it passes a keyword argument is the click. A factorization machine; one table
    holds the fields side by side.

Rows are numbered by how often their word or category comes, most frequent first; in the
table of clicks within each field. What is recorded depends on what is installed, so a file
says in `origin` what it was made from. Takes some two minutes on one core.
"""

import dataclasses
import datetime
import json
import pathlib
import platform
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.data import index_sets
from benchmarks.data.workloads import RECORDED
from benchmarks.harness import settings, table
from benchmarks.harness.record import say
from benchmarks.harness.settings import option
from benchmarks.harness.table import Column
from benchmarks.papers.formulas import measures
from examples.data import docstrings, installed
from examples.data.calls import FIELDS, calls
from examples.data.translations import Missing, sentence_pairs


RANKS, STEPS = 16, 60
WIDTH, LEARNING_RATE = index_sets.WIDTH, index_sets.LEARNING_RATE

SENTENCES, LENGTH, DRAWN = 32, 24, 256  # a rank; words of a sentence; words drawn
VOCABULARY = 32_000
PAD, UNKNOWN, END = range(3)

IMPRESSIONS = 512  # a rank
MOST_ROWS = 65_536


class Recording(NamedTuple):
    """The sets of one model.

    Attributes:
        sets: Booleans [ranks, rows].
        loss: Of the last step, the mean over the ranks.
        batch: A rank's batch, in words.
        sha256: Of the data.
        data: The sources of the data.
    """

    sets: np.ndarray
    loss: float
    batch: str
    sha256: str
    data: dict


def language() -> Recording:
    """The demo's language model, trained as the demo trains it."""
    corpus = docstrings.load()
    trained = index_sets.train(corpus, STEPS, RANKS, every=STEPS - 1)
    return Recording(
        trained.sets["input_embedding"][-1],
        trained.losses[-1],
        f"{index_sets.WINDOWS} windows of {index_sets.LENGTH} words",
        corpus.sha256,
        {"words read": len(corpus.tokens), "docstrings of": corpus.versions},
    )


def translation() -> Recording:
    """A bag of English words and the German word before, to the next German word."""
    pairs, catalogues = sentence_pairs()
    words = installed.by_frequency(word for pair in pairs for text in pair for word in text)
    place = {word: END + 1 + i for i, word in enumerate(words[: VOCABULARY - END - 1])}
    source = np.stack([_padded(english, place) for english, _ in pairs])
    target = np.stack([_padded(german, place, [END]) for _, german in pairs])
    text = target[target > END]
    say(f"  {len(pairs):,} sentences, {len(words):,} words; {len(place):,} have a row")

    def batches():
        rng = np.random.default_rng(0)
        while True:
            drawn = rng.integers(0, len(pairs), (RANKS, SENTENCES))
            yield {
                "source": source[drawn],
                "target": target[drawn],
                "negatives": rng.choice(text, (RANKS, DRAWN)),
            }

    rng = np.random.default_rng(0)
    rows = len(place) + END + 1
    params = {
        "table": _normal(rng, WIDTH**-0.5, rows, WIDTH),
        "output": _normal(rng, WIDTH**-0.5, rows, WIDTH),
        "bias": np.zeros(rows, np.float32),
        "kernel": _normal(rng, WIDTH**-0.5, 2 * WIDTH, WIDTH),
    }
    sets, loss = train(translation_loss, params, batches())
    batch = f"{SENTENCES} pairs of sentences, each cut to {LENGTH} words"
    data = {"pairs": len(pairs), "catalogues": catalogues}
    return Recording(sets, loss, batch, installed.sha256(pairs), data)


def clicks() -> Recording:
    """A factorization machine over the calls in Python source."""
    observed = list(calls())
    features, clicked = zip(*observed, strict=True)
    columns, rows = [], 0
    for column in zip(*features, strict=True):
        place = {name: rows + i for i, name in enumerate(installed.by_frequency(column))}
        columns.append([place[name] for name in column])
        say(f"  {FIELDS[len(columns) - 1]:14} {len(place):7,} rows")
        rows += len(place)
    if rows > MOST_ROWS:
        raise SystemExit(f"clicks has {rows:,} rows, more than {MOST_ROWS:,}.")
    inputs, labels = np.array(columns).T, np.array(clicked, np.float32)
    say(f"  {len(labels):,} calls, {labels.mean():.1%} with a keyword argument")

    def batches():
        rng = np.random.default_rng(0)
        while True:
            drawn = rng.integers(0, len(labels), (RANKS, IMPRESSIONS))
            yield {"rows": inputs[drawn], "labels": labels[drawn]}

    params = {
        "table": _normal(np.random.default_rng(0), 0.05, rows, WIDTH),
        "linear": np.zeros(rows, np.float32),
        "bias": np.zeros((), np.float32),
    }
    sets, loss = train(clicks_loss, params, batches())
    data = {"calls": len(labels), "source of": installed.versions()}
    return Recording(sets, loss, f"{IMPRESSIONS} calls", installed.sha256(observed), data)


def _padded(words: list[str], place: dict[str, int], end: list[int] | None = None):
    rows = [place.get(word, UNKNOWN) for word in words[:LENGTH]] + (end or [])
    return np.array(rows + [PAD] * (LENGTH + 1 - len(rows)), np.int32)


def _normal(rng: np.random.Generator, scale: float, *shape: int) -> np.ndarray:
    return scale * rng.standard_normal(shape, np.float32)


def translation_loss(params: dict, batch: dict) -> jax.Array:
    """The mean softmax loss over the right word and the words drawn for the rank."""
    target, negatives = batch["target"], batch["negatives"]
    source = _read(params["table"], batch["source"])
    lengths = jnp.sum(batch["source"] != PAD, axis=1, keepdims=True)
    meaning = jnp.sum(source, axis=1) / lengths  # [sentences, width]
    before = _read(params["table"], jnp.pad(target, ((0, 0), (1, 0)))[:, :-1])
    meaning = jnp.broadcast_to(meaning[:, None], before.shape)
    hidden = jnp.tanh(jnp.concatenate([meaning, before], axis=-1) @ params["kernel"])
    right = jnp.einsum("sld,sld->sl", hidden, params["output"][target])
    right += params["bias"][target]
    wrong = jnp.einsum("sld,nd->sln", hidden, params["output"][negatives])
    wrong += params["bias"][negatives]
    # A negative that happens to be the right word is none.
    wrong = jnp.where(target[..., None] == negatives, -jnp.inf, wrong)
    scores = jnp.concatenate([right[..., None], wrong], axis=-1)
    losses = jax.nn.logsumexp(scores, axis=-1) - right
    return jnp.mean(losses, where=target != PAD)


def _read(table: jax.Array, words: jax.Array) -> jax.Array:
    """The rows of words; zeros, and no gradient, where a sentence is padded."""
    return jnp.where((words != PAD)[..., None], table[words], 0)


def clicks_loss(params: dict, batch: dict) -> jax.Array:
    """The mean logistic loss of a factorization machine."""
    vectors = params["table"][batch["rows"]]  # [calls, fields, width]
    products = jnp.sum(vectors, axis=1) ** 2 - jnp.sum(vectors**2, axis=1)
    scores = params["bias"] + jnp.sum(params["linear"][batch["rows"]], axis=1)
    scores += jnp.sum(products, axis=1) / 2
    return jnp.mean(optax.sigmoid_binary_cross_entropy(scores, batch["labels"]))


def train(loss_fn: Callable, params: dict, batches: Iterator[dict]) -> tuple:
    """Trains on the mean gradient of all ranks; batches are [ranks, ...].

    Returns:
        Booleans [ranks, rows], the rows of `table` that had a gradient on each rank at the
        last step, and the loss of that step.
    """
    tx = optax.adam(LEARNING_RATE)

    @jax.jit
    def step(params, state, batch):
        def mean(params):
            return jnp.mean(jax.vmap(loss_fn, (None, 0))(params, batch))

        loss, gradient = jax.value_and_grad(mean)(params)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    @jax.jit
    def rows(params, batch):
        return jnp.any(jax.grad(loss_fn)(params, batch)["table"] != 0, axis=1)

    params = jax.device_put(params)
    state, sets, loss = tx.init(params), np.zeros(0, bool), 0.0
    for number, batch in zip(range(1, STEPS + 1), batches, strict=False):
        if number == STEPS:
            shares = [{k: v[rank] for k, v in batch.items()} for rank in range(RANKS)]
            sets = np.stack([np.asarray(rows(params, share)) for share in shares])
        params, state, loss = step(params, state, batch)
        if number == 1 or number % 20 == 0 or number == STEPS:
            say(f"  step {number:4} of {STEPS}  loss {float(loss):.3f}")
    return sets, float(loss)


def write(folder: pathlib.Path, name: str, recording: Recording) -> dict:
    """Stores one model's sets; returns its row of the table."""
    density = float(measures.density(recording.sets).max())
    denser = float(measures.densification(recording.sets, [RANKS])[0])
    versions = {each.__name__: each.__version__ for each in (jax, np, optax)}
    origin = {
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version()} | versions,
        "sha256": recording.sha256,
        "data": recording.data,
        "step": STEPS,
        "batch": recording.batch,
        "loss": round(recording.loss, 4),
        "density": round(density, 6),
        "densification": round(denser, 3),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.npz"
    packed = np.packbits(recording.sets, axis=1, bitorder="little")
    np.savez_compressed(
        path,
        units=np.int64(recording.sets.shape[1]),
        width=np.int64(WIDTH),
        sets=packed,
        origin=np.array(json.dumps(origin)),
    )
    return {
        "name": name,
        "rows": recording.sets.shape[1],
        "density": density,
        "densification": denser,
        "kilobytes": path.stat().st_size / 1000,
    }


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Records which rows of embedding tables have a gradient."""

    PROGRAM = "benchmarks.data.record_sets"
    out: str = option(str(RECORDED), "the folder for the files")


def main(argv: list[str] | None = None) -> None:
    folder = pathlib.Path(Settings.parse(argv).out)
    rows = []
    # The language model first: it asks for simulated devices before JAX starts.
    for model in (language, translation, clicks):
        say(f"{model.__name__}:")
        try:
            rows.append(write(folder, model.__name__, model()))
        except Missing as missing:
            say(f"  skipped: {missing}")
    columns = [
        Column("", "name"),
        Column("rows", "rows", ",d"),
        Column("density", "density", ".2%"),
        Column(f"union of {RANKS}", "densification", ".2f"),
        Column("file, KB", "kilobytes", ".1f"),
    ]
    table.show(rows, columns)


if __name__ == "__main__":
    main()
