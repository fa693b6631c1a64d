"""The laws on 64, 256 and 1,024 ranks: exact sums and replicas with the same bytes; and on
48 and 64 ranks, what lossy schemes leave out.

Ranks are those of `jax.vmap` with an axis name, which run in one program on one device. So
arrays are small, a few dozen units a rank, and what is summed is the same as on as many
devices: collectives are the only code that `vmap` sees otherwise. How programs grow with
the ranks is in `test_programs.py`.
"""

import functools

import jax
import numpy as np
import pytest

import sparsejax.wire.ladder
from tests import helpers
from tests.fuzz.programs import OF_LOSSY
from tests.laws.test_exact_sum import LOSSLESS_NEVER_WORSE, SCHEMES, assert_exact


# Units: a few dozen a rank, so that entries pay.
SIZES = {48: 6_151, 64: 6_151, 256: 16_384, 1024: 32_768}
ALWAYS = ["balanced", "hierarchical"]
# What counts ranks by itself, one of each kind.
COUNTING = ["ag_sparse_bruck", "sparse_ps"]
# At most as many ranks as a power of two, and some more: they are folded.
FOLDED = ["hierarchical", "sparcml_split"]
AT_256 = ["hierarchical"]
AT_1024 = ["zen"]
# With so many ranks a program runs for longer than XLA takes to optimize it.
OPTIMIZED = {
    "xla_backend_optimization_level": 2,
    "xla_llvm_disable_expensive_passes": False,
}


@pytest.fixture(autouse=True)
def short_messages(monkeypatch):
    """Small arrays take several message sizes, as large ones do."""
    monkeypatch.setattr(sparsejax.wire.ladder, "_SHORT", 128)


@functools.cache
def compiled(name, n):
    """A scheme on n ranks: from x [n, units] to totals by rank, and the traffic."""
    scheme = SCHEMES[name]

    def run(x):
        reduced = helpers.call(scheme, x, helpers.init(scheme, x))
        assert reduced.left is None
        return reduced.total, reduced.traffic

    like = jax.ShapeDtypeStruct((n, size_of(name, n)), np.float32)
    lowered = jax.jit(jax.vmap(run, axis_name=helpers.AXIS)).lower(like)
    return lowered.compile(OPTIMIZED if n >= 256 else None)


def size_of(name, n):
    """Units of the array; blocks are units where they are what is sent."""
    return SIZES[n] * (8 if "omni_reduce" in name else 1)


def cases(n, size):
    """Gradients [n, units] by name."""
    rng = np.random.default_rng(n)
    dense = rng.standard_normal((n, size), np.float32)
    keep = lambda mask: np.where(mask, dense, np.float32(0))
    shared = rng.random(size) < 0.002
    # Few units in the sum, and half of these on each rank.
    yield "shared", keep(shared & (rng.random((n, size), np.float32) < 0.5))
    if n == 1024:
        return  # a case takes several seconds
    yield "own", keep(rng.random((n, size), np.float32) < 1 / n)
    last = np.zeros((n, size), bool)
    last[n - 1, : size // 20] = True
    yield "the last rank alone", keep(last)
    if n < 256:
        yield "dense", dense


def check(name, n):
    run, by_entries = compiled(name, n), {}
    for case, x in cases(n, size_of(name, n)):
        by_rank, traffic = jax.tree.map(np.asarray, run(x))
        where = f"{name}, n={n}, {case}"
        assert_exact(x, by_rank[0], by_rank, where)
        wire = (traffic.wire - traffic.scalars)[0]
        assert traffic.payload[0] <= wire * (1 + 1e-6), where
        if name in LOSSLESS_NEVER_WORSE:
            assert wire <= traffic.dense[0] * (1 + 1e-6), where
        by_entries[case] = wire < traffic.dense[0]
    # Else nothing but a dense sum was tried.
    assert by_entries["shared"], f"{name}, n={n}"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ALWAYS, *helpers.slow(*COUNTING)])
def test_64_ranks_have_the_exact_sum(name):
    check(name, 64)


@pytest.mark.parametrize("name", helpers.slow(*FOLDED))
def test_ranks_that_are_folded_have_the_exact_sum(name):
    check(name, 48)


@pytest.mark.parametrize("name", helpers.slow(*AT_256))
def test_256_ranks_have_the_exact_sum(name):
    check(name, 256)


@pytest.mark.parametrize("name", helpers.slow(*AT_1024))
def test_1024_ranks_have_the_exact_sum(name):
    check(name, 1024)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n"), [("GTopk", 64), ("OkTopk", 48)])
def test_lossy_schemes_conserve_on_many_ranks(name, n):
    """Two steps, the second with the state of the first."""
    scheme = OF_LOSSY[name]
    shape = (SIZES[n] // 2,)

    def run(x):
        def step(state, x):
            reduced = helpers.call(scheme, x, state)
            return reduced.state, (reduced.total, reduced.left)

        return jax.lax.scan(step, helpers.init(scheme, x[0]), x)[1]

    rng = np.random.default_rng(1)
    x = rng.standard_t(3, (n, 2, *shape)).astype(np.float32)
    step = jax.jit(jax.vmap(run, axis_name=helpers.AXIS))
    total, left = jax.tree.map(np.asarray, step(x))
    helpers.assert_same_on_all_ranks(total)
    exact = x.astype(np.float64)
    held = total[0].astype(np.float64) + left.astype(np.float64).sum(0)
    room = 4 * (n + 2) * np.finfo(np.float32).eps * np.abs(exact).sum(0)
    assert (np.abs(exact.sum(0) - held) <= room + 1e-30).all(), name
    assert all(step.any() and (step == 0).any() for step in total)
