"""A step of every example at its paper's size is traced, with no memory for its numbers."""

import importlib
import pathlib

import jax
import numpy as np
import pytest

from examples import lm_model
from examples.common.session import Session
from tests.examples import tiny


pytestmark = pytest.mark.slow


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
    assert size > 1e7
