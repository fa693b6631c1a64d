"""Sums have the same bits always: no program for GPUs adds floats by atomic additions.

XLA compiles a scatter that adds at indices which may repeat to atomic additions, whose
order differs from run to run, and from copy to copy on a mesh with a second axis. So none
is in what is lowered for CUDA, where copies of a sum have to be alike.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import schemes
from sparsejax.errors import ArgumentError
from sparsejax.units.dense import Dense
from sparsejax.units.row_grads import RowGrads
from sparsejax.wire import Wire, ordered
from tests import helpers
from tests.laws.test_conservation import LOSSY
from tests.laws.test_exact_rows import AS_OTHERS
from tests.laws.test_exact_sum import OF_EACH_KIND, SCHEMES


SIZE, HEIGHT, WIDTH, COUNT = 3001, 701, 5, 120
COPIES, ONE = {"data": 4, "model": 2}, {"data": 4}


def additions(operation):
    """The scatters of an operation that add floats: whether each has unique indices."""
    found = []
    for region in operation.regions:
        for inner in (op for block in region for op in block):
            if inner.operation.name == "stablehlo.scatter":
                (block,) = inner.regions[0]
                names = [op.operation.name for op in block]
                kind = str(inner.results[0].type)
                if "stablehlo.add" in names and ("xf" in kind or "xbf" in kind):
                    found.append(inner.attributes["unique_indices"].value)
            found += additions(inner.operation)
    return found


def lowered(run, *like, mesh, specs, check_vma=True):
    """The scatters that add floats in a program of all ranks, lowered for CUDA."""
    with helpers.for_gpus():
        mapped = helpers.shard_map(
            run, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma
        )
        traced = jax.jit(mapped).trace(*like)
        module = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
        return additions(module.operation)


def of_dense(scheme, shape, axes=COPIES, check_vma=True, deterministic=None):
    """The additions of a sum over "data" of an array that no other axis shards."""

    def run(x):
        wire = Wire("data", deterministic=deterministic)
        state = scheme.init(jax.ShapeDtypeStruct(shape, jnp.float32), wire)
        return scheme(Dense(x[0]), state, wire).total

    like = jax.ShapeDtypeStruct((axes["data"], *shape), jnp.float32)
    mesh = helpers.grid(**axes)
    return lowered(run, like, mesh=mesh, specs=P("data"), check_vma=check_vma)


def of_listed(scheme, axes=COPIES, **how):
    """The same for listed rows."""
    tx = sparsejax.sync(
        scheme, "data", reduce="sum", rules={"": "row", "w": "sparse"}, **how
    )

    def step(ids, rows):
        own = {"w": RowGrads(ids[0], rows[0], (HEIGHT, WIDTH))}
        updates, _ = tx.update(own, tx.init({"w": jnp.zeros((HEIGHT, WIDTH))}))
        return updates

    n = axes["data"]
    ids = jax.ShapeDtypeStruct((n, COUNT), jnp.int32)
    rows = jax.ShapeDtypeStruct((n, COUNT, WIDTH), jnp.float32)
    return lowered(step, ids, rows, mesh=helpers.grid(**axes), specs=P("data"))


# Threads place its units: it is refused.
PLACED = "balanced_algorithm_1"
# Of arrays they add nothing by themselves: all-reduces do.
ADD_NOTHING = {"all_reduce", "omni_reduce", "omni_reduce_1", "omni_reduce_20"}
KINDS = [*OF_EACH_KIND, "balanced", "balanced_murmur"]


def table(*always, but=()):
    """Exact schemes of each kind; those that are not named here are slow."""
    others = [name for name in KINDS if name not in (*always, *but, PLACED)]
    return [*(x for x in always if x != PLACED), *helpers.slow(*others)]


def check(found, adds=True):
    """All additions are ordered, and there are some where there must be."""
    assert all(found)
    assert bool(found) is adds


@pytest.mark.parametrize("name", table("all_reduce", "balanced_bitmap", "ag_sparse"))
def test_copies_of_elements_are_added_in_order(name):
    check(of_dense(SCHEMES[name], (SIZE,)), name not in ADD_NOTHING)


@pytest.mark.parametrize("name", ["balanced", *helpers.slow("ag_sparse", "hierarchical")])
def test_copies_of_rows_are_added_in_order(name):
    check(of_dense(SCHEMES[name], (HEIGHT, WIDTH)), name not in ADD_NOTHING)


@pytest.mark.parametrize("name", table("ag_sparse", "all_reduce", but=AS_OTHERS))
def test_copies_of_listed_rows_are_added_in_order(name):
    check(of_listed(SCHEMES[name]))


@pytest.mark.parametrize(
    "name", helpers.slow("TopK", "GTopk", "SparDL", "OkTopk", "PowerSGD")
)
def test_schemes_that_select_add_in_order_by_default(name):
    tx = LOSSY[name]()
    params = {"w": jnp.zeros((HEIGHT, 8))}

    def step(x):
        return tx.update({"w": x[0]}, tx.init(params))[0]

    like = jax.ShapeDtypeStruct((4, HEIGHT, 8), jnp.float32)
    assert all(lowered(step, like, mesh=helpers.mesh_of(4), specs=P("data")))


@pytest.mark.slow
@pytest.mark.parametrize("distinct", [False, True])
def test_entries_have_their_sums_whether_indices_repeat_or_not(distinct):
    """Of two leaves in one bucket, one of which may have an index twice."""
    tx = sparsejax.sync(
        schemes.BalancedParallelism(), "data", rules={"": "sparse"}, reduce="sum"
    )
    params = {"a": jnp.zeros(SIZE), "b": jnp.zeros(SIZE)}

    def step(indices, values):
        first = sparsejax.SparseTensor(
            jnp.arange(40), values[0][:40], (SIZE,), distinct=True
        )
        second = sparsejax.SparseTensor(indices[0], values[0], (SIZE,), distinct=distinct)
        own = {"a": first, "b": second}
        return tx.update(own, tx.init(params))[0]

    rng = np.random.default_rng(0)
    values = rng.integers(-64, 65, (4, 50)).astype(np.float32)
    indices = rng.integers(0, 9 if not distinct else SIZE, (4, 50)).astype(np.int32)
    if distinct:
        indices = np.stack([rng.permutation(SIZE)[:50] for _ in range(4)]).astype(np.int32)
    with helpers.for_gpus():
        mapped = helpers.shard_map(
            step, mesh=helpers.mesh_of(4), in_specs=P("data"), out_specs=P()
        )
        found = jax.jit(mapped)(indices, values)
        # CPUs add what repeats, whatever they are told; what is sorted first may repeat.
        is_sorted = "stablehlo.sort" in jax.jit(mapped).lower(indices, values).as_text()
    assert is_sorted is not distinct
    wanted = np.zeros(SIZE)
    np.add.at(wanted, indices, values)
    np.testing.assert_array_equal(found["b"], wanted)
    np.testing.assert_array_equal(found["a"][:40], values[:, :40].sum(0))


def test_a_column_lookup_adds_gradients_of_equal_ids_in_order():
    table = np.zeros((HEIGHT, 8), np.float32)
    mesh = helpers.grid(**COPIES)
    tables = {"w": sparsejax.ColumnTable.of(table, mesh, axis_name="data")}

    def step(tables, ids):
        loss = lambda tables: sparsejax.column_lookup(tables, {"w": ids})["w"].sum()
        _, grads = sparsejax.value_and_grad(loss)(tables)
        return grads["w"].value.to_dense()

    specs = sparsejax.state_specs(tables), P("data")
    with helpers.for_gpus():
        out = P(None, "data")
        mapped = helpers.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out)
        traced = jax.jit(mapped).trace(tables, jnp.zeros(32, jnp.int32))
        module = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
        found = additions(module.operation)
    assert found
    assert all(found)


@pytest.mark.slow
def test_sums_of_units_that_threads_place_are_refused_where_they_must_be_ordered():
    scheme = SCHEMES[PLACED]
    with pytest.raises(ArgumentError, match=r"Algorithm 1.*Use schemes\.Zen\(\)"):
        of_dense(scheme, (SIZE,))
    with pytest.raises(ArgumentError, match="no fixed order"):
        of_dense(scheme, (SIZE,), ONE, deterministic=True)
    of_dense(scheme, (SIZE,), ONE)


# --- Where it is chosen.


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(SIZE,), (HEIGHT, WIDTH)])
def test_atomic_additions_are_seen_where_they_are_asked_for(shape):
    assert False in of_dense(SCHEMES["balanced"], shape, ONE, deterministic=False)
    assert all(of_dense(SCHEMES["balanced"], shape, ONE, deterministic=True))


@pytest.mark.slow
def test_listed_rows_are_added_in_any_order_where_that_is_asked_for():
    assert False in of_listed(SCHEMES["balanced"], ONE, deterministic=False)
    assert all(of_listed(SCHEMES["balanced"], ONE, deterministic=True))


@pytest.mark.slow
def test_by_default_few_senders_are_added_in_order_and_copies_always(monkeypatch):
    scheme, shape = SCHEMES["balanced"], (SIZE,)
    assert ordered.MOST_SENDERS == 32
    assert all(of_dense(scheme, shape, ONE))
    monkeypatch.setattr(ordered, "MOST_SENDERS", 3)
    assert False in of_dense(scheme, shape, ONE)
    assert all(of_dense(scheme, shape, ONE, deterministic=True))
    for check_vma in (True, False):
        assert all(of_dense(scheme, shape, COPIES, check_vma))
    # An axis of one device holds no copies.
    assert False in of_dense(scheme, shape, {"data": 4, "model": 1})


def is_ordered(deterministic, x_over):
    """What is chosen on (data=4, model=2) for what varies over these axes."""
    wire, seen = Wire("data", deterministic=deterministic), []

    def run(x):
        seen.append(ordered.is_ordered(wire, frozenset(x_over)))
        return x

    mapped = jax.shard_map(run, mesh=helpers.grid(**COPIES), in_specs=P(), out_specs=P())
    jax.eval_shape(mapped, jnp.zeros(3))
    return seen[0]


def test_what_another_axis_shards_has_no_copies():
    assert is_ordered(True, {"data", "model"})
    assert not is_ordered(False, {"data", "model"})
    assert is_ordered(False, {"data"})


@functools.cache
def adding(deterministic, check_vma=True):
    add = functools.partial(
        sparsejax.all_reduce, axis_name="data", deterministic=deterministic
    )
    return lambda spec: helpers.shard_map(
        lambda x: add({"w": x}),
        mesh=helpers.grid(**COPIES),
        in_specs=spec,
        out_specs=P(*spec[1:]),
        check_vma=check_vma,
    )


@pytest.mark.parametrize("check_vma", [True, False])
def test_copies_in_any_order_are_refused(check_vma):
    tx = sparsejax.zen_sync("data", deterministic=False)
    wanted = "'model' holds.*copies of the gradient of 'w'.*Leave deterministic=False out"

    def step(x):
        return tx.update({"w": x[0]}, tx.init({"w": jnp.zeros(SIZE)}))[0]

    mapped = helpers.shard_map(
        step,
        mesh=helpers.grid(**COPIES),
        in_specs=P("data"),
        out_specs=P(),
        check_vma=check_vma,
    )
    like = jax.ShapeDtypeStruct((4, SIZE), jnp.float32)
    with pytest.raises(ArgumentError, match=wanted):
        jax.eval_shape(mapped, like)
    with pytest.raises(ArgumentError, match=r"all_reduce: deterministic=False.*'w'"):
        jax.eval_shape(adding(False, check_vma)(P("data")), like)
    if check_vma:  # what the other axis shards has none
        whole = jax.ShapeDtypeStruct((4, SIZE + 1), jnp.float32)
        jax.eval_shape(adding(False)(P("data", "model")), whole)


def test_copies_along_axes_that_are_not_manual_are_refused_in_any_order():
    tx = sparsejax.zen_sync("data", deterministic=False)

    def step(x):
        return tx.update({"w": x[0]}, tx.init({"w": jnp.zeros(SIZE)}))[0]

    mesh = helpers.grid(**COPIES)
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=P("data"), out_specs=P(), axis_names={"data"}
    )
    placed = jax.NamedSharding(mesh, P("data"))
    like = jax.ShapeDtypeStruct((4, SIZE), jnp.float32, sharding=placed)
    with pytest.raises(ArgumentError, match="'model' holds copies"):
        jax.eval_shape(mapped, like)


@pytest.mark.parametrize("call", ["sync", "zen_sync", "embrace_sync"])
def test_deterministic_is_true_false_or_none(call):
    given = [schemes.Zen()] if call == "sync" else []
    for value in (None, True, False):
        getattr(sparsejax, call)(*given, deterministic=value)
    with pytest.raises(ArgumentError, match="deterministic must be True, False or None"):
        getattr(sparsejax, call)(*given, deterministic="yes")


# --- What it gives.


@pytest.mark.slow
def test_senders_follow_one_another():
    """The sum of these numbers is another one in each other order that is tried."""
    numbers = np.float32([1e8, 3.0, -1e8, 5.0])  # in order: ((1e8 + 3) - 1e8) + 5
    x = np.zeros((4, SIZE), np.float32)
    x[:, ::100] = numbers[:, None]
    want = np.float32(0)
    for number in numbers:
        want = np.float32(want + number)
    with helpers.for_gpus():
        scheme = SCHEMES["balanced"]
        total = helpers.ranked(lambda x: helpers.call(scheme, x, ()).total, 4)(x)
    assert want == 5.0
    np.testing.assert_array_equal(np.asarray(total)[:, ::100], want)
