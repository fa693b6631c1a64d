"""States on a mesh of two axes: one of ranks, and one that shards the parameters.

Two and more jitted steps, between which the state crosses the border of `shard_map`, is
donated, and goes to NumPy and back as a checkpoint does.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax
from sparsejax import schemes, sparsifiers
from sparsejax.errors import ArgumentError, AxisError, StateError
from sparsejax.schemes.top_k.base import TopKScheme
from sparsejax.state.per_rank import find
from sparsejax.transforms.feedback import FeedbackState
from sparsejax.transforms.wrappers import AccumulateState
from sparsejax.units.dense import Dense
from tests import helpers


# How states lie is asked of parts of chains, and of optimizers that do not sleep, too.
pytestmark = [
    pytest.mark.filterwarnings("ignore:the updates of"),
    pytest.mark.filterwarnings("ignore:accumulate stands beside"),
]

DATA, MODEL, STEPS, DECAY = 2, 2, 5, 0.5
SHAPES = {"cols": (10, 24), "rows": (12, 16), "same": (50,)}
SPECS = {"cols": P(None, "model"), "rows": P("model", None), "same": P()}
PARAMS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
SMALL = {"axis_name": "data", "min_size": 20}
SHARED = {"model_axis": "model", **SMALL}


def mesh_of(order=("data", "model")):
    sizes = {"data": DATA, "model": MODEL}
    return helpers.grid(**{name: sizes[name] for name in order})


def sync(scheme=None, **options):
    options = {"reduce": "sum", "rules": {"": "sparse"}, **options}
    return sparsejax.sync(scheme or schemes.AGSparse(), "data", **options)


def accumulated(scheme=None, *before, reduce="sum", **options):
    tx = optax.chain(*before, sync(scheme, reduce=reduce, **options))
    return sparsejax.accumulate(tx, 2, "data", reduce=reduce)


class HalfKept(TopKScheme):
    """Sends every other unit, and keeps the rest."""

    def __call__(self, x, state, wire):
        x = x.dense()
        sent = jnp.where(jnp.arange(x.shape[0]) % 2 == 0, x, 0)
        reduced = schemes.AllReduce()(Dense(sent), state, wire)
        return reduced._replace(left=x - sent)


def partitioned():
    return optax.partition(
        {
            "few": optax.chain(sparsejax.top_k(0.1, **SHARED), sync(), trace()),
            "more": optax.chain(accumulated(), trace()),
        },
        {"cols": "few", "rows": "more", "same": "few"},
    )


def trace():
    return optax.trace(DECAY)


def behind(first, *rest):
    return lambda: optax.chain(first(), *(make() for make in rest), trace())


TRANSFORMATIONS = {
    "dgc": behind(lambda: sparsejax.dgc(0.1, **SHARED), sync),
    "kept": behind(lambda: sync(HalfKept(density=0.5))),
    "by_shard": behind(
        lambda: sparsejax.sparsify(sparsifiers.ReuseThreshold(0.1), **SMALL), sync
    ),
    "together": behind(
        lambda: sparsejax.sparsify(sparsifiers.ReuseThreshold(0.1), global_=True, **SHARED),
        lambda: sync(schemes.BalancedParallelism()),
    ),
    "zen_every": behind(
        lambda: accumulated(
            schemes.Zen(), sparsejax.sparsify(sparsifiers.ReuseThreshold(0.1), **SHARED)
        )
    ),
    "partition": partitioned,
}


def assert_replicated(tree):
    """Raises unless devices that hold the same part of an array hold the same bytes."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        seen = {}
        for shard in x.addressable_shards:
            first = seen.setdefault(str(shard.index), shard.data)
            same = np.asarray(first).tobytes() == np.asarray(shard.data).tobytes()
            assert same, jax.tree_util.keystr(path)


def train(tx, mesh, check_vma, grads):
    """From gradients {name: [steps, data, ...]} to updates by step, and the last state."""
    state = sparsejax.init(tx, PARAMS, mesh, "data", param_specs=SPECS, check_vma=check_vma)
    specs = sparsejax.state_specs(state, PARAMS, SPECS)
    by_rank = {name: P("data", *spec) for name, spec in SPECS.items()}

    def on_rank(grads, state):
        return tx.update(jax.tree.map(lambda x: x[0], grads), state)

    step = helpers.shard_map(
        on_rank,
        mesh=mesh,
        in_specs=(by_rank, specs),
        out_specs=(SPECS, specs),
        check_vma=check_vma,
    )
    step = jax.jit(step, donate_argnums=1)
    found = []
    for number in range(STEPS):
        updates, after = step({name: x[number] for name, x in grads.items()}, state)
        assert jax.tree.structure(after) == jax.tree.structure(state)
        assert_replicated(updates)
        assert_replicated(after)
        found.append(jax.tree.map(np.asarray, updates))
        saved = jax.tree.map(np.asarray, after)
        state = helpers.placed(saved, mesh, specs)
    return {name: np.stack([x[name] for x in found]) for name in grads}, state


def by_shard(name, x):
    """Global arrays [..., *shape] as a list of flat shards [..., numbers]."""
    axis = next((i for i, part in enumerate(SPECS[name]) if part == "model"), None)
    lead = x.ndim - len(SHAPES[name])
    parts = [x] * MODEL if axis is None else np.split(x, MODEL, lead + axis)
    return [part.reshape(*part.shape[:lead], -1).copy() for part in parts]


def held(state):
    """What all ranks hold, {name: a list of flat shards}, in float64."""
    total = {name: by_shard(name, np.zeros(shape)) for name, shape in SHAPES.items()}
    trees = [own.residual for own in find(state, FeedbackState)]
    trees += [own.pending for own in find(state, AccumulateState)]
    for tree in trees:
        for name, x in ({} if tree is None else tree.value).items():
            if not isinstance(x, optax.MaskedNode):
                shards = by_shard(name, np.asarray(x, np.float64).sum(0))
                total[name] = [a + b for a, b in zip(total[name], shards, strict=True)]
    return total


@pytest.mark.parametrize(
    ("name", "check_vma"),
    [
        ("kept", False),
        *helpers.slow(
            ("together", False),
            ("zen_every", True),
            ("partition", False),
        ),
    ],
)
def test_what_came_went_or_waits_on_every_shard(name, check_vma):
    rng = np.random.default_rng(0)
    grads = {
        name: rng.standard_normal((STEPS, DATA, *shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    updates, state = train(TRANSFORMATIONS[name](), mesh_of(), check_vma, grads)
    waits = held(state)
    for name, x in grads.items():
        # What the momentum behind has made of what was sent, undone.
        seen = updates[name].astype(np.float64)
        went = seen.copy()
        went[1:] -= DECAY * seen[:-1]
        given = by_shard(name, x.astype(np.float64).sum((0, 1)))
        sizes = by_shard(name, np.abs(x).astype(np.float64).sum((0, 1)))
        gone = by_shard(name, went.sum(0))
        for shard in range(MODEL):
            error = np.abs(given[shard] - gone[shard] - waits[name][shard])
            assert (error <= 2e-6 * sizes[shard]).all(), (name, shard, error.max())
        assert went.any()
    assert any(x.any() for shards in waits.values() for x in shards)


def specs_of(name, **options):
    state = sparsejax.init(
        TRANSFORMATIONS[name](), PARAMS, mesh_of(), "data", param_specs=SPECS, **options
    )
    return state, sparsejax.state_specs(state, PARAMS, SPECS)


def test_what_is_like_a_parameter_is_sharded_like_it():
    state, (own, rest, momentum) = specs_of("dgc")
    whole = {name: P("data", *spec) for name, spec in SPECS.items()}
    assert own.residual.value == whole
    assert momentum.trace == SPECS
    assert {own.step, own.inner.step, *jax.tree.leaves(rest)} == {P()}
    shapes = jax.tree.map(np.shape, sparsejax.residuals(state))
    assert shapes == {name: (DATA, *shape) for name, shape in SHAPES.items()}
    # Global arrays lie as their specs say.
    spec_of = lambda x: x.sharding.spec
    assert spec_of(state[0].residual.value["cols"]) == P("data", None, "model")
    assert spec_of(state[2].trace["cols"]) == P(None, "model")


def test_what_is_about_a_sharded_leaf_has_a_piece_for_each_shard():
    state, (own, *_) = specs_of("by_shard")
    found = {path: per_rank.value for path, per_rank in own.inner.sparsifiers.items()}
    assert found == {
        "cols": P(("data", "model")),
        "rows": P(("data", "model")),
        "same": P("data"),
    }
    shape = lambda path: state[0].inner.sparsifiers[path].value.shape
    assert (shape("cols"), shape("same")) == ((DATA * MODEL,), (DATA,))
    # A threshold for all shards is the same on them.
    _, (own, *_) = specs_of("together")
    assert own.inner.sparsifiers[""].value == P("data")
    for options in ({}, {"check_vma": False}):
        _, (own, _) = specs_of("kept", **options)
        assert own.residual.value == {
            name: P("data", *spec) for name, spec in SPECS.items()
        }


def test_without_specs_of_parameters_nothing_is_sharded_but_over_ranks():
    tx = TRANSFORMATIONS["zen_every"]()
    state = sparsejax.init(tx, PARAMS, mesh_of(), "data")
    found = sparsejax.state_specs(state)
    assert set(jax.tree.leaves(found)) == {P(), P("data")}
    again = sparsejax.state_specs(state, PARAMS, P())
    assert jax.tree.leaves(found) == jax.tree.leaves(again)


def test_a_prefix_of_specs_and_masks_and_doubled_names():
    params = {"w": jnp.zeros((8, 8)), "head": {"w": jnp.zeros((8, 8)), "b": jnp.zeros(8)}}
    specs = {"w": P("model"), "head": P()}
    tx = optax.chain(
        optax.masked(accumulated(), {"w": True, "head": False}),
        optax.masked(optax.adam(1e-3), lambda p: {"w": True, "head": True}),
        optax.scale_by_learning_rate(optax.constant_schedule(0.1)),
    )
    state = sparsejax.init(tx, params, mesh_of(), "data", param_specs=specs)
    found = sparsejax.state_specs(state, params, specs)
    assert jax.tree.leaves(found[0].inner_state.pending.value) == [P("data", "model")]
    full = {"w": P("model"), "head": {"w": P(), "b": P()}}
    adam = found[1].inner_state[0]
    assert (adam.mu, adam.nu, adam.count) == (full, full, P())
    # Of a tree that holds the parameters, too.
    train_state = {"params": params, "opt_state": state}
    found = sparsejax.state_specs(train_state, params, specs)
    assert found["params"] == full
    assert found["opt_state"][1].inner_state[0].mu == full


def test_a_trainer_of_sharded_parameters_steps_as_numpy_does():
    """Two layers, the first sharded by columns and the second by rows."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((8, 6)), rng.standard_normal((8, 3))
    params = {"in": rng.standard_normal((6, 4)) / 3, "out": rng.standard_normal((4, 3)) / 3}
    specs = {"in": P(None, "model"), "out": P("model")}

    def loss(params, batch):
        off = lax.psum(batch[0] @ params["in"] @ params["out"], "model") - batch[1]
        return jnp.mean(off**2)

    tx = optax.chain(accumulated(schemes.AllReduce(), reduce="mean"), optax.sgd(0.1, 0.9))
    trainer = sparsejax.data_parallel(
        loss, tx, mesh_of(), axis_name="data", param_specs=specs
    )
    narrow = lambda tree: jax.tree.map(lambda x: x.astype(np.float32), tree)
    state = trainer.init(narrow(params))
    velocity = jax.tree.map(np.zeros_like, params)
    gathered = jax.tree.map(np.zeros_like, params)
    for step in range(4):
        state, value = trainer.step(state, narrow((x, y)))
        off = x @ params["in"] @ params["out"] - y
        assert float(value) == pytest.approx(np.mean(off**2), rel=1e-5)
        slope = 2 * off / off.size
        grads = {"in": x.T @ slope @ params["out"].T, "out": (x @ params["in"]).T @ slope}
        gathered = jax.tree.map(lambda a, b: a + b / 2, gathered, grads)
        now = gathered if step % 2 else jax.tree.map(np.zeros_like, params)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, now)
        params = jax.tree.map(lambda p, v: p - 0.1 * v, params, velocity)
        if step % 2:
            gathered = jax.tree.map(np.zeros_like, params)
        assert_replicated(state)
    for name, own in params.items():
        np.testing.assert_allclose(state.params[name], own, rtol=1e-5, atol=1e-6)
        there = NamedSharding(mesh_of(), specs[name])
        assert state.params[name].sharding.is_equivalent_to(there, 2)

    by_shard = lambda params, batch: jnp.mean(batch[0] @ params["in"])
    trainer = sparsejax.data_parallel(
        by_shard, tx, mesh_of(), axis_name="data", param_specs=specs
    )
    with pytest.raises(ArgumentError, match="loss_fn returns differs over 'model'"):
        trainer.step(trainer.init(narrow(params)), narrow((x, y)))


# --- Bad input.


def init(tx, params=PARAMS, specs=SPECS, axis_name="data"):
    return sparsejax.init(tx, params, mesh_of(), axis_name, param_specs=specs)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (
            lambda: sparsejax.state_specs({}, PARAMS),
            ArgumentError,
            "params and param_specs, or neither",
        ),
        (
            lambda: init(trace(), specs={"cols": P()}),
            ArgumentError,
            "a tree like the parameters, or a prefix",
        ),
        (
            lambda: init(trace(), specs=NamedSharding(mesh_of(), P())),
            ArgumentError,
            r"must hold PartitionSpecs.* its \.spec",
        ),
        (
            lambda: init(trace(), specs=P(None, None, "model")),
            ArgumentError,
            r"'cols' P.*shape \[10, 24\].* not be longer",
        ),
        (
            lambda: init(trace(), specs=P("tensor")),
            AxisError,
            "param_specs of 'cols': the mesh has no axis 'tensor'",
        ),
        (
            lambda: sparsejax.state_specs(
                init(accumulated()), PARAMS, {**SPECS, "same": P("data")}
            ),
            ArgumentError,
            "shards 'same' over 'data'",
        ),
        (
            lambda: sparsejax.state_specs(
                init(accumulated()), {"cols": PARAMS["cols"]}, SPECS["cols"]
            ),
            StateError,
            "something of 'rows', which is not among .* 'cols'. Give the parameters",
        ),
        (
            lambda: sparsejax.state_specs(
                init(accumulated()), PARAMS | {"same": np.zeros(7)}, SPECS
            ),
            StateError,
            r"parameter 'same' of shape \[50\].*has the shape \[7\]",
        ),
        (
            lambda: init(optax.adafactor(1e-3, min_dim_size_to_factor=2)),
            StateError,
            r"v_row/cols' .*parameter 'cols' .* is sharded P.*optax.partition",
        ),
        (
            lambda: init(optax.flatten(trace())),
            StateError,
            "differs over 'model', and no parameter has its path and shape",
        ),
    ],
)
def test_errors_name_what_to_do(make, error, match):
    with pytest.raises(error, match=match):
        make()


def updated(tx):
    """Traces a step in the same shard_map as the init."""

    def step(grads):
        grads = jax.tree.map(lambda x: x[0], grads)
        return tx.update(grads, tx.init(helpers.parameters(grads)))[0]

    specs = {name: P("data", *spec) for name, spec in SPECS.items()}
    grads = {name: np.ones((DATA, *shape), np.float32) for name, shape in SHAPES.items()}
    run = helpers.shard_map(step, mesh=mesh_of(), in_specs=(specs,), out_specs=SPECS)
    return jax.eval_shape(run, grads)


@pytest.mark.parametrize("options", [{"global_": True}, *helpers.slow({"clip_norm": 1.0})])
def test_what_is_of_all_leaves_is_of_all_their_shards(options):
    with pytest.raises(ArgumentError, match=r"others over .*'model'.* give .* model_axis"):
        updated(optax.chain(sparsejax.top_k(0.1, **options, **SMALL), sync()))
    updated(optax.chain(sparsejax.top_k(0.1, **options, **SHARED), sync()))


def test_leaves_that_are_written_alike_and_sharded_apart():
    params = {"a": {"b": np.zeros(64)}, "a/b": np.zeros(64)}
    specs = {"a": P("model"), "a/b": P()}
    tx = sparsejax.sparsify(sparsifiers.ReuseThreshold(0.1), **SMALL)
    with pytest.raises(StateError, match="path written 'a/b', and they are not sharded"):
        init(tx, params, specs)
    state = init(tx, params, P("model"))
    found = sparsejax.state_specs(state, params, P("model"))
    assert [x.value for x in found.inner.sparsifiers.values()] == [P(("data", "model"))] * 2


def test_a_state_for_other_types_names_what_to_do():
    """Checking tells leaves that are sharded from others, and puts them apart."""
    tx = sync(HalfKept(density=0.5))
    grads = {name: np.ones((STEPS, DATA, *s), np.float32) for name, s in SHAPES.items()}
    checked = init(tx)
    specs = sparsejax.state_specs(checked, PARAMS, SPECS)
    step = helpers.shard_map(
        lambda grads, state: tx.update(jax.tree.map(lambda x: x[0], grads), state),
        mesh=mesh_of(),
        in_specs=({name: P("data", *spec) for name, spec in SPECS.items()}, specs),
        out_specs=(SPECS, specs),
        check_vma=False,
    )
    with pytest.raises(
        StateError, match=r"init\(\.\.\., param_specs=\.\.\.\) and the check_vma"
    ):
        jax.eval_shape(step, {name: x[0] for name, x in grads.items()}, checked)


def test_specs_of_a_transformation_are_refused_with_the_call_that_is_meant():
    tx = optax.chain(sparsejax.dense_sync(), optax.adam(1e-3))
    with pytest.raises(ArgumentError, match=r"specs\(sparsejax.init\(tx, params, mesh"):
        sparsejax.state_specs(tx)
