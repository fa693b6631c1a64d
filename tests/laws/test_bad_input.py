"""Bad input gets a typed error that names the leaf or argument, the value, and the fix."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import errors, rounds, schemes, sparsifiers
from sparsejax.transforms import buckets
from sparsejax.units import ownership
from tests import helpers
from tests.helpers import grid, mesh_of
from tests.laws.test_many_leaves import TRANSFORMATIONS, params as parameters


TWO_AXES = grid(data=2, model=2)


def on_ranks(function, mesh=None, **options):
    mapped = helpers.shard_map(
        function, mesh=mesh or mesh_of(2), in_specs=P("data"), out_specs=P(), **options
    )
    return jax.jit(mapped)  # Without jit every operation is compiled by itself.


def test_outside_shard_map():
    with pytest.raises(errors.AxisError, match=r"Call it inside jax.shard_map"):
        sparsejax.all_reduce(jnp.ones(3))
    with pytest.raises(
        errors.AxisError, match=r"no manual axis 'data' here; there is none"
    ):
        sparsejax.all_reduce(jnp.ones(3), "data")
    tx = sparsejax.zen_sync()
    with pytest.raises(
        errors.AxisError, match=r"update of sparsejax.sync needs a mesh axis"
    ):
        tx.update(jnp.ones(3), tx.init(jnp.ones(3)))


def test_local_is_the_identity_outside_of_a_mesh():
    """So that a loss which makes a carry local also runs on one device."""
    x = {"carry": jnp.ones(3)}
    assert sparsejax.local(x) is x
    assert sparsejax.local(x, "data") is x
    with pytest.raises(errors.ArgumentError, match=r"sparsejax.local: axis_name must be"):
        sparsejax.local(x, TWO_AXES)
    step = on_ranks(lambda x: sparsejax.local(x[0], "dat"))
    with pytest.raises(errors.AxisError, match=r"sparsejax.local: .* no manual axis 'dat'"):
        step(jnp.ones((2, 3)))


def test_an_axis_named_twice():
    for make in (sparsejax.zen_sync, sparsejax.embrace_sync, sparsejax.chunked_sync):
        with pytest.raises(errors.ArgumentError, match=r"two different names.*'data'\)\."):
            make(("data", "data"))


def test_several_manual_axes_and_none_named():
    step = on_ranks(lambda x: sparsejax.all_reduce(x[0]), TWO_AXES)
    with pytest.raises(
        errors.AxisError,
        match=r"several .* axes, 'data', 'model'.*all_reduce\(..., axis_name='data'\)",
    ):
        step(jnp.ones((2, 3)))


def test_arguments_that_are_swapped_or_of_another_kind():
    mesh, tx, params = mesh_of(2), sparsejax.zen_sync(), {"w": jnp.ones(3)}
    with pytest.raises(errors.ArgumentError, match=r"tx must be .* got a dict.*swapped"):
        sparsejax.init(params, tx, mesh)
    with pytest.raises(errors.ArgumentError, match=r"sparsejax.init needs a mesh.* a dict"):
        sparsejax.init(tx, mesh, params)
    with pytest.raises(errors.ArgumentError, match="got a function: call it"):
        sparsejax.init(sparsejax.zen_sync, params, mesh)
    with pytest.raises(
        errors.ArgumentError, match=r"leaf 'model' is a object: .*nnx.state"
    ):
        sparsejax.init(tx, {"model": object()}, mesh)
    network = {"ranks": 2, "network": sparsejax.Network(1, 1)}
    with pytest.raises(errors.ArgumentError, match=r"leaf '1' is a .*\(tx, params\)"):
        sparsejax.explain(tx, (params, tx), **network)


def test_a_function_in_the_chain_that_was_not_called():
    for function in (sparsejax.zen_sync, sparsejax.dgc, sparsejax.spardl_sync):
        call = rf"call it, {function.__name__}\(\.\.\.\)"
        tx = optax.chain(function, optax.sgd(0.1))
        with pytest.raises(errors.ArgumentError, match=call):
            tx.init({"w": jnp.ones(3)})


def test_a_gradient_that_was_already_summed():
    tx = sparsejax.zen_sync()
    params = {"block": {"w": jnp.ones(3)}}

    def step(x):
        grads = jax.grad(lambda p: jnp.sum(p["block"]["w"] * x))(params)
        return tx.update(grads, tx.init(params))[0]

    with pytest.raises(
        errors.AlreadySummedError,
        match=r"'block/w' was already summed over 'data'.*local\(params\).*lax.pmean",
    ):
        on_ranks(step)(jnp.ones((2, 3)))

    by_data = sparsejax.zen_sync("data")
    with pytest.raises(errors.AlreadySummedError, match=r"varies over 'other'.*name it"):
        helpers.shard_map(
            lambda w: by_data.update({"w": w}, by_data.init({"w": w}))[0]["w"],
            mesh=helpers.grid(data=2, other=2),
            in_specs=P("other"),
            out_specs=P("other"),
        )(jnp.ones(4))

    def right(x):
        loss = lambda p: jnp.sum(p["block"]["w"] * x[0])
        return tx.update(jax.grad(loss)(sparsejax.local(params)), tx.init(params))[0]

    got = on_ranks(right)(jnp.arange(6.0).reshape(2, 3))
    np.testing.assert_array_equal(got["block"]["w"], [1.5, 2.5, 3.5])


@pytest.mark.parametrize(
    "name",
    helpers.mostly_slow(
        TRANSFORMATIONS,
        "zen_sync",
        "embrace_sync",
        "ok_topk_sync",
        "chunked_sync",
        "sync",
        "dgc",
        "accumulate",
    ),
)
def test_every_synchronization_refuses_a_gradient_that_was_already_summed(name):
    tx, params, mesh = TRANSFORMATIONS[name](), parameters(1), mesh_of(2)
    state = sparsejax.init(tx, params, mesh)

    def step(params, state):
        if hasattr(tx, "begin"):  # of `horizontal`, in two halves
            params, state = tx.begin(params, state)
        return tx.update(params, state, params)[0]

    specs = P(), sparsejax.state_specs(state)
    with pytest.raises(errors.AlreadySummedError, match=r"'layer/0' was already summed"):
        jax.eval_shape(
            jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P()), params, state
        )


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.bool_])
def test_leaves_that_are_not_real_floating_numbers(dtype):
    grads = {"ok": jnp.ones(2), "table": jnp.ones(3, dtype)}
    message = rf"leaf 'table' is {jnp.dtype(dtype)}; only real floating"
    with pytest.raises(errors.LeafError, match=message):
        sparsejax.zen_sync().init(grads)
    with pytest.raises(errors.LeafError, match=message):
        on_ranks(lambda x: sparsejax.all_reduce(grads))(jnp.ones(2))


zen, owned = sparsejax.zen_sync, schemes.BalancedParallelism
INJECTED = optax.inject_hyperparams(sparsejax.accumulate)(zen(), every=2)
AXIS, SCHEME = "axis_name must be .*", "scheme must be a sparsejax scheme.*"
# What is called, and what its error says: the argument, the value and the fix.
REFUSED = [
    (lambda: zen(TWO_AXES), f"{AXIS}a Mesh. .*axis_name='data'"),
    (lambda: zen(optax.sgd(0.1)), rf"{AXIS}an optax .*chain\(sparsejax.zen_sync\(\), "),
    (lambda: zen(schemes.Zen()), rf"{AXIS}a Zen. .*sparsejax.sync\(scheme\)"),
    (lambda: zen(sparsejax.Plan(2, ())), rf"{AXIS}a Plan. .*sparsejax.sync\(scheme\)"),
    (lambda: zen(()), rf"{AXIS}got \(\)"),
    (lambda: zen(reduce="avg"), r"got 'avg'. Did you mean 'mean'\?"),
    (
        lambda: sparsejax.all_reduce(jnp.ones(2), reduce="max"),
        "reduce must be 'sum' or 'mean'",
    ),
    (lambda: sparsejax.accumulate(zen(), every=0), "every must be a positive int, got 0"),
    (
        lambda: INJECTED.init({"w": jnp.ones(3)}),
        r"every must be a Python value.*static_args",
    ),
    (lambda: sparsejax.warm_up(zen(), steps=-1), "steps must be an int .* got -1"),
    (lambda: zen(wire_dtype=jnp.int8), "wire_dtype must be a floating dtype"),
    (lambda: zen(wire_dtype="bf16"), r"wire_dtype must be .*'bf16'.*'bfloat16'"),
    (lambda: zen(wire_dtype=jnp.float8_e4m3fn), r"wire_dtype must be .*float8_e4m3fn"),
    (lambda: sparsejax.sync("zen"), rf"{SCHEME}'zen'\. That is .*schemes.Zen\(\)"),
    (lambda: sparsejax.sync("dense"), rf"{SCHEME}That is .*schemes.AllReduce\(\)"),
    (lambda: sparsejax.sync("best"), rf"{SCHEME}got 'best'\. See errors"),
    (lambda: sparsejax.sync("plan.json"), rf"{SCHEME}Plan.load\('plan.json'\)"),
    (lambda: sparsejax.sync(schemes.Zen), rf"{SCHEME}the class Zen\. .*schemes.Zen\(\)"),
    (
        lambda: sparsejax.sync(sparsejax.dgc(0.01)),
        rf"{SCHEME}got dgc\(density=0.01\)\. .*optax\.chain\(sparsejax",
    ),
    (
        lambda: on_ranks(lambda x: sparsejax.all_reduce(x[0], scheme=schemes.Zen))(
            jnp.ones((2, 3))
        ),
        SCHEME,
    ),
    (lambda: sparsejax.transforms.clip_by_rank(-1), "^norm must be above 0, got -1"),
    (lambda: rounds.pulse_loco(optax.adam(1), lr=0), "^lr must be above 0, got 0"),
    (lambda: sparsejax.embrace_sync(delayed=0), "^delayed must be a positive"),
    (lambda: sparsifiers.GaussianK(rounds=None), "^rounds must be an int, got"),
    (lambda: owned(push_code="coo64"), "codes must be one of auto, coo32"),
    (lambda: owned(ratio=1), r"ratio must lie in \[1.05, 64\], got 1"),
    (lambda: owned(pull="tree"), "pull must be one of 'gather'"),
    (lambda: owned(push_capacity=0), "push_capacity must be a positive int or None, got 0"),
    (lambda: schemes.OmniReduce(block=2.5), "block must be a positive int, got 2.5"),
    (lambda: schemes.OmniReduce(aggregators=-1), "aggregators must be a positive int"),
    (lambda: ownership.Contiguous(ranges=0), "ranges must be a positive int or None"),
    (lambda: schemes.AGSparse("tree"), "gather must be one of 'auto', 'ring'"),
    (lambda: schemes.SparsePS("multicast"), "pull must be one of 'point_to_point'"),
    (lambda: schemes.SparCML("ssar"), "algorithm must be one of 'ssar_recursive"),
    (
        lambda: schemes.HierarchicalCentralization(switch="never"),
        "switch must be one of 'count', 'bound'",
    ),
    (lambda: schemes.Zen("best"), "optimum must be one of 'auto', 'balanced'"),
    (
        lambda: schemes.Zen(ownership=ownership.Contiguous()),
        "does not balance parts.* use a hash, or optimum='balanced'",
    ),
]


@pytest.mark.parametrize(("call", "match"), REFUSED)
def test_arguments_that_cannot_be_used(call, match):
    with pytest.raises(errors.ArgumentError, match=match):
        call()


def test_rules_that_say_nothing_sensible():
    grads = {"block": {"w": jnp.ones((3, 2))}, "b": jnp.ones(3)}
    with pytest.raises(errors.RuleError, match=r"'bias' matches no leaf.*'b', 'block/w'"):
        sparsejax.zen_sync(rules={"bias": "dense"}).init(grads)
    with pytest.raises(errors.RuleError, match=r"'b' says 'rows'; it must be a scheme"):
        sparsejax.zen_sync(rules={"b": "rows"})
    with pytest.raises(errors.RuleError, match=r"'\(' is not a regular expression"):
        sparsejax.zen_sync(rules={"(": "dense"})
    with pytest.raises(errors.RuleError, match="rules must map"):
        sparsejax.zen_sync(rules=["dense"])
    with pytest.raises(errors.RuleError, match=r"leaf 'b' the unit 'row'.*shape \[3\]"):
        sparsejax.zen_sync(rules={"^b$": "row"}).init(grads)
    tx = sparsejax.zen_sync()
    with pytest.raises(errors.RuleError, match=r"ids were given for 'c'"):
        on_ranks(
            lambda x: tx.update(
                sparsejax.local(grads), tx.init(grads), ids={"c": jnp.ones(1, jnp.int32)}
            )[0]
        )(jnp.ones(2))


def test_a_state_of_something_else():
    tx = sparsejax.zen_sync()
    state = tx.init({"w": jnp.ones(3)})
    with pytest.raises(
        errors.StateError, match=r"the gradients have \['v'\], the state \['w'\]"
    ):
        on_ranks(lambda x: tx.update({"v": x[0]}, state)[0])(jnp.ones((2, 3)))
    two = sparsejax.accumulate(sparsejax.zen_sync(), every=2)
    with pytest.raises(errors.StateError, match=r"every=2.* was given a FeedbackState"):
        on_ranks(lambda x: two.update({"w": x[0]}, state)[0])(jnp.ones((2, 3)))
    murmur = schemes.BalancedParallelism(ownership=ownership.MurmurHash())
    with pytest.raises(errors.StateError, match=r"call sparsejax.init\(tx, params, mesh\)"):
        sparsejax.sync(murmur, rules={"w": "sparse"}).init({"w": jnp.ones(3)})
    with pytest.raises(errors.StateError, match="no state of a sparsejax transformation"):
        sparsejax.metrics(optax.adam(1.0).init(jnp.ones(3)))


THRESHOLD = sparsejax.sparsifiers.ReuseThreshold(0.5)
BY_RANK = {
    "sums": lambda: sparsejax.accumulate(sparsejax.zen_sync(), 2),
    "thresholds": lambda: optax.chain(
        sparsejax.sparsify(THRESHOLD, memory=None, min_size=1), sparsejax.zen_sync()
    ),
}


@pytest.mark.parametrize("name", BY_RANK)
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_state_that_was_passed_with_one_spec_for_all(check_vma, name):
    tx = BY_RANK[name]()
    mesh = mesh_of(2)
    state = sparsejax.init(tx, {"w": jnp.ones(3)}, mesh)
    update = helpers.shard_map(
        lambda x, state: tx.update({"w": x[0]}, state)[0],
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P(),
        check_vma=check_vma,
    )
    with pytest.raises(errors.StateError, match=r"'w' .* all 2 hold.*state_specs\(state\)"):
        jax.eval_shape(update, jnp.ones((2, 3)), state)


@pytest.mark.parametrize("every", [1, 2])
def test_a_state_of_other_parameters(every):
    tx = optax.chain(sparsejax.top_k(0.5, min_size=1), sparsejax.zen_sync())
    if every == 2:
        tx = sparsejax.accumulate(sparsejax.zen_sync(), every)
    mesh = mesh_of(2)

    def update(grads, params):
        state = sparsejax.init(tx, params, mesh)
        step = helpers.shard_map(
            lambda x, state: tx.update(jax.tree.map(lambda g: g[0], x), state)[0],
            mesh=mesh,
            in_specs=(P("data"), sparsejax.state_specs(state)),
            out_specs=P(),
        )
        jax.eval_shape(step, grads, state)

    grads = {"a": {"w": jnp.ones((2, 3))}}
    update(grads, {"a": {"w": jnp.ones(3)}})
    with pytest.raises(errors.StateError, match=r"'a/w' has the shape \[4\], .* \[3\]\."):
        update(grads, {"a": {"w": jnp.ones(4)}})
    with pytest.raises(errors.StateError, match=r"have \['a/w'\], the state \['a/v'\]"):
        update(grads, {"a": {"v": jnp.ones(3)}})


def test_sparse_tensors_that_do_not_fit():
    def reduce(indices, values, shape):
        tensor = sparsejax.SparseTensor(jnp.asarray(indices), jnp.asarray(values), shape)
        on_ranks(lambda x: sparsejax.all_reduce(tensor).values)(jnp.ones(2))

    with pytest.raises(
        errors.ArgumentError, match=r"indices must be integers .* float32\[2\]"
    ):
        reduce([0.0, 1.0], [1.0, 2.0], (5,))
    with pytest.raises(
        errors.ArgumentError, match=r"values of shape \[3\] do not fit 2 indices"
    ):
        reduce([0, 1], [1.0, 2.0, 3.0], (5,))
    with pytest.raises(errors.ArgumentError, match=r"must have shape \[2\] or \[2, 3\]"):
        reduce([0, 1], np.ones((2, 4)), (5, 3))
    with pytest.raises(errors.ArgumentError, match=r"shape must be a tuple of Python ints"):
        reduce([0, 1], [1.0, 2.0], 5)


def test_checkify_reports_indices_out_of_range():
    """They are dropped: `tests/fuzz/test_indices.py`."""
    checked = checkify.checkify(
        lambda i: sparsejax.SparseTensor(i, jnp.ones(3), (5,)).check("grads/table"),
        errors=checkify.user_checks,
    )
    checked(jnp.array([1, 5, 0]))[0].throw()  # 5 is the padding of an array of five
    with pytest.raises(
        checkify.JaxRuntimeError,
        match=r"grads/table: indices must lie in \[0, 5\], where 5 marks an entry",
    ):
        checked(jnp.array([1, 6, -1]))[0].throw()


def test_paths_that_are_written_alike_are_told_apart():
    grads = {"a": {"b": jnp.ones(3)}, "a/b": jnp.ones(3, jnp.bfloat16)}
    state = sparsejax.zen_sync().init(grads)
    assert sorted(state.inner.traffic) == ["a/b", "a/b #1"]


def test_what_int32_cannot_number_together_forms_several_groups():
    like = [jax.ShapeDtypeStruct((1 << 30,), jnp.float32)] * 3
    groups = buckets.ByRules(schemes.Zen()).buckets(["a", "b", "c"], like)
    assert [group.paths for group in groups] == [("a",), ("b",), ("c",)]
    huge = jax.ShapeDtypeStruct((2, 2**31 - 1), jnp.float32)
    with pytest.raises(
        errors.ArgumentError, match=r"2,147,483,647 units is too large.*'row'"
    ):
        jax.eval_shape(
            on_ranks(lambda x: helpers.call(schemes.BalancedParallelism(), x[0]).total),
            huge,
        )


def test_the_defaults_of_leaves_are_as_documented():
    names = ["embedding", "small/embedding", "kernel", "embedding_bias", "shorter"]
    shapes = [(4096, 16), (16, 16), (256, 256), (65_536,), (65_535,)]
    like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    groups = buckets.ByRules(schemes.Zen()).buckets(names, like)
    found = {g.paths: (type(g.scheme).__name__, g.shape) for g in groups}
    assert found == {
        ("embedding",): ("Zen", (16,)),
        ("small/embedding", "shorter"): ("AllReduce", ()),
        ("kernel", "embedding_bias"): ("Zen", ()),
    }


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (schemes.Zen(), "Zen needs the state that its init makes, ZenState, got tuple"),
        (
            schemes.HierarchicalCentralization(),
            "HierarchicalCentralization needs the state",
        ),
        (schemes.SparCML(), "HierarchicalCentralization needs"),
        (
            schemes.BalancedParallelism(ownership=ownership.MurmurHash()),
            r"MurmurHash needs .* an array \[2, 64\] of the units by rank, got tuple",
        ),
    ],
)
def test_a_state_that_another_scheme_made_is_an_error(scheme, message):
    with pytest.raises(errors.StateError, match=message):
        helpers.traced_collectives(
            lambda x: helpers.call(scheme, x, ()).total, np.ones((2, 100), np.float32), 2
        )


def test_tables_for_another_number_of_units_are_an_error():
    scheme = schemes.BalancedParallelism(ownership=ownership.MurmurHash())

    def run(x):
        return helpers.call(scheme, x, helpers.init(scheme, x[:50])).total

    with pytest.raises(errors.StateError, match=r"\[2, 64\].* got an array \[2, 32\]"):
        helpers.traced_collectives(run, np.ones((2, 100), np.float32), 2)


@pytest.mark.parametrize(
    ("ids", "rows", "shape", "match"),
    [
        (jnp.ones(3), jnp.ones((3, 2)), (9, 2), r"integers .*float32\[3\].*optax.clip"),
        (jnp.ones((3, 1), int), jnp.ones((3, 2)), (9, 2), r"of shape \[capacity\], got"),
        (jnp.ones(3, int), jnp.ones((3, 4)), (9, 2), r"rows of shape \[3, 4\] do not fit"),
        (jnp.ones(3, int), jnp.ones(3), (9,), r"at least two axes, .*\[9\].*SparseTensor"),
    ],
    ids=["float ids", "ids of two axes", "other rows", "a table of one axis"],
)
def test_rows_that_cannot_be_are_refused_with_their_leaf(ids, rows, shape, match):
    grads = {"users": sparsejax.RowGrads(ids, rows, shape)}
    tx = sparsejax.zen_sync()
    state = tx.init({"users": jnp.zeros(shape)})

    def step(x):
        del x
        return tx.update(sparsejax.local(grads, "data"), state)[0]

    with pytest.raises(errors.ArgumentError, match=f"users.*{match}"):
        on_ranks(step)(jnp.ones((2, 3)))
