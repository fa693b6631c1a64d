"""A lookup that says that it is one: rows for certain, or an error that says why not."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import errors
from sparsejax.rows import lookup, value_and_grad
from sparsejax.rows.lookup import _said
from sparsejax.units.row_grads import is_row_grads
from tests.rows import cases
from tests.rows.cases import CASES, HEIGHT, IDS


@pytest.mark.parametrize(
    "name",
    [
        *("cast_in_jit", "cond_of_operands", "hard_negatives", "remat", "scan_in_scan"),
        *("scan_of_switch", "vmap_along_other_axes"),
    ],
)
def test_it_is_found_wherever_it_stands(name):
    case = CASES[name]
    loss = lambda p, ids: case.loss(lookup, p, ids)
    table = jax.eval_shape(value_and_grad(loss), cases.params(), IDS)[1]["table"]
    assert table.ids.shape == (case.rows,)


def test_its_gradient_lists_rows_though_they_are_as_many_as_there_are():
    loss = lambda p, ids: cases.score(lookup, p, jnp.tile(ids, 3))
    table = jax.eval_shape(value_and_grad(loss), cases.params(), IDS)[1]["table"]
    assert table.ids.shape == (18,)


def test_it_is_jnp_take():
    table = cases.params()["table"]
    ids = jnp.array([[0, -1], [HEIGHT, 3]])
    for options in ({}, {"mode": "clip"}, {"mode": "fill", "fill_value": 7.0}):
        found = jax.jit(lambda t, ids, options=options: lookup(t, ids, **options))(
            table, ids
        )
        np.testing.assert_array_equal(found, jnp.take(table, ids, axis=0, **options))
    np.testing.assert_array_equal(lookup(table, IDS), table[IDS])
    both = jax.vmap(lookup)(jnp.stack([table, 2 * table]), jnp.stack([ids, ids]))
    np.testing.assert_array_equal(both[1], jnp.take(2 * table, ids, axis=0))
    text = jax.jit(lookup).lower(table, ids).compile().as_text()
    assert "sparsejax_lookup" not in text.replace("op_name", "").split("metadata")[0]


DENSE = {
    "dot_general": lambda p, h: (h @ p["table"].T).sum(),
    "reduce_sum": lambda p, h: h.sum() + (p["table"] ** 2).sum(),
    "scan": lambda p, h: jax.lax.scan(lambda c, x: (c + x.sum(), None), 0.0, p["table"])[0],
}


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_use_of_its_table_is_refused_by_path_and_line(name):
    def loss(p, ids):
        h = lookup(p["model"]["table"], ids)
        return DENSE[name](p["model"], h) + h.sum()

    with pytest.raises(errors.ArgumentError) as error:
        jax.eval_shape(value_and_grad(loss), {"model": cases.params()}, IDS)
    line = lambda function: f"test_lookup.py:{function.__code__.co_firstlineno}"
    looked_up = f"test_lookup.py:{loss.__code__.co_firstlineno + 1}"
    for named in ("'model/table'", line(DENSE[name]), looked_up, "stop_gradient"):
        assert named in str(error.value)


def test_elsewhere_its_gradient_is_dense_which_is_said_once():
    p, _said_before = cases.params(), _said.clear()
    loss = lambda p: cases.score(lookup, p, IDS)
    with pytest.warns(errors.DenseGradientWarning, match="value_and_grad") as seen:
        grads = jax.jit(jax.grad(jax.checkpoint(loss)))(p)
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = jax.jit(jax.grad(loss))(p)
    np.testing.assert_allclose(grads["table"], again["table"], rtol=1e-6)
    want = jax.grad(lambda p: cases.score(cases.take, p, IDS))(p)["table"]
    np.testing.assert_allclose(again["table"], want, rtol=1e-6)


def test_to_evaluate_says_nothing():
    _said.clear()
    loss = lambda p: cases.score(lookup, p, IDS)
    jax.jit(loss)(cases.params())
    grads = jax.eval_shape(value_and_grad(loss), cases.params())[1]
    assert is_row_grads(grads["table"])


@pytest.mark.parametrize(
    ("table", "ids", "match"),
    [
        (jnp.ones(4), IDS, r"at least two axes.*\[4\].*table\[:, None\]"),
        (jnp.ones(()), IDS, r"at least two axes.*\[\]"),
        (jnp.ones((4, 2)), jnp.ones(3), r"integers, got float32\[3\].*astype"),
        (jnp.ones((4, 2)), jnp.ones(3, bool), r"integers, got bool\[3\].*nonzero"),
    ],
)
def test_bad_input_is_refused_by_name(table, ids, match):
    with pytest.raises(errors.ArgumentError, match=match):
        lookup(table, ids)
