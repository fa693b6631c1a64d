"""What README and docstrings show runs: their code, in order, with small names given."""

import doctest
import functools
import inspect
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import pallas_kernels
import sparsejax
from tests import helpers


README = pathlib.Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
BLOCKS = BLOCK.findall(README.read_text())


def loss_fn(params, batch):
    return optax.squared_error(batch["x"] @ params["w"], batch["y"]).mean()


def given(ranks=4):
    """The names that README takes for granted, and does not make."""
    batches = [{"x": jnp.full((8, 3), i), "y": jnp.ones((8, 2))} for i in (1.0, 2.0)]
    return {
        "P": P,
        "batch": batches[0],
        "batches": batches,
        "functools": functools,
        "jax": jax,
        "jnp": jnp,
        "loss_fn": loss_fn,
        "mesh": helpers.mesh_of(ranks),
        "nnx": nnx,
        "optax": optax,
        "pallas_kernels": pallas_kernels,
        "params": {"w": jnp.ones((3, 2))},
        "schemes": sparsejax.schemes,
        "sparsejax": sparsejax,
        "tx": optax.chain(sparsejax.zen_sync(), optax.adam(1e-3)),
    }


def loss_of_large(params, batch):
    return jnp.mean(params["w"][batch["x"].astype(int).ravel()] ** 2)


def large():
    """Parameters that are not small, of which a batch touches little."""
    return {"loss_fn": loss_of_large, "params": {"w": jnp.ones((300, 300))}}


def two_axes():
    params = {"in": jnp.ones((8, 300, 2)), "out": jnp.ones((300, 8))}
    return {"mesh": helpers.grid(data=2, model=2), "params": params}


# Names of other kinds, for the blocks in which a word stands.
OTHERS = {
    "make_plan": lambda: {**large(), "mesh": helpers.mesh_of(8)},
    "residuals(state)": large,
    "def step": given,
    "column_lookup": given,
    "param_specs": two_axes,
    "use_kernels": lambda: {"x": jnp.ones(64)},
}
# What there would have to be a GPU for is run as a test runs it.
INSTEAD = {'use_kernels("pallas")': 'use_kernels("pallas", interpret=True)'}


def test_readme(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # it saves a plan
    names = given()
    seen = set()
    for block in BLOCKS:
        for word in OTHERS:
            if word in block:
                names |= OTHERS[word]()
                seen.add(word)
        for text, instead in INSTEAD.items():
            block = block.replace(text, instead)
        try:
            exec(compile(block, "a block of README", "exec"), names)
        except Exception as error:
            error.add_note(f"In this block of README:\n{block}")
            raise
    assert seen == set(OTHERS)
    assert len(BLOCKS) >= 8
    assert "sync/wire_bytes" in capsys.readouterr().out
    assert [leaf.path for leaf in names["plan"].leaves] == ["w"]
    assert names["seen"][0]["w"].ranks == 8


def test_the_change_to_a_script():
    """The lines of the diff that stand in the changed script."""
    diff = re.search(r"^```diff\n(.*?)^```$", README.read_text(), re.M | re.S)
    assert diff
    lines = diff[1].splitlines()
    changed = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    names = given()
    exec(changed, names)
    params, tx = names["params"], names["tx"]
    step = jax.shard_map(
        names["train_step"],
        mesh=names["mesh"],
        in_specs=(P(), P(), P("data")),
        out_specs=P(),
    )
    jax.eval_shape(step, params, tx.init(params), names["batch"])


# --- Docstrings.


def documented():
    """The functions that are public and have an example, by name."""
    found = {}
    for module in (sparsejax, sparsejax.transforms, sparsejax.advise):
        for name, value in vars(module).items():
            if callable(value) and ">>>" in (inspect.getdoc(value) or ""):
                found[name] = value
    return found


FUNCTIONS = documented()
MEASURED = {"measure_teams", "worthwhile"}  # which compile much


def of_flax(params, batch, variables, key, train):
    assert key.shape == ()
    return batch["x"] @ params["w"], jax.tree.map(lambda x: x + train, variables)


def saved(ranks):
    """A state of so many ranks, and whoever gives it back."""
    names = given(ranks) | large()
    tx = optax.chain(sparsejax.dgc(0.01), names["tx"])
    state = sparsejax.init(tx, names["params"], names["mesh"])

    class Checkpointer:
        def restore(self, path, target):
            assert path == "a path"
            places = jax.tree.map(lambda x: x.sharding, target)
            return jax.device_put(jax.device_get(state), places)

    return {"checkpointer": Checkpointer(), "path": "a path", "state": state, "tx": tx}


OF_FUNCTIONS = {
    "abstract_state": lambda: {**large(), **saved(8)},
    "bind": lambda: {"model": nnx.Linear(300, 300, rngs=nnx.Rngs(0))},
    "data_parallel": lambda: {"model": of_flax, "statistics": jnp.zeros(2)},
    "measure_teams": lambda: {**large(), "mesh": helpers.mesh_of(2)},
    "resized": lambda: {**large(), **saved(8)},
    "summary": lambda: {"state": types.SimpleNamespace(opt_state=saved(8)["state"])},
}


class Ran(doctest.OutputChecker):
    """Takes any output where the docstring shows none."""

    def check_output(self, want, got, optionflags):
        return not want or super().check_output(want, got, optionflags)


@pytest.mark.parametrize(
    "name", [*sorted(set(FUNCTIONS) - MEASURED), *helpers.slow(*sorted(MEASURED))]
)
def test_the_example_of_a_function(name):
    names = given() | OF_FUNCTIONS.get(name, dict)()
    doc = inspect.getdoc(FUNCTIONS[name]) or ""
    test = doctest.DocTestParser().get_doctest(doc, names, name, None, None)
    doctest.DebugRunner(Ran()).run(test)


def test_there_are_examples_of_what_is_needed_first():
    first = {"bind", "data_parallel", "local", "zen_sync", "abstract_state", "resized"}
    assert first <= set(FUNCTIONS)
    assert set(OF_FUNCTIONS) | MEASURED <= set(FUNCTIONS)
