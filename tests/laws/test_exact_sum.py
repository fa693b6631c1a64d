"""The laws that every scheme obeys. A new scheme is a row in SCHEMES.

Shapes come from a short list, because every one is compiled; the numbers vary freely.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax.wire.ladder
from sparsejax import schemes
from sparsejax.schemes import doubling
from sparsejax.schemes.zen import growth
from sparsejax.units import ownership
from tests import helpers


@dataclasses.dataclass(frozen=True)
class AfterAStep(schemes.Zen):
    """Zen that has seen sums grow fourfold: three and four ranks send all to all."""

    optimum: str = "fastest"

    def init(self, like, wire):
        assert wire is not None
        seen = jnp.linspace(0.1, 0.4, doubling.hops(wire.ranks) + 1)
        return super().init(like, wire)._replace(curve=growth.measured(seen))


SCHEMES = {
    "all_reduce": schemes.AllReduce(),
    "balanced": schemes.BalancedParallelism(),
    "balanced_murmur": schemes.BalancedParallelism(ownership=ownership.MurmurHash(seed=3)),
    "balanced_algorithm_1": schemes.BalancedParallelism(
        ownership=ownership.MurmurHash(seed=3, memory=0.25)
    ),
    "balanced_contiguous": schemes.BalancedParallelism(ownership=ownership.Contiguous()),
    "balanced_coo32": schemes.BalancedParallelism(push_code="coo32", pull_code="coo32"),
    "balanced_coo16": schemes.BalancedParallelism(push_code="coo16", pull_code="coo16"),
    "balanced_coo8": schemes.BalancedParallelism(push_code="coo8", pull_code="coo8"),
    "balanced_bitmap": schemes.BalancedParallelism(push_code="bitmap", pull_code="bitmap"),
    "hierarchical": schemes.HierarchicalCentralization(),
    "hierarchical_bitmap": schemes.HierarchicalCentralization(code="bitmap"),
    "balanced_capacity": schemes.BalancedParallelism(
        push_capacity=20, pull_capacity=40, ratio=4.0
    ),
    "hierarchical_bound": schemes.HierarchicalCentralization(switch="bound"),
    "zen": schemes.Zen(),
    "zen_hierarchical": schemes.Zen("hierarchical"),
    "zen_bytes": schemes.Zen("bytes"),
    "zen_after_a_step": AfterAStep(),
    "ag_sparse": schemes.AGSparse(),
    "ag_sparse_ring": schemes.AGSparse("ring"),
    "ag_sparse_doubling": schemes.AGSparse("doubling"),
    "ag_sparse_bruck": schemes.AGSparse("bruck", code="auto"),
    "sparcml": schemes.SparCML(),
    "sparcml_split": schemes.SparCML("ssar_split_all_gather"),
    "sparcml_dense": schemes.SparCML("dsar_split_all_gather"),
    "omni_reduce": schemes.OmniReduce(block=32),
    "omni_reduce_1": schemes.OmniReduce(block=16, aggregators=1),
    "omni_reduce_20": schemes.OmniReduce(block=16, aggregators=20),
    "sparse_ps": schemes.SparsePS(),
    "sparse_ps_broadcast": schemes.SparsePS("broadcast"),
}
# Those that never send more bytes than the dense sum, padding included.
LOSSLESS_NEVER_WORSE = [
    "all_reduce",
    "balanced",
    "balanced_murmur",
    "balanced_algorithm_1",
    "balanced_bitmap",
    "balanced_capacity",
    "zen",
    "zen_bytes",
    "zen_after_a_step",
    "ag_sparse",
    "ag_sparse_ring",
    "ag_sparse_doubling",
    "ag_sparse_bruck",
    "sparcml_split",
    "sparcml_dense",
    "sparse_ps",
    "sparse_ps_broadcast",
]
# One of each kind.
OF_EACH_KIND = [
    "all_reduce",
    "balanced_bitmap",
    "hierarchical",
    "zen_after_a_step",
    "ag_sparse",
    "sparcml_split",
    "omni_reduce",
    "sparse_ps",
]
# What a change would break first: a dense sum, hops and a gather; owners are in the test of
# any number of ranks. The other variants are slow tests.
ALWAYS = ["all_reduce", "hierarchical", "ag_sparse"]
# Of codes one here: `tests/wire` has each at any density.
CODES = ("balanced_coo32", "balanced_coo16", "balanced_bitmap", "hierarchical_bitmap")
# On three ranks it is the same program as "hierarchical".
SAME = ("zen_hierarchical",)
SIZE = 3001  # not divisible by any number of ranks tested; several words, blocks, rounds


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Small inputs take several tiles, as large ones do."""
    monkeypatch.setattr(sparsejax.wire.ladder, "_TILE_NUMBERS", 64)


@functools.cache
def compiled(name, n, shape, dtype, check_vma=True):
    """The scheme on n ranks: from x [n, *shape] to totals by rank, and the traffic."""
    scheme = SCHEMES[name]
    mesh = helpers.mesh_of(n)

    def run(x):
        state = helpers.init(scheme, x[0])
        reduced = helpers.call(scheme, x[0], state)
        assert reduced.left is None
        return reduced.total, reduced.total[None], reduced.traffic

    specs = (P(), P("data"), P())
    step = helpers.shard_map(
        run, mesh=mesh, in_specs=P("data"), out_specs=specs, check_vma=check_vma
    )
    return jax.jit(step).lower(jax.ShapeDtypeStruct((n, *shape), dtype)).compile()


def cases(n, shape, dtype):
    """Gradients of n ranks, [n, *shape], by name."""
    rng = np.random.default_rng(7)
    units = shape[0]
    dense = rng.standard_normal((n, *shape))

    def keep(mask):
        mask = np.broadcast_to(mask, (n, units)).reshape(n, units, *[1] * (len(shape) - 1))
        return np.where(mask, dense, 0)

    for density in (0.0, 0.001, 0.01, 0.1, 0.3, 0.6, 0.95, 1.0):
        yield f"density_{density}", keep(rng.random((n, units)) < density)
        yield f"same_units_{density}", keep(rng.random(units) < density)
    unit = np.arange(units)
    yield "first_unit", keep(unit == 0)
    yield "last_unit", keep(unit == units - 1)
    yield "one_range", keep(unit < units // 7)
    yield "strided_by_n", keep(unit % max(n, 2) == 0)
    yield "strided_by_n_squared", keep(unit % max(n * n, 2) == 0)
    yield "strided_by_64", keep(unit % 64 == 0)
    lonely = np.zeros((n, units), bool)
    lonely[n - 1] = rng.random(units) < 0.2
    yield "one_rank_alone", keep(lonely)
    yield "one_rank_empty", keep(np.roll(~lonely & (rng.random((n, units)) < 0.2), 1, 0))
    cancel = keep(rng.random(units) < 0.1)
    cancel[:] = cancel[:1] * np.resize([1, -1], n).reshape(n, *[1] * len(shape))
    cancel[n - 1] *= n % 2 == 0
    yield "cancels_to_zero", cancel
    odd = keep(rng.random((n, units)) < 0.05)
    flat = odd.reshape(n, -1)
    flat[0, 3], flat[n - 1, 40], flat[n // 2, 41] = np.nan, np.inf, -np.inf
    flat[:, 50] = np.nan
    flat[0, 60], flat[n - 1, 60] = np.inf, -np.inf
    yield "nan_and_inf", odd
    # NaNs of one rank, and of two with a payload each; a sum that is too large.
    flat = odd.reshape(n, -1)
    bits = np.array([0x7FF8000123450000, 0xFFF8000077700000], np.uint64).view(np.float64)
    flat[n - 1, 70], flat[0, 71], flat[n // 2, 71] = bits[0], bits[1], bits[0]
    flat[0, 80] = flat[n - 1, 80] = 0.75 * float(jnp.finfo(dtype).max)
    flat[0, 81] = flat[n - 1, 81] = -0.75 * float(jnp.finfo(dtype).max)
    yield "payloads_and_too_large", odd
    tiny = np.zeros((n, *shape))
    tiny.reshape(n, -1)[0, ::5] = float(jnp.finfo(dtype).tiny) * 4
    yield "tiny", tiny
    minus = keep(rng.random((n, units)) < 0.1)
    yield "minus_zero", np.where(minus == 0, -0.0, minus)


def assert_exact(x, total, by_rank, where):
    """Raises unless total is the float64 sum of x [n, ...], and each rank has its bytes."""
    dtype = x.dtype
    eps, exact = float(jnp.finfo(dtype).eps), x.astype(np.float64)
    helpers.assert_same_on_all_ranks({where: by_rank})
    assert by_rank[0].tobytes() == total.tobytes(), (
        f"{where}: rank 0 differs from the total"
    )
    with np.errstate(invalid="ignore", over="ignore"):
        want = exact.sum(0)
        # Too large for its dtype; in the table no other sum is near that.
        want = np.where(np.abs(want) > float(jnp.finfo(dtype).max), want * np.inf, want)
        room = (len(x) + 2) * eps * np.abs(exact).sum(0) + float(jnp.finfo(dtype).tiny)
    got = total.astype(np.float64)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=where)
    np.testing.assert_array_equal(got[~finite], want[~finite], err_msg=where)
    found, wanted = np.where(finite, got, 0), np.where(finite, want, 0)
    helpers.assert_within(found, wanted, np.where(finite, room, 0), where)


def check(name, n, shape, dtype, check_vma=True):
    run = compiled(name, n, shape, jnp.dtype(dtype), check_vma)
    for case, x in cases(n, shape, dtype):
        x = np.asarray(x).astype(dtype)
        total, by_rank, traffic = jax.tree.map(np.asarray, run(x))
        where = f"{name}, n={n}, {case}"
        assert_exact(x, total, by_rank, where)
        wire = float(traffic.wire - traffic.scalars)
        assert float(traffic.payload) <= wire * (1 + 1e-6), where
        if name in LOSSLESS_NEVER_WORSE:
            assert wire <= float(traffic.dense) * (1 + 1e-6), where


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("balanced", 8),
        *helpers.slow(("hierarchical", 8)),
        # One, and such as are no power of two; Zen takes another way from three on.
        *helpers.slow(("balanced", 1), ("balanced", 5), ("hierarchical", 7), ("zen", 2)),
    ],
)
def test_the_total_is_the_exact_sum_on_every_rank(name, n):
    check(name, n, (SIZE,), jnp.float32)


@pytest.mark.parametrize(
    ("name", "n"),
    [
        *((name, 3) for name in ALWAYS),
        *helpers.slow(
            ("sparcml_split", 8),
            *((name, 3) for name in SCHEMES if name not in (*ALWAYS, *CODES, *SAME)),
        ),
    ],
)
def test_every_variant_gives_the_exact_sum(name, n):
    check(name, n, (SIZE,), jnp.float32)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("all_reduce", jnp.bfloat16),
        *helpers.slow(("balanced", jnp.bfloat16), ("hierarchical", jnp.float16)),
    ],
)
def test_sums_of_16_bit_numbers_are_taken_in_float32(name, dtype):
    check(name, 5, (SIZE,), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["balanced", *helpers.slow("hierarchical")])
def test_doubles_are_added_up_as_doubles(name):
    with jax.enable_x64(True):
        check(name, 3, (SIZE,), jnp.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "width"), [("balanced", 16), *helpers.slow(("hierarchical", 3))]
)
def test_rows_are_units(name, width):
    check(name, 3, (517, width), jnp.float32)


@pytest.mark.parametrize("name", ["all_reduce", *helpers.slow("balanced")])
def test_without_checking_the_result_is_the_same(name):
    check(name, 3, (SIZE,), jnp.float32, check_vma=False)


@pytest.mark.parametrize("name", ["balanced", *helpers.slow("hierarchical")])
def test_tiny_and_empty_arrays_work(name):
    for size in (0, 1, 33):
        run = compiled(name, 3, (size,), jnp.dtype(jnp.float32))
        x = np.arange(3 * size, dtype=np.float32).reshape(3, size)
        total, by_rank, _ = run(x)
        np.testing.assert_array_equal(total, x.sum(0))
        np.testing.assert_array_equal(by_rank, np.broadcast_to(x.sum(0), x.shape))


@pytest.mark.slow
def test_rows_of_plus_and_minus_one_are_not_lost():
    """A row whose numbers add up to zero is not an empty row."""
    x = np.zeros((3, 517, 16), np.float32)
    x[1, ::9] = np.resize([1, -1], 16)
    total, _, traffic = compiled("balanced", 3, (517, 16), jnp.dtype(jnp.float32))(x)
    np.testing.assert_array_equal(total, x.sum(0))
    np.testing.assert_allclose(traffic.density_after, 58 / 517, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["balanced", *helpers.slow("hierarchical")])
def test_values_may_travel_narrow_and_are_added_up_wide(name):
    """The error is that of rounding each value and the sum once more, not of n sums."""
    scheme = dataclasses.replace(SCHEMES[name], wire_dtype=jnp.bfloat16)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, SIZE)).astype(np.float32) * (rng.random((8, SIZE)) < 0.1)
    done = helpers.run_ranks(lambda x: helpers.call(scheme, x), x, 8)
    full = compiled(name, 8, (SIZE,), jnp.dtype(jnp.float32))(x)[2].wire
    half = 2**-8
    rounds = 4 if name == "hierarchical" else 2
    room = rounds * half * np.abs(x).sum(0) * 1.02
    assert (np.abs(done.total[0] - x.sum(0)) <= room + 1e-30).all()
    helpers.assert_same_on_all_ranks(done.total)
    assert 0.4 * full < done.traffic.wire[0] < 0.8 * full


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "check_vma"),
    [
        ("hierarchical", True),
        *helpers.slow(("zen_bytes", False), ("ag_sparse_doubling", True)),
    ],
)
def test_shards_on_a_second_axis_may_differ_in_density(name, check_vma):
    """One shard is nearly empty and the other nearly full, and no rank waits for ever."""
    scheme = SCHEMES[name]
    mesh = helpers.grid(data=4, model=2)
    rng = np.random.default_rng(0)
    x = np.zeros((4, 2, SIZE), np.float32)
    x[:, 0, :20] = 1
    x[:, 1] = rng.random((4, SIZE)) < 0.3

    def run(x):
        x = x[0, 0]
        return helpers.call(scheme, x, helpers.init(scheme, x)).total[None]

    step = helpers.shard_map(
        run,
        mesh=mesh,
        in_specs=P("data", "model"),
        out_specs=P("model"),
        check_vma=check_vma,
    )
    np.testing.assert_array_equal(jax.jit(step)(x), x.sum(0))


@pytest.mark.slow
def test_units_that_the_caller_did_not_name_are_not_sent():
    scheme, n = SCHEMES["balanced"], 4
    x = np.ones((n, SIZE), np.float32)
    named = np.arange(SIZE) % 50 == 0

    def run(x):
        return helpers.call(scheme, x, present=jnp.asarray(named) & (x > 0)).total

    np.testing.assert_array_equal(helpers.run_ranks(run, x, n)[0], n * named)
