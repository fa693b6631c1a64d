"""Training with tables that are sharded by columns is training with whole ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import rows
from sparsejax.embrace import ColumnTable
from tests import helpers
from tests.embrace.model import DIM, HEIGHT, TABLES, batch_of, loss_fn, params
from tests.helpers import mesh_of


# A gradient of a ColumnTable that jax.grad takes is dense, and meant to be here.
pytestmark = pytest.mark.filterwarnings("ignore:sparsejax.column_lookup of a table")

EACH = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adagrad": optax.adagrad(0.1),
    "adam": optax.adam(1e-2),
}
ALL = optax.partition(
    EACH | {"kernel": optax.adam(1e-2)}, {k: k for k in (*EACH, "kernel")}
)
LAZY = {exact: sparsejax.lazy(ALL, exact=exact) for exact in (True, False)}
STEPS = 4


@functools.cache
def trained(n, optimizer, sharded, weighted=True):
    """The losses and the last state of some steps."""
    tx = LAZY.get(optimizer, ALL)
    # Small as they are, whole tables are to be summed by rows, too.
    rules = None if sharded else {"sgd|adam|adagrad": "sparse"}
    tx = optax.chain(sparsejax.zen_sync(rules=rules), tx)
    weight = (lambda batch: batch["mask"].sum()) if weighted else None
    trainer = sparsejax.data_parallel(loss_fn, tx, mesh_of(n), weight=weight)
    state, losses = trainer.init(params(n, sharded)), []
    for step in range(STEPS):
        state, loss = trainer.step(state, batch_of(step, n, uneven=weighted))
        losses.append(float(loss))
    return losses, state


@pytest.mark.slow
@pytest.mark.parametrize(("n", "optimizer"), [(3, "dense"), (3, True), (2, False)])
def test_it_is_training_with_whole_tables(n, optimizer):
    """SGD with momentum, Adagrad and Adam; ranks with weights, of which one is zero."""
    losses, state = trained(n, optimizer, sharded=True)
    # Without exact=True an optimizer leaves rows alone that whole gradients move.
    want, whole = trained(n, "dense" if optimizer is True else optimizer, sharded=False)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    found = state.params
    if optimizer is True:
        found, _ = jax.jit(rows.settle, static_argnums=2)(
            state.params, state.opt_state, LAZY[True]
        )
    for k in TABLES:
        got = np.asarray(found[k].whole())
        np.testing.assert_allclose(got, whole.params[k], rtol=1e-5, atol=1e-6)
        assert not np.asarray(found[k].value)[:, DIM:].any()  # what fills up stays zero
    np.testing.assert_allclose(
        found["kernel"], whole.params["kernel"], rtol=1e-5, atol=1e-6
    )
    moved = np.abs(whole.params["adam"] - params(n, sharded=False)["adam"])
    assert moved.max() > 1e-2


@pytest.mark.slow
def test_a_rank_holds_its_share_of_tables_and_of_what_optimizers_keep():
    n = 3
    _, state = trained(n, "dense", sharded=True)
    width = -(-DIM // n)
    counts = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
        here = [shard.data.shape for shard in leaf.addressable_shards]
        if leaf.shape == (HEIGHT, width * n):
            assert here == [(HEIGHT, width)] * n
            kind = jax.tree_util.keystr(keys[:1])
            counts[kind] = counts.get(kind, 0) + 1
        else:
            assert leaf.size < HEIGHT
    # Of SGD a velocity, of Adagrad sums of squares, of Adam both moments.
    assert counts == {".params": 3, ".opt_state": 4}


def test_a_state_goes_to_another_number_of_ranks():
    """What fills up is left behind; tables and moments are what they were."""
    _, state = trained(3, "dense", sharded=True)
    tables = {k: ColumnTable.of(state.params[k].whole(), mesh_of(2)) for k in TABLES}
    moved = tables | {"kernel": np.asarray(state.params["kernel"])}
    tx = optax.chain(sparsejax.zen_sync(), ALL)
    fresh = sparsejax.init(tx, moved, mesh_of(2))
    opt_state = sparsejax.resized(state.opt_state, like=fresh)
    target = sparsejax.abstract_state(tx, moved, mesh_of(2), ranks=3)
    assert jax.tree.structure(target) == jax.tree.structure(state.opt_state)
    shapes = lambda tree: [x.shape for x in jax.tree.leaves(tree)]
    assert shapes(target) == shapes(state.opt_state)
    is_table = lambda node: isinstance(node, ColumnTable)
    pairs = zip(
        *(jax.tree.leaves(x, is_leaf=is_table) for x in (state.opt_state, opt_state)),
        strict=True,
    )
    kept = [(old, new) for old, new in pairs if is_table(old) and jax.tree.leaves(old)]
    assert len(kept) == 4
    for old, new in [*kept, *((state.params[k], tables[k]) for k in TABLES)]:
        assert new.value.shape == (HEIGHT, 14)
        assert new.value.addressable_shards[1].data.shape == (HEIGHT, 7)
        np.testing.assert_array_equal(new.whole(), old.whole())


def test_in_a_shard_map_of_ones_own_synchronizations_leave_it_alone():
    """With checking off; a mean is divided by the ranks, a sum is not, nothing is sent."""
    n, mesh = 2, mesh_of(2)
    given = {k: x for k, x in params(n, sharded=True).items() if k in ("sgd", "kernel")}
    tx = {
        "mean": optax.chain(sparsejax.dgc(0.1), sparsejax.zen_sync()),
        "sum": sparsejax.zen_sync(reduce="sum"),
        "accumulated": sparsejax.accumulate(sparsejax.zen_sync(), every=1),
        "skipping": sparsejax.skip_nonfinite(sparsejax.warm_up(sparsejax.dense_sync(), 1)),
    }

    def on_rank(params, grads):
        made = {}
        for name, each in tx.items():
            made[name], _ = each.update(grads, each.init(params), params)
        made["all_reduce"] = sparsejax.all_reduce(grads, reduce="mean")
        return {name: updates["sgd"] for name, updates in made.items()}

    specs = sparsejax.state_specs(given)
    call = helpers.shard_map(
        on_rank,
        mesh=mesh,
        in_specs=(specs, specs),
        out_specs=dict.fromkeys([*tx, "all_reduce"], specs["sgd"]),
        check_vma=False,
    )
    made = jax.jit(call)(given, given)
    for name, table in made.items():
        want = given["sgd"].whole() / (1 if name == "sum" else n)
        np.testing.assert_array_equal(table.whole(), want, err_msg=name)
    alone = lambda x: sparsejax.all_reduce({"sgd": x})["sgd"]
    of_table = specs["sgd"]
    call = helpers.shard_map(alone, mesh=mesh, in_specs=(of_table,), out_specs=of_table)
    assert not helpers.collectives(jax.make_jaxpr(call)(given["sgd"]))


def test_specs_say_what_is_sharded():
    given = params(2, sharded=True)
    specs = sparsejax.state_specs({"params": given, "step": jnp.zeros(())})
    assert specs["params"]["adam"].value == P(None, "data")
    assert specs["params"]["kernel"] == specs["step"] == P()
