"""The names that README, pages and docstrings take for granted, and do not make."""

import doctest
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import pallas_kernels
import sparsejax
from tests.helpers.runs import grid, mesh_of


def loss_fn(params, batch):
    return optax.squared_error(batch["x"] @ params["w"], batch["y"]).mean()


def given(ranks: int = 4) -> dict[str, Any]:
    """What nearly all snippets need; `docs/api/index.md` lists it for readers."""
    batches = [{"x": jnp.full((8, 3), i), "y": jnp.ones((8, 2))} for i in (1.0, 2.0)]
    return {
        "P": P,
        "batch": batches[0],
        "batches": batches,
        "functools": functools,
        "jax": jax,
        "jnp": jnp,
        "loss_fn": loss_fn,
        "mesh": mesh_of(ranks),
        "network": sparsejax.Network(25, 20),
        "nnx": nnx,
        "optax": optax,
        "pallas_kernels": pallas_kernels,
        "params": {"w": jnp.ones((3, 2))},
        "schemes": sparsejax.schemes,
        "sparsejax": sparsejax,
        "sparsifiers": sparsejax.sparsifiers,
        "tx": optax.chain(sparsejax.zen_sync(), optax.adam(1e-3)),
    }


def loss_of_large(params, batch):
    return jnp.mean(params["w"][batch["x"].astype(int).ravel()] ** 2)


def large() -> dict[str, Any]:
    """Parameters that are not small, of which a batch touches little."""
    return {"loss_fn": loss_of_large, "params": {"w": jnp.ones((300, 300))}}


def two_axes() -> dict[str, Any]:
    params = {"in": jnp.ones((8, 300, 2)), "out": jnp.ones((300, 8))}
    return {"mesh": grid(data=2, model=2), "params": params}


def of_flax(params, batch, variables, key, train):
    assert key.shape == ()
    return batch["x"] @ params["w"], jax.tree.map(lambda x: x + train, variables)


def saved(ranks: int) -> dict[str, Any]:
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


class Ran(doctest.OutputChecker):
    """Takes any output where the docstring shows none."""

    def check_output(self, want, got, optionflags):
        return not want or super().check_output(want, got, optionflags)


def run_doctest(name: str, text: str, names: dict[str, Any]) -> None:
    """Runs the examples in a text; output that it shows must be what comes."""
    test = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    doctest.DebugRunner(Ran(), optionflags=doctest.ELLIPSIS).run(test)


# What the docstrings of some take for granted beside that.
OF_NAMES = {
    "sparsejax.abstract_state": lambda: {**large(), **saved(8)},
    "sparsejax.bind": lambda: {"model": nnx.Linear(300, 300, rngs=nnx.Rngs(0))},
    "sparsejax.data_parallel": lambda: {"model": of_flax, "statistics": jnp.zeros(2)},
    "sparsejax.advise.measure_teams": lambda: {**large(), "mesh": mesh_of(2)},
    "sparsejax.resized": lambda: {**large(), **saved(8)},
    "sparsejax.summary": lambda: {
        "state": types.SimpleNamespace(opt_state=saved(8)["state"])
    },
}
