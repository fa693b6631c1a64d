"""The trainer's state, keys and evaluation, and what it says where something is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax.errors import ArgumentError, AxisError, StateError
from sparsejax.training import train_state
from tests import helpers
from tests.helpers import mesh_of
from tests.training import model


TX = optax.chain(sparsejax.top_k(0.1, min_size=1), sparsejax.dense_sync(), optax.adam(0.5))


def plain(loss_fn=lambda p, b: jnp.mean(p["w"] * b), tx=None, **options):
    tx = tx or optax.chain(sparsejax.dense_sync(), optax.sgd(0.5))
    return sparsejax.data_parallel(loss_fn, tx, mesh_of(2), **options)


def stepped(trainer, batch=None, **values):
    """Traces a step from the first state of a trainer of parameters {"w": 1}."""
    state = trainer.init({"w": np.float32(1)}, **values)
    batch = np.ones(2, np.float32) if batch is None else batch
    return jax.eval_shape(trainer.compiled(state), state, batch)


def draws(state, count=3):
    """What each rank draws in each of so many steps, and the states before them."""
    states, drawn = [], []
    for step in range(count):
        states.append(state)
        state, (_, aux) = model.trainer().step(state, model.batch_of(step))
        drawn.append(np.asarray(aux["drawn"]))
    return np.stack(drawn), states


def test_each_rank_and_step_has_a_key_of_its_own():
    drawn, states = draws(model.first())
    assert drawn.shape == (3, model.RANKS)
    assert len(np.unique(drawn)) == drawn.size
    want = [
        [
            jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, step), rank))
            for rank in range(model.RANKS)
        ]
        for key in [jax.random.key(0)]
        for step in range(3)
    ]
    np.testing.assert_array_equal(drawn, want)
    # From any state on it goes on as before; another key draws other numbers.
    again, _ = draws(states[1], 2)
    np.testing.assert_array_equal(again, drawn[1:])
    other, _ = draws(model.first(seed=1), 1)
    assert not np.isin(other, drawn).any()


@pytest.mark.parametrize("key", [0, jax.random.split(jax.random.key(0), 2), np.ones(2)])
def test_what_is_no_key_is_an_error_that_says_what_is_one(key):
    with pytest.raises(ArgumentError, match=r"key must be one .*jax.random.key\(0\).* got"):
        plain().init({"w": np.float32(1)}, key=key)


def test_a_key_of_the_old_kind_will_do():
    loss = lambda p, b, *, key: jnp.mean(p["w"] * b) + jax.random.uniform(key)
    stepped(plain(loss), key=jax.random.PRNGKey(0))


def test_a_state_that_is_not_donated_can_be_used_again():
    state, batch = model.first(), model.batch_of(0)
    first, _ = model.trainer().step(state, batch)
    second, _ = model.trainer().step(state, batch)
    assert float(first.params["w"]) == float(second.params["w"]) != 1


@pytest.mark.parametrize("kind", helpers.KINDS)
def test_a_state_of_numpy_arrays_compiles_no_second_step(kind):
    """As a checkpoint may give it back: it is placed as what a step returns is."""
    mesh = helpers.KINDS[kind](mesh_of(2))
    trainer = sparsejax.data_parallel(lambda p, b: jnp.mean(p["w"] * b), TX, mesh)
    state = jax.tree.map(np.asarray, trainer.init({"w": np.ones((2, 2), np.float32)}))
    for _ in range(2):
        state, _ = trainer.step(state, np.ones((2, 2), np.float32))
    assert trainer.compiled(state)._cache_size() == 1


@pytest.mark.parametrize("kind", helpers.KINDS)
def test_tables_by_columns_on_meshes_of_both_kinds(kind):
    mesh = helpers.KINDS[kind](mesh_of(2))
    table = sparsejax.ColumnTable.create(jax.random.key(0), 6, 4, mesh)
    tx = optax.chain(sparsejax.dense_sync(), optax.trace(0.9))
    trainer = sparsejax.data_parallel(lambda p, b: jnp.mean(b), tx, mesh)
    state = trainer.init({"users": table, "bias": np.ones(3, np.float32)})
    assert sparsejax.state_specs(state.opt_state)[1].trace["users"].value == P(None, "data")
    assert state.params["users"].value.sharding.spec == P(None, "data")


def test_a_state_that_is_used_up_is_an_error_that_names_the_fix():
    trainer, batch = plain(), np.ones(2, np.float32)
    state = trainer.init({"w": np.float32(1)})
    after, _ = trainer.step(state, batch)
    for call in (trainer.step, trainer.evaluate):
        with pytest.raises(StateError, match=r"'step' was deleted.*donate=False"):
            call(state, batch)
    # One leaf is enough.
    mixed = after._replace(params=state.params)
    with pytest.raises(StateError, match=r"'params/w' was deleted"):
        trainer.step(mixed, batch)
    # What is asked of it says so, too.
    for ask in (sparsejax.metrics, sparsejax.summary, sparsejax.residuals):
        with pytest.raises(StateError, match=r"was deleted.*Go on with the state"):
            ask(state.opt_state)
    trainer.step(after, batch)


@pytest.mark.parametrize("name", ["loss_fn", "ids"])
def test_what_is_no_function_is_named(name):
    with pytest.raises(ArgumentError, match=rf"{name} must be a function, .* got 'm'"):
        plain(**{name: "m"})


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda t, s, b: jax.jit(t.step)(s, b), "a state whose leaf 'step' is being"),
        (lambda t, s, b: jax.jit(t.evaluate)(s, b), "a batch whose leaf 'x' is"),
        (lambda t, s, b: jax.jit(lambda x: t.step(s, x))(b["x"]), "a batch that is being"),
    ],
)
def test_a_call_that_is_traced_is_an_error_that_says_where_to_call_it(call, match):
    trainer = plain(lambda p, b: jnp.mean(p["w"] * b["x"]))
    state = trainer.init({"w": np.float32(1)})
    fix = r".*outside of jax.jit, jax.lax.scan.*docs/shard_map.md"
    with pytest.raises(ArgumentError, match=match + fix):
        call(trainer, state, {"x": np.ones((2, 2), np.float32)})


def test_a_step_without_the_state_of_the_optimizer_is_an_error():
    batch = np.ones(2, np.float32)
    for tx in (None, TX):
        trainer = plain(tx=tx)
        state = trainer.init({"w": np.float32(1)})._replace(opt_state=None)
        with pytest.raises(StateError, match=r"opt_state is None, .*evaluate alone: give"):
            trainer.step(state, batch)
    # An optimizer may keep None.
    bare = optax.GradientTransformation(lambda params: None, lambda g, s, p=None: (g, s))
    train_state.require_opt_state(sparsejax.TrainState(jnp.int32(0), {}, None), bare)


def test_what_is_no_state_is_an_error_that_names_what_makes_one():
    with pytest.raises(StateError, match=r"trainer.init\(params\).*got a dict"):
        plain().step({"w": np.float32(1)}, np.ones(2, np.float32))


def test_evaluation_is_the_loss_without_gradient_or_optimizer():
    trainer, batch = model.trainer(), model.batch_of(0)
    state = model.first()
    loss, aux = trainer.evaluate(state._replace(opt_state=None), batch)
    # What is evaluated is `eval_fn`, which knows no parameters.
    np.testing.assert_array_equal(aux["product"], -batch["x"])
    np.testing.assert_allclose(loss, -batch["x"].mean(), rtol=1e-6)
    # It draws what the next step draws, and changes nothing.
    _, (_, stepped_aux) = trainer.step(state, batch)
    np.testing.assert_array_equal(aux["drawn"], stepped_aux["drawn"])
    assert (int(state.step), int(state.variables["steps"])) == (0, 0)


def test_evaluation_calls_loss_fn_if_there_is_nothing_else():
    trainer = plain()
    state = trainer.init({"w": np.float32(3)})
    assert float(trainer.evaluate(state, np.ones(2, np.float32))) == 3
    assert float(state.params["w"]) == 3


def test_an_optimizer_in_front_of_the_synchronization_is_named():
    params, tx = {"w": np.float32(3)}, optax.chain(optax.trace(0.9), sparsejax.dense_sync())
    with pytest.raises(StateError, match=r"0/trace/w' would differ by rank.*zen_sync"):
        plain(tx=tx).init(params)
    # A state that was made elsewhere is found out by the step.
    state = plain().init(params)._replace(opt_state=tx.init(params))
    fix = r"opt_state/0/trace/w differs by rank.*zen_sync\(\) before the optimizer"
    with pytest.raises(ArgumentError, match=fix):
        jax.eval_shape(plain(tx=tx).compiled(state), state, np.ones(2, np.float32))


@pytest.mark.parametrize(
    ("loss_fn", "options", "values", "match"),
    [
        (lambda p, b: {"loss": p["w"]}, {}, {}, "must return a scalar loss, got dict"),
        (lambda p, b: (p["w"] > 0).sum(), {}, {}, "floating loss.*got int32.*has_aux"),
        (lambda p, b: p["w"], {"has_aux": True}, {}, r"return \(loss, aux\), got"),
        (
            lambda p, b, variables: (p["w"], 1, 2),
            {},
            {"variables": 1.0},
            r"return \(loss, variables\), got a tuple of 3",
        ),
        (
            lambda p, b, variables: (p["w"], variables),
            {"aux": "mean"},
            {"variables": 1.0},
            r"second value .* must return \(aux, variables\), got ",
        ),
        (
            lambda p, b: p["w"],
            {},
            {"key": jax.random.key(0)},
            r"called as loss_fn\(params, batch, key=key\).*unexpected",
        ),
        (
            lambda p, b, key: p["w"],
            {},
            {},
            r"called as loss_fn\(params, batch\).*missing .*'key'.*trainer.init\(",
        ),
    ],
)
def test_a_loss_function_of_another_form_is_an_error(loss_fn, options, values, match):
    with pytest.raises(ArgumentError, match=match):
        stepped(plain(loss_fn, **options), **values)


def test_a_state_of_other_ranks_is_an_error_before_it_is_placed():
    """On Explicit axes JAX would refuse to place it, in words about a sharding."""

    def of(ranks):
        mesh = helpers.KINDS["explicit"](mesh_of(ranks))
        return sparsejax.data_parallel(lambda p, b: jnp.mean(p["w"] * b), TX, mesh)

    state = jax.device_get(of(2).init({"w": np.ones(8, np.float32)}))
    with pytest.raises(StateError, match=r"made for 2 ranks, and there are 4: .*resized"):
        of(4).step(state, np.ones(4, np.float32))


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ({"x": np.ones(3)}, r"2 ranks along.* 2 must divide; got shape \[3\] for .*'x'"),
        ({"x": np.float32(1)}, r"\[\] for the array 'x'.*trainer.init\(params, key="),
        ({"x": np.array(["a", "b"])}, "numbers, and 'x' is ndarray of str.*tokenized"),
        ({"x": ["a", "b"]}, "numbers, and .* is str of str.*tokenized"),
        ({"x": np.zeros(2, "M8[s]")}, r"'x' is .* of datetime64\[s\]: dates .*number"),
        ({"x": np.zeros(2, "m8[s]")}, r"'x' is .* of timedelta64\[s\]: dates .*number"),
        ({"x": np.zeros(2, [("a", "f4")])}, "'x' is .* of void32: the fields .*arrays"),
        ({"x": [[0.5, 1.0]]}, r"\[\] for .*'x/0/0', a float in a list.*np.asarray of the"),
        (jax.random.key(0), r"shape \[\] for the array\..*trainer.init\(params, key="),
    ],
)
def test_a_batch_that_cannot_be_split_is_an_error_that_names_the_array(batch, match):
    trainer = plain(lambda p, b: p["w"])
    state = trainer.init({"w": np.float32(1)})
    with pytest.raises(ArgumentError, match=match):
        trainer.step(state, batch)


def test_a_batch_of_narrow_floats_is_taken():
    trainer = plain(lambda p, b: jnp.mean(p["w"] * b.astype(jnp.float32)))
    state = trainer.init({"w": np.float32(1)})
    assert float(trainer.evaluate(state, np.ones(2, jnp.bfloat16))) == 1


@pytest.mark.parametrize("checks", [True, False])
def test_a_synchronization_over_another_axis_is_refused_with_both_names(checks):
    tx = optax.chain(sparsejax.zen_sync("model"), optax.sgd(0.5))
    mesh = helpers.grid(data=2, model=2)
    loss_fn = lambda p, b: jnp.mean(p["w"] * b)
    options = {"axis_name": "data", "check_vma": checks}
    trainer = sparsejax.data_parallel(loss_fn, tx, mesh, **options)
    match = r"axis_name is 'data', .* sparsejax.sync in tx synchronizes over 'model': give"
    with pytest.raises(AxisError, match=match):
        stepped(trainer)
