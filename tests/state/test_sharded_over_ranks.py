"""What is sharded over which axis, and what is said of it.

Parameters that are sharded over the axis of the ranks (FSDP) have gradients that are no
parts of a sum over the ranks: adding up those of different shards would train wrong numbers
with losses that look right. Over another axis they are shards like any other.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import axes
from sparsejax.errors import ArgumentError, StateError
from tests import helpers


HEIGHT, WIDTH = 8, 3
FSDP = r"sharded over 'data'.*each rank holds a shard of it \(FSDP\).*optax.partition"

SYNCS = {
    "zen_sync": sparsejax.zen_sync,
    "dense_sync": sparsejax.dense_sync,
    "dgc": lambda axis: optax.chain(
        sparsejax.dgc(0.5, axis_name=axis, min_size=1), sparsejax.zen_sync(axis)
    ),
    "ok_topk_sync": lambda axis: sparsejax.ok_topk_sync(0.5, axis_name=axis),
    "accumulate": lambda axis: sparsejax.accumulate(sparsejax.zen_sync(axis), 2, axis),
}


def params():
    table = np.random.default_rng(0).normal(size=(HEIGHT, WIDTH))
    return {"table": jnp.asarray(table, jnp.float32), "w": jnp.ones(WIDTH)}


def loss_of(over):
    """A loss that gathers the table, where it is sharded."""

    def loss(p, ids):
        table = lax.all_gather(p["table"], over, tiled=True) if over else p["table"]
        return jnp.mean((table[ids] @ p["w"]) ** 2)

    return loss


def made_inside(tx, mesh, specs, out_specs, check_vma):
    """A state of shards, made in a `shard_map` of one's own."""
    made = helpers.shard_map(
        tx.init, mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=check_vma
    )
    return jax.jit(made)(params())


def step_of(tx, mesh, specs, over, *, check_vma=True, with_params=True, axis="data"):
    def step(p, state, ids):
        grads = jax.grad(loss_of(over))(sparsejax.local(p, axis), ids)
        updates, state = tx.update(grads, state, p if with_params else None)
        return updates, state

    def run(p, state, ids):
        of = lambda x: specs["table"] if x.shape[:1] == (HEIGHT,) else P()
        state_specs = jax.tree.map(of, state)
        return helpers.shard_map(
            step,
            mesh=mesh,
            in_specs=(specs, state_specs, P(axis)),
            out_specs=(specs, state_specs),
            check_vma=check_vma,
        )(p, state, ids)

    return run


IDS = np.arange(8, dtype=np.int32) % HEIGHT


@pytest.mark.parametrize(
    ("check_vma", "with_params", "name"),
    [
        (True, True, "zen_sync"),
        (True, False, "dense_sync"),
        (False, True, "dense_sync"),
        (False, False, "zen_sync"),
    ],
)
def test_fsdp_over_the_axis_of_the_ranks_is_refused(check_vma, with_params, name):
    """In a `shard_map` of one's own, with a state of the whole parameters."""
    mesh, specs = helpers.mesh_of(4), {"table": P("data"), "w": P()}
    tx, p = SYNCS[name]("data"), params()
    state = tx.init(p)
    run = step_of(tx, mesh, specs, "data", check_vma=check_vma, with_params=with_params)
    with pytest.raises((ArgumentError, StateError), match=FSDP):
        jax.eval_shape(run, p, state, IDS)


PAIR = ("data", "fsdp")


@pytest.mark.parametrize(
    ("check_vma", "over"), [(True, "data"), (True, PAIR), (False, "fsdp")]
)
def test_shards_over_one_of_a_pair_of_axes_of_the_ranks_are_refused(check_vma, over):
    """By their shapes, with or without `check_vma`: the ranks are those of both axes."""
    mesh, specs = helpers.grid(data=2, fsdp=4), {"table": P(over), "w": P()}
    tx, p = sparsejax.zen_sync(PAIR), params()
    run = step_of(tx, mesh, specs, over, check_vma=check_vma, with_params=False, axis=PAIR)
    named = " and ".join(map(repr, axes.axis_names(over)))
    match = rf"If 'table' is sharded over {named}, .*FSDP\).* none of the ranks'"
    with pytest.raises(StateError, match=match):
        jax.eval_shape(run, p, tx.init(p), IDS)


def test_of_axes_of_one_size_both_are_named():
    mesh, specs = helpers.grid(data=2, fsdp=2), {"table": P("fsdp"), "w": P()}
    tx, p = sparsejax.zen_sync(PAIR), params()
    run = step_of(tx, mesh, specs, "fsdp", with_params=False, axis=PAIR)
    with pytest.raises(StateError, match="If 'table' is sharded over 'data' or 'fsdp', "):
        jax.eval_shape(run, p, tx.init(p), IDS)


def test_fsdp_is_named_where_another_axis_is_left_to_xla():
    """The ranks' axis alone is manual, and shards a parameter."""
    mesh, specs = helpers.grid(data=4, fsdp=2), {"table": P("data"), "w": P()}
    tx, p = sparsejax.zen_sync("data"), params()

    def step(p, state, ids):
        return tx.update(jax.grad(loss_of("data"))(sparsejax.local(p, "data"), ids), state)

    run = helpers.shard_map(
        step,
        mesh=mesh,
        axis_names={"data"},
        in_specs=(specs, P(), P("data")),
        out_specs=(specs, P()),
    )
    match = rf"'fsdp' is no manual axis.*its shard\. If 'table' is {FSDP}"
    with pytest.raises(StateError, match=match):
        jax.eval_shape(run, p, tx.init(p), IDS)


@pytest.mark.parametrize("name", SYNCS)
def test_a_state_of_shards_over_the_axis_of_the_ranks_is_refused(name):
    mesh, specs = helpers.mesh_of(4), {"table": P("data"), "w": P()}
    with pytest.raises(ArgumentError, match=FSDP):
        made_inside(SYNCS[name]("data"), mesh, specs, P(), True)
    with pytest.raises(ArgumentError, match="param_specs shards 'table' over 'data'"):
        sparsejax.init(SYNCS[name]("data"), params(), mesh, param_specs=specs)


def test_fsdp_is_refused_with_the_update_where_no_init_could_tell():
    """A state of shards, made with checking off, and an update with checking on."""
    mesh, specs = helpers.mesh_of(4), {"table": P("data"), "w": P()}
    tx = sparsejax.zen_sync("data")
    state = made_inside(tx, mesh, specs, P(), False)
    run = step_of(tx, mesh, specs, "data")
    with pytest.raises(ArgumentError, match=FSDP):
        jax.eval_shape(run, params(), state, IDS)


def test_all_reduce_adds_up_what_different_shards_have():
    """It has no state and is given no parameters: nothing tells it what a leaf is."""
    mesh, specs = helpers.mesh_of(4), {"table": P("data"), "w": P()}

    def summed(p, ids):
        return sparsejax.all_reduce(jax.grad(loss_of("data"))(sparsejax.local(p), ids))

    run = helpers.shard_map(summed, mesh=mesh, in_specs=(specs, P("data")), out_specs=P())
    got = jax.jit(run)(params(), IDS)["table"]
    shards = 4 * jax.grad(loss_of(None))(params(), IDS)["table"]
    np.testing.assert_allclose(got, shards.reshape(4, 2, WIDTH).sum(0), 1e-5, 1e-6)


def test_parameters_that_were_made_local_are_not_those_for_update():
    mesh, specs = helpers.mesh_of(4), {"table": P(), "w": P()}
    tx = sparsejax.zen_sync()

    def step(p, state, ids):
        p = sparsejax.local(p)
        grads = jax.grad(loss_of(None))(p, ids)
        return tx.update(grads, state, p)

    run = helpers.shard_map(
        step, mesh=mesh, in_specs=(specs, P(), P("data")), out_specs=P()
    )
    match = "If it is what sparsejax.local returned, give the parameters themselves"
    with pytest.raises(ArgumentError, match=match):
        jax.eval_shape(run, params(), tx.init(params()), IDS)


@pytest.mark.parametrize(
    ("check_vma", "name"), [(True, "zen_sync"), *helpers.slow((False, "dense_sync"))]
)
def test_shards_over_another_axis_have_the_gradient_of_all_ranks(check_vma, name):
    mesh = helpers.grid(data=2, fsdp=2)
    specs = {"table": P("fsdp"), "w": P()}
    tx, p = SYNCS[name]("data"), params()
    state = sparsejax.init(tx, p, mesh, "data", param_specs=specs, check_vma=check_vma)
    state_specs = sparsejax.state_specs(state, p, specs)

    def step(p, state, ids):
        # Without types the sum of the gradient of a shard is that of all its ranks' losses.
        mean = lambda x: lax.pmean(x, "fsdp") if check_vma else x / 2
        loss = lambda p: mean(loss_of("fsdp")(p, ids))
        grads = jax.grad(loss)(sparsejax.local(p, "data"))
        return tx.update(grads, state, p)[0]

    run = helpers.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, state_specs, P(("data", "fsdp"))),
        out_specs=specs,
        check_vma=check_vma,
    )
    got = jax.jit(run)(helpers.placed(p, mesh, specs), state, IDS)
    want = jax.grad(loss_of(None))(p, IDS)
    np.testing.assert_allclose(got["table"], want["table"], 1e-5, 1e-6)


@pytest.mark.parametrize("name", SYNCS)
def test_a_state_of_whole_parameters_is_not_one_of_their_shards(name):
    """Sharded over another axis, as tensor parallelism does, and made without specs."""
    mesh = helpers.grid(data=2, model=2)
    specs = {"table": P("model"), "w": P()}
    tx, p = SYNCS[name]("data"), params()
    state = sparsejax.init(tx, p, mesh, "data")
    state_specs = sparsejax.state_specs(state)

    def step(p, state, ids):
        loss = lambda p: lax.pmean(loss_of("model")(p, ids), "model")
        grads = jax.grad(loss)(sparsejax.local(p, "data"))
        return tx.update(grads, state, p)[0]

    run = helpers.shard_map(
        step, mesh=mesh, in_specs=(specs, state_specs, P("data")), out_specs=specs
    )
    with pytest.raises(StateError, match=r"'table' has the shape \[8, 3\].* \[4, 3\]"):
        jax.eval_shape(run, p, state, IDS)
