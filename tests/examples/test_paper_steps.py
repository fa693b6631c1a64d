"""A step of every example at its paper's size is traced, with no memory for its numbers.

It has as many as the paper counts: in Zen's 406 million in the tables of the language
model and 19 elsewhere, 214 and 68 of DeepFM, 112 and 31 of the translator, and OPT-2.7B;
VGG-16 for ten classes in Ok-Topk's; in DRAGONN's a layer of 126.72 million for the labels.
"""

import importlib
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

from examples import lm_model, transformer_tp
from examples.common.session import Session
from tests.examples import tiny


pytestmark = pytest.mark.slow
# Millions of numbers; of the decoder those with one block.
SIZES = {
    "language_model": 426,
    "click_model": 283,
    "translation": 143,
    "digits_vgg": 15,
    "extreme_classification": 544,
    "transformer_tp": 210,
}


def test_the_decoder_is_that_of_zen():
    words, width, blocks, heads, length, _ = transformer_tp.SIZES["paper"]

    def numbers(blocks):
        sizes = words, width, blocks, heads, length
        make = lambda: nnx.state(transformer_tp.Decoder(*sizes, nnx.Rngs(0)), nnx.Param)
        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(make)))

    one, two = numbers(1), numbers(2)
    # Every block is like the second one; OPT-2.7B has 2.65 billion numbers.
    assert round((one + (blocks - 1) * (two - one)) / 1e9, 2) == 2.65


@pytest.mark.parametrize("name", tiny.EXAMPLES)
def test_a_step_of_the_paper_s_size_is_traced(name, monkeypatch, tmp_path):
    example, traced = tiny.EXAMPLES[name], []

    def trace(self, name, trainer, params, batches, *_, **__):
        """In place of training: the types of a step."""
        like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
        state = jax.tree.map(like, jax.eval_shape(trainer.init, jax.tree.map(like, params)))
        batch = jax.tree.map(like, next(iter(batches(0))))
        after, loss = jax.eval_shape(trainer.compiled(state), state, batch)
        assert loss.shape == ()
        assert jax.tree.structure(after) == jax.tree.structure(state)
        assert list(map(like, jax.tree.leaves(after))) == jax.tree.leaves(state)
        traced.append(sum(x.size for x in jax.tree.leaves(state.params)))

    def init(words, width, seed, hidden):
        small = lm_model_init(10, width, hidden=hidden)
        rows = lambda x: words if len(x) == 10 else len(x)
        return {
            name: jax.ShapeDtypeStruct((rows(x), *x.shape[1:]), x.dtype)
            for name, x in small.items()
        }

    lm_model_init = lm_model.init
    monkeypatch.setattr(lm_model, "init", init)  # by NumPy, in memory
    monkeypatch.setattr(Session, "train", trace)
    monkeypatch.setattr(Session, "finish", lambda self: self)
    module = importlib.import_module(f"examples.{name}")
    data = example.data(tmp_path)
    if name == "transformer_tp":  # Its windows are longer than all of it.
        file = pathlib.Path(data[1])
        file.write_text(5 * (file.read_text() + "\n"))
        words, width, _, *rest = module.SIZES["paper"]
        monkeypatch.setitem(module.SIZES, "paper", (words, width, 1, *rest))  # of 32 alike
    options = [*data, "--devices", str(example.devices), "--json"]
    # Rows take long to trace, and are arrays of the sizes of a batch.
    sync = {"rows": "zen"}.get(example.resumed, example.resumed)
    options += ["--size", "paper", "--sync", sync]

    def run():
        module.main(options)
        return np.zeros(0)

    jax.eval_shape(run)  # flax's first numbers are abstract, too
    (size,) = traced
    assert round(size / 1e6) == SIZES[name]
