"""Bad input gets an error that names the table and the fix."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import rows
from sparsejax.embrace import ColumnTable, column_lookup
from sparsejax.errors import ArgumentError, AxisError, RuleError, StateError
from tests.helpers import grid, mesh_of, shard_map


def table(n=2, dim=5, dtype=np.float32, axis_name=None, mesh=None):
    return ColumnTable.of(np.ones((6, dim), dtype), mesh or mesh_of(n), axis_name)


def traced(function, tables, mesh=None, specs=None):
    """Traces a function of tables on ranks."""
    specs = sparsejax.state_specs(tables) if specs is None else specs
    mapped = shard_map(
        lambda tables: jnp.zeros(()) * len(jax.tree.leaves(function(tables))),
        mesh=mesh or mesh_of(2),
        in_specs=(specs,),
        out_specs=P(),
    )
    return jax.eval_shape(mapped, tables)


IDS = jnp.array([0, 3])


def looked_up(tables, ids=None, **options):
    ids = jax.tree.map(lambda _: IDS, tables, is_leaf=is_table) if ids is None else ids
    return column_lookup(tables, ids, **options)


def is_table(node):
    return isinstance(node, ColumnTable)


def test_outside_of_its_axis():
    with pytest.raises(AxisError, match=r"no manual axis 'data' here.*shard_map"):
        column_lookup(table(), IDS)
    one = table(mesh=grid(data=2, model=2), axis_name="model")
    match = "of the table 'users' .*: there is no manual axis 'model'"
    with pytest.raises(AxisError, match=match):
        traced(looked_up, {"users": one}, specs=P())
    with pytest.raises(AxisError, match="name the one over which"):
        table(mesh=grid(data=2, model=2))


def test_fewer_columns_than_ranks():
    match = r"\[6, 3\] has 3 columns, .* among 4 ranks: make dim at least as large"
    with pytest.raises(ArgumentError, match=match):
        table(n=4, dim=3)
    with pytest.raises(ArgumentError, match=match):
        ColumnTable.create(jax.random.key(0), 6, 3, mesh_of(4))
    with pytest.raises(ArgumentError, match=r"'users' \[6, 3\] has 3 columns, .* 4 ranks"):
        trainer(4).init({"users": table(n=2, dim=3)})


def trainer(n, tx=None):
    tx = tx or optax.chain(sparsejax.zen_sync(), optax.sgd(0.1))
    return sparsejax.data_parallel(lambda params, batch: 0.0, tx, mesh_of(n))


def test_made_for_another_number_of_ranks():
    match = r"'users' \[6, 5\] has 6 columns, filled up .* 4 ranks need 8: .*Table\.of"
    with pytest.raises(StateError, match=match):
        trainer(4).init({"users": table(n=2)})
    tables = {"users": table(n=2, dim=9)}  # ten columns with the one that fills up
    with pytest.raises(StateError, match=r"'users' \[6, 9\] has \[6, 10\] on this rank"):
        traced(looked_up, tables, mesh_of(1))


def test_given_to_each_rank_whole():
    with pytest.raises(ArgumentError, match=r"'users' \[6, 5\] was given .*state_specs"):
        traced(looked_up, {"users": table()}, specs=P())
    update = lambda grads: sparsejax.zen_sync().update(grads, STATE)[0]
    with pytest.raises(StateError, match=r"'users' is the same on all ranks.*state_specs"):
        traced(update, {"users": table()}, specs=P())


STATE = sparsejax.zen_sync().init({"users": table()})


def test_tables_of_two_kinds_in_one_exchange():
    match = "one dtype, and the table 'a' .* has float32, the table 'b' .* bfloat16"
    with pytest.raises(ArgumentError, match=match):
        traced(looked_up, {"a": table(), "b": table(dtype=jnp.bfloat16)})


def test_arguments():
    tables = {"users": table()}
    ids = lambda x: {"users": x}
    with pytest.raises(ArgumentError, match=r"got a .*Tracer.* read by sparsejax.lookup"):
        traced(lambda x: column_lookup(x["users"].value, IDS), tables)
    with pytest.raises(ArgumentError, match="ids must be a tree like the tables"):
        traced(lambda x: column_lookup(x, {"items": IDS}), tables)
    with pytest.raises(
        ArgumentError, match=r"ids of the table 'users' .* got float32\[2\]"
    ):
        traced(lambda x: column_lookup(x, ids(IDS * 1.0)), tables)
    with pytest.raises(ArgumentError, match="mode must be one of 'fill', 'clip', 'wrap'"):
        traced(lambda x: column_lookup(x, ids(IDS), mode="clamp"), tables)
    with pytest.raises(
        ArgumentError, match=r"capacity of the table 'users' .* positive int"
    ):
        traced(lambda x: column_lookup(x, ids(IDS), capacity=0), tables)
    with pytest.raises(ArgumentError, match="capacity must be a number, or a tree"):
        traced(lambda x: column_lookup(x, ids(IDS), capacity={"items": 1}), tables)
    with pytest.raises(ArgumentError, match=r"of shape \[rows, dim\], got int"):
        ColumnTable.of(np.ones((3, 4), int), mesh_of(2))
    with pytest.raises(ArgumentError, match="rows must be a positive int"):
        ColumnTable.create(jax.random.key(0), 0, 4, mesh_of(2))


def test_synchronized_over_other_ranks():
    mesh = grid(data=2, model=2)
    tables = {"users": table(mesh=mesh, axis_name="model")}
    match = "'users' is sharded over 'model', .* synchronized over 'data'.*axis_name='data'"
    update = lambda grads: sparsejax.zen_sync("data").update(grads, STATE)[0]
    with pytest.raises(ArgumentError, match=match):
        traced(update, tables, mesh)


def kept_by_row():
    """An optimizer that keeps a number a row, as an array of one column."""
    mean = lambda g: jnp.mean(g * g, 1, keepdims=True)
    init = lambda params: jax.tree.map(mean, params)
    return optax.GradientTransformation(init, lambda g, state, params=None: (g, state))


def test_resized_to_another_table_or_mesh():
    tx = optax.sgd(0.1, 0.9)
    state = sparsejax.init(tx, {"users": table()}, mesh_of(2))
    match = r"at '.*users' a table with dim=5, and `like` has dim=7: make `like`"
    with pytest.raises(StateError, match=match):
        sparsejax.resized(state, sparsejax.init(tx, {"users": table(dim=7)}, mesh_of(2)))
    mesh = grid(model=2)
    other = sparsejax.init(tx, {"users": table(mesh=mesh)}, mesh)
    with pytest.raises(StateError, match=r"axis_name='data', and `like` has .*'model'"):
        sparsejax.resized(state, other)
    with pytest.raises(AxisError, match="name the one over which"):
        ColumnTable.of(table().whole(), grid(data=2, model=2))


def test_what_is_kept_by_row_has_no_place_on_a_mesh_either():
    kept = ColumnTable(jnp.zeros((6, 4)), 8)
    match = r"at '.*users.*' an array \[6, 4\] .* dim=8"
    with pytest.raises(StateError, match=match):
        sparsejax.state_specs({"users": kept})


def test_what_would_see_some_columns_only():
    tables = {"users": table()}
    for optimizer in (
        rows.rowwise_adagrad(0.1),
        optax.adafactor(0.1),
        optax.sm3(1e-2),
        kept_by_row(),
    ):
        tx = optax.chain(sparsejax.zen_sync(), optimizer)
        match = r"keeps at '.*users.*' an array \[\d+(, 1)?\] of a ColumnTable with dim=300"
        with pytest.raises(StateError, match=match):
            sparsejax.init(tx, {"users": table(dim=300)}, mesh_of(2))
    clip = sparsejax.transforms.clip_by_rank(1.0)
    with pytest.raises(ArgumentError, match=r"clip_by_rank: 'users' is a table.*masked"):
        traced(lambda grads: clip.update(grads, optax.EmptyState())[0], tables)
    with pytest.raises(RuleError, match="'users' matches no leaf"):
        sparsejax.zen_sync(rules={"users": "sparse"}).init(tables | {"w": IDS * 1.0})


def test_velocity_that_a_table_would_not_have():
    """Neither at the first state, nor with one that was made otherwise."""
    tables, memory = {"users": table()}, sparsejax.MomentumCorrection(0.9)
    match = r"MomentumCorrection\(.*'users' is a table.*without momentum.*memory=.*Residual"
    for tx in (
        sparsejax.top_k(0.9, memory=memory),
        sparsejax.ok_topk_sync(0.1, memory=memory),
    ):
        with pytest.raises(ArgumentError, match=match):
            sparsejax.init(tx, tables, mesh_of(2))
    plain = sparsejax.top_k(0.9).init({})
    update = lambda grads: sparsejax.top_k(0.9, memory=memory).update(grads, plain)[0]
    with pytest.raises(ArgumentError, match=match):
        traced(update, tables)


def test_what_that_message_says_to_do():
    def chain(sync, momentum=None):
        return optax.chain(*sync, optax.sgd(0.1, momentum))

    memory = sparsejax.MomentumCorrection(0.9)
    rest = chain([sparsejax.top_k(0.9, memory=memory), sparsejax.zen_sync()])
    each = {"table": chain([sparsejax.dense_sync()], 0.9), "rest": rest}
    tx = optax.partition(each, {"users": "table", "w": "rest"})
    state = sparsejax.init(tx, {"users": table(), "w": jnp.ones(600)}, mesh_of(2))
    found = [x for x in jax.tree.leaves(state, is_leaf=is_table) if is_table(x)]
    assert [x.value.shape for x in found] == [(6, 6)]  # its velocity


def state_of(tx, n=2, **others):
    """Traces the first state of a chain for a table and a kernel."""
    params = {"items": table(n), "kernel": jnp.ones((5, 2)), **others}
    return sparsejax.abstract_state(tx, params, mesh_of(n))


def by_the_norm(norm):
    """A chain whose last part divides all numbers by a norm of the table."""

    def update(updates, state, params=None):
        size = norm(updates["items"].value)
        return jax.tree.map(lambda x: x / size, updates), state

    scaled = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    return optax.chain(sparsejax.zen_sync(), scaled)


NORMS = {
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(1.0),
    "scale_by_trust_ratio": lambda: optax.lamb(0.1),
    "centralize": lambda: optax.centralize(),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(1.0),
}


@pytest.mark.parametrize("name", NORMS)
def test_what_an_optimizer_computes_over_columns_of_one_rank_is_refused(name):
    """By name, whether the table's own update depends on it or that of another leaf."""
    match = rf"depends on what optax.{name} computes over columns of the table 'items'"
    for around in (lambda tx: tx, lambda tx: sparsejax.accumulate(tx, every=2)):
        tx = around(optax.chain(sparsejax.zen_sync(), NORMS[name]()))
        with pytest.raises(ArgumentError, match=match):
            state_of(tx)
    tx = optax.chain(sparsejax.zen_sync(), NORMS[name]())
    trainer = sparsejax.data_parallel(lambda p, b: p["kernel"].sum(), tx, mesh_of(2))
    with pytest.raises(ArgumentError, match=match):
        trainer.init({"items": table(), "kernel": jnp.ones((5, 2))})
    state_of(tx, n=1)  # one rank has the whole table
    rest = optax.chain(sparsejax.zen_sync(), NORMS[name]())
    of_tables = optax.chain(sparsejax.zen_sync(), optax.adam(0.1))
    labels = {"items": "tables", "kernel": "rest"}
    state_of(optax.partition({"tables": of_tables, "rest": rest}, labels))


@pytest.mark.parametrize(
    "norm", [lambda x: jnp.vdot(x, x), lambda x: jnp.max(jnp.abs(x.T @ x))]
)
def test_a_norm_is_seen_however_it_is_computed(norm):
    with pytest.raises(ArgumentError, match=r"columns of the table 'items'"):
        state_of(by_the_norm(norm))


@pytest.mark.parametrize(
    "tx",
    [
        by_the_norm(lambda x: jax.lax.psum(jnp.sum(x**2), "data")),
        by_the_norm(lambda x: jnp.float32(x.size)),
        optax.chain(sparsejax.zen_sync(), optax.adaptive_grad_clip(0.1), optax.adamw(0.1)),
        sparsejax.accumulate(optax.chain(sparsejax.zen_sync(), optax.lion(0.1)), every=2),
        sparsejax.skip_nonfinite(optax.chain(sparsejax.zen_sync(), optax.adam(0.1))),
        sparsejax.warm_up(
            optax.chain(
                sparsejax.top_k(0.1, min_size=1), sparsejax.zen_sync(), optax.adam(0.1)
            ),
            2,
        ),
        optax.chain(sparsejax.embrace_sync(), sparsejax.lazy(optax.adam(0.1))),
        optax.chain(sparsejax.zen_sync(), optax.add_noise(0.1, 0.5, 1), optax.sgd(0.1)),
    ],
)
def test_what_looks_at_each_number_alone_or_sums_over_the_ranks_is_taken(tx):
    state_of(tx)


@pytest.mark.filterwarnings("ignore:sparsejax.column_lookup of a table")
def test_a_norm_in_a_loop_is_a_cause_that_a_step_names():
    def norm(x):
        return jax.lax.fori_loop(0, 2, lambda _, total: total + jnp.sum(x * x), x[0, 0])

    loss = lambda p, b: (column_lookup(p["items"], b) @ p["kernel"]).sum()
    trainer = sparsejax.data_parallel(loss, by_the_norm(norm), mesh_of(2))
    state = trainer.init({"items": table(), "kernel": jnp.ones((5, 2))})
    match = r"'kernel' still differs by rank.* a norm over the columns .* table 'items'"
    with pytest.raises(ArgumentError, match=match):
        jax.eval_shape(trainer.compiled(state), state, IDS)
