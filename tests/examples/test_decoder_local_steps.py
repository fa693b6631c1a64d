"""The decoder by local steps: each method learns, sends what it says, and shows it."""

import csv

import jax
import numpy as np
import pytest

from examples import decoder_local_steps as example
from examples.data.text import Corpus


RANKS, STEPS, EVERY = 4, 60, 3
SIZE = example.Size(words=64, width=16, layers=1, heads=2, length=8, windows=2)


@pytest.fixture(scope="module", autouse=True)
def tiny():
    """A small decoder, and a text that one can learn from few windows."""
    rng = np.random.default_rng(0)
    tokens = np.repeat(rng.integers(0, SIZE.words, 2_000), 4).astype(np.int32)
    corpus = Corpus(tokens, [str(i) for i in range(SIZE.words)], "", {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example.docstrings, "load", lambda words: corpus)
        patch.setitem(example.SIZES, "small", SIZE)
        patch.setattr(example, "WARM_UP", 1)
        patch.setattr(example, "RATE", 3e-2)
        patch.setitem(example.RATES, "demo", 1e-2)
        yield


@pytest.mark.slow
def test_methods_learn_and_send_what_they_say(tmp_path):
    methods = ["data_parallel", "sparse_loco", "streaming_diloco", "demo"]
    sizes = ["--ranks", str(RANKS), "--steps", str(STEPS), "--every", str(EVERY)]
    files = ["--csv", str(tmp_path / "a.csv"), "--plot", str(tmp_path / "a.png")]
    curves = example.main(["--methods", *methods, *sizes, *files])
    assert list(curves) == methods
    first = SIZE.loss(SIZE.init(0), example.Text(SIZE, 0).validation(RANKS))
    for curve in curves.values():
        assert curve.tokens == [at * RANKS * 16 for at in range(EVERY, STEPS + 1, EVERY)]
        assert curve.losses[-1] < float(first) - 0.1
    numbers = sum(x.size for x in jax.tree.leaves(SIZE.init(0)))
    dense = 2 * (RANKS - 1) / RANKS * 4 * numbers
    assert curves["data_parallel"].bytes[-1] == pytest.approx(STEPS * dense, rel=1e-3)
    assert curves["sparse_loco"].bytes[-1] < 0.1 * STEPS // EVERY * dense
    with (tmp_path / "a.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row["method"] for row in rows[:: STEPS // EVERY]] == methods
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize("wrong", [["--every", "0"], ["--steps", "3", "--every", "4"]])
def test_sizes_that_make_no_round_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        example.main(wrong)
    assert "--steps at least --every" in capsys.readouterr().err
