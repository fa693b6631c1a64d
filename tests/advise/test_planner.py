"""Profiles of first steps, the plans made from them, and what a plan does."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import errors, schemes
from sparsejax.advise import codec
from sparsejax.state import tree
from sparsejax.units import ownership
from tests import helpers


N, ROWS, WIDTH = 4, 4096, 16
PARAMS = {
    "embedding": jnp.zeros((ROWS, WIDTH)),
    "kernel": jnp.zeros((512, 256)),
    "bias": jnp.zeros(256),
}
NETWORK = {"network": sparsejax.Network(gbit_per_s=10, latency_us=10)}


def gradients(seed, density=0.01, n=N):
    """A sparse table, a full kernel, a full bias: integers, so that sums are exact."""
    rng = np.random.default_rng(seed)
    rows = rng.random((n, ROWS, 1)) < density
    return {
        "embedding": (rng.integers(1, 5, (n, ROWS, WIDTH)) * rows).astype(np.float32),
        "kernel": rng.integers(1, 5, (n, 512, 256)).astype(np.float32),
        "bias": rng.integers(1, 5, (n, 256)).astype(np.float32),
    }


def on_ranks(function, n=N):
    def run(x):
        return function(jax.tree.map(lambda g: g[0], x))

    mesh = helpers.mesh_of(n)
    return jax.jit(helpers.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P()))


@functools.cache
def profiling(n):
    return on_ranks(lambda g: sparsejax.profile(g, "data"), n)


@functools.cache
def profile_of(seed, n):
    return profiling(n)(gradients(seed, n=n))


def profiled(*seeds, n=N):
    return [profile_of(seed, n) for seed in seeds]


def made(**options):
    options = {"ranks": N, **NETWORK, **options}
    return sparsejax.make_plan(profiled(0, 1), PARAMS, **options)


def made_of(profiles):
    return sparsejax.make_plan(profiles, PARAMS, ranks=N, **NETWORK)


@functools.cache
def a_file():
    return made().to_json()


@pytest.mark.parametrize("n", [3, *helpers.slow(4)])
def test_a_profile_counts_what_sums_have(n):
    grads = gradients(0, density=0.05, n=n)
    found = on_ranks(lambda g: sparsejax.profile(g), n)(grads)
    assert set(found) == {"embedding", "kernel"}
    mask = (grads["embedding"] != 0).any(-1)
    counts = [mask.sum(1).max()]
    distance = 1
    while distance < n:
        held = [
            np.any([mask[(r + k) % n] for k in range(min(2 * distance, n))], axis=0).sum()
            for r in range(n)
        ]
        counts.append(max(held))
        distance *= 2
    np.testing.assert_array_equal(found["embedding"].counts, counts)
    assert found["embedding"].counts[-1] == mask.any(0).sum()
    np.testing.assert_array_equal(found["kernel"].counts, [512 * 256] * len(counts))
    assert 1 <= found["embedding"].skewness < 3
    # Ranges are of whole words: where these do not divide evenly, the last has less.
    np.testing.assert_allclose(found["kernel"].skewness, 1, rtol=0.002)


def test_a_profile_sees_skew():
    grads = gradients(0)
    grads["embedding"][:, ROWS // N :] = 0
    found = on_ranks(sparsejax.profile)(grads)
    np.testing.assert_allclose(found["embedding"].skewness, N)
    np.testing.assert_allclose(found["embedding"].sum_skewness, N)


def test_a_plan_sends_what_is_sparse_sparsely_and_the_rest_densely():
    plan = made()
    by_path = {leaf.path: leaf for leaf in plan.leaves}
    assert by_path["embedding"].unit == "row"
    # Between four ranks a round less is worth more than the bytes of owners.
    assert isinstance(by_path["embedding"].scheme, schemes.AGSparse)
    assert by_path["kernel"].scheme == schemes.AllReduce()
    assert by_path["bias"].scheme == schemes.AllReduce()
    assert plan.ranks == N


def test_a_slow_start_of_exchanges_makes_a_dense_plan():
    """A table of 256 KB saves less than 400 us at 10 Gbit/s, and more at 1."""
    for rate, scheme in ((10, schemes.AllReduce), (1, schemes.AGSparse)):
        plan = made(network=sparsejax.Network(rate, 10, exchange_us=400))
        assert plan.leaves[1].path == "embedding"
        assert type(plan.leaves[1].scheme) is scheme


def balanced(**options):
    return made(candidates=[schemes.BalancedParallelism()], **options)


def test_capacities_have_head_room_and_one_code():
    scheme = balanced().leaves[1].scheme
    assert balanced().leaves[1].path == "embedding"
    most = max((g != 0).any(-1).sum(1).max() for g in
               (gradients(s)["embedding"] for s in (0, 1)))  # fmt: skip
    assert 1.25 * most / N <= scheme.push_capacity <= 3.5 * most / N
    assert scheme.push_code != "auto"
    roomier = balanced(headroom=2.5).leaves[1].scheme
    assert roomier.push_capacity == pytest.approx(2 * scheme.push_capacity, rel=0.05)


def test_all_schemes_of_a_plan_have_its_wire_dtype():
    """Candidates and schemes in rules, too, as in `sparsejax.sync`."""
    chosen = {"candidates": [schemes.AGSparse()], "rules": {"kernel": schemes.SparCML()}}
    plan = made(wire_dtype=jnp.bfloat16, **chosen)
    kinds = {leaf.path: type(leaf.scheme).__name__ for leaf in plan.leaves}
    assert kinds == {"bias": "AllReduce", "embedding": "AGSparse", "kernel": "SparCML"}
    assert {leaf.scheme.wire_dtype for leaf in plan.leaves} == {jnp.dtype("bfloat16")}
    plan = made(wire_dtype=jnp.bfloat16, rules={"kernel": schemes.PowerSGD()})
    assert plan.leaves[2].scheme == schemes.PowerSGD()  # it has none


def test_slots_in_the_order_of_hashes_keep_their_code():
    """Where Algorithm 1 has found the owners only 32 bits each can carry the slots."""
    hashed = schemes.BalancedParallelism(ownership=ownership.MurmurHash(memory=0.5))
    plan = made(candidates=[hashed])
    (scheme,) = {leaf.scheme for leaf in plan.leaves if leaf.path == "embedding"}
    assert (scheme.push_code, scheme.ownership) == ("coo32", hashed.ownership)
    assert scheme.push_capacity == balanced().leaves[1].scheme.push_capacity
    assert sparsejax.Plan.from_json(plan.to_json()) == plan


def test_a_plan_is_followed_and_what_does_not_fit_is_exact():
    tx = sparsejax.sync(balanced(), "data", reduce="sum")

    def run(grads):
        total, state = tx.update(grads, tx.init(helpers.parameters(grads)))
        return total, sparsejax.metrics(state)

    step = on_ranks(run)
    told = []
    # As planned for, much fuller than planned for, full, and empty.
    for density in (0.01, 0.3, 1.0, 0.0):
        grads = gradients(7, density)
        total, metrics = step(grads)
        for name, value in grads.items():
            np.testing.assert_array_equal(total[name], value.sum(0))
        told.append(metrics)
    assert step._cache_size() == 1
    assert told[0]["sync/embedding/rounds"] == 2
    assert told[1]["sync/embedding/rounds"] > 2
    dense = float(told[0]["sync/embedding/dense_bytes"])
    assert float(told[0]["sync/embedding/wire_bytes"]) < 0.1 * dense
    for metrics in told:
        assert float(metrics["sync/embedding/wire_bytes"]) <= dense + 200


@pytest.mark.slow
def test_a_plan_can_be_saved_read_and_edited(tmp_path):
    plan = balanced(wire_dtype=jnp.bfloat16, rules={"kernel": schemes.SparCML()})
    plan.save(tmp_path / "plan.json")
    assert sparsejax.Plan.load(tmp_path / "plan.json") == plan
    twice = sparsejax.Plan(N, (*plan.leaves, plan.leaves[0]))
    refused("two entries for 'bias'", sparsejax.Plan.from_json, twice.to_json())
    text = json.loads((tmp_path / "plan.json").read_text())
    text["leaves"][0]["scheme"] = "dense"
    entry = text["leaves"][1]
    assert entry["path"] == "embedding"
    # Defaults are left out.
    assert text["leaves"][2]["scheme"] == {"name": "SparCML", "wire_dtype": "bfloat16"}
    entry["scheme"] = {"name": "OmniReduce", "block": 64}
    edited = sparsejax.Plan.from_json(json.dumps(text))
    assert edited.leaves[0].scheme == schemes.AllReduce()
    assert edited.leaves[1].scheme == schemes.OmniReduce(block=64)
    grads = gradients(3)
    tx = sparsejax.sync(edited, "data", reduce="sum")
    total = on_ranks(lambda g: tx.update(g, tx.init(helpers.parameters(g)))[0])(grads)
    np.testing.assert_array_equal(total["embedding"], grads["embedding"].sum(0))


def test_a_file_of_the_first_format_can_be_read():
    text = """{"format": 1, "ranks": 8, "leaves": [
      {"path": "a", "shape": [64, 2], "dtype": "bfloat16", "unit": "row", "note": "why",
       "scheme": {"name": "BalancedParallelism", "push_capacity": 5,
                  "ownership": {"name": "MurmurHash", "seed": 3}}},
      {"path": "b", "shape": [], "dtype": "float32", "unit": "element",
       "scheme": {"name": "TwoLevel",
                  "across": {"name": "SparCML", "wire_dtype": "float16"}}},
      {"path": "c", "shape": [4], "dtype": "float32", "unit": "element",
       "scheme": "AllReduce"}]}"""
    across = schemes.SparCML(wire_dtype=jnp.dtype("float16"))
    hashed = sparsejax.units.ownership.MurmurHash(seed=3)
    balanced = schemes.BalancedParallelism(push_capacity=5, ownership=hashed)
    leaf = sparsejax.advise.LeafPlan
    assert sparsejax.Plan.from_json(text) == sparsejax.Plan(
        8,
        (
            leaf("a", (64, 2), "bfloat16", "row", balanced, "why"),
            leaf("b", (), "float32", "element", schemes.TwoLevel(across)),
            leaf("c", (4,), "float32", "element", schemes.AllReduce()),
        ),
    )


def test_every_scheme_can_be_written_down():
    from tests.laws.test_exact_sum import SCHEMES

    leaves = [
        sparsejax.advise.LeafPlan(name, (64, 2), "float32", "row", scheme)
        for name, scheme in SCHEMES.items()
        # One is Zen with a past, made for those tests.
        if type(scheme).__module__.startswith("sparsejax.")
    ]
    assert len(leaves) == len(SCHEMES) - 1
    narrow = schemes.Zen(ownership=ownership.MurmurHash(3), wire_dtype=jnp.bfloat16)
    leaves.append(
        sparsejax.advise.LeafPlan(
            "two", (64,), "float32", "element", schemes.TwoLevel(narrow)
        )
    )
    plan = sparsejax.Plan(8, tuple(leaves))
    assert sparsejax.Plan.from_json(plan.to_json()) == plan


@pytest.mark.slow
def test_a_running_synchronization_tells_enough_for_a_plan():
    tx = sparsejax.zen_sync("data")

    def run(grads):
        step = lambda state, _: (tx.update(grads, state)[1], None)
        return jax.lax.scan(step, tx.init(helpers.parameters(grads)), length=2)[0]

    grads = gradients(0)
    state = on_ranks(run)(grads)
    found = sparsejax.advise.profile_from_state((state,), PARAMS, ranks=N)
    mask = (grads["embedding"] != 0).any(-1)
    counts = np.asarray(found["embedding"].counts)
    np.testing.assert_allclose(counts[0], mask.sum(1).max(), rtol=1e-4)
    np.testing.assert_allclose(counts[-1], mask.any(0).sum(), rtol=1e-4)
    assert counts[0] < counts[1] < counts[2]
    plan = sparsejax.make_plan([found], PARAMS, ranks=N, **NETWORK)
    assert plan.leaves[1].scheme != schemes.AllReduce()


def test_a_table_by_columns_is_no_part_of_a_plan():
    mesh = helpers.mesh_of(2)
    table = sparsejax.ColumnTable.of(np.ones((4096, 4), np.float32), mesh)
    params = {"table": table, "kernel": jnp.zeros(70_000)}
    of_tree = sparsejax.state_specs(params)
    seen = helpers.shard_map(
        lambda grads: sparsejax.profile(sparsejax.local(grads, "data")),
        mesh=mesh,
        in_specs=(of_tree,),
        out_specs=P(),
    )
    found = jax.jit(seen)(params)
    assert set(found) == {"kernel"}
    plan = sparsejax.make_plan([found], params, ranks=2, **NETWORK)
    assert [leaf.path for leaf in plan.leaves] == ["kernel"]
    state = sparsejax.init(sparsejax.sync(plan), params, mesh)
    assert jax.tree.leaves(state)
    state = sparsejax.init(sparsejax.zen_sync(), params, mesh)
    found = sparsejax.advise.profile_from_state(state, params, ranks=2)
    assert set(found) == {"kernel"}


@pytest.mark.slow
def test_two_levels_plan_for_hosts():
    step = on_ranks(lambda g: sparsejax.profile(g, "data"), 8)
    seen = [step(gradients(0, n=8))]
    plan = sparsejax.make_plan(seen, PARAMS, ranks=4, inner=2, **NETWORK)
    assert plan.ranks == 4
    pair = ("hosts", "chips")
    mesh = helpers.grid(hosts=4, chips=2)
    tx = sparsejax.sync(plan, pair, reduce="sum")

    def run(x):
        grads = jax.tree.map(lambda g: g[0], x)
        return tx.update(grads, tx.init(helpers.parameters(grads, *pair)))[0]

    grads = gradients(5, n=8)
    total = jax.jit(helpers.shard_map(run, mesh=mesh, in_specs=P(pair), out_specs=P()))(
        grads
    )
    for name, value in grads.items():
        np.testing.assert_array_equal(total[name], value.sum(0))


# --- Bad input.


def refused(match, function, *args, **options):
    with pytest.raises(errors.PlanError, match=match):
        function(*args, **options)


def test_a_plan_for_another_tree_is_refused_before_anything_is_sent():
    tx = sparsejax.sync(made(), "data")
    grads = gradients(0)
    first = on_ranks(lambda g: tx.init(helpers.parameters(g)).step)
    fewer = {k: v for k, v in grads.items() if k != "kernel"}
    refused("no leaf for its 'kernel'", first, fewer)
    more = {**grads, "new": grads["bias"]}
    refused("no entry for 'new'", first, more)
    other = {**grads, "bias": np.zeros((N, 300), np.float32)}
    refused(
        r"in the plan 'bias' is float32\[256\], in the tree float32\[300\]", first, other
    )


def test_a_plan_of_whole_parameters_is_one_of_their_shards():
    """Parameters are sharded over a fast axis, and the update runs under `jit`."""
    mesh = helpers.grid(data=2, model=2)
    put = lambda x: jax.device_put(x, jax.NamedSharding(mesh, P(None, "model")))
    params = {"embedding": put(PARAMS["embedding"])}
    grads = {"embedding": gradients(0, n=2)["embedding"]}

    def summed(tx):
        stacked = jnp.stack([grads["embedding"]] * 2, 1).reshape(4, ROWS, WIDTH)
        with jax.set_mesh(mesh):
            given = {"embedding": helpers.partial_sums(stacked, mesh)}
            state = sparsejax.init(tx, params)
            updates, state = jax.jit(tx.update)(given, state, params)
        return np.asarray(updates["embedding"]), state

    zen = sparsejax.zen_sync("data", reduce="sum")
    total, state = summed(zen)
    seen = sparsejax.advise.profile_from_state(state, params, ranks=2)
    plan = sparsejax.make_plan([seen], params, ranks=2, **NETWORK)
    np.testing.assert_array_equal(total, 2 * grads["embedding"].sum(0))
    of_plan, _ = summed(sparsejax.sync(plan, "data", reduce="sum"))
    np.testing.assert_array_equal(of_plan, total)
    shard = lambda *shape: (["embedding"], [jax.ShapeDtypeStruct(shape, jnp.float32)])
    with jax.set_mesh(mesh), tree.of_shards({"embedding": frozenset({"model"})}):
        plan.check_leaves(*shard(ROWS, WIDTH // 2))
        for shape in ((ROWS, WIDTH // 4), (ROWS, 3 * WIDTH // 4), (ROWS, 0)):
            refused("of the whole", plan.check_leaves, *shard(*shape))
    # Without an axis that shards it, or over those of the ranks, it is another tree.
    refused("of the whole", plan.check_leaves, *shard(ROWS, WIDTH // 2))
    tx = sparsejax.sync(plan, "data")
    half = {"embedding": jnp.zeros((ROWS // 2, WIDTH))}
    first = helpers.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=P())
    refused("of the whole", jax.eval_shape, first, half)


def test_a_plan_for_other_ranks_is_refused_before_anything_is_sent():
    tx = sparsejax.sync(made(), "data")
    step = on_ranks(lambda g: tx.update(g, tx.init(helpers.parameters(g)))[0], 2)
    refused("made for 4 ranks, and there are 2", step, gradients(0, n=2))
    refused("taken on 4 ranks, and here there are 16", made, ranks=16)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"scheme": "OkTopk"}, "unknown scheme 'OkTopk'"),  # leaves something out
        ({"scheme": ["Zen"]}, r"unknown scheme \['Zen'\]"),
        ({"scheme": {"name": "Zen", "wire_dtype": "x"}}, "Zen: wire_dtype must be"),
        ({"note": 3}, "note must be a string"),
        ({"colour": 1}, "unknown key 'colour'; its keys are dtype"),
        ({"scheme": "Balanced"}, r"unknown scheme 'Balanced'.*'BalancedParallelism'\?"),
        ({"scheme": {"name": "OmniReduce", "block": 0}}, "block must be a positive int"),
        (
            {"scheme": {"name": "OmniReduce", "blok": 1}},
            "OmniReduce has an unknown key 'blok'; its keys are aggregators, block",
        ),
        (
            {"scheme": {"name": "BalancedParallelism", "ownership": "Hash"}},
            "unknown ownership 'Hash'; there are Contiguous",
        ),
        ({"unit": "column"}, "unit must be one of 'element', 'row', got 'column'"),
        ({"unit": "row", "shape": [4]}, "rows need two axes"),
        ({"shape": "big"}, "shape must be a list, got 'big'"),
        ({"shape": [-4, 4]}, "ints of at least 0"),
        ({"shape": [2**40, 2**40]}, r"more elements than an array .* \(1099511627776,"),
        ({"shape": [1] * 65}, r"an array can have, or axes: \(1, 1,"),
        ({"dtype": "int8"}, "dtype must be a floating dtype .* got 'int8'"),
        (
            {"scheme": {"name": "TwoLevel", "across": "Zenn"}},
            "TwoLevel: unknown scheme 'Zenn'",
        ),
    ],
)
def test_a_file_with_a_mistake_names_it(change, match):
    text = json.loads(a_file())
    text["leaves"][1] |= change
    refused(match, sparsejax.Plan.from_json, json.dumps(text))


def test_a_plan_prints_as_a_table_with_a_line_a_leaf():
    plan = balanced()
    title, _, heading, _, *lines = str(plan).splitlines()
    assert title == f"plan for {N} ranks"
    assert heading.split() == "leaf shape unit scheme push pull note".split()
    assert [line.split()[0] for line in lines] == [leaf.path for leaf in plan.leaves]
    for line, leaf in zip(lines, plan.leaves, strict=True):
        for cell in (f"{leaf.shape[-1]}]", leaf.unit, type(leaf.scheme).__name__):
            assert cell in line
        assert line.endswith(leaf.note)
    scheme = plan.leaves[1].scheme
    assert f"{scheme.push_capacity:,} {scheme.push_code}" in lines[1]


def test_profiles_that_were_kept_while_traced_are_told_how_to_return():
    seen = []
    on_ranks(lambda g: (seen.append(sparsejax.profile(g)), sparsejax.profile(g))[1])(
        gradients(0)
    )
    refused(r"'embedding' has no numbers yet.*out_specs=P\(\)", made_of, seen)


def test_a_profile_of_another_shape_is_refused():
    """Whether it was measured, or read from a state, and in a forecast, too."""
    taller = PARAMS | {"embedding": jax.ShapeDtypeStruct((2 * ROWS, WIDTH), jnp.float32)}
    match = rf"'embedding' is of a gradient \[{ROWS}, {WIDTH}\], .* is \[{2 * ROWS}, "
    make = functools.partial(sparsejax.make_plan, params=taller, ranks=N, **NETWORK)
    refused(match, make, profiled(0))
    tx = sparsejax.zen_sync()
    state = sparsejax.init(tx, PARAMS, helpers.mesh_of(N))
    read = sparsejax.advise.profile_from_state(state, PARAMS, ranks=N)
    refused(match, make, [read])
    explain = functools.partial(sparsejax.explain, tx, taller, ranks=N, **NETWORK)
    refused(match, explain, density=profiled(0))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ('{"format": 1, "ranks": 4}', "no 'leaves'"),
        (
            '{"format": 1, "ranks": 4, "leaves": [], "ranks": 8}',
            "the plan has the key 'ranks' more than once .* with 4 and 8: keep one",
        ),
        (
            '{"format": 9, "entries": []}',
            r"format 9, and sparsejax \S+ reads format 1: .* sparsejax.make_plan",
        ),
        ('{"format": 1, "ranks": 0, "leaves": []}', "positive int, got 0"),
        (
            '{"format": 1, "ranks": 99999999, "leaves": []}',
            "at most 16777216, got 99999999",
        ),
        ('{"format": 1, "ranks": 4, "leaves": ' + "[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(text, match):
    refused(match, sparsejax.Plan.from_json, text)


def test_schemes_inside_of_schemes_have_an_end():
    leaf = {"path": "w", "shape": [4], "dtype": "float32", "unit": "element"}
    scheme = '{"name": "TwoLevel", "across": ' * 200 + '"Zen"' + "}" * 200
    text = json.dumps({"format": 1, "ranks": 4, "leaves": [leaf | {"scheme": "here"}]})
    refused("TwoLevel|deeply", sparsejax.Plan.from_json, text.replace('"here"', scheme))


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    made().save(tmp_path / "plan.json")
    monkeypatch.setattr(codec, "LARGEST", 100)
    match = r"the plan in .*/plan\.json has more than 100 bytes"
    refused(match, sparsejax.Plan.load, tmp_path / "plan.json")
    (tmp_path / "plan.json").write_bytes(b"\xff")
    refused("is not text", sparsejax.Plan.load, tmp_path / "plan.json")


def test_arguments_that_a_plan_settles_are_refused():
    with pytest.raises(errors.ArgumentError, match="pass it alone"):
        sparsejax.sync(made(), rules={"bias": "dense"})
    for options, match in (
        ({"network": 10}, r"network must be a sparsejax.Network\(.*, got 10"),
        ({"headroom": 0}, "headroom must be above 0"),
    ):
        with pytest.raises(errors.ArgumentError, match=match):
            made(**options)
    for profiles in ([], profiled(0)[0]):
        with pytest.raises(errors.ArgumentError, match="profiles must be a list"):
            sparsejax.make_plan(profiles, PARAMS, ranks=N, **NETWORK)
    for options, match in (
        ({"ranks": 1.5}, "ranks must be a positive int"),
        ({"inner": 0}, "inner must be a positive int"),
        ({"candidates": ["zen"]}, "must be lossless schemes"),
        ({"wire_dtype": "int32"}, "wire_dtype must be a floating dtype"),
    ):
        with pytest.raises(errors.ArgumentError, match=match):
            made(**options)
    with pytest.raises(errors.RuleError, match="it must be a scheme"):
        made(rules={"bias": "sparsely"})
    two = sparsejax.advise.LeafPlan(
        "a", (4,), "float32", "element", schemes.TwoLevel(schemes.Zen())
    )
    with pytest.raises(errors.ArgumentError, match="TwoLevel for leaf 'a'"):
        sparsejax.sync(sparsejax.Plan(N, (two,)), "data")


def test_profiles_of_other_parameters_are_refused():
    params = {**PARAMS, "another_embedding": PARAMS["embedding"]}
    make = functools.partial(sparsejax.make_plan, params=params, ranks=N, **NETWORK)
    refused("no leaf 'another_embedding'", make, profiled(0))
    state = sparsejax.zen_sync().init({"other_embedding": PARAMS["embedding"]})
    refused(
        "no group 'embedding'", sparsejax.advise.profile_from_state, state, PARAMS, ranks=N
    )
