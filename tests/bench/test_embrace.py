"""EmbRace's comparisons count what they say, and all systems train alike."""

import functools
import math

import jax
import numpy as np
import optax
import pytest

from benchmarks.papers.embrace import network, sizes, systems, tasks, training, translator
from benchmarks.papers.embrace.bleu import bleu
from tests import helpers


# --- BLEU.


def test_bleu_by_hand():
    """Of 7 words 5 are right, of 6, 5 and 4 runs 3, 2 and 1; the reference has 8 words."""
    candidate, reference = "a b c d x a y".split(), "a b c d e a f g".split()
    # Runs of two: ab, bc, cd of ab, bc, cd, dx, xa, ay; of three: abc, bcd; of four: abcd.
    right = 5 / 7 * 3 / 6 * 2 / 5 * 1 / 4
    want = 100 * math.exp(1 - 8 / 7) * right**0.25
    assert bleu([candidate], [reference]) == pytest.approx(want)
    # Of two sentences runs are counted together, and none goes over an end.
    both = bleu([candidate, ["z"]], [reference, ["z"]])
    right = 6 / 8 * 3 / 6 * 2 / 5 * 1 / 4
    assert both == pytest.approx(100 * math.exp(1 - 9 / 8) * right**0.25)


def test_bleu_counts_a_word_as_often_as_it_is_right():
    """Papineni et al.'s example: seven times "the", of which two are in the reference."""
    reference = "the cat is on the mat".split()
    assert bleu([["the"] * 7], [reference], order=1) == pytest.approx(100 * 2 / 7)
    assert bleu([["the"] * 7], [reference]) == 0
    assert bleu([reference], [reference]) == pytest.approx(100)
    # Longer than the reference is no loss by itself; shorter is.
    assert bleu([["the", "cat"]], [reference], order=1) == pytest.approx(100 * math.exp(-2))
    with pytest.raises(ValueError, match="1 candidates cannot be compared with 2"):
        bleu([[1]], [[1], [2]])


# --- Sizes and balance.


def made(ids):
    """A task of one table that reads what is given."""
    return tasks.Task("made", dict, lambda batch: {"t": batch["ids"]}, None, None, 0.0)


def test_sizes_by_hand():
    """Two ranks; rank 0 reads 1 1 2, rank 1 reads 3 4 4; then rank 1 reads 1 3."""
    now = {"ids": np.array([[1, 1, 2], [3, 4, 4]])}
    then = {"ids": np.array([[5, 5, 5], [1, 3, 3]])}
    found = sizes.sizes(made(now), [now, then], 2)
    # A rank's are prior where any rank reads them next: 1 and 3.
    assert found == {"original": 3, "merged": 2, "prior": 1}


def test_balance_by_hand():
    """Four rows of 2 numbers; both ranks read row 0, rank 1 rows 1 and 2 as well."""
    reads = [{"t": np.array([0])}, {"t": np.array([0, 1, 2])}]
    found = sizes.balance(reads, {"t": (4, 2)}, "columns")
    # Rank 0 sends a column of three rows and is sent one of one, and back: 4 each.
    assert found == {"mean": 4, "busiest": 1, "padded": 6 / 4}
    # Rank 0 has rows 0 and 1, which rank 1 reads; rank 1 has rows 2 and 3, which nobody
    # else reads.
    found = sizes.balance(reads, {"t": (4, 2)}, "ranges")
    assert found == {"mean": 4, "busiest": 1, "padded": 8 / 4}
    by_hash = sizes.parts_by_rows(np.arange(10_000), 10_000, 4, "hash")
    assert by_hash.sum() == 10_000
    assert abs(by_hash / 2_500 - 1).max() < 0.05


# --- What is trained.


def test_padding_says_nothing_to_the_translator():
    params = translator.init(20, 8, 8)
    batch = {
        "source": np.array([[4, 5, 0, 0], [6, 0, 0, 0]]),
        "before": np.array([[2, 7, 8, 0], [2, 9, 0, 0]]),
        "after": np.array([[7, 8, 3, 0], [9, 3, 0, 0]]),
    }
    ids = {"source": batch["source"], "target": batch["before"]}
    vectors = {k: params["tables"][k][ids[k]] for k in ids}
    loss = jax.jit(translator.loss)
    want = loss(vectors, params["rest"], batch)
    for name in ids:
        moved = vectors[name] + 3.0 * (ids[name] == 0)[..., None]
        found = loss(vectors | {name: moved}, params["rest"], batch)
        np.testing.assert_allclose(found, want, rtol=1e-6)
    # What comes later says nothing either: the first word's score is that of itself alone.
    first = {**batch, "after": np.where(np.arange(4) == 0, batch["after"], 0)}
    moved = vectors["target"] + 3.0 * (np.arange(4) > 0)[:, None]
    found = loss(vectors | {"target": moved}, params["rest"], first)
    np.testing.assert_allclose(found, loss(vectors, params["rest"], first), rtol=1e-6)


def test_a_translation_is_the_likeliest_word_after_the_ones_before():
    params = translator.init(12, 8, 8)
    params["rest"]["words"][:] = 0
    bias = params["rest"]["bias"]
    bias[5], bias[translator.UNKNOWN] = 1, 9  # what is no word is never said
    source = np.array([[4, 5, 0, 0]])
    assert translator.translated(params, source) == [[5] * (translator.LENGTH + 1)]
    bias[translator.END] = 2
    assert translator.translated(params, source) == [[]]


def small():
    return tasks.language(words=60, width=8, hidden=4, windows=2)


@functools.cache
def batches(ranks, count=3):
    """Batches of ids that repeat, without a corpus."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.zipf(1.3, shape) % 60).astype(np.int32)
    rows = 2 * ranks
    return [
        {"tokens": draw(rows, 5), "targets": draw(rows, 5), "negatives": draw(ranks, 7)}
        for _ in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "check"), [("both", False), ("parallax", True)])
def test_every_system_is_plain_training(name, check):
    n, task, optimizer = 2, small(), optax.sgd(0.5)
    system = systems.SYSTEMS[name]
    want, params = training.plain(task, optimizer, batches(n), n)
    run = systems.Training(
        system,
        task,
        helpers.mesh_of(n),
        optimizer,
        exact=True,
        rooms=tasks.rooms(task, batches(n), n),
        check=check,
    )
    found = [run.step(*given) for given in system.feed(iter(batches(n)))]
    np.testing.assert_allclose(found, want, rtol=1e-5)
    assert abs(want[0] - want[-1]) > 1e-3
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        run.params(),
        params,
    )
    tables, _ = systems.held(run.state)
    assert tables == 2 * 60 * 8 * 4 / (n if system.columns else 1)


# --- What is made of times and bytes.


def test_stall_is_a_step_less_one_that_exchanges_nothing():
    n, task = 2, small()
    seconds = {
        "all-reduce": [5.0],
        "alone, dense": [1.0],
        "parallax": [4.0, 3.0, 2.0],
        "alone, rows": [1.0, 0.5, 2.0],
        "hybrid": [1.5],
        "alone, columns": [0.5],
    }
    rows = [{"scheme": k, "seconds": s, "loss": 7.0} for k, s in seconds.items()]
    rows[-2]["loss"] = 7.1
    found = network._completed(rows, task, batches(n), n)
    by_name = {row["scheme"]: row for row in found}
    assert [by_name[k]["stall"] for k in ("all-reduce", "parallax", "hybrid")] == [4, 2, 1]
    assert by_name["all-reduce"]["stall_ratio"] == 4
    assert by_name["hybrid"]["gain"] == 3 / 1.5  # the best baseline takes 3 s
    assert [by_name[k]["agrees"] for k in ("parallax", "hybrid")] == [True, False]


def test_bytes_needed_are_those_of_the_rest_and_of_tables():
    n, task = 2, small()
    rest = 4 * (12 * 16 + 4 * 8)  # 2 (n - 1)/n is one
    assert network.formula(task, batches(n), n, "all-reduce") == rest + 4 * 2 * 60 * 8
    reads = [tasks.distinct(task, batch, n) for batch in batches(n)]
    most = [max(len(own[k]) for own in read) for read in reads for k in read[0]]
    found = network.formula(task, batches(n), n, "hybrid")
    assert found == pytest.approx(rest + sum(most) / 3 * (8 * 4 + 4))
    # On two ranks Zen's lists of so few rows go to all; Parallax's go by servers.
    gathered, zen = (
        network.formula(task, batches(n), n, way) for way in ("all-gather", "zen rows")
    )
    assert zen == gathered < network.formula(task, batches(n), n, "parallax")
