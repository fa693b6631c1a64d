"""The names that snippets of README, pages and docstrings use without defining them."""

import doctest
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import pallas_kernels
import sparsejax
from sparsejax.training.ahead import ReportedBatch
from tests.helpers.meshes import grid, mesh_of, placed


def loss_fn(params, batch):
    return optax.squared_error(batch["x"] @ params["w"], batch["y"]).mean()


def given(ranks: int = 4) -> dict[str, Any]:
    """Returns the names that nearly all snippets use; `docs/api/index.md` lists them."""
    batches = [{"x": jnp.full((8, 3), i), "y": jnp.ones((8, 2))} for i in (1.0, 2.0)]
    batches = placed(batches, mesh_of(ranks), P("data"))
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
        "params": placed({"w": jnp.ones((3, 2))}, mesh_of(ranks), P()),
        "schemes": sparsejax.schemes,
        "sparsejax": sparsejax,
        "sparsifiers": sparsejax.sparsifiers,
        "tx": optax.chain(sparsejax.zen_sync(), optax.adam(1e-3)),
    }


def loss_of_large(params, batch):
    return jnp.mean(params["w"][batch["x"].astype(int).ravel()] ** 2)


def large() -> dict[str, Any]:
    """Returns a table that is large enough to be sent sparsely, and its loss."""
    return {"loss_fn": loss_of_large, "params": {"w": jnp.ones((300, 300))}}


def table_and_head() -> dict[str, Any]:
    """Returns a table large enough to be sent sparsely, a dense leaf, and a loss."""

    def loss_fn(params, batch):
        return jnp.mean((params["w"][batch["x"].astype(int).ravel()] @ params["out"]) ** 2)

    return {
        "loss_fn": loss_fn,
        "params": {"w": jnp.ones((300, 300)), "out": jnp.ones((300, 2))},
    }


def two_axes() -> dict[str, Any]:
    params = {"in": jnp.ones((8, 300, 2)), "out": jnp.ones((300, 8))}
    return {"mesh": grid(data=2, model=2), "params": params}


def inside_jit() -> dict[str, Any]:
    """Returns a model on replicas of shards, with its batch and activations placed."""
    mesh, rows = grid(replica=4, fsdp=2), P(("replica", "fsdp"))
    params = {"table": jnp.ones((64, 8)), "out": jnp.ones((8, 4))}

    def loss_fn(params, batch):
        out = P(*rows, None)
        x = params["table"].at[batch].get(out_sharding=out)
        return jnp.mean(jnp.einsum("bi,io->bo", x, params["out"], out_sharding=out) ** 2)

    place = lambda x: jax.device_put(x, NamedSharding(mesh, rows))
    names = {"params": params, "loss_fn": loss_fn, "batch": place(jnp.arange(16))}
    return names | {"x": place(jnp.ones((16, 4))), "mesh": mesh}


def sharded_over_fsdp() -> dict[str, Any]:
    """Returns the names of `inside_jit`, with placed parameters and more arrays."""
    names = inside_jit()
    mesh = names["mesh"]
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    names["params"] = {name: place(x, "fsdp") for name, x in names["params"].items()}
    batches = place(jnp.arange(32).reshape(2, 16), None, ("replica", "fsdp"))
    kernels = place(jnp.ones((3, 4, 4)), None, "fsdp", None)
    with jax.set_mesh(mesh):
        metadata = {"out_sharding": ("fsdp", None)}
        model = nnx.Linear(4, 2, kernel_metadata=metadata, rngs=nnx.Rngs(0))
    tx = optax.chain(sparsejax.zen_sync("replica", reduce="sum"), optax.adam(1e-3))
    return names | {"batches": batches, "kernels": kernels, "model": model, "tx": tx}


def on_auto_axes() -> dict[str, Any]:
    """Returns a model whose kernel is sharded over an Auto axis."""
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("replica", "fsdp"), axis_types=kinds)
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["kernel"]) ** 2)

    params = {"kernel": place(jnp.ones((16, 4)), "fsdp", None)}
    batch = place(jnp.ones((16, 16)), ("replica", "fsdp"))
    return {"mesh": mesh, "loss_fn": loss_fn, "params": params, "batch": batch}


def over_the_ranks() -> dict[str, Any]:
    """Returns parameters that can be sharded over eight ranks."""
    return {"params": {"table": jnp.ones((64, 8)), "out": jnp.ones((8, 4))}}


def striped() -> dict[str, Any]:
    """Returns a table and ids of its rows."""
    return {"table": jnp.ones((50_000, 2)), "ids": jnp.arange(16)}


def table_under_jit() -> dict[str, Any]:
    """Returns a table on replicas of shards, and ids of its rows."""
    mesh = grid(replica=4, fsdp=2)
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    params = {"embedding": place(jnp.ones((64, 8)), "fsdp", None)}
    names = {"mesh": mesh, "params": params}
    return names | {"ids": place(jnp.zeros((16, 2), int), ("replica", "fsdp"))}


def of_flax(params, batch, variables, key, train):
    assert key.shape == ()
    return batch["x"] @ params["w"], jax.tree.map(lambda x: x + train, variables)


def saved(ranks: int) -> dict[str, Any]:
    """Returns a state for this number of ranks, and a checkpointer that restores it."""
    names = given(ranks) | large()
    tx = optax.chain(sparsejax.dgc(0.01), names["tx"])
    state = sparsejax.init(tx, names["params"], names["mesh"])

    class Checkpointer:
        def restore(self, path, target):
            assert path == "a path"
            places = jax.tree.map(lambda x: x.sharding, target)
            return jax.device_put(jax.device_get(state), places)

    return {"checkpointer": Checkpointer(), "path": "a path", "state": state, "tx": tx}


def loss_of_blocks(params, batch):
    hidden = batch["x"] @ params["embed"]["w"]
    for layer in params["layers"]:
        hidden = jnp.tanh(hidden @ layer["w"])
    return optax.squared_error(hidden @ params["head"]["w"], batch["y"]).mean()


def blocks(layers: int) -> dict[str, Any]:
    """Returns a model of blocks, and the state of a chain with `embrace.horizontal`."""
    w = lambda *shape: {"w": jnp.ones(shape)}
    params = {"head": w(3, 2), "layers": [w(3, 3)] * layers, "embed": w(3, 3)}
    tx = optax.chain(sparsejax.dense_sync(), optax.adam(1e-3))
    order = ["embed", *(f"layers/{number}" for number in range(layers)), "head"]
    tx = sparsejax.embrace.horizontal(tx, order=order)
    names = {"loss_fn": loss_of_blocks, "params": params}
    return names | {"state": sparsejax.abstract_state(tx, params, mesh_of(4))}


def loss_of_table(params, batch):
    table, ids = params["users"], batch["x"].astype(int)
    read = sparsejax.lookup
    if isinstance(table, sparsejax.ColumnTable):
        read = sparsejax.column_lookup
    return jnp.mean(read(table, ids) ** 2)


def by_rows(tx: Any, table: Any, value_and_grad: Any) -> dict[str, Any]:
    """Returns a table whose gradient is rows, and the state of a chain that takes rows."""
    params = {"users": table}
    return {
        "batch": given()["batches"][0],
        "loss_fn": loss_of_table,
        "next_batch": jax.device_get(given()["batches"][1]),
        "of_batch": lambda *of: {"grads": value_and_grad(loss_of_table)(*of)[1]},
        "params": params,
        "state": sparsejax.abstract_state(tx, params, mesh_of(4)),
        "tx": tx,
    }


def by_columns() -> dict[str, Any]:
    rows = sparsejax.lazy(optax.adam(1e-3))
    table = sparsejax.ColumnTable.create(jax.random.key(0), 100, 8, mesh_of(4))
    tx = optax.chain(sparsejax.embrace_sync(), rows)
    return by_rows(tx, table, sparsejax.embrace.value_and_grad)


def by_lists() -> dict[str, Any]:
    tx = optax.chain(sparsejax.zen_sync(), sparsejax.lazy(optax.adam(1e-3)))
    return by_rows(tx, jnp.ones((300, 300)), sparsejax.value_and_grad)


# The classes that have a section in docs/errors.md, in the order of the module.
ERRORS = [
    name
    for name, value in vars(sparsejax.errors).items()
    if isinstance(value, type) and issubclass(value, Exception) and name[0] != "_"
]


def of_two_processes() -> dict[str, Any]:
    """Returns a trainer that only compares batches, as one of two processes does."""
    reported = ReportedBatch(processes=2)

    def step(state, batch, next_batch):
        reported.is_kept(state, batch)
        reported.after(state, next_batch)
        return state, 0.0

    return {"trainer": types.SimpleNamespace(step=step), "state": object()}


def traced(text: str, name: str, names: dict[str, Any]) -> None:
    """Traces the examples of a text inside a `shard_map`, or without compiling theirs."""
    jit = lambda function: functools.partial(jax.eval_shape, function)
    names["jax"] = types.SimpleNamespace(**vars(jax) | {"jit": jit})
    if "mesh=mesh" in text:
        return run_doctest(name, text, names)

    def on_rank(params, state, batch):
        more = names.get("of_batch", lambda *_: {})(sparsejax.local(params), batch)
        own = names | {"params": params, "state": state, "batch": batch} | more
        run_doctest(name, text, own)
        return 0

    operands = names["params"], names["state"]
    specs = (*sparsejax.state_specs(operands), P("data"))
    mapped = jax.shard_map(on_rank, mesh=mesh_of(4), in_specs=specs, out_specs=P())
    jax.eval_shape(mapped, *operands, names["batch"])
    return None


class Ran(doctest.OutputChecker):
    """An output checker that accepts any output if the docstring shows none."""

    def check_output(self, want, got, optionflags):
        return not want or super().check_output(want, got, optionflags)


def run_doctest(name: str, text: str, names: dict[str, Any]) -> None:
    """Runs the examples in a text; outputs have to match those that it shows."""
    test = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    doctest.DebugRunner(Ran(), optionflags=doctest.ELLIPSIS).run(test)


# The names that the docstrings of some functions use in addition to `given`.
OF_NAMES = {
    "sparsejax.abstract_state": lambda: {**large(), **saved(8)},
    "sparsejax.bind": lambda: {"model": nnx.Linear(300, 300, rngs=nnx.Rngs(0))},
    "sparsejax.data_parallel": lambda: {"model": of_flax, "statistics": jnp.zeros(2)},
    "sparsejax.advise.measure_teams": lambda: {**large(), "mesh": mesh_of(2)},
    "sparsejax.embrace.find_order": lambda: blocks(2),
    "sparsejax.embrace.flush": by_columns,
    "sparsejax.embrace.horizontal": lambda: blocks(1),
    "sparsejax.embrace.lookahead": lambda: {
        "state": None,
        "trainer": types.SimpleNamespace(step=lambda state, *_: (state, 0.0)),
    },
    "sparsejax.embrace.rows_read": by_columns,
    "sparsejax.resized": lambda: {**large(), **saved(8)},
    "sparsejax.rows.within_capacity": by_lists,
    "sparsejax.summary": lambda: {
        "state": types.SimpleNamespace(opt_state=saved(8)["state"])
    },
}
