"""Tables too small for a search for their rows, whose gradients come as rows all the same.

Then it is known how many there are, and bytes decide: lists of rows, or the dense sum.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax import schemes
from sparsejax.errors import RuleError
from sparsejax.state import observing
from sparsejax.transforms.buckets import SPARSE_FROM, tables
from sparsejax.transforms.buckets.tables import LISTED_FROM, Table
from tests import helpers


RANKS, TABLES, HEIGHT, WIDTH, READ = 4, 3, 1000, 16, 8


def params():
    rng = np.random.default_rng(0)
    made = {f"t{at}": rng.normal(size=(HEIGHT, WIDTH)) for at in range(TABLES)}
    made = {name: x.astype(np.float32) for name, x in made.items()}
    return {"tables": made, "w": np.ones((TABLES * WIDTH, 2), np.float32)}


def loss_fn(p, ids):
    rows = [p["tables"][f"t{at}"][ids[:, at]] for at in range(TABLES)]
    return jnp.mean((jnp.concatenate(rows, axis=1) @ p["w"]) ** 2)


def batch():
    rng = np.random.default_rng(1)
    return rng.integers(0, HEIGHT, (RANKS * READ, TABLES)).astype(np.int32)


@functools.cache
def trained(rule=None):
    """The state after a step, and the bytes that were sent."""
    rules = None if rule is None else {"tables": rule}
    sync = sparsejax.zen_sync(rules=rules)
    tx = optax.chain(sync, sparsejax.lazy(optax.adagrad(0.1)))
    trainer = sparsejax.data_parallel(loss_fn, tx, helpers.mesh_of(RANKS))
    state, _ = trainer.step(trainer.init(params()), batch())
    sent = sparsejax.metrics(state.opt_state)
    return state, float(sent["sync/wire_bytes"]), float(sent["sync/dense_bytes"])


@pytest.mark.slow
def test_their_rows_are_sent_by_default():
    """As with the rule "sparse": in a tenth of the bytes, to the same parameters."""
    assert HEIGHT * WIDTH < SPARSE_FROM
    state, sent, dense = trained()
    assert sent < 0.1 * dense
    other, by_rule, _ = trained("sparse")
    assert sent == by_rule
    densely, whole, _ = trained("dense")
    assert whole > 0.99 * dense
    for x, y, z in zip(
        *(jax.tree.leaves(s.params) for s in (state, other, densely)), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-6)
        np.testing.assert_allclose(x, z, rtol=1e-5, atol=1e-6)


def test_what_saves_few_bytes_joins_the_dense_sum():
    """One table of a few rows is not worth an exchange of its own."""
    zen = schemes.Zen()
    few = Table((100, 4), np.float32, 8)
    assert tables.worth_listing([few], zen, RANKS) == [False]
    large = Table((4000, 16), np.float32, 64)
    assert tables.worth_listing([large], zen, RANKS) == [True]
    # Beside one that is, it costs nothing more.
    assert tables.worth_listing([few, large], zen, RANKS) == [True, True]
    # Nearly all rows of a table: lists would be longer than the table.
    full = Table((4000, 16), np.float32, 3999)
    assert tables.worth_listing([full, large], zen, 16) == [False, True]
    assert tables.worth_listing([large], schemes.AllReduce(), RANKS) == [False]
    assert tables.worth_listing([Table((0, 16), np.float32, 3)], zen, RANKS) == [False]
    # By 16 KB, for all tables of one width together.
    assert LISTED_FROM == 16 * 1024
    some = Table((100, 16), np.float32, 8)
    assert tables.worth_listing([some] * 2, zen, RANKS) == [False] * 2
    assert tables.worth_listing([some] * 3, zen, RANKS) == [True] * 3


@pytest.mark.slow
def test_explain_forecasts_what_is_sent():
    tx = optax.chain(sparsejax.zen_sync(), sparsejax.lazy(optax.adagrad(0.1)))
    network = sparsejax.Network(25, 20)
    found = sparsejax.explain(tx, params(), ranks=RANKS, network=network, ids={"t": READ})
    rows = [row for row in found.rows if row.ids]
    assert [path for row in rows for path in row.paths] == [
        f"tables/t{k}" for k in range(3)
    ]
    assert {row.scheme for row in rows} == {"Zen"}
    (dense,) = [row for row in found.rows if not row.ids]
    assert dense.paths == ("w",)
    _, sent, _ = trained()
    told = sum(row.sent_bytes for row in found.rows)
    assert 0.8 * told < sent < 1.25 * told


def test_a_rule_for_units_without_effect_is_reported():
    """The unit "row" of leaves that are summed densely."""
    tx = sparsejax.zen_sync(rules={"tables": "row"})
    match = r"the rule 'tables' says 'row', and it has no effect.* 16,000 numbers.*'sparse'"
    with pytest.raises(RuleError, match=match):
        tx.init(params())
    # One leaf is enough, and of a yardstick rules are taken as they are.
    large = params() | {"large": np.ones((SPARSE_FROM, 2), np.float32)}
    sparsejax.zen_sync(rules={"": "row"}).init(large)
    sparsejax.dense_sync(rules={"tables": "row"}).init(params())
    tx = sparsejax.zen_sync(rules={"tables": "sparse", "t0": "row"})
    seen = observing.observed(tx, params())
    assert [b.shape for b in seen.exchanges[0].buckets] == [(WIDTH,), (), ()]


BY_RULE = {
    "tables": ({"t": "dense", "t0": "row"}, r"the rule 't' says 'dense' of it"),
    "a scheme": (
        {"t": schemes.AllReduce(), "t0": "row"},
        r"'t' says AllReduce\(...\) of it",
    ),
}


@pytest.mark.parametrize("case", BY_RULE)
def test_a_rule_for_units_of_what_a_rule_made_dense_names_that_rule(case):
    rules, why = BY_RULE[case]
    large = {f"t{k}": np.ones((SPARSE_FROM, 2), np.float32) for k in range(2)}
    match = (
        rf"'t0' says 'row'.* no effect.* 131,072 numbers, and .*{why}.* in front of that"
    )
    with pytest.raises(RuleError, match=match) as error:
        sparsejax.zen_sync(rules=rules).init(large)
    assert "65,536" not in str(error.value)
