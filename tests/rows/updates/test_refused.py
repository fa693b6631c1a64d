"""What cannot be updated by rows is refused by name; what can be is known to be so."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sparsejax.errors import ArgumentError, StateError
from sparsejax.rows import lazy, settle, value_and_grad
from sparsejax.rows.updates.layout import study
from sparsejax.units.row_grads import RowGrads


PARAMS = {"table": jnp.ones((5, 4)), "w": jnp.ones((4, 3)), "b": jnp.ones(3)}
MIXED = "'table' cannot be updated by rows: optax.{} takes rows together"

REFUSED = {
    "a norm of all leaves": (
        optax.chain(optax.clip_by_global_norm(1e9), optax.sgd(0.1)),
        MIXED.format("clip_by_global_norm"),
    ),
    "Muon": (optax.contrib.muon(1e-3), MIXED.format("scale_by_muon")),
    "Adafactor": (optax.adafactor(1e-3), MIXED.format("clip_by_block_rms")),
    "norms of columns": (
        optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
        MIXED.format("adaptive_grad_clip"),
    ),
    "factors of a leaf": (
        optax.scale_by_factored_rms(min_dim_size_to_factor=2),
        MIXED.format("scale_by_factored_rms"),
    ),
    "nothing if one is infinite": (
        optax.apply_if_finite(optax.sgd(0.1), 3),
        MIXED.format("apply_if_finite"),
    ),
    "noise": (
        optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)),
        "optax.add_noise has numbers of its own for each row",
    ),
    "a running maximum": (
        optax.stateless(lambda g, p: jax.tree.map(lambda x: jax.lax.cummax(x), g)),
        MIXED.format("stateless"),
    ),
    "another leaf": (
        optax.stateless(lambda g, p: jax.tree.map(lambda x: x * g["b"][0], g)),
        MIXED.format("stateless"),
    ),
    "steps added up": (
        optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
        r"acc_grads/table adds up .*sparsejax.accumulate\(tx, every=k\)",
    ),
    "a loss": (
        optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()),
        "cannot be called with gradients, state and parameters alone.*'value'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_rows_is_refused_by_name(name):
    tx, match = REFUSED[name]
    with pytest.raises(ArgumentError, match=match):
        lazy(tx).init({"table": PARAMS["table"], "b": PARAMS["b"]})


# What of its state has to be zero for a gradient of zero not to move a row, and for it to
# do no more than multiply its state, and by what. None: it is not known.
KINDS = {
    "adagrad": (optax.adagrad(0.1), (), (), (1,)),
    "rmsprop": (optax.rmsprop(0.1, decay=0.5), (), (), (0.5,)),
    "momentum": (optax.sgd(0.1, momentum=0.9), (0,), (0,), (1,)),
    "adam": (optax.adam(0.1, b2=0.75), (0,), (0,), (1, 0.75)),
    "clipped": (
        optax.chain(optax.clip(1.0), optax.adam(0.1, b2=0.75)),
        *((0,), (0,), (1, 0.75)),
    ),
    "adamw": (optax.adamw(0.1, b2=0.75), None, (0,), (1, 0.75)),
    "lion": (optax.lion(0.1), None, (0,), (1,)),
    # Each step rounds to 16 bits, and the epsilon of AdaBelief is added to its state.
    "16 bits": (optax.adam(0.1, mu_dtype=jnp.bfloat16), (0,), (0,), (1, 0.999)),
    "adabelief": (optax.adabelief(0.1), (0,), None, None),
    # Their factors are not known before they are run; that zeros stay zeros is.
    "injected": (optax.inject_hyperparams(optax.rmsprop)(0.1), (), (0,), (1,)),
    "injected adam": (optax.inject_hyperparams(optax.adam)(0.1), (0,), (0, 1), (1, 1)),
    "injected adamw": (optax.inject_hyperparams(optax.adamw)(0.1), None, None, None),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_a_gradient_of_zero_does_is_known(name):
    tx, still, idle, decays = KINDS[name]
    table = study(tx, PARAMS, PARAMS).tables[1]
    assert (table.path, table.refused, table.replay_refused) == ("table", None, None)
    assert (table.still, table.idle) == (still, idle)
    assert table.moves == (idle != ())
    assert (table.decays is None) == (decays is None)
    np.testing.assert_allclose(table.decays or (), decays or (), rtol=1e-6)


def test_arrays_of_the_state_belong_to_a_table_by_its_height_not_by_their_shape():
    """Another table of the same shape, and a constant of that shape, are not its own."""

    def init(params):
        return optax.tree.zeros_like(params), jnp.ones((5, 4))

    def update(grads, state, params=None):
        sums = optax.tree.add(grads, state[0])
        return sums, (sums, state[1])

    params = {"a": jnp.ones((5, 4)), "b": jnp.ones((5, 4))}
    tables = study(optax.GradientTransformation(init, update), params, params).tables
    assert [table.own for table in tables.values()] == [(0,), (1,)]
    assert not any(table.refused for table in tables.values())


@pytest.mark.slow
def test_a_leaf_that_is_not_kept_by_rows_may_have_a_dense_gradient():
    tx = lazy(optax.contrib.muon(0.1, muon_weight_dimension_numbers=_only_w))
    state = tx.init(PARAMS)
    rows = RowGrads(jnp.array([1]), jnp.ones((1, 4)), (5, 4))
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = jax.jit(tx.update)({**zeros, "table": rows}, state, PARAMS)
    assert 1 in updates["table"].ids
    rows = RowGrads(jnp.array([1]), jnp.ones((1, 3)), (4, 3))
    with pytest.raises(ArgumentError, match=r"'w' cannot be updated.*optax.*muon"):
        tx.update({**zeros, "w": rows}, state, PARAMS)


def _only_w(params):
    return {"b": None, "table": None, "w": optax.contrib.MuonDimensionNumbers()}


def test_inexact_needs_no_numbers_of_steps():
    tx = optax.contrib.schedule_free_sgd(0.1)
    assert lazy(tx, exact=False).init(PARAMS)
    with pytest.raises(ArgumentError, match=r"weight_sum of its state is .*exact=False"):
        lazy(tx).init(PARAMS)


def test_gradients_that_are_added_up_are_those_of_other_leaves():
    """What adds up rows would drop those that the last of its steps has not."""
    several = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    for tx in (several, optax.apply_every(2)):
        with pytest.raises(ArgumentError, match="adds up gradients of several steps"):
            lazy(tx, exact=False).init({"table": PARAMS["table"]})
    labels = {name: "rows" if name == "table" else "dense" for name in PARAMS}
    by_label = {"rows": optax.adam(0.1), "dense": several}
    assert lazy(optax.partition(by_label, labels)).init(PARAMS)


def test_arguments_that_cannot_be_are_refused():
    with pytest.raises(ArgumentError, match=r"tx must be an optax transformation.*float"):
        lazy(0.1)
    twice = {"a/b": jnp.ones((5, 4)), "a": {"b": jnp.ones((5, 4))}}
    with pytest.raises(ArgumentError, match="two parameters have the path 'a/b'"):
        lazy(optax.adam(0.1)).init(twice)
    assert lazy(optax.adam(0.1)).init({"a/b": jnp.ones(4), "a": {"b": jnp.ones(4)}})
    tx = lazy(optax.adam(0.1))
    state = tx.init(PARAMS)
    with pytest.raises(ArgumentError, match=r"what sparsejax.lazy has"):
        settle(PARAMS, state, optax.adam(0.1))
    rows = RowGrads(jnp.array([1]), jnp.ones((1, 4)), (5, 4))
    with pytest.raises(ArgumentError, match=r"'table' catch up.*tx\.update"):
        tx.update({**PARAMS, "table": rows}, state)
    with pytest.raises(StateError, match=r"one LazyState .* and there are 0"):
        tx.reader(PARAMS, optax.adam(0.1).init(PARAMS))
    bad = RowGrads(jnp.array([1]), jnp.ones((1, 3)), (5, 4))
    with pytest.raises(ArgumentError, match="lazy: the update of 'table': rows of shape"):
        tx.update({**PARAMS, "table": bad}, state, PARAMS)


def test_rows_of_another_table_are_refused_by_name():
    tx, params = lazy(optax.adam(0.1)), {"table": jnp.ones((5, 4))}
    grads = {"table": RowGrads(jnp.array([1]), jnp.ones((1, 4)), (6, 4))}
    with pytest.raises(ArgumentError, match=r"'table' .*\[6, 4\], .* shape \[5, 4\]"):
        tx.update(grads, tx.init(params), params)


def test_a_reader_of_other_parameters_is_refused_by_the_names_that_it_knows():
    tx, params = lazy(optax.adam(0.1)), {"inner": PARAMS}
    read = tx.reader(params, tx.init(params))
    by_rows = lambda own: own["table"][jnp.array([1])].sum()
    for loss, name in ((by_rows, "table"), (lambda own: own["b"].sum(), "b")):
        with pytest.raises(ArgumentError, match=f"read=.* no parameter '{name}'.*inner/b"):
            value_and_grad(loss, read=read)({name: PARAMS[name]})
