"""Under `jit`: scans over layers and microbatches, checkpoints, donation, bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax
from benchmarks.device import hlo
from sparsejax.errors import RuleError
from tests import helpers
from tests.transforms.in_jit import model


STEPS, PARTS = 3, 4


@pytest.fixture(autouse=True)
def _on_the_mesh():
    with jax.set_mesh(model.mesh()):
        yield


def chain(sync):
    return optax.chain(sync, optax.sgd(0.5))


def through(params, batch):
    """The gradient of a scan over microbatches: its transpose adds gradients up."""

    def loss_fn(params):
        one = jax.checkpoint(lambda sum, part: (sum + model.loss_fn(params, part), None))
        return jax.lax.scan(one, 0.0, batch)[0] / PARTS

    return jax.value_and_grad(loss_fn)(params)


def in_carry(params, batch):
    """A scan over microbatches that carries the sum of their gradients, unreduced."""
    part_of_loss = lambda params, part: model.loss_fn(params, part) / PARTS
    loss_and_grads = jax.value_and_grad(part_of_loss)
    one = lambda carry, part: (
        jax.tree.map(jnp.add, carry, loss_and_grads(params, part)),
        None,
    )
    first = jax.tree.map(lambda x: x[0], batch)
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(loss_and_grads, params, first))
    return jax.lax.scan(one, zeros, batch)[0]


MICROBATCHES = {"through": through, "in carry": in_carry}


@pytest.fixture(scope="module")
def wanted():
    """By dense sums: of one batch a step, and of all microbatches as one."""

    def run(value_and_grad, given):
        tx = chain(model.dense())
        with jax.set_mesh(model.mesh()):
            return model.trained(model.make_step(value_and_grad, tx), tx, given)

    def whole(params, batch):
        joined = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1], out_sharding=P()), batch)
        whole = jax.tree.map(lambda x: jax.reshard(x, P(model.BOTH)), joined)
        return jax.value_and_grad(model.loss_fn)(params, whole)

    return {
        "layers": run(jax.value_and_grad(model.loss_fn), model.batches(STEPS)),
        "microbatches": run(whole, model.batches(STEPS, PARTS)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["through", *helpers.slow("in carry")])
def test_microbatches_are_added_up_where_they_are_and_exchanged_once(name, wanted):
    tx = chain(model.zen())
    step = model.make_step(MICROBATCHES[name], tx)
    params, state, losses = model.trained(step, tx, model.batches(STEPS, PARTS))
    np.testing.assert_allclose(losses, wanted["microbatches"][2], rtol=1e-5)
    model.assert_equal(params, wanted["microbatches"][0])

    (batch,) = model.batches(1, PARTS)
    compiled = step.lower(params, state, batch).compile()
    loops = [
        one
        for one in hlo.parse(compiled.as_text()).entry.instructions.values()
        if one.opcode == "while"
    ]
    assert PARTS in {one.trips for one in loops}
    found = helpers.compiled_collectives(compiled, model.mesh())
    # Of the loop over microbatches there is no more than the sum of a loss, one number.
    inside = [one for one in found if one.path[:1] == ("while",)]
    assert all(one.size == 1 for one in inside), inside
    scattered = [one for one in found if one.opcode in ("all-to-all", "reduce-scatter")]
    scattered = [one.size for one in scattered if one.axes == {"fsdp"}]
    assert sorted(scattered) == sorted(x.size for x in jax.tree.leaves(params))


@pytest.mark.slow
def test_layers_are_gathered_in_the_scan_and_exchanged_once(wanted):
    """A cast over the slow axis is outside of the loss, one over the fast axis inside."""

    def loss_fn(params, batch):
        gathered = lambda tree: sparsejax.local(tree, model.BOTH)
        ids, classes = batch
        x = gathered(params["embedding"]).at[ids].get(out_sharding=P(model.BOTH))
        each = lambda x, layer: (model.block(x, gathered(layer)), None)
        x, _ = jax.lax.scan(jax.checkpoint(each), x, params["layers"])
        return model.entropy(x @ gathered(params["head"]), classes)

    tx = chain(model.zen())
    step = model.make_step(jax.value_and_grad(loss_fn), tx, "replica")
    params, state, losses = model.trained(step, tx, model.batches(STEPS))
    np.testing.assert_allclose(losses, wanted["layers"][2], rtol=1e-5)
    model.assert_equal(params, wanted["layers"][0])

    (batch,) = model.batches(1)
    compiled = step.lower(params, state, batch).compile()
    found = helpers.compiled_collectives(compiled, model.mesh())
    inside = [one for one in found if one.path[:1] == ("while",)]
    assert {one.axes for one in inside} == {frozenset({"fsdp"})}
    layer = sum(x[0].size for x in jax.tree.leaves(params["layers"]))
    assert max(one.size for one in inside) <= layer
    assert {"all-gather"} < {one.opcode for one in inside}


@pytest.mark.slow
def test_what_is_donated_is_used():
    tx = optax.chain(
        sparsejax.dgc(0.1, axis_name="replica", min_size=100),
        sparsejax.zen_sync("replica", reduce="sum"),
        optax.adam(1e-2),
    )
    step = model.make_step(jax.value_and_grad(model.loss_fn), tx)
    params, state, _ = model.trained(step, tx, model.batches(2))
    (batch,) = model.batches(1)
    # All but the last step's metrics, which no step reads.
    large = [x for x in jax.tree.leaves((params, state)) if x.size > 64]
    needed = sum(x.addressable_shards[0].data.nbytes for x in large)
    compiled = step.lower(params, state, batch).compile()
    assert needed <= compiled.memory_analysis().alias_size_in_bytes < 1.01 * needed
    step(params, state, batch)
    assert all(x.is_deleted() for x in large)


@pytest.mark.slow
def test_bfloat16_parameters_with_a_float32_copy():
    """Gradients are widened before they are summed, as partial sums."""
    narrow = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)

    def make(tx):
        @jax.jit
        def step(params, copies, state, batch):
            local = sparsejax.local(params, model.BOTH)
            loss, grads = jax.value_and_grad(model.loss_fn)(local, batch)
            grads = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
            updates, state = tx.update(grads, state, copies)
            copies = optax.apply_updates(copies, updates)
            return narrow(copies), copies, state, loss

        return step

    runs = []
    for sync in (model.zen(), model.dense()):
        tx, copies = chain(sync), model.parameters()
        state = sparsejax.init(tx, copies, axis_name="replica")
        carried, step = (narrow(copies), copies, state), make(tx)
        before = model.types(carried)
        for batch in model.batches(STEPS):
            *carried, loss = step(*carried, batch)
        assert model.types(carried) == before
        assert step._cache_size() == 1
        runs.append((carried[1], float(loss)))
    (found, loss), (dense, wanted) = runs
    # A float32 sum that differs in its last place may round to the next bfloat16 number.
    model.assert_equal(found, dense, room=1e-4)
    assert loss == pytest.approx(wanted, rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [2, 4])
def test_sizes_are_those_of_shards(fsdp):
    """Two shards have 65,536 numbers each; of four none is as large."""
    mesh = helpers.grid(replica=2, fsdp=fsdp)
    place = NamedSharding(mesh, P("fsdp", None))
    params = {"table": jax.device_put(np.zeros((4096, 32), np.float32), place)}
    rows = sparsejax.zen_sync("replica", reduce="sum", rules={"table": "row"})
    tx = optax.chain(
        sparsejax.dgc(0.01, axis_name="replica"),
        sparsejax.zen_sync("replica", reduce="sum"),
    )
    x = np.random.default_rng(0).random((2 * fsdp, 32), np.float32)
    x = jax.device_put(x, NamedSharding(mesh, P(model.BOTH, None)))

    @jax.jit
    def update(params, state, x):
        loss_fn = lambda params: jnp.sum(jnp.einsum("bd,vd->bv", x, params["table"]))
        grads = jax.grad(loss_fn)(sparsejax.local(params, model.BOTH))
        return tx.update(grads, state, params)[1]

    with jax.set_mesh(mesh):
        state = update(params, sparsejax.init(tx, params), x)
        if fsdp == 2:
            sparsejax.init(rows, params)
        else:
            with pytest.raises(RuleError, match="largest has 32,768 numbers"):
                sparsejax.init(rows, params)
    held = np.asarray(sparsejax.residuals(state)["table"])
    assert held.any() == (fsdp == 2)
