"""What `explain` says, in Python and on the command line."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import sparsejax
from sparsejax import __main__ as command, errors, schemes
from sparsejax.units import ownership
from tests import helpers


PARAMS = {
    "embedding": jax.ShapeDtypeStruct((50_000, 64), jnp.float32),
    "kernel": jax.ShapeDtypeStruct((512, 512), jnp.float32),
    "bias": jax.ShapeDtypeStruct((512,), jnp.float32),
}
NETWORK = {"ranks": 16, "network": sparsejax.Network(gbit_per_s=25, latency_us=20)}


def explained(tx=None, params=None, **options):
    tx = optax.chain(sparsejax.zen_sync(), optax.adam(1e-3)) if tx is None else tx
    found = sparsejax.explain(tx, params or PARAMS, **{**NETWORK, **options})
    return found, {path: row for row in found.rows for path in row.paths}


def test_units_schemes_and_bytes_are_those_of_the_optimizer():
    found, rows = explained(density={"embedding": 0.01, "kernel": 1.0})
    assert [row.name for row in found.rows] == ["bias", "embedding", "kernel"]
    assert found.row("kernel") == found.rows[2]
    with pytest.raises(errors.ArgumentError, match="no leaf 'kernal'"):
        found.row("kernal")
    assert (rows["embedding"].unit, rows["embedding"].scheme) == ("row", "Zen")
    assert rows["embedding"].taken == ("BalancedParallelism",)
    assert rows["bias"].scheme == "AllReduce"
    assert rows["embedding"].dense_bytes == 2 * 15 / 16 * 4 * 50_000 * 64
    assert rows["embedding"].sent_bytes < 0.2 * rows["embedding"].dense_bytes
    assert rows["embedding"].verdict == ""
    assert rows["kernel"].verdict == "dense is better here"
    assert rows["embedding"].capacity > 0
    assert rows["kernel"].capacity == 0
    assert rows["embedding"].density == pytest.approx(0.01)
    assert rows["embedding"].density_after == pytest.approx(1 - 0.99**16)


def test_a_tall_leaf_without_a_name_of_a_table_asks_what_is_read_of_it():
    """It is taken to be dense, and that is no verdict, nor a reason for a sparsifier."""
    params = {
        "users": jax.ShapeDtypeStruct((2_000_000, 64), jnp.float32),
        "kernel": jax.ShapeDtypeStruct((4096, 1024), jnp.float32),
    }
    found, _ = explained(params=params)
    text = str(found)
    assert "dense is better, unless few rows are read: see below" in text
    assert "Taken to be dense, though tall as tables are: users." in text
    assert "ids={'users': n} (--ids)" in text
    assert found.advice.startswith("Advice: say first what a step reads of users, ids= or")
    assert "dgc" not in found.advice
    settled, _ = explained(params=params, density={"users": 0.001})
    assert "tall as tables" not in str(settled)
    assert settled.advice.startswith("Advice: keep sparsejax.zen_sync()")
    # Nor is a rule advised for it, where the rest is known.
    tables = {
        "users": jax.ShapeDtypeStruct((20_000, 16), jnp.float32),
        "items": jax.ShapeDtypeStruct((8000, 16), jnp.float32),
    }
    slow = {"network": sparsejax.Network(0.25, 200), "ranks": 8, "ids": {"users": 16}}
    found, rows = explained(params=tables, **slow)
    assert "tall as tables are: items." in str(found)
    assert rows["items"].verdict.startswith("dense is better")
    assert found.advice.startswith("Advice: keep")
    assert "items" not in found.advice
    # The height of a kernel is a few times its width.
    _, rows = explained(params={"kernel": params["kernel"]})
    assert rows["kernel"].verdict == "dense is better here"


def test_parameters_that_are_sharded_are_said_to_be_counted_whole():
    mesh = helpers.mesh_of(2)
    params = {"a": jnp.zeros((4, 8)), "b": jnp.zeros((4, 8))}
    params["b"] = jax.device_put(params["b"], jax.NamedSharding(mesh, jax.P("data")))
    text = str(explained(params=params)[0])
    assert "b are counted whole, as if one rank had them" in text
    whole = str(explained(params=params | {"b": params["a"]})[0])
    assert "counted whole" not in whole


@pytest.mark.parametrize(
    ("tx", "exchanges"),
    [
        (lambda tx: sparsejax.warm_up(sparsejax.accumulate(tx, 5), 12), 2),
        (lambda tx: sparsejax.accumulate(sparsejax.warm_up(tx, 12), 5), 12),
        (lambda tx: sparsejax.warm_up(sparsejax.accumulate(tx, 5), 4), 0),
    ],
)
def test_the_first_dense_exchanges_are_counted_as_exchanges(tx, exchanges):
    found, _ = explained(tx(optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))))
    said = f"The first {exchanges} exchanges send everything densely."
    assert (said in str(found)) == bool(exchanges)
    assert ("send everything densely" in str(found)) == bool(exchanges)


def test_leaves_that_are_joined_are_one_row_with_one_latency():
    many = {f"l{i:03d}": jax.ShapeDtypeStruct((128,), jnp.float32) for i in range(200)}
    one = {"l": jax.ShapeDtypeStruct((200 * 128,), jnp.float32)}
    (joined,), (alone,) = (explained(params=params)[0].rows for params in (many, one))
    assert len(joined.paths) == 200
    assert joined.name == "l000 and 199 more"
    assert joined.milliseconds == alone.milliseconds
    assert joined.sent_bytes == alone.sent_bytes
    assert joined.latencies == 8


def test_other_schemes_would_send_whole_leaves_by_elements():
    params = {"kernel": PARAMS["kernel"]}
    txs = sparsejax.transforms.power_sgd_sync(2), sparsejax.zen_sync()
    whole, elements = (explained(tx, params, density=0.1)[1]["kernel"] for tx in txs)
    assert (whole.unit, elements.unit) == ("leaf", "element")
    for name in ("BalancedParallelism", "SparCML"):
        assert whole.milliseconds[name] == elements.milliseconds[name]


def test_a_sparsifier_says_how_sparse_it_is():
    inner = lambda d: optax.chain(sparsejax.dgc(d), sparsejax.zen_sync())
    tx = lambda d: optax.masked(inner(d), {"kernel": True, "bias": False})
    params = {name: PARAMS[name] for name in ("kernel", "bias")}
    of = {d: explained(tx(d), params)[1]["kernel"] for d in (0.001, 0.05)}
    for density, row in of.items():
        assert row.density == pytest.approx(density, rel=0.01)
        assert (row.sparsifier, row.sources) == ("DGC", ("selected",))
    assert of[0.001].sent_bytes < 0.1 * of[0.05].sent_bytes
    # What a gradient has is all that can be selected; dense ones are no denser for it.
    _, rows = explained(tx(0.01), params, density=1.0, network=sparsejax.Network(1, 20))
    assert rows["kernel"].density == pytest.approx(0.01, rel=0.01)
    assert rows["kernel"].verdict == ""
    sparse = explained(tx(0.01), params, density=0.002)[1]["kernel"]
    assert sparse.density == pytest.approx(0.002)


def test_a_schedule_is_taken_at_its_end_and_warm_up_is_told():
    warm = sparsejax.sparsifiers.Warmup(0.001, 100, start=0.25)
    tx = optax.chain(sparsejax.dgc(warm), sparsejax.zen_sync())
    tx = sparsejax.warm_up(tx, 10)
    found, rows = explained(tx)
    assert rows["kernel"].density == pytest.approx(0.001, rel=0.01)
    text = str(found)
    assert "up to 25.000%" in text
    assert "first 10 exchanges" in text
    falling = sparsejax.sparsifiers.Schedule(optax.linear_schedule(0.1, 0.01, 5), 0.1)
    tx = optax.chain(sparsejax.dgc(falling), sparsejax.zen_sync())
    found, rows = explained(tx, {"kernel": PARAMS["kernel"]})
    assert rows["kernel"].density == pytest.approx(0.1, rel=0.01)
    assert "largest density of its schedule, 10.000%" in str(found)


def test_a_step_costs_its_share_of_an_exchange():
    inner = optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))
    (alone, one), (found, rows) = (
        explained(sparsejax.accumulate(inner, every), density=0.01) for every in (1, 4)
    )
    row = rows["embedding"]
    assert (one["embedding"].every, row.every) == (1, 4)
    # Four steps that are drawn alone have nearly four times as many rows.
    assert row.density == pytest.approx(1 - 0.99**4)
    assert one["embedding"].sent_bytes < row.sent_bytes < 4 * one["embedding"].sent_bytes
    assert found.step_bytes == pytest.approx(sum(r.sent_bytes for r in found.rows) / 4)
    assert found.step_bytes < alone.step_bytes
    assert found.step_milliseconds < alone.step_milliseconds
    assert "every 4 steps" in str(found)


def test_lists_of_rows_are_as_long_as_their_ids_and_shorter_where_ids_repeat():
    tx = optax.chain(sparsejax.zen_sync(), sparsejax.lazy(optax.adam(1e-3)))
    found, rows = explained(tx, ids={"embed": 4096})
    most = rows["embedding"]
    assert most.ids == 4096
    assert most.sources == ("uniform",)
    assert "Ids of embedding are taken to be drawn uniformly from all rows" in str(found)
    # Owners: a slot and 64 numbers a row, there for most of the ids and back for the sum.
    assert 4096 * 260 * 15 / 16 < most.sent_bytes < most.dense_bytes / 2
    fewer, rows = explained(tx, ids={"embed": 4096}, density={"embed": 0.01})
    assert rows["embedding"].sent_bytes < most.sent_bytes / 4
    assert rows["embedding"].density == 0.01
    assert "drawn from all rows" not in str(fewer)
    assert rows["kernel"].ids == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "density", "better"), [(64, 0.01, "columns"), (32, 0.9, "rows")]
)
def test_rows_are_compared_with_a_table_by_columns(width, density, better):
    """By EmbRace's formulas; where all ranks read about the same rows, ids cost more."""
    tx = optax.chain(sparsejax.zen_sync(), sparsejax.lazy(optax.adam(1e-3)))
    params = {"embed": jax.ShapeDtypeStruct((50_000, width), jnp.float32)}
    options = {"ids": {"embed": 50_000}, "density": {"embed": density}}
    found, rows = explained(tx, params, **options)
    read = 50_000 * density
    sent, milliseconds = rows["embed"].columns
    assert sent == pytest.approx(15 / 16 * read * (2 * 4 * width + 16 * 4))
    # 25 Gbit/s; three times messages of 15 ranks, of 20 us each, and what agrees on sizes.
    assert milliseconds == pytest.approx(sent * 8 / 25e6 + (45 + 4) * 0.02)
    assert (milliseconds < rows["embed"].milliseconds["chosen"]) == (better == "columns")
    assert f"{better} are better here" in str(found)
    # A row of fewer numbers than ranks, or arrays, cannot be, and none is mentioned.
    narrow = {"embed": jax.ShapeDtypeStruct((50_000, 8), jnp.float32)}
    for given, more in ((narrow, options), (params, {})):
        found, rows = explained(tx, given, **more)
        assert rows["embed"].columns is None
        assert "by columns" not in str(found)


def test_nothing_is_sparse_unless_something_makes_it_so():
    found, rows = explained()
    assert (rows["kernel"].density, rows["kernel"].sources) == (1.0, ("dense",))
    assert (rows["embedding"].density, rows["embedding"].sources) == (0.01, ("assumed",))
    assert "1% of the rows of embedding" in str(found)
    assert "makes it sparse: kernel." in str(found)
    shapes = {"wide/embedding": (300, 400), "table": (5000, 20), "tall": (5000, 20)}
    params = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    found, rows = explained(params=params, density={"nothing|tall": 0.3})
    assert rows["wide/embedding"].density == 1.0
    # Two that go together: their mean, and where each is from.
    assert rows["table"] == rows["tall"]
    assert rows["tall"].paths == ("table", "tall")
    assert rows["tall"].sources == ("assumed", "given")
    assert rows["tall"].density == pytest.approx(0.155)
    assert "1% of the rows of table," in str(found)


def test_a_profile_may_be_given_alone():
    counts = jnp.array([500.0, 900.0, 1600.0])
    profile = sparsejax.advise.profile.LeafProfile(counts, 1.0, 1.0, 4)
    for density in ({"embedding": profile}, [{"embedding": profile}]):
        _, rows = explained(ranks=4, density=density)
        assert rows["embedding"].density == pytest.approx(0.01)
        assert rows["embedding"].density_after == pytest.approx(0.032)
        assert rows["embedding"].sources == ("measured",)
        assert rows["kernel"].sources == ("dense",)
    # Of a table that a sparsifier takes apart the profile still counted rows.
    tx = optax.chain(sparsejax.dgc(0.1), sparsejax.zen_sync())
    table = {"embedding": PARAMS["embedding"]}
    _, rows = explained(tx, table, ranks=4, density={"embedding": profile})
    assert rows["embedding"].unit == "element"
    assert rows["embedding"].density == pytest.approx(0.01)


def test_every_scheme_has_a_time_and_the_chosen_one_is_that_which_runs():
    _, rows = explained()
    times = rows["embedding"].milliseconds
    assert set(times) == {
        "chosen",
        "AllReduce",
        "AGSparse",
        "BalancedParallelism",
        "HierarchicalCentralization",
        "SparCML",
        "OmniReduce",
        "SparsePS",
    }
    # Of sixteen ranks Zen never takes the hierarchical way, and of two always.
    balanced, hierarchical = "BalancedParallelism", "HierarchicalCentralization"
    assert times["chosen"] == times[balanced] != times[hierarchical]
    of_two = explained(ranks=2)[1]["embedding"].milliseconds
    # In sizes closer together than the scheme has by itself.
    assert of_two["chosen"] < of_two[hierarchical] < of_two[balanced]
    # 20 us for each of 8 messages, and the bytes at 3.125 GB/s.
    dense = 8 * 0.02 + rows["embedding"].dense_bytes / 3.125e6
    assert times["AllReduce"] == pytest.approx(dense)


@pytest.mark.parametrize("density", [0.01, *helpers.slow(0.3)])
@pytest.mark.parametrize(
    "tx",
    [
        sparsejax.zen_sync,
        sparsejax.dense_sync,
        lambda: sparsejax.sync(schemes.SparCML()),
        lambda: optax.chain(sparsejax.dgc(0.01), sparsejax.sync(schemes.Zen("bytes"))),
    ],
)
def test_what_is_chosen_is_the_least_of_its_row_or_a_reason_is_given(tx, density):
    found, _ = explained(tx(), ranks=8, density=density)
    for row in found.rows:
        times = {name: t for name, t in row.milliseconds.items() if t is not None}
        least = min(times, key=lambda name: times[name])
        assert (times["chosen"] > times[least]) == bool(row.reason)
        if row.reason:
            assert least in row.reason
            assert row.reason in str(found)


def test_rounds_are_priced_and_what_room_would_save_is_told():
    params = {"embedding": jax.ShapeDtypeStruct((60_000, 512), jnp.float32)}
    found, rows = explained(params=params)
    row = rows["embedding"]
    assert row.rounds > 5
    bandwidth = 25e9 / 8
    expected = 1e3 * (row.latencies * 20e-6 + row.sent_bytes / bandwidth)
    assert row.milliseconds["chosen"] == pytest.approx(expected)
    # Each round is a message to each of the fifteen others.
    assert row.latencies >= row.rounds * 15
    assert row.roomy is not None
    best, push, pull = row.roomy
    assert best < 0.9 * row.milliseconds["chosen"]
    assert f"push_capacity={push}, pull_capacity={pull}" in str(found)
    scheme = schemes.BalancedParallelism(push_capacity=push, pull_capacity=pull, ratio=4)
    _, rows = explained(sparsejax.sync(scheme), params)
    assert rows["embedding"].rounds == 2
    assert rows["embedding"].milliseconds["chosen"] == pytest.approx(best, rel=0.01)


def test_room_is_advised_where_algorithm_1_finds_the_owners():
    params = {"embedding": jax.ShapeDtypeStruct((500_000, 512), jnp.float32)}
    hashed = ownership.MurmurHash(memory=1.0)
    scheme = schemes.BalancedParallelism(ownership=hashed)
    _, rows = explained(sparsejax.sync(scheme), params)
    assert rows["embedding"].roomy is not None


ADVICE = {
    "rule": (
        sparsejax.zen_sync(),
        {},
        ["keep sparsejax.zen_sync()", 'kernel the rule "dense"'],
    ),
    "dgc": (
        sparsejax.zen_sync(),
        {"density": 1.0},
        ["add sparsejax.dgc(0.01)", "use sparsejax.dense_sync()"],
    ),
    "dense": (
        sparsejax.dense_sync(),
        {"density": 1.0, "network": sparsejax.Network(25, 10_000)},
        ["keep sparsejax.dense_sync()"],
    ),
    "zen": (
        sparsejax.dense_sync(),
        {},
        ["use sparsejax.zen_sync()", "if the share of rows that is assumed holds"],
    ),
    "named": (
        sparsejax.sync(schemes.AGSparse()),
        {"density": 0.001},
        ["keep sparsejax.sync(schemes.AGSparse(...))"],
    ),
    "several": (
        sparsejax.zen_sync(rules={"kernel": schemes.SparCML()}),
        {"density": 0.001},
        ["keep the schemes that it names"],
    ),
    "both": (
        sparsejax.zen_sync(),
        {
            "ranks": 4,
            "network": sparsejax.Network(1, 20),
            "density": {"embedding": 0.3, "kernel": 1.0},
        },
        ["keep sparsejax.zen_sync()", "or put sparsejax.dgc(0.01) in front"],
    ),
    "no sparsifier": (
        optax.chain(sparsejax.dgc(0.9), sparsejax.zen_sync()),
        {"density": 1.0},
        ["use sparsejax.dense_sync() without DGC"],
    ),
    "nothing": (sparsejax.zen_sync(), {"ranks": 1}, ["there is nothing to send"]),
    "system": (sparsejax.spardl_sync(0.01), {}, ["keep sparsejax.spardl_sync"]),
}


@pytest.mark.parametrize("name", ADVICE)
def test_it_ends_with_one_sentence_of_advice(name):
    tx, options, words = ADVICE[name]
    found, _ = explained(tx, **options)
    last = str(found).splitlines()[-1]
    assert last == found.advice
    assert last.endswith(".")
    for word in words:
        assert word in last


def test_what_there_is_to_compile_is_told():
    assert "no sparse exchange" in explained(sparsejax.dense_sync())[0].compiling
    assert "2 sparse exchanges;" in explained()[0].compiling
    both = explained(sparsejax.sync(schemes.Zen("bytes")), ranks=8)[0].compiling
    assert "2 sparse exchanges of 4 schemes" in both
    assert "JAX 0.10.2" in both
    assert "schemes.BalancedParallelism()" in both


def test_below_the_density_named_it_pays_and_above_it_does_not():
    _, rows = explained()
    limit = rows["embedding"].pays_below
    assert 0.01 < limit < 1
    # The next density tried is a ninth above.
    for factor, pays in ((1.0, True), (10 ** (1 / 20) * 1.001, False)):
        density = min(1.0, factor * limit)
        _, there = explained(density={"embedding": density})
        times = there["embedding"].milliseconds
        assert (times["chosen"] < times["AllReduce"]) == pays


def test_up_to_the_bandwidth_named_it_pays_and_above_it_does_not():
    _, rows = explained(network=sparsejax.Network(25, 20, exchange_us=400))
    limit = rows["embedding"].pays_up_to
    for factor in (0.99, 1.01):
        network = sparsejax.Network(factor * limit, 20, exchange_us=400)
        found, there = explained(network=network)
        times = there["embedding"].milliseconds
        assert (times["chosen"] < times["AllReduce"]) == (factor < 1)
        assert ("dense is better" in there["embedding"].verdict) == (factor > 1)
    assert "but for 400 us of each sparse exchange" in str(found)
    assert f"{limit:.3g} Gbit/s" in str(found)


def test_what_starting_an_exchange_takes_counts_where_entries_are_sent():
    _, free = explained()
    network = dataclasses.replace(NETWORK["network"], exchange_us=400)
    _, costly = explained(network=network)
    for name, more in (("embedding", 0.4), ("kernel", 0.0)):
        before, after = free[name].milliseconds, costly[name].milliseconds
        assert after["chosen"] - before["chosen"] == pytest.approx(more)
        assert after["AllReduce"] == before["AllReduce"]
    assert costly["embedding"].pays_up_to < free["embedding"].pays_up_to
    assert free["kernel"].pays_up_to == 0


def test_rules_masks_and_two_levels_are_seen_through():
    inner = optax.masked(
        sparsejax.zen_sync(rules={"kernel": schemes.SparCML()}),
        {"embedding": True, "kernel": True, "bias": False},
    )
    _, rows = explained(optax.chain(inner, optax.sgd(0.1)))
    assert set(rows) == {"embedding", "kernel"}
    assert rows["kernel"].scheme == "SparCML"
    _, rows = explained(sparsejax.zen_sync(("hosts", "chips")), ranks=(16, 8))
    assert rows["embedding"].scheme == "TwoLevel(Zen)"
    # A rank of a host sends its eighth.
    assert rows["embedding"].dense_bytes == 2 * 15 / 16 * 4 * 50_000 * 64 / 8


def test_a_bound_transformation_is_seen_through():
    tx = optax.chain(sparsejax.dgc(0.01), sparsejax.zen_sync(), optax.adam(1e-3))
    bound = sparsejax.bind(tx, helpers.mesh_of(4))
    assert explained(bound)[0] == explained(tx)[0]


def test_a_million_ranks_are_forecast_in_seconds():
    """Nothing is listed rank by rank."""
    for tx in (sparsejax.zen_sync(), sparsejax.transforms.gtopk_sync(0.01)):
        for ranks in (10**6, 2**24 - 1):
            found, rows = explained(tx, ranks=ranks)
            assert found.ranks == ranks
            assert rows["embedding"].sent_bytes > 0


def test_bad_input_is_refused():
    for options, match in (
        ({"ranks": 0}, "ranks must be a positive int"),
        ({"ranks": 10**9}, r"ranks must be at most 16,777,216 in all, .* got 1000000000"),
        ({"ranks": (4, 2)}, "ranks is a pair, and the synchronization has one level"),
        ({"density": "0.1"}, "density must be a number"),
        ({"network": 25}, r"network must be a sparsejax.Network\(.*, got 25"),
        ({"density": 2}, r"density must lie in \[0, 1\]"),
        ({"ids": 8192}, r"ids must be \{pattern of paths: .*'embedding': 8192\}, got 8192"),
        ({"ids": {"embedding": 0.5}}, "ids of 'embedding' must be a positive int, got 0.5"),
        (
            {"ids": {"embed": 100}, "density": {"embed": 0.01}},
            "density of leaf 'embedding' is 0.01, which is 500 of .* a rank lists 100 ids",
        ),
    ):
        with pytest.raises(errors.ArgumentError, match=match):
            explained(**options)
    with pytest.raises(errors.ArgumentError, match="no sparsejax synchronization"):
        explained(optax.adam(1e-3))
    with pytest.raises(errors.ArgumentError, match=r"tx must be .*zen_sync.* got a Zen"):
        explained(schemes.Zen())
    with pytest.raises(errors.ArgumentError, match="they are swapped"):
        explained(PARAMS, params=optax.adam(1e-3))
    with pytest.raises(errors.ArgumentError, match="has two levels, and ranks is one"):
        explained(sparsejax.zen_sync(("hosts", "chips")))
    with pytest.raises(errors.RuleError, match="'embeding' matches no leaf"):
        explained(density={"embeding": 0.1})
    with pytest.raises(errors.RuleError, match="not a regular expression"):
        explained(ids={"(": 10})
    for tx, name in (
        (optax.chain(sparsejax.dgc(0.01), sparsejax.zen_sync()), "TopK|DGC|Dgc"),
        (sparsejax.ok_topk_sync(0.01), "OkTopk"),
        (sparsejax.accumulate(sparsejax.zen_sync(), 2), "accumulate"),
    ):
        with pytest.raises(errors.ArgumentError, match=f"'embedding', and ({name}) takes"):
            explained(tx, ids={"embed": 10})
    huge = {"w": jax.ShapeDtypeStruct((100_000, 100_000), jnp.float32)}
    with pytest.raises(errors.ArgumentError, match="leaf 'w' has 10,000,000,000 units"):
        sparsejax.explain(sparsejax.zen_sync(), huge, **NETWORK)
    dense = sparsejax.explain(sparsejax.zen_sync(rules={"w": "dense"}), huge, **NETWORK)
    assert dense.rows[0].milliseconds["BalancedParallelism"] is None


def test_explaining_leaves_the_optimizer_as_it_was():
    """Nor does it matter what was traced before."""
    tx = sparsejax.zen_sync()
    params = {"embedding": jnp.zeros((9000, 8))}
    before = jax.eval_shape(tx.init, params)
    for density in (0.1, 0.2):
        found = sparsejax.explain(tx, params, **NETWORK, density=density)
        assert found.rows[0].density == pytest.approx(density)
    after = jax.eval_shape(tx.init, params)
    assert jax.tree.structure(before) == jax.tree.structure(after)


def test_empty_leaves_and_single_arrays_are_explained():
    assert "In all a step sends" in str(
        sparsejax.explain(optax.chain(sparsejax.zen_sync()), {}, **NETWORK)
    )
    params = {"none": jax.ShapeDtypeStruct((0, 5), jnp.float32), **PARAMS}
    found = sparsejax.explain(sparsejax.zen_sync(), params, **NETWORK)
    assert found.row("none").paths == ("bias", "none")
    alone = sparsejax.explain(sparsejax.dense_sync(), {"n": params["none"]}, **NETWORK)
    assert "n [0, 5]" in str(alone)
    assert "there is nothing to send" in alone.advice
    one = sparsejax.explain(sparsejax.zen_sync(), PARAMS["embedding"], **NETWORK)
    assert "value [50000, 64]" in str(one)


def test_a_leaf_is_held_against_a_dense_sum_of_its_own_wire_dtype():
    wide, narrow = (
        explained(sparsejax.zen_sync(wire_dtype=dtype))[1]["embedding"]
        for dtype in (None, jnp.bfloat16)
    )
    assert narrow.dense_bytes == wide.dense_bytes / 2


def test_patterns_may_lie_in_different_synchronizations():
    tx = optax.partition(
        {"rows": sparsejax.zen_sync(), "rest": sparsejax.dense_sync()},
        {"embedding": "rows", "kernel": "rest", "bias": "rest"},
    )
    _, rows = explained(tx, density={"embedding": 0.1, "kernel": 0.2, "": 0.5})
    assert rows["embedding"].density == pytest.approx(0.1)
    assert rows["kernel"].density == pytest.approx(0.2)
    assert rows["bias"].density == pytest.approx(0.5)


MODEL = ["--leaf", "embedding=5000x64", "--leaf", "bias=100:bfloat16"]
ARGUMENTS = ["--ranks", "8", "--gbit-per-s", "10", "--latency-us", "5"]


HERE = __name__ if "." in __name__ else "tests.advise.test_explain"


def test_the_command_prints_a_table_or_json(capsys):
    assert command.main(["explain", *MODEL, *ARGUMENTS, "--platform", "gpu"]) == 0
    printed = capsys.readouterr().out
    assert "embedding [5000, 64]" in printed
    assert "8 ranks, 10 Gbit/s, 5 us, on GPUs" in printed
    assert command.main(["explain", *MODEL, *ARGUMENTS, "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["ranks"] == 8
    assert read["rows"][0]["dtype"] == "bfloat16"
    # Where no density pays at any bandwidth a number is infinite, which JSON has not.
    nothing = [*MODEL, "--leaf-density", "embed=0", *ARGUMENTS, "--json"]
    assert command.main(["explain", *nothing]) == 0
    refuse = lambda name: pytest.fail(name)
    read = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert None in [row["pays_up_to"] for row in read["rows"]]
    ids = ["--ids", "embed=1000", "--leaf-density", "embed=0.1"]
    assert command.main(["explain", *MODEL, *ARGUMENTS, *ids]) == 0
    assert "row, 1,000 ids" in capsys.readouterr().out


def test_a_reader_that_has_enough_is_no_error():
    """As `| head -1`."""
    line = [sys.executable, "-m", "sparsejax", "explain", *MODEL, *ARGUMENTS]
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run(line, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (ran.returncode, ran.stderr) == (128 + signal.SIGPIPE, b"")


def test_the_command_reads_models_and_plans(capsys, tmp_path):
    assert command.main(["explain", f"{HERE}:model", *ARGUMENTS, "--inner", "2"]) == 0
    assert "TwoLevel(Zen)" in capsys.readouterr().out
    leaf = sparsejax.advise.LeafPlan(
        "a", (70_000,), "float32", "element", schemes.AGSparse()
    )
    sparsejax.Plan(8, (leaf,)).save(tmp_path / "plan.json")
    plan = ["--plan", str(tmp_path / "plan.json")]
    assert command.main(["explain", *plan, *ARGUMENTS]) == 0
    assert "AGSparse" in capsys.readouterr().out
    other = ["--ranks", "4", *ARGUMENTS[2:]]
    assert command.main(["explain", *plan, *other]) == 2
    assert "made for 8 ranks, and there are 4" in capsys.readouterr().err


def model():
    return PARAMS


def a_pair_the_wrong_way_round():
    return PARAMS, sparsejax.zen_sync()


class Flax(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


a_module = Flax()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "nothing to explain"),
        (["--leaf", "x"], "a leaf is written"),
        (["nowhere"], "written module:name"),
        ([*MODEL, "--leaf-density", "embedding=lots"], "a density is written"),
        ([*MODEL, "--leaf-density", "nothing=0.1"], "matches no leaf"),
        ([*MODEL, "--ids", "embedding=many"], "ids are written PATTERN=NUMBER"),
        ([*MODEL, "--ids", "nothing=7"], "ids of 'nothing' match no leaf"),
        ([*MODEL, "--ids", "bias=7"], "by rows. Those are: 'embedding'"),
        ([*MODEL, *MODEL], "given twice"),
        (["a:b", *MODEL], "not both"),
        ([*MODEL, "--ids", "embedding=99999999999"], "at most 2,147,483,647, got 99"),
        (["--leaf", "w=4x4:garbage"], "garbage"),
        (["--plan", "nowhere.json"], "nowhere.json"),
        ([f"{HERE}:a_pair_the_wrong_way_round"], "they are swapped"),
        ([f"{HERE}:a_module"], "nnx.state(model, nnx.Param)"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, match, capsys):
    assert command.main(["explain", *arguments, *ARGUMENTS]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert match in told


@pytest.mark.parametrize("kind", helpers.KINDS)
def test_advice_under_a_mesh_that_was_set_is_that_without(kind):
    """A program under `jit` sets its mesh first."""
    mesh = helpers.KINDS[kind](helpers.grid(data=2, model=2))
    over = jax.NamedSharding(mesh, jax.P("model"))
    params = {"embedding": jax.device_put(jnp.zeros((20_000, 8)), over)}
    tx = sparsejax.zen_sync("data", reduce="sum")
    plan = lambda: sparsejax.make_plan(
        [sparsejax.advise.profile_from_state(state, params, ranks=2)],
        params,
        ranks=2,
        network=NETWORK["network"],
    )
    doctor = lambda: sparsejax.doctor(tx, params, network=NETWORK["network"])
    made = lambda: (str(explained(tx, params, density=0.01)[0]), plan(), str(doctor()))
    with jax.set_mesh(mesh):
        state = sparsejax.init(tx, params)
        inside = made()
    assert inside == made()


def test_a_forecast_is_for_the_platform_that_is_named():
    """GPUs send entries where they save 0.72 MB, and TPUs list no single numbers."""
    params = {
        "embedding": jax.ShapeDtypeStruct((50_000, 64), jnp.float32),
        "small": jax.ShapeDtypeStruct((90_000,), jnp.bfloat16),
        "kernel": jax.ShapeDtypeStruct((2000, 2000), jnp.float32),
    }
    by_platform = {
        name: explained(params=params, density=0.01, platform=name)[1]
        for name in (None, "cpu", "gpu", "tpu")
    }
    saved = {
        platform: {name: row.sent_bytes < row.dense_bytes for name, row in rows.items()}
        for platform, rows in by_platform.items()
    }
    everything = {"embedding": True, "small": True, "kernel": True}
    assert saved[None] == saved["cpu"] == everything
    assert saved["gpu"] == everything | {"small": False}
    assert saved["tpu"] == everything | {"small": False, "kernel": False}
    assert by_platform["tpu"]["kernel"].scheme == "AllReduce"
    # Messages of GPUs have other sizes.
    sent = {name: rows["kernel"].sent_bytes for name, rows in by_platform.items()}
    assert sent["gpu"] != sent["cpu"]
    with pytest.raises(errors.ArgumentError, match="platform must be one of 'cpu', 'gpu'"):
        explained(platform="cuda")
