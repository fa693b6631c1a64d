"""A forecast from true counts is what a run sends."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sparsejax import errors, schemes
from sparsejax.schemes import forecast, two_level
from sparsejax.units.row_grads import RowGrads
from tests import helpers
from tests.laws.test_exact_sum import SCHEMES


SIZE = 60_000
# They are as others with another code or hash, or forecast what a later step sends; what
# the dense sum sends follows from the size alone.
AS_OTHERS = [
    *("all_reduce", "balanced_murmur", "balanced_algorithm_1"),
    *("balanced_coo32", "balanced_coo16", "balanced_coo8", "hierarchical_bitmap"),
    *("zen", "zen_hierarchical", "zen_bytes", "zen_after_a_step", "omni_reduce_1"),
]
# Ranks with which loads are drawn, if not 4: with a fold, or with other owners.
DRAWN = {
    "ag_sparse_ring": 3,
    "ag_sparse_doubling": 5,
    "ag_sparse_bruck": 5,
    "hierarchical": 5,
    "sparcml": 5,
    "sparcml_split": 5,
    "sparse_ps": 5,
    "omni_reduce_20": 5,
}


def load_of(x, n, units):
    """The true load of gradients [n, units, ...]."""
    mask = (x != 0).reshape(n, units, -1).any(2)
    counts = []
    for held in forecast.merged(n):
        groups = [mask[i : i + held].any(0).sum() for i in range(0, n - held + 1, held)]
        counts.append(float(max(groups)))
    ranges = lambda row: np.array([part.sum() for part in np.array_split(row, n)])
    skew = max(n * ranges(row).max() / max(row.sum(), 1) for row in mask)
    union = mask.any(0)
    return forecast.Load(
        n,
        units,
        x[0].size // units,
        "float32",
        tuple(counts),
        float(skew),
        float(n * ranges(union).max() / max(union.sum(), 1)),
    )


@functools.cache
def traffic_of(scheme, n):
    """From gradients [n, ...] to what a first step sends."""

    run = helpers.ranked(lambda x: helpers.call(scheme, x).traffic, n)
    return lambda x: jax.tree.map(lambda each: each[0], run(x))


def drawn(rng, n):
    """A random load: how full it is, how it lies, and how unlike ranks are."""
    alike, is_sparse = rng.random(2) < 0.5
    shape = (1, 1) if alike else (n, 1)
    density = 10 ** rng.uniform(-4, 0, shape) if is_sparse else rng.uniform(0, 1, shape)
    density = density if rng.random() < 0.9 else 1.0
    at = np.arange(SIZE)
    there = rng.random((n, SIZE)) < density
    if rng.random() < 0.3:
        there &= (at < rng.integers(100, SIZE)) | (rng.random(SIZE) < 0.1)
    return np.where(there, 1, 0).astype(np.float32)


def blocks_of(scheme, x):
    """Which blocks [n, blocks] of gradients [n, size] OmniReduce sends."""
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % scheme.block)))
    return (x != 0).reshape(len(x), -1, scheme.block).any(2)


def ways_of(scheme, n, loads):
    """Whether random loads were sent densely: each as was forecast, to the byte."""
    step, rng, ways = traffic_of(scheme, n), np.random.default_rng(0), set()
    for _ in range(loads):
        x = drawn(rng, n)
        mask = blocks_of(scheme, x) if isinstance(scheme, schemes.OmniReduce) else x != 0
        fullest = helpers.fullest_of(scheme, mask)
        load = dataclasses.replace(load_of(x, n, SIZE), fullest=fullest)
        told = scheme.forecast(load)
        assert_sent(told, step(x))
        ways.add(told.dense)
    return ways


def assert_sent(told, traffic):
    push, pull = float(traffic.push.wire), float(traffic.pull.wire)
    assert told.bytes == pytest.approx(push + pull, rel=1e-6), (
        f"{told}, but {push:,.0f} bytes were pushed and {pull:,.0f} pulled"
    )
    if not told.dense:
        rounds = float(traffic.push.rounds + traffic.pull.rounds)
        assert told.rounds == rounds, (told, traffic)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("balanced", 4),
        ("ag_sparse", 4),
        *helpers.slow(
            *(
                (name, DRAWN.get(name, 4))
                for name in SCHEMES
                if name not in ("balanced", "ag_sparse", *AS_OTHERS)
            ),
            # Of these a partial sum may go densely where the one before it did not.
            ("hierarchical_coo32", 5),
        ),
    ],
)
def test_a_forecast_of_a_random_load_is_what_a_run_sends(name, n):
    """To the byte where the counts of the fullest parts are known: there is one plan."""
    more = {"hierarchical_coo32": schemes.HierarchicalCentralization(code="coo32")}
    scheme = (SCHEMES | more)[name]
    ways = ways_of(scheme, n, 30)
    counts = forecast.independent(n, SIZE, 1e-4)
    sparsest = scheme.forecast(forecast.Load(n, SIZE, 1, "float32", counts))
    assert ways == {True, sparsest.dense}, f"{name} was drawn only with dense = {ways}"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n"), [("balanced", 4), ("sparse_ps", 5)])
def test_a_forecast_for_gpus_is_what_a_run_sends_there(name, n):
    """Messages have other sizes there, and where all sums come back some come twice."""
    with helpers.traced_for("cuda", overhead=20_000):
        traffic_of.cache_clear()
        ways = ways_of(SCHEMES[name], n, 20)
    traffic_of.cache_clear()
    assert ways == {True, False}


def drawn_ids(rng, n, height, count):
    """Random lists: how many rows ranks list, of how many, and of one owner or of all."""
    ids = rng.integers(0, rng.integers(1, height + 1), (n, count))
    if rng.random() < 0.2:
        ids = helpers.of_one_owner(n, height, count)
    listed = rng.integers(0, count + 1, (n, 1))
    return np.where(np.arange(count) < listed, ids, height).astype(np.int32)


@pytest.mark.parametrize(
    ("name", "n", "ways"),
    [
        ("balanced", 4, {1, 2}),
        # Of each of their own ways; variants are in `test_exact_rows`.
        *helpers.slow(
            ("ag_sparse_doubling", 5, {1}),
            ("zen", 5, {1, 2}),
            ("ag_sparse_ring", 4, {1}),
            ("ag_sparse_bruck", 5, {1}),
            ("sparcml", 5, {1}),
            ("sparcml_split", 5, {1, 2}),
            ("sparse_ps", 5, {1, 2}),
            ("omni_reduce", 4, {1, 2}),
        ),
    ],
)
def test_a_forecast_of_random_lists_of_rows_is_what_a_run_sends(name, n, ways):
    """To the byte, by owners in two rounds and to all in one."""
    (height, width, count), scheme = (5003, 6, 300), SCHEMES[name]

    def run(ids, rows):
        grads = RowGrads(ids[0], rows[0], (height, width))
        return scheme.rows([grads], helpers.WIRE).traffic

    mapped = {"mesh": helpers.mesh_of(n), "in_specs": P("data"), "out_specs": P()}
    step = jax.jit(helpers.shard_map(run, **mapped))
    rng, taken = np.random.default_rng(0), set()
    for _ in range(40):
        ids = drawn_ids(rng, n, height, count)
        mask = np.zeros((n, height + 1), bool)
        np.put_along_axis(mask, ids, True, 1)
        mask = mask[:, :height]
        load = dataclasses.replace(
            load_of(mask, n, height),
            numbers=width,
            room=count,
            listed=True,
            fullest=helpers.fullest_of(scheme, mask),
        )
        told = scheme.forecast(load)
        assert_sent(told, step(ids, np.ones((n, count, width), np.float32)))
        taken.add(told.rounds)
    assert taken == ways


@pytest.mark.parametrize(
    ("scheme", "n"),
    [
        (schemes.PowerSGD(2), 4),
        *helpers.slow(
            (schemes.GTopk(0.02), 5),
            (schemes.SparDL(0.02), 5),
            (schemes.SparDL(0.02, teams=4, code="coo32"), 8),
        ),
    ],
)
def test_what_has_one_size_is_forecast_to_the_byte(scheme, n):
    """Of Ok-Topk, and of SparDL's B-SAG, the state decides how much is sent."""
    shape = (2, 60, 50) if scheme.unit == "leaf" else (SIZE,)
    x = np.random.default_rng(0).standard_normal((n, *shape)).astype(np.float32)
    load = dataclasses.replace(load_of(x, n, x[0].size), shape=shape[1:])
    assert_sent(scheme.forecast(load), traffic_of(scheme, n)(x))


@pytest.mark.slow
@pytest.mark.parametrize("across", [schemes.Zen(), schemes.HierarchicalCentralization()])
def test_a_forecast_of_two_levels_is_that_of_the_part_that_sends_most(across):
    """Each rank of a host sends its part; push and pull are those of the fullest."""
    outer, inner, scheme = 4, 2, schemes.TwoLevel(across)
    axes = ("hosts", "chips")
    run = lambda x: helpers.call(scheme, x[0], axis=axes).traffic
    grid = helpers.grid(hosts=outer, chips=inner)
    mapped = {"mesh": grid, "in_specs": P(axes), "out_specs": P()}
    step = jax.jit(helpers.shard_map(run, **mapped))
    layout, rng, ways = two_level._INSIDE.over(SIZE, inner), np.random.default_rng(0), set()
    units = np.asarray(layout.invert(np.arange(inner)[:, None], jnp.arange(layout.width)))
    for _ in range(20):
        x = drawn(rng, outer * inner)
        hosts = np.pad(x.reshape(outer, inner, SIZE).sum(1), ((0, 0), (0, 1)))
        told = []
        for places in np.minimum(units, SIZE):
            part = hosts[:, places]
            load = load_of(part, outer, layout.width)
            fullest = helpers.fullest_of(across, part != 0)
            told.append(scheme.forecast(dataclasses.replace(load, fullest=fullest)))
        traffic = step(x)
        assert max(part.push for part in told) == pytest.approx(float(traffic.push.wire))
        assert max(part.pull for part in told) == pytest.approx(float(traffic.pull.wire))
        ways |= {part.dense for part in told}
    assert ways == {True, False}


def test_counts_between_known_ones_are_powers():
    load = forecast.Load(8, 1000, 1, "float32", (10.0, 20.0, 40.0, 80.0))
    for ranks in (1, 2, 3, 4, 6, 8):
        assert load.count(ranks) == pytest.approx(10 * ranks)
    empty = forecast.Load(4, 1000, 1, "float32", (0.0, 0.0, 0.0))
    assert empty.count(2) == 0


def test_a_part_is_that_of_one_rank_of_a_host():
    counts = forecast.independent(8, 8000, 0.01)
    load = forecast.Load(8, 8000, 4, "float32", counts)
    part = load.part(2)
    assert (part.ranks, part.units, part.numbers) == (4, 4000, 4)
    assert part.counts == pytest.approx([c / 2 for c in counts[1:]])


def test_counts_of_another_number_of_ranks_are_refused():
    with pytest.raises(errors.ArgumentError, match="counts must have 4 numbers"):
        forecast.Load(8, 1000, 1, "float32", (1.0, 2.0))


def test_a_forecast_of_seconds_adds_latencies_and_bytes():
    one = forecast.Forecast(1e6, 0.25e6, 10)
    assert one.seconds(forecast.Network(1, 100)) == pytest.approx(0.001 + 0.01)
    assert one.bytes == 1.25e6
    # An infinite bandwidth leaves the latencies.
    assert one.seconds(forecast.Network(float("inf"), 100)) == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        (("fast", 1), "gbit_per_s must be above 0, got 'fast'"),
        ((1, float("inf")), "latency_us must be at least 0, got inf"),
    ],
)
def test_a_network_that_cannot_be_is_refused(numbers, match):
    with pytest.raises(errors.ArgumentError, match=match):
        forecast.Network(*numbers)


def test_the_dense_forecast_is_that_of_an_all_reduce():
    load = forecast.Load(4, 1000, 1, "float32", (1000.0, 1000.0, 1000.0))
    for scheme in SCHEMES.values():
        assert scheme.forecast(load).bytes <= 1.5 * 4 * 1000 * 1.1
    assert schemes.AllReduce(jnp.bfloat16).forecast(load).bytes == 1.5 * 2 * 1000
