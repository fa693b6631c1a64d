"""Steps in a `shard_map` of one mesh axis of two, as those write who leave FSDP to XLA.

Parameters and gradients are sharded over "fsdp", which is no manual axis: each leaf is
whole to a rank, and is gathered before a rank does anything by itself.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax.errors import AxisError, StateError
from tests import helpers
from tests.placement.test_specs import assert_replicated


RANKS = 2
SHAPES = {"rows": (60, 8), "columns": (8, 44), "same": (7,)}
SPECS = {"rows": P("fsdp"), "columns": P(None, "fsdp"), "same": P()}
EACH = {"rules": {"": "sparse"}, "reduce": "sum"}
TABLE = {"rules": {"rows": "sparse"}, "reduce": "sum"}
FEW = {"axis_name": "replica", "min_size": 0}


def mesh(kind="auto"):
    return helpers.KINDS[kind](helpers.grid(replica=RANKS, fsdp=2))


def sync():
    return sparsejax.zen_sync("replica", **EACH)


SYSTEMS = {
    "zen": lambda: sync(),
    "dgc": lambda: optax.chain(sparsejax.dgc(0.1, **FEW), sync()),
    "spardl": lambda: sparsejax.spardl_sync(0.1, "replica", **EACH),
    "power_sgd": lambda: sparsejax.transforms.power_sgd_sync(
        1, axis_name="replica", **TABLE
    ),
    "skipping": lambda: sparsejax.skip_nonfinite(SYSTEMS["dgc"](), "replica"),
    "accumulating": lambda: sparsejax.accumulate(sync(), 1, "replica"),
    "warming": lambda: sparsejax.warm_up(SYSTEMS["dgc"](), 1),
}


def placed(tree, mesh, specs=SPECS):
    return helpers.placed(tree, mesh, specs)


@functools.cache
def params():
    return {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}


@functools.cache
def drawn():
    """Gradients by rank, small integers of which most are zero."""
    rng = np.random.default_rng(0)
    draw = lambda shape: rng.integers(1, 5, shape) * (rng.random(shape) < 0.3)
    return {
        name: draw((RANKS, *shape)).astype(np.float32) for name, shape in SHAPES.items()
    }


def stepped(tx, mesh, state, check_vma=True):
    """Updates, parameters and state after a step that sends the gradients drawn."""
    specs = sparsejax.state_specs(state)

    def step(params, state, grads):
        grads = jax.tree.map(lambda x: x[0], grads)
        updates, state = tx.update(grads, state, params)
        return updates, optax.apply_updates(params, updates), state

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        axis_names={"replica"},
        in_specs=(P(), specs, P("replica")),
        out_specs=(P(), P(), specs),
        check_vma=check_vma,
    )
    grads = placed(drawn(), mesh, {k: P("replica", *spec) for k, spec in SPECS.items()})
    return jax.jit(mapped)(placed(params(), mesh), state, grads)


def lies(tree):
    return [x.sharding.devices_indices_map(x.shape) for x in jax.tree.leaves(tree)]


EXACT = ("zen", "accumulating")


@pytest.mark.parametrize(
    ("name", "check_vma", "kind"),
    [
        ("zen", True, "explicit"),
        ("zen", True, "auto"),
        ("accumulating", True, "explicit"),
        *helpers.slow(
            ("skipping", True, "explicit"),
            ("warming", False, "explicit"),
            ("dgc", True, "explicit"),
            ("skipping", True, "auto"),
            ("spardl", False, "auto"),
            ("power_sgd", True, "auto"),
        ),
    ],
)
def test_gradients_are_those_of_a_dense_sum_and_lie_where_they_did(name, check_vma, kind):
    """What was sent and what ranks hold back is the sum; copies have the same bytes."""
    tx, mesh_ = SYSTEMS[name](), mesh(kind)
    before = sparsejax.init(tx, placed(params(), mesh_), mesh_, "replica")
    updates, after, state = stepped(tx, mesh_, before, check_vma)
    kept = {} if name in EXACT else sparsejax.residuals(state)
    room = {"rtol": 1e-4, "atol": 1e-4} if name == "power_sgd" else {"rtol": 0, "atol": 0}
    for path, grads in drawn().items():
        held = kept.get(path, optax.MaskedNode())
        rest = 0 if isinstance(held, optax.MaskedNode) else np.asarray(held).sum(0)
        np.testing.assert_allclose(updates[path] + rest, grads.sum(0), **room)
        np.testing.assert_array_equal(after[path], 1 + np.asarray(updates[path]))
    assert_replicated((updates, after))
    sparsejax.check_replicas((after, state), axis_name="replica")
    assert lies(after) == lies(placed(params(), mesh_))
    if kind == "explicit":  # elsewhere XLA chooses for what nobody names
        assert lies(state) == lies(before)
        assert name not in EXACT or lies(updates) == lies(after)


def test_sums_and_profiles_are_of_whole_leaves():
    """The same bytes on meshes of both kinds, and where no axis is left to XLA."""

    def run(grads):
        own = jax.tree.map(lambda x: x[0], grads)
        seen = sparsejax.profile(own, "replica", rules=EACH["rules"])
        return sparsejax.all_reduce(own, "replica"), seen

    found = []
    for kind, manual in (("explicit", {"replica"}), ("auto", {"replica"}), ("auto", set())):
        further = SPECS if manual else dict.fromkeys(SPECS, P())
        specs = {name: P("replica", *spec) for name, spec in further.items()}
        options = {"mesh": mesh(kind), "axis_names": manual}
        mapped = jax.shard_map(run, **options, in_specs=P("replica"), out_specs=P())
        found.append(helpers.octets(jax.jit(mapped)(placed(drawn(), mesh(kind), specs))))
    assert found[0] == found[1] == found[2]
    for name, grads in drawn().items():
        assert found[0][f"[0]['{name}']"] == grads.sum(0).tobytes()


@pytest.mark.slow
def test_rows_that_a_loss_reads_train_as_dense_gradients_do():
    mesh_, lr = mesh(), 0.5
    tx = optax.chain(sync(), sparsejax.lazy(optax.sgd(lr, momentum=0.5)))
    at = placed(params(), mesh_)
    ids = np.array([[0, 7, 7], [59, 7, 3]], np.int32)
    state = sparsejax.init(tx, at, mesh_, "replica")
    specs = sparsejax.state_specs(state)

    def loss(params, ids):
        return jnp.sum(params["rows"][ids] * params["columns"][0, 0])

    def step(params, state, ids):
        own = sparsejax.local(params, "replica")
        _, grads = sparsejax.value_and_grad(loss)(own, ids[0])
        updates, state = tx.update(grads, state, params)
        return sparsejax.apply_updates(params, updates), state

    mapped = jax.shard_map(
        step,
        mesh=mesh_,
        axis_names={"replica"},
        in_specs=(P(), specs, P("replica")),
        out_specs=(P(), specs),
    )
    after, _ = jax.jit(mapped)(at, state, placed(ids, mesh_, P("replica")))
    grads = jax.grad(lambda p: sum(loss(p, own) for own in ids))(params())
    for name, own in params().items():
        np.testing.assert_allclose(after[name], own - lr * grads[name], rtol=1e-6)
    assert_replicated(after)


SHARDED = [("dgc", True), ("power_sgd", True), ("power_sgd", False)]


@pytest.mark.parametrize(("name", "check_vma"), SHARDED)
def test_a_state_of_shards_is_refused_with_how_to_make_one_of_whole_leaves(name, check_vma):
    mesh_, tx = mesh(), SYSTEMS[name]()
    options = {"param_specs": SPECS, "check_vma": check_vma}
    state = sparsejax.init(tx, placed(params(), mesh_), mesh_, "replica", **options)
    match = r"'fsdp' is no manual axis.* Make it without: sparsejax.init\(tx, params, mesh"
    with pytest.raises(StateError, match=match):
        stepped(tx, mesh_, state, check_vma)


def test_rows_that_ranks_catch_up_by_themselves_are_refused():
    tables, lazy = {"rows": params()["rows"]}, sparsejax.lazy(optax.adam(0.1))
    step = jax.shard_map(
        lambda params: lazy.reader(params, lazy.init(params)) and 0,
        mesh=mesh(),
        axis_names={"replica"},
        in_specs=P(),
        out_specs=P(),
    )
    with pytest.raises(AxisError, match=r"'fsdp' is no manual axis.* or take exact=False"):
        jax.eval_shape(step, tables)


# `jax.vmap(jax.jit(lambda x: lax.psum(x, "i")), axis_name="i")` alone does, too.
FAILS_ON_0_12 = pytest.mark.xfail(
    jax.__version_info__ >= (0, 12),
    reason="JAX 0.12: on an Explicit mesh a psum in a batched jit has a sharding too long",
    raises=ValueError,
    strict=True,
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", pytest.param("explicit", marks=FAILS_ON_0_12)])
def test_a_mesh_without_manual_axes_leaves_nothing_to_xla(kind):
    """Under `jit` on a mesh that is set, with ranks of `vmap` or with none."""
    tables, lazy, tx = {"rows": params()["rows"]}, sparsejax.lazy(optax.adam(0.1)), sync()

    def summed(grads):
        return tx.update(grads, tx.init(grads))[0]

    with jax.set_mesh(mesh(kind)):
        jax.eval_shape(lambda p: lazy.reader(p, lazy.init(p)) and 0, tables)
        total = jax.jit(jax.vmap(summed, axis_name="replica"))(drawn())
    for name, grads in drawn().items():
        np.testing.assert_array_equal(total[name], [grads.sum(0)] * RANKS)
