"""A forecast from true counts is what a run sends."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sparsejax import errors, schemes
from sparsejax.schemes import forecast
from sparsejax.units.slots import Slots
from sparsejax.wire import ladder
from tests import helpers
from tests.laws.test_exact_sum import SCHEMES


SIZE = 60_000


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


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("all_reduce", 4),
        ("balanced", 4),
        *helpers.slow(
            ("hierarchical", 5),
            ("ag_sparse", 4),
            ("balanced_algorithm_1", 4),
            ("balanced_contiguous", 4),
            ("balanced_capacity", 4),
            ("hierarchical", 4),
            ("sparcml", 4),
            ("sparcml_split", 5),
            ("sparcml_dense", 4),
            ("sparse_ps", 5),
            ("sparse_ps_broadcast", 4),
        ),
    ],
)
def test_a_forecast_from_true_counts_is_what_a_run_sends(name, n):
    scheme = SCHEMES[name]

    def run(x):
        return helpers.call(scheme, x[0], helpers.init(scheme, x[0])).traffic

    mesh = helpers.mesh_of(n)
    step = jax.jit(helpers.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P()))
    rng, errors_seen = np.random.default_rng(3), []
    for density in (0.002, 0.02, 0.2):
        x = np.where(rng.random((n, SIZE)) < density, 1, 0).astype(np.float32)
        traffic = step(x)
        expected = scheme.forecast(load_of(x, n, SIZE))
        sent = float(traffic.wire - traffic.scalars)
        # The fullest part is reckoned, and may fall on the next message size, 2 apart.
        # With a fold not all partial sums are over a power of two.
        room = 0.35 if n == 4 else 0.5
        if expected.dense:
            room = 1e-6
        assert abs(expected.bytes - sent) <= room * sent, (density, expected, sent)
        errors_seen.append(abs(expected.bytes - sent) / sent)
        assert expected.rounds <= expected.messages
        if errors_seen[-1] < 1e-6:
            rounds = float(traffic.push.rounds + traffic.pull.rounds)
            assert expected.rounds == rounds, (density, expected, rounds)
    if n == 4:
        assert min(errors_seen) < 1e-6


def drawn(rng, n):
    """A random load: how full it is, how it lies, and how unlike ranks are."""
    density = 10 ** rng.uniform(-4, 0, (n, 1)) if rng.random() < 0.5 else None
    density = 10 ** rng.uniform(-4, 0) if density is None else density
    at = np.arange(SIZE)
    there = rng.random((n, SIZE)) < density
    if rng.random() < 0.3:
        there &= (at < rng.integers(100, SIZE)) | (rng.random(SIZE) < 0.1)
    return np.where(there, 1, 0).astype(np.float32)


def with_fullest(load, scheme, x):
    """The load with the fullest parts by the owners of a scheme, where it has owners."""
    ownership = getattr(scheme, "ownership", None)
    if ownership is None:
        return load
    layout = ownership.over(SIZE, load.ranks)
    fullest = jax.jit(lambda flags: jnp.max(Slots.of(layout.split(flags)).counts))
    pushed = max(int(fullest(row)) for row in x != 0)
    return dataclasses.replace(load, fullest=(pushed, int(fullest((x != 0).any(0)))))


@pytest.mark.parametrize(
    "name",
    [
        "balanced",
        "ag_sparse",
        *helpers.slow(
            "all_reduce",
            "ag_sparse_doubling",
            "balanced_bitmap",
            "balanced_contiguous",
            "balanced_capacity",
            "hierarchical",
            "zen",
        ),
    ],
)
def test_a_forecast_of_a_random_load_is_what_a_run_sends(name):
    """To the byte where the counts of the fullest parts are known: there is one plan."""
    n, scheme = 4, SCHEMES[name]

    def run(x):
        return helpers.call(scheme, x[0], helpers.init(scheme, x[0])).traffic

    mesh = helpers.mesh_of(n)
    step = jax.jit(helpers.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P()))
    rng, ways = np.random.default_rng(0), set()
    for _ in range(40):
        x = drawn(rng, n)
        traffic = step(x)
        told = scheme.forecast(with_fullest(load_of(x, n, SIZE), scheme, x))
        sent = float(traffic.wire - traffic.scalars)
        assert told.bytes == pytest.approx(sent, rel=1e-6), (told, traffic)
        if not told.dense:
            assert told.rounds == float(traffic.push.rounds + traffic.pull.rounds)
        ways.add(told.dense)
    assert ways == ({True} if name == "all_reduce" else {True, False})


def test_omni_reduce_forecasts_blocks():
    n, scheme = 4, schemes.OmniReduce(block=64)
    rng = np.random.default_rng(3)
    x = np.where(rng.random((n, SIZE)) < 0.002, 1, 0).astype(np.float32)
    step = helpers.shard_map(
        lambda x: helpers.call(scheme, x[0]).traffic,
        mesh=helpers.mesh_of(n),
        in_specs=P("data"),
        out_specs=P(),
    )
    traffic = jax.jit(step)(x)
    sent = float(traffic.wire - traffic.scalars)
    expected = scheme.forecast(load_of(x, n, SIZE))
    assert abs(expected.bytes - sent) <= 0.35 * sent


def test_rounds_by_python_are_those_of_the_program():
    steps = ladder.ladder(1 << 20, 4, 8)
    for need in (0, 1, 50, 1000, 5000, 40_000, 131_073, 600_000):
        for messages in (1, 7):
            taken = steps.messages_for(need, messages)
            told = helpers.rounds_of(steps, need, messages)
            assert taken == [rung for rung, _ in told]


@pytest.mark.parametrize("n", [1, 2, 3, 8, 12])
def test_sums_are_over_powers_of_two_and_all(n):
    sums = forecast.merged(n)
    assert sums[0] == 1
    assert sums[-1] == n
    assert all(b == 2 * a for a, b in itertools.pairwise(sums[:-1]))


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
        ((0, 1), "gbit_per_s must be above 0, got 0"),
        ((float("nan"), 1), "gbit_per_s must be above 0, got nan"),
        (("fast", 1), "gbit_per_s must be above 0, got 'fast'"),
        ((1, -1), "latency_us must be at least 0, got -1"),
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
