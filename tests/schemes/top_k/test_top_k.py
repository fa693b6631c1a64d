"""The laws of schemes that choose and send in one motion: Ok-Topk, SparDL, gTopk.

What is given is what was applied and what is held, over many steps; ranks end with the same
bytes; what is chosen is what the papers say, computed in NumPy; messages have the sizes of
the papers' formulas.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import sparsejax
from benchmarks.papers.formulas import cost_tables
from sparsejax import axes as mesh_axes, errors, schemes
from sparsejax.schemes import forecast
from sparsejax.schemes.top_k import regions, spar_all_gather
from sparsejax.schemes.top_k.threshold_reuse import ThresholdRule
from sparsejax.units import bits
from sparsejax.units.dense import Dense
from sparsejax.units.selection import magnitudes
from sparsejax.wire import Wire
from tests import helpers


SIZE = 3001  # not divisible by any number of ranks tested
DENSITY = 0.02
# Thresholds are found a dozen times, and regions are bounded six times.
STEPS = 100
SCHEMES = {
    "spar_dl": schemes.SparDL(DENSITY),
    "spar_dl_coo32": schemes.SparDL(DENSITY, code="coo32"),
    "r_sag_4": schemes.SparDL(DENSITY, teams=4),
    "b_sag_3": schemes.SparDL(DENSITY, teams=3),
    "g_topk": schemes.GTopk(DENSITY),
    "ok_topk": schemes.OkTopk(DENSITY, threshold_every=8, repartition_every=16),
    "ok_topk_rotated": schemes.OkTopk(
        DENSITY, threshold_every=8, repartition_every=16, split="rotated", bucket=2
    ),
    "ok_topk_listed": schemes.OkTopk(DENSITY, threshold_every=8, balance_at=1.0),
}


def steps_of(scheme, n, size, dtype=jnp.float32):
    """From gradients [n, steps, size] totals, what each step leaves, and what was sent."""

    def on_rank(g):
        like = jax.ShapeDtypeStruct((size,), dtype)
        axes = mesh_axes.varying_axes(g)
        state = helpers.first_state(scheme, like, n)

        def step(carry, g):
            state, held = carry
            reduced = helpers.call(scheme, g + held, state, helpers.AXIS)
            sent = reduced.traffic
            rounds = sent.push.rounds + sent.pull.rounds
            told = sent.push.wire, sent.pull.wire, rounds, sent.density_before
            told = *told, sent.scalars
            return (reduced.state, reduced.left), (reduced.total, reduced.left, told)

        held = mesh_axes.as_varying(jnp.zeros(size, dtype), axes)
        return mesh_axes.as_varying(lax.scan(step, (state, held), g)[1], axes)

    return on_rank


@functools.cache
def compiled(name, n, size=SIZE, density=None):
    """`steps_of` on n ranks."""
    scheme = SCHEMES[name]
    if density is not None:
        scheme = dataclasses.replace(scheme, density=density)
    return helpers.ranked(steps_of(scheme, n, size), n)


def gradients(n, steps, size=SIZE, seed=0):
    """Long tails, a part that ranks share, and single elements that are always large."""
    rng = np.random.default_rng(seed)
    g = rng.standard_t(3, (n, steps, size)) + rng.standard_t(3, (1, steps, size))
    g[:, :, :: max(1, size // 7)] *= 8
    g[:, :, size // 3 : size // 2] *= 0.01
    return g.astype(np.float32)


def check_law(g, totals, held):
    """What was given is what was applied and what is held; ranks have the same bytes."""
    assert np.isfinite(totals).all()
    helpers.assert_same_on_all_ranks(totals)
    given = g.astype(np.float64).sum((0, 1))
    got = totals[0].astype(np.float64).sum(0) + held.astype(np.float64).sum(0)
    scale = np.abs(g).astype(np.float64).sum((0, 1))
    assert (np.abs(given - got) <= 1e-6 * scale).all()


# SparDL without teams, with swaps between them, and gTopk: below, with what they select.
LAWFUL = [("ok_topk", 4), ("ok_topk_listed", 4), ("b_sag_3", 6)]


def applied(name, n):
    """What was given and all totals by rank, of which nothing is lost and much applied."""
    g = gradients(n, STEPS)
    totals, lefts, _ = compiled(name, n)(g)
    check_law(g, totals, lefts[:, -1])
    chosen = (totals[0] != 0).sum(axis=1)
    assert chosen.min() > 0
    # Most of what was given has been applied: it does not only pile up.
    assert np.abs(lefts[:, -1]).sum() < 0.5 * np.abs(g).sum()
    return g, totals


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n"), LAWFUL)
def test_nothing_is_lost_over_many_steps(name, n):
    applied(name, n)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "n"),
    [("ok_topk", 4), ("spar_dl", 5), *helpers.slow(("g_topk", 5), ("b_sag_3", 6))],
)
def test_where_the_total_is_zero_each_rank_keeps_all_that_it_had(name, n):
    """And elsewhere what its own selections left out: all that the total has not."""
    g = gradients(n, STEPS)
    totals, lefts, _ = compiled(name, n)(g)
    x, total, left = g[:, 0], totals[:, 0], lefts[:, 0]
    stays = total[0] == 0
    assert 0 < stays.sum() < SIZE
    assert left[:, stays].tobytes() == x[:, stays].tobytes()
    np.testing.assert_allclose(total[0] + left.sum(0), x.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "n", "wanted"),
    helpers.slow(
        ("ok_topk", 2, "one"), ("spar_dl", 3, "fewer_than_ranks"), ("g_topk", 3, "all")
    ),
)
def test_one_element_fewer_than_ranks_and_all_of_them_can_be_chosen(name, n, wanted):
    size = 1009
    k = {"one": 1, "fewer_than_ranks": n - 1, "all": size}[wanted]
    g = gradients(n, STEPS, size)
    totals, lefts, _ = compiled(name, n, size, density=k / size)(g)
    check_law(g, totals, lefts[:, -1])
    chosen = (totals[0] != 0).sum(axis=1)
    # A threshold used again may let nothing through, one found exactly does.
    assert (chosen[::8] >= 1).all()
    if wanted == "all":
        np.testing.assert_allclose(totals[0], g.sum(0), rtol=1e-4, atol=1e-4)
        assert not lefts[:, -1].any()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n"), [("ok_topk", 4), ("spar_dl", 5), ("g_topk", 5)])
def test_zeros_equal_numbers_and_nan_are_kept_to_the_law(name, n):
    """On as many ranks as above, so that nothing is compiled for it."""
    scheme, run = SCHEMES[name], compiled(name, n)
    zeros = np.zeros((n, STEPS, SIZE), np.float32)
    totals, lefts, _ = run(zeros)
    assert not totals.any()
    assert not lefts.any()
    ones = np.ones((n, STEPS, SIZE), np.float32)
    totals, lefts, _ = run(ones)
    check_law(ones, totals, lefts[:, -1])
    room = (1 + getattr(scheme, "slack", 0)) * scheme.k(SIZE) + n
    assert (totals[0] != 0).sum(axis=1).max() <= room
    bad = gradients(n, STEPS)
    bad[1, 0, 100], bad[2, 3, 2000] = np.nan, np.inf
    bad[0, 0, ::20] = np.nan
    totals, lefts, _ = run(bad)
    helpers.assert_same_on_all_ranks(totals)
    assert np.isfinite(lefts[:, 8:]).all()
    # They go first, as many as fit a step, and all ranks see where they were.
    soon = totals[0, :8]
    assert (np.isnan(soon).any(0) == np.isnan(bad).any((0, 1))).all()
    assert np.isposinf(soon[:, 2000]).any()
    # The others have not waited for the next time that thresholds are found.
    others = np.isfinite(soon[4:]) & (soon[4:] != 0)
    assert others.sum(axis=1).min() > 0


def top(x, k):
    """x with all but its k largest magnitudes zero."""
    kept = np.argsort(-np.abs(x), kind="stable")[:k]
    result = np.zeros_like(x)
    result[kept] = x[kept]
    return result


def spar_dl_in_numpy(x, k, teams):
    """SparDL's total for x [n, size], by its algorithm 1, swaps between teams."""
    n, size = x.shape
    q = n // teams
    width = -(-size // q)
    keep = min(width, -(-k // q))
    held = np.pad(x, ((0, 0), (0, q * width - size))).reshape(teams, q, q, width).copy()
    distance = 1 << (q - 1).bit_length() >> 1
    while distance:
        sent = {}
        for team in range(teams):
            for me in range(q):
                for ahead in range(min(distance, q - distance)):
                    block = (me + distance + ahead) % q
                    to = (me + distance) % q
                    sent[team, to, block] = top(held[team, me, block], keep)
        for (team, to, block), values in sent.items():
            held[team, to, block] += values
        distance //= 2
    own = np.array([[top(held[t, b, b], keep) for b in range(q)] for t in range(teams)])
    distance = 1
    while distance < teams:
        both = own + own[np.arange(teams) ^ distance]
        own = np.array([[top(row, keep) for row in team] for team in both])
        distance *= 2
    return own[0].reshape(-1)[:size]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n"), [("spar_dl", 5), ("r_sag_4", 8)])
def test_spar_dl_chooses_what_its_algorithm_says(name, n):
    scheme, (g, totals) = SCHEMES[name], applied(name, n)
    want = spar_dl_in_numpy(g[:, 0].astype(np.float64), scheme.k(SIZE), scheme.teams)
    np.testing.assert_array_equal(totals[0, 0] != 0, want != 0)
    np.testing.assert_allclose(totals[0, 0], want, rtol=1e-5)


@pytest.mark.slow
def test_g_topk_merges_two_by_two():
    n = 5
    g, totals = applied("g_topk", n)
    k = SCHEMES["g_topk"].k(SIZE)
    held = [top(x, k) for x in g[:, 0].astype(np.float64)]
    core = 1 << (n.bit_length() - 1)
    for extra in range(core, n):
        held[extra - core] = top(held[extra - core] + held[extra], k)
    distance = 1
    while distance < core:
        held = [top(held[me] + held[me ^ distance], k) for me in range(core)]
        distance *= 2
    np.testing.assert_array_equal(totals[0, 0] != 0, held[0] != 0)
    np.testing.assert_allclose(totals[0, 0], held[0], rtol=1e-5)


def test_ok_topk_has_the_largest_of_the_sum_of_the_largest():
    """Where thresholds are exact, and messages have room for all."""
    n, name = 4, "ok_topk"
    g = gradients(n, STEPS)
    g[:, 0] = np.random.default_rng(1).standard_normal((n, SIZE))  # evenly spread
    totals, _, _ = compiled(name, n)(g)
    k = SCHEMES[name].k(SIZE)
    want = top(sum(top(x, k) for x in g[:, 0].astype(np.float64)), k)
    np.testing.assert_array_equal(totals[0, 0] != 0, want != 0)
    np.testing.assert_allclose(totals[0, 0], want, rtol=1e-5)


@pytest.mark.slow
def test_ok_topk_finds_thresholds_anew_that_fit_no_more():
    n, scheme = 4, SCHEMES["ok_topk"]
    g = gradients(n, STEPS)
    rng = np.random.default_rng(1)
    scales = np.resize([1.0, 0.01, 50.0, 0.1, 500.0], STEPS)
    g[:] = rng.standard_normal((n, STEPS, SIZE)) * scales[:, None]
    totals, lefts, _ = compiled("ok_topk", n)(g)
    check_law(g, totals, lefts[:, -1])
    chosen, k = (totals[0] != 0).sum(axis=1), scheme.k(SIZE)
    assert chosen.min() >= (1 - scheme.slack) * k
    assert chosen.max() <= math.ceil((1 + scheme.slack) * k)


@pytest.mark.slow
def test_a_region_sends_its_largest_where_not_all_fit():
    of = regions.divide(2_000, 4, 200, 0.25)
    rng = np.random.default_rng(0)
    x = rng.standard_normal(2_000).astype(np.float32)
    chosen = rng.random(2_000) < 0.1
    chosen[:200] = True
    chosen[np.flatnonzero(chosen)[of.most :]] = False
    starts = of.even()
    flags = jnp.asarray(np.pad(chosen, (0, of.words * 32 - 2_000)))
    parts, words = of.fitted(jnp.asarray(x), bits.pack(flags), starts, jnp.uint32(3))
    want = chosen.copy()
    bounds = [*(32 * np.asarray(starts)), 2_000]
    for first, end in itertools.pairwise(bounds):
        here = first + np.flatnonzero(chosen[first:end])
        want[here[np.argsort(-np.abs(x[here]))[of.room :]]] = False
    assert want.sum() < chosen.sum()
    np.testing.assert_array_equal(helpers.unpacked(np.asarray(words))[:2_000], want)
    for part, first, end in zip(parts, bounds, bounds[1:], strict=False):
        own = helpers.unpacked(np.asarray(part))
        np.testing.assert_array_equal(own[: end - first], want[first:end])
        assert not own[end - first :].any()


@pytest.mark.slow
def test_regions_that_are_crowded_are_bounded_anew():
    g = np.zeros((4, STEPS, SIZE), np.float32)
    g[:] = np.random.default_rng(0).standard_normal((STEPS, SIZE))
    g[:, 9:, : SIZE // 4] *= 100
    g[:, 9:, SIZE // 4 :] = 0  # from now on all is in one rank's region
    totals, lefts, _ = compiled("ok_topk", 4)(g)
    check_law(g, totals, lefts[:, -1])
    shares = (totals[0] != 0).sum(axis=1) / SCHEMES["ok_topk"].k(SIZE)
    assert shares[11:16].min() > 0.7


@pytest.mark.slow
def test_both_ways_to_split_and_to_gather_give_the_same_bytes():
    n = 4
    g = gradients(n, STEPS)
    at_once, one_by_one = compiled("ok_topk", n)(g), compiled("ok_topk_rotated", n)(g)
    listed, _, _ = compiled("ok_topk_listed", n)(g)
    # Regions are bounded at other steps, and hold the same for as many.
    np.testing.assert_array_equal(at_once[0][:, :16], listed[:, :16])
    np.testing.assert_array_equal(at_once[0], one_by_one[0])
    # One message and its like to all others; or one after another, `bucket` at a time.
    bucket = SCHEMES["ok_topk_rotated"].bucket
    more = math.ceil((n - 1) / bucket) - 1
    assert more > 0
    np.testing.assert_array_equal(at_once[2][2] + more, one_by_one[2][2])


@pytest.mark.slow
def test_fewer_equal_ones_than_ranks_are_sent_at_once():
    """Each rank's share of two is less than one; some of them have to go all the same."""
    n, size = 4, 800
    g = np.zeros((n, 3, size), np.float32)
    g[np.arange(n), 1, np.arange(n) * 100 + 5] = 1
    totals, lefts, _ = helpers.ranked(steps_of(schemes.OkTopk(2 / size), n, size), n)(g)
    check_law(g, totals, lefts[:, -1])
    chosen = (totals[0] != 0).sum(axis=1)
    assert chosen[0] == 0
    assert 1 <= chosen[1] <= 3
    assert chosen[2] >= 1


# --- What is sent.

EXACT = 2560  # divisible by 4 ranks times 4, and by blocks of whole words


@pytest.mark.slow
def test_spar_dl_sends_what_table_i_says():
    name, n, k = "spar_dl_coo32", 5, 80
    run = compiled(name, n, size=640 * n, density=k / (640 * n))
    _, _, (push, pull, rounds, *_) = run(gradients(n, 3, 640 * n))
    paper = cost_tables.spar_dl(k, n)
    headers = 4 * 2 * (n - 1)
    assert push[0, -1] + pull[0, -1] == paper.bytes + headers
    counts = (float(k),) * len(forecast.merged(n))
    load = forecast.Load(n, 640 * n, 1, "float32", counts)
    scheme = dataclasses.replace(SCHEMES[name], density=k / (640 * n))
    assert push[0, -1] + pull[0, -1] == scheme.forecast(load).bytes
    assert rounds[0, -1] == paper.rounds


@pytest.mark.slow
def test_r_sag_sends_what_its_formula_says():
    n, teams = 8, SCHEMES["r_sag_4"].teams
    k = 16 * n
    scheme = dataclasses.replace(SCHEMES["r_sag_4"], code="coo32", density=k / (640 * n))
    run = jax.jit(jax.vmap(steps_of(scheme, n, 640 * n), axis_name=helpers.AXIS))
    _, _, (push, pull, *_) = run(gradients(n, 3, 640 * n))
    blocks = 2 * (n // teams - 1) + int(math.log2(teams))
    paper = cost_tables.spar_dl_r_sag(k, n, teams)
    assert push[0, -1] + pull[0, -1] == paper.bytes + 4 * blocks


@pytest.mark.slow
def test_b_sag_sends_what_its_formulas_say():
    n, teams = 6, SCHEMES["b_sag_3"].teams
    k = 16 * n
    scheme = dataclasses.replace(SCHEMES["b_sag_3"], code="coo32", density=k / (640 * n))
    run = jax.jit(jax.vmap(steps_of(scheme, n, 640 * n), axis_name=helpers.AXIS))
    _, _, (push, pull, *_) = run(gradients(n, 12, 640 * n))
    _, high = cost_tables.spar_dl_b_sag(k, n, teams)
    headers = 4 * (2 * (n // teams - 1) + teams - 1)
    sent = push[0] + pull[0]
    # Within the teams messages have one size; what the teams exchange is adapted.
    inside = 2 * (n // teams - 1) * teams * 16 * 8
    assert (sent - inside >= (teams - 1) * 16 * 8).all()
    assert (sent <= high.bytes + headers).all()


@pytest.mark.slow
def test_g_topk_sends_half_of_what_the_paper_says():
    k, n = 64, 4
    scheme = dataclasses.replace(SCHEMES["g_topk"], code="coo32", density=k / EXACT)
    run = jax.jit(jax.vmap(steps_of(scheme, n, EXACT), axis_name=helpers.AXIS))
    _, _, (push, pull, *_) = run(gradients(n, 3, EXACT))
    hops = math.log2(n)
    sent = push[0, -1] + pull[0, -1]
    assert sent == hops * (8 * k + 4) == cost_tables.g_topk(k, n).bytes / 2 + 4 * hops


@pytest.mark.slow
def test_ok_topk_sends_no_more_than_six_k_and_seldom_finds_thresholds_anew():
    n, size = 4, 64_000
    scheme = schemes.OkTopk(DENSITY, code="coo32")  # exact ones every 32 steps, by default
    g = gradients(n, 40, size)
    g = g[:, :, np.random.default_rng(0).permutation(size)]
    _, _, told = helpers.ranked(steps_of(scheme, n, size), n)(g)
    push, pull, _, chosen, scalars = told
    most = cost_tables.ok_topk(scheme.k(size), n)[1].bytes
    assert (push[0] + pull[0]).max() <= most
    # To find the sum's threshold exactly, numbers are counted eight times on all ranks.
    usual = scalars[0].min()
    search = magnitudes.kth_by_digits_bytes(np.float32, lambda b: 2 * (n - 1) / n * b)
    searched = scalars[0] - usual > 0.9 * search
    assert searched[[0, 32]].all()
    assert searched[8:].sum() <= 3
    assert scalars[0].mean() < 0.05 * (push[0] + pull[0]).mean()
    # A local one that was found exactly lets k through; where all ranks' do, it shows.
    shares = chosen[0] * size / scheme.k(size)
    anew = np.isclose(shares, 1, atol=1e-6)
    assert anew[[0, 32]].all()
    assert anew[8:].sum() <= 4
    assert np.abs(shares[8:] - 1).mean() < 0.15


@pytest.mark.slow
def test_index_codes_send_less():
    """Than coo32, which sends what the formula says, above; of as many in each block."""
    n, k = 4, SCHEMES["spar_dl"].k(SIZE)
    auto = sum(compiled("spar_dl", n)(gradients(n, STEPS))[2][:2])[0, -1]
    assert auto < 0.75 * cost_tables.spar_dl(n * -(-k // n), n).bytes


# --- Bad input.


def test_a_density_that_chooses_nothing_is_an_error():
    with pytest.raises(errors.ArgumentError, match="less than one element"):
        schemes.SparDL(1e-4).check_size("w", 3001)
    # A density above 1 would be refused as well.
    with pytest.raises(errors.ArgumentError, match=r"at least 1\.0e\+00,"):
        schemes.SparDL(0.1).check_size("w", 1)


def test_teams_that_do_not_divide_the_ranks_are_an_error():
    with pytest.raises(errors.ArgumentError, match=r"Use one of \[1, 2, 4, 8\]"):
        schemes.SparDL(0.01, teams=3).teams_of(SIZE, 8)


REFUSED = {
    "density": [
        lambda: schemes.SparDL(0),
        lambda: schemes.GTopk(1.5),
        lambda: schemes.OkTopk("half"),
    ],
    "teams must be": [lambda: schemes.SparDL(0.01, teams=0)],
    "power of two": [lambda: schemes.SparDL(0.01, teams=3, between="swaps")],
    "between must be": [lambda: schemes.SparDL(0.01, between="trees")],
    "power must be above 0 and at most 1": [lambda: schemes.OkTopk(0.01, power=0)],
    "threshold_every": [lambda: schemes.OkTopk(0.01, threshold_every=0)],
    "repartition_every": [lambda: schemes.OkTopk(0.01, repartition_every=0)],
    "bucket": [lambda: schemes.OkTopk(0.01, bucket=0)],
}


@pytest.mark.parametrize("match", REFUSED)
def test_what_a_scheme_cannot_be_is_refused(match):
    for make in REFUSED[match]:
        with pytest.raises(errors.ArgumentError, match=match):
            make()


@pytest.mark.parametrize("make", [schemes.SparDL, schemes.OkTopk])
def test_a_state_of_another_scheme_is_an_error(make):
    """It is not begun anew in silence, by which a schedule would be lost."""
    scheme, wire = make(DENSITY), Wire(helpers.AXIS)
    run = lambda x: scheme(Dense(x), (), wire).total
    message = f"{make.__name__} needs the state that its init makes.*got tuple"
    with pytest.raises(errors.StateError, match=message):
        jax.eval_shape(jax.vmap(run, axis_name=helpers.AXIS), jnp.zeros((2, SIZE)))


def test_thresholds_of_other_ranks_are_an_error():
    scheme = schemes.OkTopk(DENSITY)
    like = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
    state = helpers.first_state(scheme, like, 4)
    run = lambda x: scheme(Dense(x), state, Wire(helpers.AXIS)).total
    with pytest.raises(errors.StateError, match="made for 4 ranks, and there are 2"):
        jax.eval_shape(jax.vmap(run, axis_name=helpers.AXIS), jnp.zeros((2, SIZE)))


def test_without_a_power_a_threshold_moves_as_that_of_the_authors():
    """By 1.012, where it selects less than two thirds of k or more than five quarters."""
    scheme = schemes.OkTopk(DENSITY, power=None)
    rule = ThresholdRule(scheme.threshold_every, scheme.slack, scheme.power, scheme.step)
    counts = jnp.array([66, 67, 125, 126], jnp.int32)
    moved, _ = rule.next_local(jnp.ones(4), counts, 100, jnp.zeros(4), jnp.zeros(4))
    np.testing.assert_allclose(moved, [1 / 1.012, 1, 1, 1.012], rtol=1e-6)


# --- What they are measured against chooses from the same leaves.


@pytest.mark.slow
def test_those_that_choose_once_follow_the_rules():
    tx = sparsejax.transforms.topk_dsa_sync(
        0.01, rules={"small": "sparse", "whole": "dense"}
    )
    sizes = {"bias": 64, "small": 2000, "whole": 70_000}
    rng = np.random.default_rng(0)
    grads = {key: rng.standard_normal((2, n)) for key, n in sizes.items()}
    grads = jax.tree.map(jnp.float32, grads)
    params = jax.tree.map(lambda x: x[0], grads)
    mesh = helpers.mesh_of(2)
    state = sparsejax.init(tx, params, mesh)
    specs = sparsejax.state_specs(state)

    def step(grads, state):
        return tx.update(jax.tree.map(lambda x: x[0], grads), state)

    of = helpers.shard_map(
        step, mesh=mesh, in_specs=(P(helpers.AXIS), specs), out_specs=(P(), specs)
    )
    means, _ = jax.jit(of)(grads, state)
    counts = jax.tree.map(lambda x: int((x != 0).sum()), means)
    # Of both ranks at most 20 and a quarter more, the rest of the leaf waits.
    assert 20 <= counts.pop("small") <= 50
    assert counts == {"bias": 64, "whole": 70_000}


def test_a_density_that_an_error_names_is_enough():
    for size in (66_000, 70_000, 90_000, 123_457):
        with pytest.raises(errors.ArgumentError) as caught:
            schemes.GTopk(0.5 / size).check_size("w", size)
        named = float(str(caught.value).split("at least ")[1].split(",")[0])
        schemes.GTopk(named).check_size("w", size)


def test_teams_are_those_with_the_least_forecast_time():
    """Where messages are slow more teams, of which each sends fewer one after another."""
    size, n, found = 1 << 20, 8, []
    for network in (sparsejax.Network(0.01, 1), sparsejax.Network(100, 10_000)):
        scheme = schemes.SparDL(0.01, teams="auto", network=network)
        load = forecast.Load(n, size, 1, "float32", (0.0,) * len(forecast.merged(n)))
        made = lambda teams, scheme=scheme: dataclasses.replace(scheme, teams=teams)
        least = min((1, 2, 4, 8), key=lambda d: made(d).forecast(load).seconds(network))
        found.append(scheme.teams_of(size, n).number)
        assert found[-1] == least
    assert found[0] < found[1]


@pytest.mark.parametrize("many", [True, False])
def test_b_sag_comes_back_from_where_it_could_not_go_on(many):
    """Its step does not grow while it stands at a bound."""
    scheme = schemes.SparDL(0.1, teams=3)
    teams = scheme.teams_of(SIZE, 6)
    h = spar_all_gather.first_h(teams)
    full, empty = jnp.ones(teams.blocks.size), jnp.zeros(teams.blocks.size)
    after = jax.jit(lambda h, total: spar_all_gather.next_h(h, teams, total))
    for _ in range(300):
        h = after(h, full if many else empty)
    bound = teams.least_h if many else teams.k
    assert h.value == bound
    for _ in range(3):
        h = after(h, empty if many else full)
    assert h.value != bound


@pytest.mark.parametrize("network", [[1.0], (0, 1), None, ("a", "b")])
def test_a_network_is_one_or_two_positive_numbers(network):
    with pytest.raises(errors.ArgumentError, match="network must be"):
        schemes.SparDL(0.01, network=network)
    pair = schemes.SparDL(0.01, network=[1e-5, 1e9])
    assert hash(pair)
    assert pair == schemes.SparDL(0.01, network=sparsejax.Network(8, 10))
