"""What each sparsifier selects: those of the table in `laws/test_conservation.py`.

That nothing is lost is tested there.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
import sparsejax.wire.ladder
from sparsejax import schemes, sparsifiers
from sparsejax.errors import ArgumentError
from sparsejax.sparsifiers import base
from sparsejax.units.selection import magnitudes
from tests import helpers
from tests.laws.test_conservation import SPARSIFIERS


SIZE = 20011  # long enough for thresholds to come from a sample
DENSITY = 0.02
EACH = {name: make(DENSITY) for name, make in SPARSIFIERS.items()}
# Variants select as the first of their kind.
SELECTING = {
    name: kind
    for name, kind in EACH.items()
    if isinstance(kind, base.Selector) and "," not in name
}
# By an exact and by a sampled threshold, by chance, by hashing.
DIFFERENT = ("RandomK", "DGC")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Small inputs take several tiles, as large ones do."""
    monkeypatch.setattr(sparsejax.wire.ladder, "_TILE_NUMBERS", 2048)


def long_tails():
    return np.random.default_rng(0).standard_t(3, SIZE).astype(np.float32)


def draw(step, wanted):
    seed = jnp.asarray(step, jnp.uint32) * 7919 + 1
    return base.Draw(jnp.asarray(step, jnp.int32), seed, jnp.int32(wanted))


@functools.cache
def selecting(sparsifier, size):
    room = sparsifier.capacity(size)

    def run(x, step):
        wanted = sparsifier.wanted(size, step)
        own = base.Draw(step, step.astype(jnp.uint32) * 7919 + 1, wanted)
        return sparsifier.select(x, sparsifier.init(size, x.dtype), own, room)[0]

    return jax.jit(run)


@pytest.mark.parametrize(
    "name", [*DIFFERENT, *helpers.slow(*(x for x in SELECTING if x not in DIFFERENT))]
)
def test_places_are_in_range_and_none_comes_twice(name):
    x = long_tails()
    few = np.where(np.abs(x) > 20, x, 0)
    nan = np.where(np.arange(SIZE) % 20 == 3, np.nan, x)
    for case in (x, 0 * x, np.full_like(x, 0.5), few, nan, np.full_like(x, np.nan)):
        found = np.asarray(selecting(SELECTING[name], SIZE)(case, jnp.int32(2)))
        used = found[found != SIZE]
        assert ((used >= 0) & (used < SIZE)).all()
        times = np.bincount(used, minlength=1)
        assert times.max() <= 1, f"index {times.argmax()} comes {times.max()} times"
        if not SELECTING[name].shared:
            assert (case[used] != 0).all()  # zeros never go
            if not case.all():  # few others: all of them, but who found no slot
                sent, there = len(used), np.count_nonzero(case)
                assert sent >= (0.8 if "Dragonn" in name else 1.0) * there
            if np.isnan(case).any():
                assert np.isnan(case[used]).any()


@pytest.mark.parametrize(
    "name", ["MSTopK", *helpers.slow("DGC", "GaussianK", "ReuseThreshold")]
)
def test_approximate_ones_find_about_the_largest(name):
    x = long_tails()
    wanted = int(np.ceil(DENSITY * SIZE))
    least = np.sort(np.abs(x))[-wanted]
    found = np.asarray(selecting(SELECTING[name], SIZE)(x, jnp.int32(0)))
    used = found[found != SIZE]
    assert 0.75 * wanted <= len(used) <= 1.3 * wanted
    assert np.abs(x[used]).min() > 0.8 * least


@pytest.mark.parametrize("share", [0.5, *helpers.slow(3.0)])
def test_all_from_a_fixed_magnitude_on_go_and_of_too_many_the_largest(share):
    """With half as many elements as fit above it, and with three times as many."""
    x = long_tails()
    room = sparsifiers.Threshold(DENSITY, 1.0).capacity(SIZE)
    order = np.argsort(-np.abs(x))
    least = float(np.abs(x[order[int(share * room)]]))
    found = np.asarray(
        selecting(sparsifiers.Threshold(DENSITY, least), SIZE)(x, jnp.int32(2))
    )
    above = np.flatnonzero(np.abs(x) >= least)
    assert sorted(found[found != SIZE]) == sorted(above if share < 1 else order[:room])


def test_a_threshold_is_reused_for_32_steps_by_default():
    assert sparsifiers.ReuseThreshold(DENSITY).every == 32


@pytest.mark.parametrize(("slots", "tables"), [(2.0, 1), *helpers.slow((1.0, 2))])
def test_dragonn_keeps_the_share_that_the_paper_expects(slots, tables):
    """(m / l) (1 - exp(-l / m)) of l in m slots; two tables, who has a slot in either.

    On CPUs the last to write stays, so who loses is likely to lose twice: by lemma A.5 the
    i-th stays with ((m - 1) / m)^(l - i).
    """
    size, survivors, seeds = 50_000, 2000, 20
    x = np.zeros(size, np.float32)
    kept = []
    own = sparsifiers.Dragonn(survivors / size, slots=slots, tables=tables)
    level = magnitudes.key_of(1.0, jnp.float32)
    run = jax.jit(lambda x, step: own.take(x, level, draw(step, survivors), room)[1])
    room = own.capacity(size)
    for seed in range(seeds):
        x[:] = 0
        x[np.random.default_rng(seed).permutation(size)[:survivors]] = 2
        kept.append(int(run(x, jnp.int32(seed))) / survivors)
    places = slots / tables * survivors
    each = (1 - 1 / places) ** np.arange(survivors)
    want = 1 - np.mean((1 - each) ** tables)
    if tables == 1:
        assert want == pytest.approx(slots * (1 - np.exp(-1 / slots)), abs=1e-3)
    # Of one draw the spread is below 1/sqrt(4 l).
    assert abs(np.mean(kept) - want) < 4 / np.sqrt(4 * survivors * seeds)


def test_no_element_of_a_constant_gradient_is_starved():
    """With another hash at every step each of 2000 goes, element 0 among them."""
    size = 2000
    x = np.full(size, 0.1, np.float32)
    own = sparsifiers.Dragonn(1.0, slots=0.5)
    level = magnitudes.key_of(0.1, jnp.float32)
    run = jax.jit(lambda step: own.take(x, level, draw(step, size), size // 2)[0])
    went = np.zeros(size + 1)
    for step in range(60):
        went[np.asarray(run(jnp.int32(step)))] += 1
    share = 0.5 * (1 - np.exp(-2))
    assert went[:size].min() > 0
    assert abs(went[:size].mean() / 60 - share) < 0.01
    assert went[0] > 0


def test_a_leaf_of_fewer_elements_than_dragonn_has_tables():
    own = sparsifiers.Dragonn(1.0, tables=3)
    level = magnitudes.key_of(0.1, jnp.float32)
    places, count = own.take(jnp.ones(2), level, draw(0, 2), 2)
    assert 1 <= int(count) == np.sum(np.asarray(places) < 2)


@pytest.mark.parametrize("tx", ["dgc", *helpers.slow("dragonn")])
def test_with_a_memory_no_element_waits_for_ever(tx):
    """Of a constant gradient everything goes, though there is room for a tenth a step."""
    size, steps = 3001, 40
    made = {
        "dgc": sparsejax.dgc(0.1, min_size=1),
        "dragonn": sparsejax.sparsify(sparsifiers.Dragonn(0.1, slots=1.0), min_size=1),
    }[tx]
    chain = optax.chain(made, sparsejax.sync(schemes.AGSparse(), rules={"": "sparse"}))

    def run(grad):
        def step(state, _):
            update, state = chain.update({"w": grad}, state)
            return state, update["w"] != 0

        return jax.lax.scan(step, chain.init({"w": helpers.parameters(grad)}), None, steps)[
            1
        ]

    went = helpers.ranked(run, 1)(np.ones((1, size), np.float32))[0].sum(0)
    assert went.min() > 0


def test_random_k_is_unbiased_and_sends_no_indices():
    n, size, density, steps = 2, 3001, 0.05, 400
    own = sparsejax.sparsify(sparsifiers.RandomK(density), memory=None, min_size=1)
    sync = sparsejax.sync(schemes.Zen(), reduce="sum", rules={"": "sparse"})
    tx = optax.chain(own, sync)
    rng = np.random.default_rng(0)
    grad = rng.standard_normal((n, size)).astype(np.float32)

    def run(grad):
        def step(state, _):
            update, state = tx.update({"w": grad}, state)
            return state, (update["w"], sparsejax.metrics(state)["sync/wire_bytes"])

        state = tx.init({"w": helpers.parameters(grad)})
        return jax.lax.scan(step, state, None, steps)[1]

    updates, sent = helpers.ranked(run, n)(grad)
    k = int(np.ceil(density * size))
    assert (sent == 2 * (n - 1) / n * 4 * k).all()
    assert ((updates[0] != 0).sum(1) == k).all()
    exact = grad.sum(0)
    spread = np.abs(exact) * np.sqrt(size / k / steps)
    assert (np.abs(updates[0].mean(0) - exact) < 6 * spread + 1e-6).all()
    assert abs(np.mean((updates[0].mean(0) - exact) / spread)) < 0.1


@pytest.mark.parametrize(
    "name", sorted(name for name in SELECTING if SELECTING[name].shared)
)
@pytest.mark.parametrize("warm_up", [False, True])
def test_what_ranks_share_is_as_many_as_wanted_and_is_scaled_to_the_whole(name, warm_up):
    """Without a memory: each element is sent equally often, times what makes up for it."""
    size, steps = 301, 420
    kind = SPARSIFIERS[name](0.3)
    room = kind.capacity(size)
    wanted = room // 3 if warm_up else room

    def run(total, step):
        own = draw(step, wanted)
        found, _ = kind.select(jnp.ones(size), kind.init(size, jnp.float32), own, room)
        scaled = total.at[found].add(kind.scale(size, own), mode="drop")
        return scaled, jnp.sum(found < size)

    total, sent = jax.lax.scan(run, jnp.zeros(size), jnp.arange(steps, dtype=jnp.uint32))
    assert (np.asarray(sent) <= wanted).all()
    np.testing.assert_allclose(total.mean() / steps, 1, rtol=0.01)
    assert np.abs(total / steps - 1).max() < 6 * np.sqrt(size / wanted / steps)


@pytest.mark.parametrize("share", [1 / 7, 0.3, 1.0])
def test_striding_sends_each_element_once_in_a_turn(share):
    """After ceil(size / k) steps, whatever divides what; never more than k in one."""
    kind, size = sparsifiers.Striding(share), 101
    stride = -(-size // math.ceil(share * size))
    for start in (0, 5):
        seen = np.zeros(size + 1, int)
        for step in range(start, start + stride):
            found = np.asarray(selecting(kind, size)(np.ones(size), jnp.int32(step)))
            assert ((found == size) | (found % stride == step % stride)).all()
            np.add.at(seen, found, 1)
        assert (seen[:size] == 1).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_visible_is_what_changes_the_cast_parameter(dtype):
    """Compiled, too, where a cast to fewer bits and back may be left out."""
    rng, rate = np.random.default_rng(0), 0.25
    param = rng.standard_normal(4096).astype(np.float32)
    x = (param * 2.0 ** rng.uniform(-14, -2, 4096)).astype(np.float32)
    param[:3], x[:3] = [0, 0, 1], [0, 1e-3, 0]
    kind = sparsifiers.Visible(dtype=dtype, rate=rate)
    own = draw(0, 1)._replace(param=jnp.asarray(param))
    sent = jax.jit(lambda x: kind.rounded(x, own))(x)
    cast = lambda x: x.astype(jnp.dtype(dtype)).view(np.uint16)
    changes = cast(param - np.float32(rate) * x) != cast(param)
    assert 0.2 < changes.mean() < 0.9
    np.testing.assert_array_equal(sent, np.where(changes, x, 0))


def test_what_is_visible_is_asked_of_parameters():
    tx = sparsejax.sparsify(sparsifiers.Visible(), min_size=1)
    run = lambda x: tx.update({"w": x}, tx.init({"w": helpers.parameters(x)}))
    with pytest.raises(ArgumentError, match="given no parameters, by which it selects"):
        jax.eval_shape(helpers.stacked(run, 2), jnp.ones((2, 8)))
    for wrong in (None, "float8_e4m3fn", "int8"):
        with pytest.raises(ArgumentError, match=r"dtype must be .*such as"):
            sparsifiers.Visible(dtype=wrong)
    with pytest.raises(ArgumentError, match="rate must be above 0, got -1"):
        sparsifiers.Visible(rate=-1)


@pytest.mark.parametrize(
    ("kind", "values"), [(sparsifiers.Sign(), 2), (sparsifiers.QSGD(levels=4), 9)]
)
def test_rounding_leaves_few_values_and_sends_all_of_them(kind, values):
    """Signs, or levels of either sign and zero; of an array of its dtype, whole."""
    n, size = 2, 3001
    tx = sparsejax.sparsify(kind, min_size=1)
    sync, zeros = sparsejax.dense_sync(reduce="sum"), {"w": jnp.zeros(size)}

    def run(grad):
        rounded, _ = tx.update({"w": grad}, tx.init(zeros))
        _, state = sync.update(rounded, sync.init(zeros))
        return rounded["w"], sparsejax.metrics(state)["sync/wire_bytes"]

    grad = np.random.default_rng(0).standard_normal((n, size)).astype(np.float32)
    rounded, sent = helpers.ranked(run, n)(grad)
    assert 1 < len(np.unique(rounded[0])) <= values
    assert sent[0] == 2 * (n - 1) / n * 4 * size


@pytest.mark.slow
def test_a_threshold_is_found_again_when_it_is_due():
    """Gradients grow tenfold in between: the old one lets through all there is room for."""
    own = sparsifiers.ReuseThreshold(DENSITY, every=4)
    room = own.capacity(SIZE)
    wanted = int(np.ceil(DENSITY * SIZE))
    x = long_tails()
    state = own.init(SIZE, jnp.float32)
    run = jax.jit(lambda x, state, step: own.select(x, state, draw(step, wanted), room))
    thresholds, counts = [], []
    for step in range(9):
        scaled = x * (10 if step >= 2 else 1)
        found, state = run(scaled, state, jnp.int32(step))
        counts.append(int((np.asarray(found) != SIZE).sum()))
        thresholds.append(float(state))
    exact = np.sort(np.abs(x))[-wanted]
    assert thresholds[0] == exact  # nothing to adapt: just as many as wanted
    assert counts[0] == wanted
    assert thresholds[2] == pytest.approx(exact * 1.012)
    assert thresholds[3] == pytest.approx(exact * 1.012**2)
    assert counts[2] == room
    assert thresholds[4] == pytest.approx(10 * exact)


def test_a_density_may_follow_a_schedule_of_optax():
    schedule = optax.piecewise_constant_schedule(0.5, {2: 0.2, 4: 0.1})
    own = sparsifiers.TopK(sparsifiers.Schedule(schedule, largest=0.2))
    assert own.capacity(SIZE) == math.ceil(0.2 * SIZE)
    # The first density is more than there is capacity for.
    for step, share in ((0, 0.2), (3, 0.1), (9, 0.01)):
        want = math.ceil(np.float32(share) * SIZE)
        assert int(own.wanted(SIZE, jnp.int32(step))) == pytest.approx(want, abs=1)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: sparsifiers.Schedule(0.1, 0.1), "density_at must be a function"),
        (lambda: sparsifiers.Schedule(optax.constant_schedule(0.1), 2), "must lie in"),
        (lambda: sparsifiers.TopK(optax.constant_schedule(0.1)), r"Schedule\(.*largest"),
    ],
)
def test_a_schedule_says_what_is_wrong_with_it(make, match):
    with pytest.raises(ArgumentError, match=match):
        make()


def test_a_warmup_starts_dense_and_ends_sparse():
    warmup = sparsifiers.Warmup(0.01, 4, start=0.16)
    shares = [float(warmup(jnp.int32(step))) for step in (0, 2, 4, 9)]
    np.testing.assert_allclose(shares, [0.16, 0.04, 0.01, 0.01], rtol=1e-5)
    own = sparsifiers.TopK(warmup)
    x = long_tails()
    sent = [
        int((np.asarray(selecting(own, SIZE)(x, jnp.int32(step))) != SIZE).sum())
        for step in (0, 2, 9)
    ]
    assert sent == [int(np.ceil(np.float32(s) * SIZE)) for s in (0.16, 0.04, 0.01)]
