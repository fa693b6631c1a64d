"""`sync` and its kin as optax transformations, and what they compose with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax
from sparsejax import schemes
from sparsejax.schemes.base import Traffic
from sparsejax.schemes.top_k.base import TopKScheme
from sparsejax.state.per_rank import find
from sparsejax.transforms.exchange import ExchangeState
from sparsejax.units.dense import Dense
from tests.helpers import compilations, grid, mesh_of, parameters, shard_map, slow, stacked


RANKS = 4
ROWS, WIDTH = 1024, 8  # small, so that it compiles fast; a rule makes it sparse
SPARSE = {"embedding": "sparse"}
MESH = mesh_of(RANKS)


def optimizer():
    """One that is linear in the gradient, so that rounding stays rounding."""
    return optax.sgd(0.1, momentum=0.9)


def zen(axis_name=None, **options):
    return sparsejax.zen_sync(axis_name, **{"rules": SPARSE, **options})


def gathering(axis_name=None, **options):
    """All entries to all: what compiles fastest."""
    scheme = schemes.AGSparse()
    return sparsejax.sync(scheme, axis_name, **{"rules": SPARSE, **options})


# What meets a scheme's state or branches: by what compiles fastest, and, slowly, by Zen.
any_scheme = pytest.mark.parametrize("make", [gathering, *slow(zen)])


def make_params():
    rng = np.random.default_rng(0)
    return {
        "embedding": jnp.asarray(rng.standard_normal((ROWS, WIDTH)), jnp.float32),
        "kernel": jnp.asarray(rng.standard_normal((WIDTH, 5)), jnp.float32),
        "bias": jnp.zeros(5, jnp.float32),
    }


def make_batch(seed, n=RANKS):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.integers(0, ROWS, (6 * n, 3)).astype(np.int32),
        "y": rng.standard_normal((6 * n, 5)).astype(np.float32),
    }


def loss_fn(params, batch):
    hidden = params["embedding"][batch["x"]].mean(1)
    out = jnp.tanh(hidden @ params["kernel"]) + params["bias"]
    return jnp.mean((out - batch["y"]) ** 2)


def train(tx, steps=3, check_vma=True, ids=False, make=make_params):
    """Parameters and states after each step of a hand-written loop."""
    params = jax.device_put(make(), NamedSharding(MESH, P()))
    state = sparsejax.init(tx, params, MESH)
    specs = sparsejax.state_specs(state)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @functools.partial(
        shard_map,
        mesh=MESH,
        in_specs=(P(), specs, P("data")),
        out_specs=(P(), specs),
        check_vma=check_vma,
    )
    def step(params, state, batch):
        grads = jax.grad(loss_fn)(sparsejax.local(params), batch)
        extra = {"ids": {"embedding": batch["x"]}} if ids else {}
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    history = []
    with compilations() as compiled:
        for seed in range(steps):
            params, state = step(params, state, make_batch(seed))
            history.append(jax.tree.map(np.asarray, (params, state)))
    assert len(compiled) == 1, "a step was compiled twice"
    return history


@functools.cache
def trained_by_zen():
    """Parameters and state after three steps of Zen, checked by types."""
    return train(optax.chain(zen("data"), optimizer()))[-1]


def assert_same(a, b, rtol=2e-6, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


@functools.cache
def reference(steps=3):
    """What one device does with the whole batch: SGD on the exact mean gradient."""
    tx, params = optimizer(), make_params()
    state = tx.init(params)
    for seed in range(steps):
        batch, total = make_batch(seed), None
        for rank in range(RANKS):
            share = {k: v[6 * rank : 6 * rank + 6] for k, v in batch.items()}
            grads = jax.grad(loss_fn)(params, share)
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        mean = jax.tree.map(lambda g: g / RANKS, total)
        updates, state = tx.update(mean, state, params)
        params = optax.apply_updates(params, updates)
    return jax.tree.map(np.asarray, params)


@pytest.mark.slow  # as one of tests/test_smoke.py
@pytest.mark.parametrize("check_vma", [True, False])
def test_zen_sync_trains_as_the_mean_gradient_does(check_vma):
    if check_vma:
        params, state = trained_by_zen()
    else:
        tx = optax.chain(zen("data"), optimizer())
        params, state = train(tx, check_vma=False)[-1]
    assert_same(params, reference())
    metrics = sparsejax.metrics(state)
    assert (
        metrics["sync/embedding/wire_bytes"] < 0.1 * metrics["sync/embedding/dense_bytes"]
    )


@pytest.mark.slow
def test_dense_sync_trains_as_the_mean_gradient_does():
    params, state = train(optax.chain(sparsejax.dense_sync(), optimizer()))[-1]
    assert_same(params, reference())
    metrics = sparsejax.metrics(state)
    assert metrics["sync/wire_bytes"] == metrics["sync/dense_bytes"]


@pytest.mark.slow
def test_ids_that_the_caller_knows_give_the_same_bits():
    tx = optax.chain(zen(), optimizer())
    found, given = trained_by_zen()[0], train(tx, ids=True)[-1][0]
    jax.tree.map(np.testing.assert_array_equal, found, given)


@any_scheme
def test_rows_that_were_not_named_are_not_sent(make):
    """The ids are believed: this is what would go wrong with too few of them."""
    tx = make()

    def run(x):
        # An int8 does not hold the number of rows.
        grads, ids = {"embedding": x[0]}, {"embedding": jnp.array([1, -1], jnp.int8)}
        return tx.update(grads, tx.init(parameters(grads)), ids=ids)[0]["embedding"]

    x = np.ones((RANKS, ROWS, WIDTH), np.float32)
    total = jax.jit(shard_map(run, mesh=MESH, in_specs=P("data"), out_specs=P()))(x)
    want = np.zeros((ROWS, WIDTH), np.float32)
    want[1] = want[-1] = 1
    np.testing.assert_array_equal(total, want)


@pytest.mark.slow
def test_accumulating_equals_optax_multisteps_around_adam():
    """Two micro-steps of this, or MultiSteps over gradients that are averaged each time."""
    every = optax.conditionally_mask(optimizer(), lambda step: step % 2 == 1)
    ours = optax.chain(sparsejax.accumulate(gathering(), 2), every)
    theirs = optax.chain(
        sparsejax.dense_sync(), optax.MultiSteps(optimizer(), 2).gradient_transformation()
    )
    for (mine, _), (other, _) in zip(train(ours, 4), train(theirs, 4), strict=True):
        assert_same(mine, other)


def test_between_synchronizations_nothing_is_sent_and_nothing_lost():
    history = train(sparsejax.accumulate(gathering(reduce="sum"), 2, reduce="sum"), 2)
    first, second = history[0][1], history[1][1]
    assert float(sparsejax.metrics(first)["sync/wire_bytes"]) == 0
    assert float(sparsejax.metrics(second)["sync/wire_bytes"]) > 0
    held = first.pending.value["embedding"]
    assert held.shape == (RANKS, ROWS, WIDTH)
    assert np.abs(held).sum() > 0
    assert all(np.abs(x).sum() == 0 for x in jax.tree.leaves(second.pending.value))


@any_scheme
def test_warm_up_is_dense_and_then_it_is_not(make):
    tx = sparsejax.warm_up(make(), 2)
    sent = [float(sparsejax.metrics(s)["sync/embedding/wire_bytes"]) for _, s in train(tx)]
    dense = 2 * (RANKS - 1) / RANKS * ROWS * WIDTH * 4
    assert sent[:2] == [dense, dense]
    assert sent[2] < 0.1 * dense


@pytest.mark.slow
def test_a_narrow_wire_halves_the_bytes_and_keeps_the_dtype():
    x = np.zeros((RANKS, ROWS, WIDTH), np.float32)
    x[:, ::4] = np.random.default_rng(0).standard_normal((RANKS, ROWS // 4, WIDTH))

    def run(tx):
        def update(x):
            grads = {"embedding": x[0]}
            updates, state = tx.update(grads, tx.init(parameters(grads)))
            traffic = Traffic.of_one(state.inner.traffic["embedding"])
            return updates["embedding"], traffic.wire

        step = shard_map(update, mesh=MESH, in_specs=P("data"), out_specs=P())
        return jax.jit(step)(x)

    full, full_bytes = run(gathering())
    narrow, narrow_bytes = run(gathering(wire_dtype=jnp.bfloat16))
    assert narrow.dtype == full.dtype == jnp.float32
    np.testing.assert_allclose(narrow, full, atol=2**-6)
    assert 0 < np.abs(np.asarray(narrow) - np.asarray(full)).max()
    assert 0.45 < narrow_bytes / full_bytes < 0.6


@pytest.mark.slow
def test_rules_decide_scheme_and_unit():
    rules = {"kernel": "sparse", "embed": "sparse", "embedding": "element"}
    _, state = train(gathering(rules=rules), 1)[0]
    names = {key.split("/")[1] for key in sparsejax.metrics(state) if key.count("/") == 2}
    # One group of single numbers now, and the bias alone is dense.
    assert names == {"embedding and 1 more", "bias"}
    _, state = train(gathering(rules={".*": "dense"}), 1)[0]
    metrics = sparsejax.metrics(state)
    assert metrics["sync/wire_bytes"] == metrics["sync/dense_bytes"]
    _, state = train(gathering(rules={"embedding": schemes.AllReduce()}), 1)[0]
    metrics = sparsejax.metrics(state)
    assert metrics["sync/wire_bytes"] == metrics["sync/dense_bytes"]


def test_a_leaf_that_a_rule_calls_dense_is_not_looked_at():
    """The program is that of a dense sum: nothing looks for zeros, in it or in front."""
    x = jnp.ones((RANKS, 70_000))

    def program(tx):
        state = tx.init(jnp.zeros(70_000))
        return str(jax.make_jaxpr(stacked(lambda g: tx.update(g, state)[0], RANKS))(x))

    dense = program(sparsejax.dense_sync())
    assert program(sparsejax.zen_sync(rules={".*": "dense"})) == dense
    assert program(sparsejax.zen_sync()) != dense


@pytest.mark.slow
def test_masked_and_partition_and_inject_hyperparams():
    labels = {"embedding": "sparse", "kernel": "dense", "bias": "dense"}
    tx = optax.chain(
        optax.partition({"sparse": gathering(), "dense": sparsejax.dense_sync()}, labels),
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9),
    )
    params, state = train(tx)[-1]
    assert_same(params, reference())
    assert len(find(state, ExchangeState)) == 2
    assert "sync1/wire_bytes" in sparsejax.metrics(state)

    sparse = {key: value == "sparse" for key, value in labels.items()}
    others = {key: not value for key, value in sparse.items()}
    tx = optax.chain(
        optax.masked(gathering(), sparse),
        optax.masked(sparsejax.dense_sync(), others),
        optax.sgd(optax.constant_schedule(0.1), momentum=0.9),
    )
    assert_same(train(tx)[-1][0], reference())


@pytest.mark.slow
def test_inject_hyperparams_around_zen_sync():
    make = optax.inject_hyperparams(sparsejax.zen_sync)
    params, _ = train(optax.chain(make(rules=SPARSE), optimizer()))[-1]
    assert_same(params, reference())


@pytest.mark.slow
@any_scheme
def test_scan_over_steps(make):
    tx = optax.chain(make(), optimizer())
    params = make_params()
    state = sparsejax.init(tx, params, MESH)
    specs = sparsejax.state_specs(state)
    batches = jax.tree.map(lambda *x: np.stack(x), *(make_batch(seed) for seed in range(3)))

    def run(params, state, batches):
        def step(carry, batch):
            params, state = carry
            grads = jax.grad(loss_fn)(sparsejax.local(params), batch)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return lax.scan(step, (params, state), batches)[0]

    run = shard_map(
        run, mesh=MESH, in_specs=(P(), specs, P(None, "data")), out_specs=(P(), specs)
    )
    params, _ = jax.jit(run)(params, state, batches)
    assert_same(params, reference())


@pytest.mark.slow
@any_scheme
def test_under_vmap_with_an_axis_name(make):
    tx = make("ranks")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, ROWS, WIDTH)).astype(np.float32)
    x *= rng.random((3, ROWS, 1)) < 0.01

    def run(x):
        return tx.update({"embedding": x}, tx.init({"embedding": x}))[0]["embedding"]

    got = np.asarray(jax.jit(jax.vmap(run, axis_name="ranks"))(x))
    np.testing.assert_allclose(got[0], x.mean(0), rtol=1e-6, atol=1e-7)
    assert got[0].tobytes() == got[1].tobytes() == got[2].tobytes()


@pytest.mark.slow
def test_flax_nnx_optimizer():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(ROWS, WIDTH, rngs=rngs)
            self.out = nnx.Linear(WIDTH, 5, rngs=rngs)

        def __call__(self, x):
            return self.out(self.embed(x).mean(1))

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(
        model, optax.chain(gathering(), optax.sgd(0.1)), wrt=nnx.Param
    )
    graph, state = nnx.split((model, optimizer))

    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        split, params = nnx.split(model, nnx.Param)

        def loss(params):
            return jnp.mean((nnx.merge(split, params)(batch["x"]) - batch["y"]) ** 2)

        optimizer.update(model, jax.grad(loss)(sparsejax.local(params)))
        return nnx.state((model, optimizer))

    step = shard_map(step, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())
    after = jax.jit(step)(state, make_batch(0))
    before = jax.tree.leaves(nnx.filter_state(state, nnx.Param))
    changed = [
        float(jnp.abs(a - b).sum())
        for a, b in zip(
            before, jax.tree.leaves(nnx.filter_state(after, nnx.Param)), strict=True
        )
    ]
    assert all(change > 0 for change in changed)
    _, optimizer = nnx.merge(graph, after)
    assert "sync/wire_bytes" in sparsejax.metrics(optimizer.opt_state)


@any_scheme
def test_dtypes_and_the_shape_of_the_state_are_kept(make):
    """optax's own conformance rules for a transformation."""
    tx = make(rules={"half": "sparse"})
    params = {
        "half": jnp.ones(2000, jnp.bfloat16),
        "small": jnp.ones((), jnp.float16),
        "none": jnp.ones((0, 3)),
    }

    def run(x):
        grads = jax.tree.map(lambda p: p * x[0].astype(p.dtype), params)
        state = tx.init(params)
        updates, after = tx.update(grads, state, params, unknown_argument=1)
        assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, after)
        assert jax.tree.map(lambda a: a.dtype, state) == jax.tree.map(
            lambda a: a.dtype, after
        )
        assert jax.tree.structure(state) == jax.tree.structure(after)
        lax.cond(after.step > 5, lambda: state, lambda: after)
        return updates

    got = jax.jit(shard_map(run, mesh=MESH, in_specs=P("data"), out_specs=P()))(
        np.arange(4, dtype=np.float32)
    )
    assert jax.tree.map(lambda a: a.dtype, got) == jax.tree.map(lambda a: a.dtype, params)
    assert float(got["small"]) == 1.5
    np.testing.assert_array_equal(got["half"], jnp.full(2000, 1.5, jnp.bfloat16))


def test_init_on_abstract_values():
    tx = zen()
    state = jax.eval_shape(tx.init, make_params())
    assert isinstance(sparsejax.state_specs(state).step, P)


@pytest.mark.slow
@any_scheme
def test_leaves_of_a_second_mesh_axis_stay_apart(make):
    """Data parallel over one axis, tensor parallel over the other, both manual."""
    mesh = grid(data=4, model=2)
    tx = make("data")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, ROWS, 2 * WIDTH)).astype(np.float32)
    x *= rng.random((4, ROWS, 1)) < 0.02
    small = rng.standard_normal((4, 7)).astype(np.float32)

    def run(x, small):
        grads = {"embedding": x[0], "small": small[0]}
        return tx.update(grads, tx.init(parameters(grads)))[0]

    step = shard_map(
        run,
        mesh=mesh,
        in_specs=(P("data", None, "model"), P("data")),
        out_specs={"embedding": P(None, "model"), "small": P()},
    )
    got = jax.jit(step)(x, small)
    np.testing.assert_allclose(got["embedding"], x.mean(0), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(got["small"], small.mean(0), rtol=1e-6)


class HalfKept(TopKScheme):
    """A lossy scheme for the test: sends every other unit, and keeps the rest."""

    def __call__(self, x, state, wire):
        x = x.dense()
        even = (jnp.arange(x.shape[0]) % 2 == 0).reshape(-1, *[1] * (x.ndim - 1))
        sent = jnp.where(even, x, 0)
        reduced = schemes.AllReduce()(Dense(sent), state, wire)
        return reduced._replace(left=x - sent)


def test_what_a_scheme_keeps_back_is_added_to_the_next_gradient():
    """Conservation over steps: all gradients are in the updates or in the residuals."""
    tx = sparsejax.sync(HalfKept(density=0.5), reduce="sum", rules={".*": "sparse"})
    params = {"w": jnp.zeros(100), "v": jnp.zeros((3, 5))}
    state = sparsejax.init(tx, params, MESH)
    specs = sparsejax.state_specs(state)
    step = jax.jit(
        shard_map(
            lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s),
            mesh=MESH,
            in_specs=(P("data"), specs),
            out_specs=(P(), specs),
        )
    )
    rng = np.random.default_rng(0)
    given = {"w": np.zeros(100), "v": np.zeros((3, 5))}
    applied = {"w": np.zeros(100), "v": np.zeros((3, 5))}
    for _ in range(4):
        grads = {
            "w": rng.standard_normal((4, 100)).astype(np.float32),
            "v": rng.standard_normal((4, 3, 5)).astype(np.float32),
        }
        updates, state = step(grads, state)
        for key in given:
            given[key] += grads[key].sum(0)
            applied[key] += np.asarray(updates[key])
    tree = sparsejax.residuals(state)
    held = np.concatenate([tree[k].reshape(4, -1) for k in sorted(tree)], 1)
    flat = lambda tree: np.concatenate([tree[k].reshape(-1) for k in sorted(tree)])
    np.testing.assert_allclose(
        flat(applied) + held.sum(0), flat(given), rtol=1e-5, atol=1e-5
    )
    norm = [v for k, v in sparsejax.metrics(state).items() if k.endswith("residual_norm")]
    np.testing.assert_allclose(norm[0], np.linalg.norm(held), rtol=1e-6)


@pytest.mark.slow
@any_scheme
def test_a_state_may_be_donated_though_its_old_values_are_read(make):
    """No array may stand in a fresh state twice: XLA cannot give one buffer away twice."""
    tx = make()
    state = jax.device_put(tx.init(make_params()), NamedSharding(MESH, P()))
    arrays = jax.tree.leaves(state.inner.traffic)
    assert len({x.unsafe_buffer_pointer() for x in map(shard, arrays)}) == len(arrays)

    def step(x, state):
        grads = jax.tree.map(lambda p: p * x[0], make_params())
        _, after = tx.update(grads, state)
        return jax.tree.map(lambda a, b: jnp.where(after.step > 0, a, b), after, state)

    step = shard_map(step, mesh=MESH, in_specs=(P("data"), P()), out_specs=P())
    state = jax.jit(step, donate_argnums=1)(np.ones(RANKS, np.float32), state)
    assert int(state.step) == 1


def shard(x):
    return x.addressable_shards[0].data


@pytest.mark.slow
def test_ids_are_for_the_transformation_that_holds_the_leaf():
    labels = {"embedding": "sparse", "kernel": "dense", "bias": "dense"}
    parts = {"sparse": gathering(), "dense": sparsejax.dense_sync()}
    tx = optax.chain(optax.partition(parts, labels), optimizer())
    assert_same(train(tx, ids=True)[-1][0], reference())
    tx = optax.chain(sparsejax.dense_sync(), optimizer())
    assert_same(train(tx, ids=True)[-1][0], reference())


@pytest.mark.parametrize("check_vma", slow(True, False))
def test_a_second_axis_may_hold_more_than_its_neighbour(check_vma):
    """Ranks that take different branches must not meet in one collective."""
    mesh = grid(data=2, model=2)
    x = np.zeros((2, 2, 4096), np.float32)
    x[:, 0, :20], x[:, 1, :] = 1, 2

    def run(x):
        total = sparsejax.all_reduce(
            x[0, 0], "data", scheme=schemes.HierarchicalCentralization()
        )
        return total[None]

    step = shard_map(
        run,
        mesh=mesh,
        in_specs=P("data", "model"),
        out_specs=P("model"),
        check_vma=check_vma,
    )
    np.testing.assert_array_equal(jax.jit(step)(x), x.sum(0))


@pytest.mark.slow
@any_scheme
def test_the_state_of_tensor_parallel_leaves_is_replicated(make):
    mesh = grid(data=2, model=2)
    tx = make("data", rules={"w": "sparse"})

    def run(x):
        grads = {"w": x[0]}
        updates, state = tx.update(grads, tx.init(parameters(grads)))
        return updates, state

    step = shard_map(
        run,
        mesh=mesh,
        in_specs=P("data", "model"),
        out_specs=({"w": P("model")}, P()),
    )
    x = np.zeros((2, 4000), np.float32)
    x[:, :30] = 1
    updates, state = jax.jit(step)(x)
    np.testing.assert_array_equal(updates["w"], x.mean(0))
    assert float(sparsejax.metrics(state)["sync/wire_bytes"]) > 0
