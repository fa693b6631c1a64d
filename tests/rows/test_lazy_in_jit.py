"""Exact lazy optimizers under `jit`: rows are read, and updated, where their shards are."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import errors
from sparsejax.rows.updates.state import LazyState
from tests import helpers
from tests.helpers import hlo
from tests.rows.test_in_jit import (
    BATCH,
    BOTH,
    LENGTH,
    OUT,
    ROWS,
    WHERE,
    WIDTH,
    ids_of,
    table,
)


STEPS = 5
OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-2),
    "decayed": lambda: optax.adamw(optax.linear_schedule(1e-2, 1e-3, 4), weight_decay=0.1),
    "adagrad": lambda: optax.adagrad(1e-2),
    "rowwise": lambda: sparsejax.rows.rowwise_adagrad(1e-2),
}


def first():
    return {"kernel": np.full((WIDTH,), 0.5, np.float32), "table": table()}


def loss_of(params, rows):
    return jnp.sum(jnp.einsum("btd,d->btd", jnp.sin(rows) * rows, params["kernel"])) / BATCH


def by_rows(params, ids):
    return loss_of(params, params["table"].at[ids].get(out_sharding=OUT))


def plain(params, ids):
    return loss_of(params, params["table"][ids])


def densely(name, each):
    """The dense optimizer on one device, of a loss a step: losses, and the parameters."""
    tx, params = OPTIMIZERS[name](), jax.tree.map(jnp.asarray, first())
    gradients = {loss: jax.jit(jax.value_and_grad(loss)) for loss in each}
    update, state, losses = jax.jit(tx.update), tx.init(params), []
    for seed, loss in enumerate(each):
        value, grads = gradients[loss](params, jnp.asarray(ids_of(seed)))
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses, jax.tree.map(np.asarray, params)


reference = functools.cache(lambda name: densely(name, STEPS * [plain]))


class Programs(NamedTuple):
    """What runs of one kind share: a mesh, optimizers, the step and what settles rows."""

    mesh: jax.sharding.Mesh
    lazy: Any
    tx: Any
    step: Any
    settle: Any


@functools.cache
def programs(name, loss, sizes, given):
    lazy = OPTIMIZERS[name]()
    if name != "rowwise":  # which is by rows already
        lazy = sparsejax.lazy(lazy)
    sync = sparsejax.zen_sync("replica", reduce="sum", rules={"table": "sparse"})
    tx = optax.chain(sync, lazy)

    def step(params, state, ids):
        read = lazy.reader(params, state)
        value_and_grad = sparsejax.value_and_grad(loss, read=read)
        value, grads = value_and_grad(sparsejax.local(params, BOTH), ids)
        extra = {"read": read} if given else {}
        updates, state = tx.update(grads, state, params, **extra)
        return sparsejax.apply_updates(params, updates), state, value

    settle = lambda *given: sparsejax.rows.settle(*given, lazy)
    mesh = helpers.grid(replica=sizes[0], fsdp=sizes[1])
    return Programs(mesh, lazy, tx, jax.jit(step), jax.jit(settle))


class Run:
    """Parameters and a state on a mesh, and the step that trains them."""

    def __init__(self, where, name, loss=by_rows, sizes=(4, 2), given=True):
        self.mesh, self.lazy, tx, self.step, self.settle = programs(
            name, loss, sizes, given
        )
        self.specs = {"kernel": P(None), "table": WHERE[where]}
        with jax.set_mesh(self.mesh):
            self.params = helpers.placed(first(), self.mesh, self.specs)
            self.state = sparsejax.init(tx, self.params)

    def ids(self, seed):
        return helpers.placed(ids_of(seed), self.mesh, P(BOTH, None))

    def train(self, seeds):
        """The losses of some steps."""
        losses = []
        with jax.set_mesh(self.mesh):
            for seed in seeds:
                out = self.step(self.params, self.state, self.ids(seed))
                self.params, self.state, loss = out
                losses.append(float(loss))
        return losses

    def settled(self):
        """The parameters once all rows have caught up, as NumPy arrays."""
        with jax.set_mesh(self.mesh):
            params, _ = self.settle(self.params, self.state)
        return jax.tree.map(np.asarray, params)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("zero", "decayed"),
        *helpers.slow(("both", "adam"), ("replicated", "adagrad"), ("rows", "rowwise")),
    ],
)
def test_rows_are_those_of_the_dense_optimizer(where, name):
    run = Run(where, name)
    losses, params = run.train(range(STEPS)), run.settled()
    wanted, others = reference(name)
    np.testing.assert_allclose(losses, wanted, rtol=2e-5)
    np.testing.assert_allclose(params["table"], others["table"], atol=2e-5)
    np.testing.assert_allclose(params["kernel"], others["kernel"], atol=1e-6)
    # Compiled once, and nothing has moved.
    assert run.step._cache_size() == 1
    types = jax.tree.map(lambda x: jax.typeof(x).sharding.spec.partitions, run.params)
    assert types == jax.tree.map(lambda spec: (*spec,), run.specs)
    (lazy,) = [x for x in run.state if isinstance(x, LazyState)]
    if name not in ("adagrad", "rowwise"):
        over = run.specs["table"][0]
        assert jax.typeof(lazy.last["table"]).sharding.spec.partitions == (over,)


def test_a_mesh_axis_of_size_1_shards_no_columns():
    run = Run("rows and columns", "adam", sizes=(4, 1))
    losses, params = run.train(range(2)), run.settled()
    wanted, others = densely("adam", 2 * [plain])
    np.testing.assert_allclose(losses, wanted, rtol=2e-5)
    np.testing.assert_allclose(params["table"], others["table"], atol=2e-5)
    partitions = jax.typeof(run.params["table"]).sharding.spec.partitions
    assert partitions == ("replica", "fsdp")


@pytest.mark.slow
def test_neither_a_table_nor_its_state_is_sent_or_copied():
    """Of a table that is sharded over the ranks only rows that are read go anywhere."""
    run = Run("zero", "adam")
    with jax.set_mesh(run.mesh):
        compiled = run.step.lower(run.params, run.state, run.ids(0)).compile()
    shard = ROWS // 4 * WIDTH
    sent = hlo.compiled_collectives(compiled, run.mesh)
    rows = [one for one in sent if "replica" in one.axes and one.size > 256]
    assert rows
    assert {one.opcode for one in rows} == {"all-to-all"}
    # Rows for this device, and those that it lists: each message has room for all of them.
    listed = BATCH * LENGTH // 4
    assert max(one.size for one in rows) <= 4 * listed * (WIDTH + 1) < 2 * shard
    assert all(one.size < 4 * shard for one in sent)


@pytest.mark.slow
def test_a_table_may_have_dense_gradients_in_some_steps():
    run = Run("zero", "decayed")
    other = Run("zero", "decayed", loss=dense_in_part)
    run.train(range(2))
    other.params, other.state = run.params, run.state
    other.train([2])
    run.params, run.state = other.params, other.state
    run.train([3, 4])
    losses = {2: plain_in_part}
    _, params = densely("decayed", [losses.get(seed, plain) for seed in range(STEPS)])
    np.testing.assert_allclose(run.settled()["table"], params["table"], atol=2e-5)


def dense_in_part(params, ids):
    """A loss that uses the whole table, too, on one example."""
    first = ids.at[:, 0].get(out_sharding=P(BOTH)) < ROWS
    weights = jnp.where(first, 1.0, 0.0)
    used = jnp.einsum("b,hd->b", weights, jnp.sin(params["table"]), out_sharding=P(BOTH))
    return by_rows(params, ids) + jnp.sum(used) / BATCH


def plain_in_part(params, ids):
    return plain(params, ids) + jnp.sum(jnp.sin(params["table"]))


def in_turns(params, ids):
    """A scan over ids beyond the table and from its end; one lookup is that of a branch."""

    def turn(total, ids):
        half = jax.tree.map(lambda x: 2 * x, params)
        beyond = half["table"].at[ids + 256]
        filled = beyond.get(mode="fill", fill_value=1.0, out_sharding=OUT)
        halves = lambda half: by_rows(half, ids // 2)
        nearest = lambda half: by_rows(half, ids - 300)
        chosen = jax.lax.cond(jnp.max(ids) % 2 == 0, halves, nearest, half)
        return total + loss_of(half, filled) + chosen, None

    return jax.lax.scan(jax.checkpoint(turn), 0.0, jnp.stack([ids, ids // 2]))[0]


def in_turns_plain(params, ids):
    half, total = jax.tree.map(lambda x: 2 * x, params), 0.0
    for own in (ids, ids // 2):
        filled = half["table"].at[own + 256].get(mode="fill", fill_value=1.0)
        chosen = jnp.where(jnp.max(own) % 2 == 0, own // 2, own - 300)
        total += loss_of(half, filled) + plain(half, chosen)
    return total


@pytest.mark.slow
def test_losses_read_rows_as_they_read_the_table():
    run = Run("both", "decayed", loss=in_turns)
    losses = run.train(range(3))
    wanted, params = densely("decayed", 3 * [in_turns_plain])
    np.testing.assert_allclose(losses, wanted, rtol=2e-5)
    np.testing.assert_allclose(run.settled()["table"], params["table"], atol=2e-5)


def scaled_by(shape):
    """An optimizer whose step is scaled by a function, and by an array of a shape."""

    def update(updates, state, params=None, *, scale=None, by=None, **extra):
        del params, extra
        if scale is not None:
            assert by.shape == shape
            updates = jax.tree.map(lambda x: -scale(x) * jnp.sum(by), updates)
        return updates, state

    init = lambda params: optax.EmptyState()
    return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.slow
def test_an_optimizer_is_given_what_update_is_given_besides():
    """Functions, too, and all of an array that is sharded."""
    mesh = helpers.grid(replica=4, fsdp=2)
    lazy = sparsejax.lazy(scaled_by((8,)))
    sync = sparsejax.zen_sync("replica", reduce="sum", rules={"table": "sparse"})
    tx = optax.chain(sync, lazy)
    with jax.set_mesh(mesh):
        params = helpers.placed(first(), mesh, {"kernel": P(None), "table": WHERE["both"]})

        @jax.jit
        def step(params, state, ids, by):
            grads = sparsejax.value_and_grad(by_rows)(sparsejax.local(params, BOTH), ids)[1]
            extra = {"scale": lambda x: 2 * x, "by": by}
            updates, _ = tx.update(grads, state, params, **extra)
            return sparsejax.apply_updates(params, updates)

        given = ids_of(0), np.arange(8.0)
        ids, by = helpers.placed(given, mesh, (P(BOTH, None), P("fsdp")))
        found = step(params, sparsejax.init(tx, params), ids, by)
    grads = jax.grad(plain)(jax.tree.map(jnp.asarray, first()), jnp.asarray(ids_of(0)))
    wanted = first()["table"] - 56 * grads["table"]
    np.testing.assert_allclose(np.asarray(found["table"]), wanted, atol=1e-4)


@pytest.mark.slow
def test_a_kernel_that_is_sharded_by_rows_and_columns_is_settled():
    """Though all its rows have seen each step, but those that another run has left late."""
    run = Run("both", "adam")
    run.train(range(3))
    specs = {"kernel": P(None), "table": P("replica", "fsdp")}
    with jax.set_mesh(run.mesh):
        run.params = helpers.placed(run.params, run.mesh, specs)
        (lazy,) = [x for x in run.state if isinstance(x, LazyState)]

        def moved(x):
            if x.shape[:1] != (ROWS,):
                return x
            return helpers.placed(x, run.mesh, P(*["replica", "fsdp"][: x.ndim]))

        run.state = jax.tree.map(moved, lazy)
    found, (_, params) = run.settled(), densely("adam", 3 * [plain])
    np.testing.assert_allclose(found["table"], params["table"], atol=2e-5)


def test_an_optimizer_of_traced_values_is_refused_by_name():
    mesh = helpers.grid(replica=4, fsdp=2)
    sync = sparsejax.zen_sync("replica", reduce="sum", rules={"table": "sparse"})
    adagrad = lambda learning_rate: sparsejax.lazy(optax.adagrad(learning_rate))
    tx = optax.chain(sync, optax.inject_hyperparams(adagrad)(0.1))
    with jax.set_mesh(mesh):
        params = helpers.placed(first(), mesh, {"kernel": P(None), "table": WHERE["both"]})

        def step(params, state, ids):
            grads = sparsejax.value_and_grad(by_rows)(sparsejax.local(params, BOTH), ids)[1]
            return tx.update(grads, state, params)

        given = params, sparsejax.init(tx, params), helpers.placed(ids_of(0), mesh, P(BOTH))
        with pytest.raises(errors.ArgumentError, match=r"'table'.*hyperparams inside"):
            jax.jit(step)(*given)


def test_what_cannot_be_read_is_refused_by_name():
    run = Run("rows", "adam")
    with jax.set_mesh(run.mesh):

        def read(params, ids, over):
            find = run.lazy.reader(params, run.state)
            loss = lambda params, ids: jnp.sum(
                params["table"].at[ids].get(out_sharding=P(over, None))
            )
            loss = sparsejax.value_and_grad(loss, read=find)
            return loss(sparsejax.local(params, over), ids)

        of_replica = helpers.placed(ids_of(0)[:, 0], run.mesh, P("replica"))
        match = r"'table' are sharded over 'fsdp'.*Shard the ids over all axes"
        with pytest.raises(errors.AxisError, match=match):
            jax.jit(functools.partial(read, over="replica"))(run.params, of_replica)
        by_columns = dict(run.params)
        by_columns["table"] = helpers.placed(first()["table"], run.mesh, P(None, "fsdp"))
        of_all = helpers.placed(ids_of(0)[:, 0], run.mesh, P(BOTH))
        with pytest.raises(errors.ArgumentError, match=r"'table' is sharded.*by rows"):
            jax.jit(functools.partial(read, over=BOTH))(by_columns, of_all)
