"""What local steps refuse: each error names the cause, the value, and the fix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax import contrib

import sparsejax
from sparsejax import errors
from sparsejax.rounds import checks
from tests import helpers
from tests.rounds import model
from tests.rounds.model import RANKS


MESH = helpers.mesh_of(RANKS)
local_steps = functools.partial(sparsejax.local_steps, optax.sgd(0.1))


def params():
    return helpers.placed(model.first(), MESH, P())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"outer": 0.7},
            r"outer must be an optax transformation, such as optax.sgd.*got 0.7",
        ),
        (
            {"sync": sparsejax.zen_sync},
            r"sync must be an .*such as sparsejax.dense_sync.*: cal",
        ),
        ({"inner": None}, r"inner must be an optax transformation, such as optax.adamw"),
        ({"every": 2.0}, r"every must be .*got 2.0"),
        ({"axis_name": 3}, r"local_steps: axis_name must be the name of a mesh"),
        ({"inner": sparsejax.embrace.horizontal(optax.sgd(0.1))}, r"inner is .*horizontal"),
    ],
)
def test_parts_that_are_no_transformations(options, message):
    with pytest.raises(errors.ArgumentError, match=message):
        sparsejax.local_steps(**{"inner": optax.sgd(0.1), "every": 2} | options)


@pytest.mark.parametrize(
    ("inner", "options", "message"),
    [
        (
            optax.chain(sparsejax.zen_sync(), optax.sgd(0.1)),
            {},
            r"inner synchronizes \(sparsejax.sync\).*such as optax.adamw.*sync=optax.chain",
        ),
        (
            optax.chain(sparsejax.top_k(0.1, min_size=0), optax.sgd(0.1)),
            {},
            "inner selects entries to be sent",
        ),
        (optax.sgd(0.1), {"outer": sparsejax.dense_sync()}, "outer synchronizes"),
        (
            optax.sgd(0.1),
            {"sync": optax.scale(2.0)},
            r"nothing in sync synchronizes.*sync=sparsejax.dense_sync\(\)",
        ),
        (
            optax.sgd(0.1),
            {"sync": sparsejax.rounds.sparse_loco(optax.sgd(0.1), every=1)},
            r"sync has local steps of its own.*sync=sparsejax.chunked_sync\(\)",
        ),
    ],
)
def test_parts_that_do_not_do_what_they_are_for(inner, options, message):
    tx = sparsejax.local_steps(inner, every=2, **options)
    with pytest.raises(errors.ArgumentError, match=message):
        sparsejax.init(tx, params(), MESH)


KEEPING = {
    "schedule_free": (contrib.schedule_free_adamw, "z/b"),
    "mechanize": (lambda rate: contrib.mechanize(optax.adam(rate)), "x0/b"),
    "prodigy": (contrib.prodigy, "params0/b"),
}


@pytest.mark.parametrize("name", KEEPING)
def test_an_inner_optimizer_that_keeps_parameters_of_its_own(name):
    """It would not follow the anchor; outside it does, since all that moves is its own."""
    make, path = KEEPING[name]
    tx = sparsejax.local_steps(make(1e-3), every=2)
    message = rf"state of inner has parameters.*at '{path}'.*optax.adamw.*outer="
    with pytest.raises(errors.ArgumentError, match=message):
        sparsejax.init(tx, params(), MESH)
    with pytest.raises(errors.ArgumentError, match=message):
        jax.jit(lambda x: sparsejax.init(tx, x, MESH))(params())
    if name == "schedule_free":
        outer, sync = make(0.5), sparsejax.dense_sync()
        checks.check_parts(optax.sgd(0.1), outer, sync, model.first())


@pytest.mark.parametrize(
    "inner",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1)),
        optax.MultiSteps(optax.lamb(1e-3), 4).gradient_transformation(),
        optax.partition(
            {"a": optax.lion(1e-3), "b": optax.set_to_zero()}, {"w": "a", "b": "b"}
        ),
        # What is only cast, or made in a function that is compiled, is a copy, or is none.
        optax.GradientTransformation(
            jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params)),
            optax.identity().update,
        ),
    ],
    ids=["adamw", "multi_steps", "partition", "compiled"],
)
def test_inner_optimizers_that_follow_the_anchor_are_taken(inner):
    checks.check_parts(inner, optax.sgd(1.0), sparsejax.dense_sync(), model.first())


def test_tables_by_rows_and_by_columns():
    tx = sparsejax.local_steps(sparsejax.lazy(optax.sgd(0.1)), every=2)
    with pytest.raises(
        errors.LeafError, match=r"inner updates rows of 'w'.*optax.partition"
    ):
        sparsejax.init(tx, {"w": params()["w"]}, MESH)
    table = sparsejax.ColumnTable.of(jnp.ones((6, 6)), MESH, "data")
    with pytest.raises(errors.ArgumentError, match=r"'table' is a table that is sharded"):
        sparsejax.init(local_steps(every=2), {"table": table}, MESH)


def test_parameters_of_dtypes_that_ranks_cannot_add_up():
    with pytest.raises(errors.LeafError, match=r"'w' is float8_e4m3fn; only real"):
        sparsejax.init(local_steps(every=2), {"w": jnp.ones(3, jnp.float8_e4m3fn)}, MESH)


def test_a_synchronization_behind_an_optimizer():
    sync = optax.chain(optax.adam(0.1), sparsejax.dense_sync())
    with pytest.raises(errors.StateError, match=r"would differ by rank"):
        sparsejax.init(local_steps(every=2, sync=sync), params(), MESH)


@pytest.mark.parametrize("order", ["after", "partition"])
def test_an_optimizer_beside_it_is_warned_of(order, recwarn):
    tx = local_steps(every=2)
    if order == "after":
        with pytest.warns(UserWarning, match=r"local_steps stands beside an optimizer"):
            sparsejax.init(optax.chain(tx, optax.adam(0.1)), params(), MESH)
        return
    other = optax.chain(sparsejax.zen_sync(), optax.adam(0.1))
    parts = optax.partition({"a": tx, "b": other}, {"w": "a", "b": "b"})
    run = model.train(parts, model.batches(3))
    helpers.assert_same_on_all_ranks(jax.tree.map(lambda *x: np.stack(x, 1), *run.params))
    moved = [(one["b"][0] != model.first()["b"]).any() for one in run.params]
    assert moved == [True] * 3
    assert [(one["w"][0] != model.first()["w"]).any() for one in run.params] == [
        *(False, True, True)
    ]
    assert not recwarn.list


def updated(change):
    """Traces an update on ranks, with what `change` makes of its arguments."""
    tx = local_steps(every=2)
    state = sparsejax.init(tx, params(), MESH)
    specs = sparsejax.state_specs(state)

    def on_rank(params, state):
        own = sparsejax.local(params, "data", state)
        grads, state, params = change(jax.tree.map(jnp.ones_like, own), state, params, own)
        tx.update(grads, state, params)
        return 0

    of = {"in_specs": (P(), specs), "out_specs": P()}
    jax.eval_shape(helpers.shard_map(on_rank, mesh=MESH, **of), params(), state)


WRONG = {
    "no parameters": (
        lambda grads, state, params, own: (grads, state, None),
        (
            errors.ArgumentError,
            r"given no parameters.*tx.update\(grads, opt_state, params\)",
        ),
    ),
    "local parameters": (
        lambda grads, state, params, own: (grads, state, own),
        (errors.ArgumentError, "'b' varies over 'data'.*give the parameters themselves"),
    ),
    "rows": (
        lambda grads, state, params, own: (
            {
                **grads,
                "w": sparsejax.RowGrads.marked(jnp.arange(2), grads["w"][:2], (4, 3)),
            },
            state,
            params,
        ),
        (errors.LeafError, "gradient of 'w' is RowGrads.*optax.partition"),
    ),
    "integers": (
        lambda grads, state, params, own: (
            jax.tree.map(lambda x: x.astype(int), grads),
            state,
            params,
        ),
        (errors.LeafError, "'b' is int32"),
    ),
    "a summed gradient": (
        lambda grads, state, params, own: (
            jax.tree.map(jnp.ones_like, params),
            state,
            params,
        ),
        (
            errors.AlreadySummedError,
            r"gradient of 'b' was already summed over 'data'.* with respect to "
            r"sparsejax\.local\(params, 'data', opt_state\) instead",
        ),
    ),
    "another state": (
        lambda grads, state, params, own: (grads, optax.sgd(0.1).init(params), params),
        (errors.StateError, r"local_steps \(every=2\) was given a tuple.*LocalStepsState"),
    ),
    "other parameters": (
        lambda grads, state, params, own: ({"w": grads["w"]}, state, {"w": params["w"]}),
        (errors.StateError, "made for other parameters.*the state \\['b'\\]"),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_updates_of_something_else(case):
    change, (kind, message) = WRONG[case]
    with pytest.raises(kind, match=message):
        updated(change)


def test_two_states_are_of_two_offsets():
    states = [sparsejax.init(local_steps(every=n), params(), MESH) for n in (2, 3)]
    with pytest.raises(errors.StateError, match=r"found 2 states of sparsejax.local_steps"):
        sparsejax.local(model.first(), "data", states)


def test_a_state_without_local_steps_changes_nothing():
    state = optax.adam(0.1).init(model.first())
    found = sparsejax.local(model.first(), None, state)
    assert helpers.octets(found) == helpers.octets(model.first())


def test_states_of_other_ranks_or_parameters():
    state = sparsejax.init(local_steps(every=2), params(), MESH)
    specs = sparsejax.state_specs(state)

    def read(params, state, specs):
        own = lambda params, state: sparsejax.local(params, "data", state)
        options = {"in_specs": (P(), specs), "out_specs": P("data")}
        jax.eval_shape(helpers.shard_map(own, mesh=MESH, **options), params, state)

    with pytest.raises(errors.StateError, match=r"passed to shard_map with the spec P\(\)"):
        read(params(), state, P())
    with pytest.raises(errors.StateError, match=r"was made for other parameters.*Make it"):
        read({"w": params()["w"]}, state, specs)
    with pytest.raises(errors.StateError, match=r"made for other parameters"):
        read({"w": params()["w"], "b": [params()["b"]]}, state, specs)


def test_there_has_to_be_a_mesh_to_begin_with():
    tx = local_steps(every=2)
    with pytest.raises(errors.NeedsRanks, match=r"trains on each rank by itself"):
        tx.init(model.first())
    host = jax.tree.map(np.asarray, sparsejax.init(tx, params(), MESH))
    with pytest.raises(errors.AxisError, match=r"found no mesh: call jax.set_mesh"):
        sparsejax.local(model.first(), None, host)


def test_weights_of_a_trainer():
    trainer = sparsejax.data_parallel(
        model.loss_fn, local_steps(every=2), MESH, weight=lambda batch: jnp.float32(1)
    )
    state = trainer.init(model.first())
    with pytest.raises(errors.ArgumentError, match=r"weight= says how gradients count"):
        trainer.step(state, model.batches(1)[0])


@pytest.mark.parametrize(
    "sync",
    [
        sparsejax.spardl_sync(0.5, rules={".*": "sparse"}),
        optax.chain(sparsejax.top_k(0.5, min_size=0), sparsejax.zen_sync()),
        optax.chain(sparsejax.dgc(0.5), sparsejax.zen_sync()),
    ],
)
def test_weights_of_a_synchronization_that_leaves_something_out(sync):
    """What a rank of weight 0 sends would be in no sum, and no longer in its residual."""
    tx = local_steps(every=2, sync=sync)
    state = sparsejax.init(tx, params(), MESH)

    def on_rank(params, state, weight):
        grads = jax.tree.map(jnp.ones_like, sparsejax.local(params, "data", state))
        return tx.update(grads, state, params, weight=weight)[1].step

    specs = P(), sparsejax.state_specs(state), P("data")
    mapped = helpers.shard_map(on_rank, mesh=MESH, in_specs=specs, out_specs=P())
    message = r"given weight=.*keeps on each.*chunked_sync"
    with pytest.raises(errors.ArgumentError, match=message):
        jax.eval_shape(mapped, params(), state, jnp.ones(RANKS))


def test_exchanges_in_flight_for_other_numbers_of_steps():
    """Without a delay nothing is, and a round ends when the new number says."""
    mesh, params = helpers.mesh_of(2), {"w": jnp.ones(3)}
    make = lambda **options: sparsejax.local_steps(optax.sgd(0.1), **options)

    def stepped(made, now):
        state = sparsejax.init(make(**made), params, mesh)
        specs = sparsejax.state_specs(state)
        tx = make(**now)
        mapped = helpers.shard_map(
            lambda p, state: tx.update(sparsejax.local(p, "data", state), state, p),
            mesh=mesh,
            in_specs=(P(), specs),
            out_specs=(P(), specs),
        )
        return jax.eval_shape(mapped, params, state), state

    stepped({"every": 4}, {"every": 6})
    delayed = {"every": 4, "delay": 1}
    _, state = stepped(delayed, delayed)
    for now, match in (
        ({"every": 4, "delay": 2}, "has every=4 and delay=2, .* with every=4 and delay=1"),
        ({"every": 6, "delay": 1}, "has every=6 and delay=1, .* with every=4 and delay=1"),
    ):
        with pytest.raises(errors.StateError, match=match):
            stepped(delayed, now)
        with pytest.raises(errors.StateError, match=match):
            sparsejax.resized(state, like=sparsejax.init(make(**now), params, mesh))
