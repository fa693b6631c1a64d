"""The papers' formulas against the bytes that `wire` counts for a run.

A scheme that is built runs on simulated ranks. For one that is not, the messages of its
algorithm are written down here with the functions of `wire`, on buffers of the sizes that
its paper assumes, and traced.
"""

import functools
import math

import jax
import numpy as np
import pytest

from benchmarks.papers.formulas import cost_model, cost_tables
from benchmarks.papers.formulas.cost_model import Cost, Workload
from sparsejax import schemes
from sparsejax.advise.tensors import saved
from sparsejax.errors import ArgumentError
from sparsejax.wire import gathers
from tests import helpers
from tests.helpers import WIRE


# --- Schemes that are built.

UNITS, DENSITY, RANKS = 1 << 17, 0.02, 4
BUILT = {
    "all_reduce": (schemes.AllReduce(), cost_model.all_reduce),
    "balanced_parallelism": (
        schemes.BalancedParallelism(push_code="coo32", pull_code="coo32"),
        cost_model.balanced_parallelism,
    ),
    "balanced_parallelism_with_bitmap": (
        schemes.BalancedParallelism(push_code="coo32", pull_code="bitmap"),
        cost_model.balanced_parallelism_with_bitmap,
    ),
    "hierarchical_centralization": (
        schemes.HierarchicalCentralization(code="coo32"),
        cost_model.hierarchical_centralization,
    ),
    "ag_sparse": (schemes.AGSparse(), cost_model.ag_sparse),
    # The sets drawn here are even over equal ranges: skewness 1.
    "sparse_ps": (schemes.SparsePS(), cost_model.sparse_ps),
    "sparcml": (schemes.SparCML(), cost_model.hierarchical_centralization),
    # What is held doubles, and in all it is what is gathered.
    "sparcml_split": (
        schemes.SparCML("ssar_split_all_gather"),
        cost_model.balanced_parallelism,
    ),
    "sparcml_dense": (
        schemes.SparCML("dsar_split_all_gather"),
        lambda load: Cost(0, (load.ranks - 1) / load.ranks * split_and_dense(load)),
    ),
}


def split_and_dense(load):
    """A set on the way in, the dense array on the way back (SparCML's DSAR)."""
    return load.set_bytes + load.dense_bytes


def runner(scheme, n):
    """What a scheme sends on n ranks and the sum's density, compiled once."""

    def run(x):
        traffic = helpers.call(scheme, x, helpers.init(scheme, x)).traffic
        return traffic.payload, traffic.wire, traffic.density_after

    return helpers.ranked(run, n)


def gradients(overlap, n):
    """Ones at as many units on every rank, which overlap in one of three ways."""
    count = round(UNITS * DENSITY)
    order = np.random.default_rng(n).permutation(UNITS)
    independent = [np.random.default_rng(rank).permutation(UNITS) for rank in range(n)]
    x = np.zeros((n, UNITS), np.float32)
    for rank in range(n):
        units = {
            "same": order,
            "disjoint": order[rank * count :],
            "independent": independent[rank],
        }[overlap][:count]
        x[rank, units] = 1
    return x


def workload(overlap, n):
    # What was drawn: a whole number of units.
    density = round(UNITS * DENSITY) / UNITS
    return getattr(Workload, overlap)(n, UNITS, 4, density)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT)
def test_a_run_needs_the_bytes_of_its_formula(name):
    scheme, formula = BUILT[name]
    run = runner(scheme, RANKS)
    for overlap in ("same", "disjoint", "independent"):
        payload, sent, density = run(gradients(overlap, RANKS))
        load = workload(overlap, RANKS)
        # 2%: a header of 4 bytes a message is 0.2% of the shortest one, and of random sets
        # the fullest partial sum is a little fuller than the mean one.
        assert payload[0] == pytest.approx(formula(load).bytes, rel=0.02)
        assert sent[0] >= payload[0]
        if name != "all_reduce":  # which does not look
            assert density[0] == pytest.approx(load.density * load.gamma(RANKS), rel=0.02)


@pytest.mark.slow
def test_a_broadcast_by_all_servers_at_once_sends_less_than_its_formula():
    """In the paper servers broadcast one after another, each with a scatter of its own."""
    n, load = RANKS, workload("independent", RANKS)
    run = runner(schemes.SparsePS("broadcast"), n)
    payload = run(gradients("independent", n))[0][0]
    push = (n - 1) / n * load.set_bytes
    pull = (n - 1) / n * (1 + 1 / n) * load.sum_bytes
    assert payload == pytest.approx(push + pull, rel=0.02)
    assert payload <= cost_model.sparse_ps_broadcast(load).bytes * 1.02


@pytest.mark.slow
def test_omni_reduce_sends_the_blocks_of_its_formula():
    n, block = RANKS, 64
    run = runner(schemes.OmniReduce(block=block), n)
    # Whole blocks, one in fifty, so that their density is exact.
    rng = np.random.default_rng(0)
    count, blocks = 40, UNITS // block
    mask = np.zeros((n, blocks), bool)
    for rank in range(n):
        mask[rank, rng.permutation(blocks)[:count]] = True
    x = np.repeat(mask, block, axis=1).astype(np.float32)
    growth = [
        np.mean([mask[i : i + k].any(0).sum() for i in range(0, n, k)]) / count
        for k in (2, 4)
    ]
    load = workload("independent", n)
    formula = cost_model.omni_reduce(load, block, count / blocks, tuple(growth)).bytes
    # Offsets and headers come on top: 4 bytes to a block of 256.
    assert formula <= run(x)[0][0] <= formula * 1.03


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 6])
def test_ranks_beyond_a_power_of_two_fold_as_in_our_scheme(n):
    """Disjoint sets, whose ratios between the known points are exact."""
    load = workload("disjoint", n)
    scheme, _ = BUILT["hierarchical_centralization"]
    payload, _, _ = runner(scheme, n)(gradients("disjoint", n))
    cost = cost_model.hierarchical_centralization(load)
    assert payload[0] == pytest.approx(cost.bytes, rel=0.02)
    # A fold, 1 or 2 swaps, an unfold.
    assert cost.rounds == (3 if n == 3 else 4)


# --- Algorithms written down: generators over the bytes of each message.

N = 8  # ranks
WORD = 4
K = 4096  # entries chosen, two words each
NUMBERS = 1 << 16
GROWTH = (1.5, 2.5, 4.0)
LOAD = Workload(N, NUMBERS, WORD, 1 / 16, GROWTH)
SET = NUMBERS // 16  # entries of one rank


def ahead(distance, n=N):
    return tuple((rank, (rank + distance) % n) for rank in range(n))


def across(distance):
    return tuple((rank, rank ^ distance) for rank in range(N))


def send(words, count, pairs):
    return WIRE.permute(words(count), pairs)[1]


def to_all_from_all(words, each, n=N):
    """To every rank a message of its own."""
    return WIRE.all_to_all(words(n, each))[1]


def to_all(words, each):
    """To every rank the same message."""
    return WIRE.all_gather(words(each))[1]


def team_gather(words, each, size, stride=1):
    """A Bruck all-gather in teams of ranks that are a stride apart."""
    have = 1
    while have < size:
        sent = min(have, size - have)
        pairs = []
        for rank in range(N):
            place = rank // stride % size
            pairs.append((rank, rank + ((place - have) % size - place) * stride))
        yield send(words, sent * each, tuple(pairs))
        have += sent


def all_reduce(words):
    yield WIRE.psum(words(NUMBERS))[1]


def ag_sparse(words):
    yield to_all(words, 2 * SET)


def without_index(words):
    yield to_all_from_all(words, SET // N)
    yield to_all(words, SET * 4 // N)


def sparse_ps(words):
    """One range has 3 of 8 parts of all entries, and all messages are as long as its."""
    yield to_all_from_all(words, 2 * 3 * SET // N)
    yield to_all(words, 2 * 3 * SET * 4 // N)


def broadcast_tree(words):
    yield to_all_from_all(words, 2 * 3 * SET // N)
    for distance in (1, 2, 4):
        pairs = tuple((rank, rank + distance) for rank in range(distance))
        yield send(words, 2 * SET * 4, pairs)


def broadcast_scatter(words):
    yield to_all_from_all(words, 2 * 3 * SET // N)
    for rank in range(1, N):
        yield send(words, 2 * SET * 4 // N, ((0, rank),))
    yield to_all(words, 2 * SET * 4 // N)


def ring(words):
    for stage in range(1, N):
        yield send(words, round(2 * SET * LOAD.gamma(stage) / N), ahead(1))


def hierarchy(words):
    """Every partition has a tree of its own: halving."""
    yield send(words, SET, across(4))
    yield send(words, SET * 3 // 2 // 2, across(2))
    yield send(words, SET * 5 // 2 // 4, across(1))


def omni_reduce(words):
    """Blocks of 256, half of them, all of them in the sum."""
    yield to_all_from_all(words, NUMBERS // 2 // N)
    yield to_all(words, NUMBERS // N)


def embrace_all_to_all(words):
    for _ in ("looked-up rows", "gradients"):
        yield to_all_from_all(words, NUMBERS // 16 // N)


def embrace_ps(words):
    """A server on each of 4 nodes has a quarter; what the first one sends and gets."""
    for rank in range(N):
        yield send(words, NUMBERS // 16 // 4, ((0, rank),))
        yield send(words, NUMBERS // 16 // 4, ((rank, 0),))


def all_gather(words):
    yield to_all(words, NUMBERS // 16)


def halving_and_doubling(words):
    for distance in (4, 2, 1):
        yield send(words, NUMBERS // N * distance, across(distance))
    for distance in (1, 2, 4):
        yield send(words, NUMBERS // N * distance, across(distance))


def topk_a(words):
    yield gathers.bruck_all_gather(words(2 * K), WIRE)[1]


def topk_dsa_low(words):
    yield to_all_from_all(words, 2 * K // N)
    yield from team_gather(words, 2 * K // N, N)


def topk_dsa_high(words):
    yield to_all_from_all(words, 2 * K // N)
    yield from team_gather(words, NUMBERS // N, N)


def g_topk(words):
    for distance in (1, 2, 4):
        up = tuple((rank + distance, rank) for rank in range(0, N, 2 * distance))
        yield send(words, 2 * K, up)
    for distance in (4, 2, 1):
        down = tuple((rank, rank + distance) for rank in range(0, N, 2 * distance))
        yield send(words, 2 * K, down)


def ok_topk_low(words):
    yield from team_gather(words, 2 * K // N, N)


def ok_topk_high(words):
    """One rank has all winners and hands each other rank a share."""
    yield to_all_from_all(words, 2 * K // N)
    for rank in range(1, N):
        yield send(words, 2 * K // N, ((0, rank),))
    yield from team_gather(words, 2 * K // N, N)


def spar_reduce_scatter(words, block, size):
    """Bags of 4, 2 and 1 blocks, so far as there are blocks, to ranks of the same team."""
    left = size
    while left > 1:
        distance = 1 << ((left - 1).bit_length() - 1)
        pairs = tuple(
            (rank, rank // size * size + (rank % size + distance) % size)
            for rank in range(N // size * size)
        )
        yield send(words, (left - distance) * block, pairs)
        left = distance


def spar_dl(words):
    yield from spar_reduce_scatter(words, 2 * K // N, N)
    yield from team_gather(words, 2 * K // N, N)


def r_sag(words, teams):
    size = N // teams
    block = 2 * K // size
    yield from spar_reduce_scatter(words, block, size)
    distance = size
    while distance < N:
        yield send(words, block, across(distance))
        distance *= 2
    yield from team_gather(words, block, size)


def b_sag(words, teams, chosen, held):
    """`chosen` and `held` in units of k/P entries."""
    size = N // teams
    yield from spar_reduce_scatter(words, 2 * K // size, size)
    yield from team_gather(words, chosen * 2 * K // N, teams, stride=size)
    yield from team_gather(words, held * 2 * K // N, size)


SKEWED = Workload(N, NUMBERS, WORD, 1 / 16, GROWTH, skewness=3.0)
by_tree = functools.partial(cost_model.sparse_ps_broadcast, algorithm="binomial")
low = lambda pair: pair[0]
high = lambda pair: pair[1]
# The formula, the algorithm, and how many more rounds the formula counts.
WRITTEN = {
    "all_reduce": (cost_model.all_reduce(LOAD), all_reduce, 0),
    "ag_sparse": (cost_model.ag_sparse(LOAD), ag_sparse, 0),
    "without index": (
        cost_model.balanced_parallelism_without_index(LOAD),
        without_index,
        0,
    ),
    "sparse_ps": (cost_model.sparse_ps(SKEWED), sparse_ps, 0),
    "broadcast, tree": (by_tree(SKEWED), broadcast_tree, 0),
    "broadcast, scatter": (cost_model.sparse_ps_broadcast(SKEWED), broadcast_scatter, 0),
    "ring": (cost_model.ring_parallelism_push(LOAD), ring, 0),
    "hierarchy": (cost_model.hierarchy_parallelism_push(LOAD), hierarchy, 0),
    "omni_reduce": (
        cost_model.omni_reduce(LOAD, 256, 0.5, (1.5, 2, 2)),
        omni_reduce,
        0,
    ),
    "EmbRace AlltoAll": (
        cost_tables.embrace_all_to_all(4 * NUMBERS, 1 / 16, N),
        embrace_all_to_all,
        0,
    ),
    "EmbRace AllReduce": (cost_tables.embrace_all_reduce(4 * NUMBERS, N), all_reduce, 0),
    "EmbRace PS": (cost_tables.embrace_ps(4 * NUMBERS, 1 / 16, N, 4), embrace_ps, 0),
    "EmbRace AllGather": (
        cost_tables.embrace_all_gather(4 * NUMBERS, 1 / 16, N),
        all_gather,
        0,
    ),
    "DRAGONN full": (cost_tables.dragonn_full(NUMBERS, 4, N), all_reduce, 0),
    "DRAGONN sparse": (cost_tables.dragonn_sparse(NUMBERS, 4, 1 / 16, N), all_gather, 0),
    "Dense": (cost_tables.dense(NUMBERS, N), halving_and_doubling, 0),
    "TopkA": (cost_tables.topk_a(K, N), topk_a, 0),
    "Gaussiank": (cost_tables.gaussian_k(K, N), topk_a, 0),
    # The table counts P for the P - 1 of the split, and log P = 3 twice.
    "TopkDSA, low": (low(cost_tables.topk_dsa(K, NUMBERS, N)), topk_dsa_low, 1 + 3),
    "TopkDSA, high": (high(cost_tables.topk_dsa(K, NUMBERS, N)), topk_dsa_high, 1 + 3),
    "gTopk": (cost_tables.g_topk(K, N), g_topk, 0),
    # One number of rounds for both ends: no split and no balancing, and no sizes.
    "Ok-Topk, low": (low(cost_tables.ok_topk(K, N)), ok_topk_low, 8 + 8 + 3),
    # P for P - 1 twice, and the 3 rounds in which sizes are gathered.
    "Ok-Topk, high": (high(cost_tables.ok_topk(K, N)), ok_topk_high, 1 + 1 + 3),
    "SparDL": (cost_tables.spar_dl(K, N), spar_dl, 0),
}
for teams in (1, 2, 4):
    WRITTEN[f"R-SAG, {teams} teams"] = (
        cost_tables.spar_dl_r_sag(K, N, teams),
        functools.partial(r_sag, teams=teams),
        0,
    )
    bounds = cost_tables.spar_dl_b_sag(K, N, teams)
    WRITTEN[f"B-SAG, {teams} teams, low"] = (
        low(bounds),
        functools.partial(b_sag, teams=teams, chosen=1, held=1),
        0,
    )
    WRITTEN[f"B-SAG, {teams} teams, high"] = (
        high(bounds),
        functools.partial(b_sag, teams=teams, chosen=teams, held=teams),
        0,
    )


def counted(algorithm, n=N):
    """The messages of one rank that follow one another, and their bytes."""
    sent = []

    def run(x):
        def words(*shape):
            return x[: math.prod(shape)].reshape(shape)

        sent.extend(algorithm(words))
        return x

    # Room for the longest buffer, the TopkDSA's dense half of the sums.
    x = jax.ShapeDtypeStruct((n, 4 * NUMBERS), np.float32)
    found = helpers.traced_collectives(run, x, n, check_vma=False)
    messages = {
        "psum": 2 * (n - 1),
        "all_gather": n - 1,
        "all_to_all": n - 1,
        "ppermute": 1,
    }
    return Cost(sum(messages[c.name] for c in found), sum(sent))


@pytest.mark.parametrize("name", WRITTEN)
def test_an_algorithm_sends_the_bytes_and_messages_of_its_formula(name):
    formula, algorithm, more_rounds = WRITTEN[name]
    found = counted(algorithm)
    # The ring's ratios between known points give sizes that are rounded to words.
    assert found.bytes == pytest.approx(formula.bytes, rel=1e-3 if name == "ring" else 1e-9)
    assert found.rounds == formula.rounds - more_rounds


@pytest.mark.parametrize("n", [3, 6, 7])
def test_spar_dl_needs_no_power_of_two(n):
    k = 5 * 6 * 7 * 8

    def algorithm(words):
        held = n
        while held > 1:
            distance = 1 << ((held - 1).bit_length() - 1)
            yield send(words, (held - distance) * 2 * k // n, ahead(distance, n))
            held = distance
        yield gathers.bruck_all_gather(words(2 * k // n), WIRE)[1]

    found, formula = counted(algorithm, n), cost_tables.spar_dl(k, n)
    assert found.bytes == pytest.approx(formula.bytes)
    assert found.rounds == formula.rounds


# --- Arithmetic by hand.


def test_two_ranks_by_hand():
    """100 units of 4 bytes, 10 of them on a rank, 15 in the sum."""
    load = Workload(2, 100, 4, 0.1, (1.5,), skewness=2.0)
    values = {name: tuple(cost(load)) for name, cost in cost_model.SCHEMES.items()}
    # A set has 10 entries of 8 bytes; the sum 15.
    assert values == {
        "all_reduce": (2, 400),
        "ag_sparse": (1, 80),
        "hierarchical_centralization": (1, 80),
        "balanced_parallelism": (2, pytest.approx((80 + 120) / 2)),
        # 15 values of 4 bytes, 100 bits.
        "balanced_parallelism_with_bitmap": (2, pytest.approx((80 + 60 + 12.5) / 2)),
        "balanced_parallelism_without_index": (2, pytest.approx((40 + 60) / 2)),
        # All entries are in one of the two ranges.
        "sparse_ps": (2, pytest.approx(80 + 120)),
        "sparse_ps_broadcast": (3, pytest.approx(80 + 120)),
    }


def test_one_rank_sends_nothing():
    load = Workload.same(1, 100, 4, 0.1)
    for name, cost in cost_model.SCHEMES.items():
        assert cost(load) == (0, 0), name
    assert cost_model.ring_parallelism_push(load) == (0, 0)
    assert cost_model.hierarchy_parallelism_push(load) == (0, 0)
    assert cost_tables.spar_dl(10, 1) == cost_tables.dense(10, 1) == (0, 0)


def test_growth_between_known_points_is_a_power():
    load = Workload(6, 100, 4, 0.1, (1.5, 2.0, 2.5))
    assert [load.gamma(k) for k in (1, 2, 4, 6)] == [1, 1.5, 2, 2.5]
    # Halfway between 2 and 4, in logarithms, lies the square root of 1.5 * 2.
    assert load.gamma(2 * math.sqrt(2)) == pytest.approx(math.sqrt(3))
    disjoint = Workload.disjoint(7, 100, 4, 0.1)
    assert [disjoint.gamma(k) for k in range(1, 8)] == pytest.approx(range(1, 8))
    independent = Workload.independent(4, 100, 4, 0.1)
    # 1 - 0.9**2 = 0.19 and 1 - 0.9**4 = 0.3439.
    assert independent.growth == pytest.approx((1.9, 3.439))


# --- What the papers say about their formulas.


@pytest.mark.parametrize("n", [2, 16])
def test_zen_on_sets_without_overlap_and_on_equal_sets(n):
    """Zen 2.3: 1 + 1/n between the optima, and log2 n against 2 (n - 1)/n."""
    apart = Workload.disjoint(n, 10**6, 4, 1e-3)
    hierarchical = cost_model.hierarchical_centralization(apart).bytes
    balanced = cost_model.balanced_parallelism(apart).bytes
    assert balanced / hierarchical == pytest.approx(1 + 1 / n)
    assert cost_model.ag_sparse(apart).bytes == pytest.approx(hierarchical)
    equal = Workload.same(n, 10**6, 4, 1e-3)
    in_sets = 8 * 10**6 * 1e-3
    hierarchical = cost_model.hierarchical_centralization(equal).bytes / in_sets
    balanced = cost_model.balanced_parallelism(equal).bytes / in_sets
    assert hierarchical == pytest.approx(math.log2(n))
    assert balanced == pytest.approx(2 * (n - 1) / n)


def test_zen_on_nmt_with_eight_gpus_and_one_sentence():
    """Zen 2.4: SparCML beats AGsparse by 4% and Balanced Parallelism by 9%.

    Without any overlap they would be 0% and 12.5%. One growth gives both numbers: that
    where two ranks share 5% of their units.
    """
    growth = tuple(1.95**i for i in (1, 2, 3))
    load = Workload(8, 10**6, 4, 1e-3, growth)
    best = cost_model.hierarchical_centralization(load).bytes
    # Rounded to whole percents.
    assert cost_model.ag_sparse(load).bytes / best == pytest.approx(1.04, abs=0.005)
    assert cost_model.balanced_parallelism(load).bytes / best == pytest.approx(
        1.09, abs=0.005
    )
    assert cost_model.zen_optimum(load) == "hierarchical"


def test_zen_on_nmt_with_a_batch_of_64():
    """Zen, table 1 and figure 8: 2.47% dense; AGsparse loses to AllReduce above 40 GPUs."""
    ratio = {}
    for n in (40, 41):
        load = Workload.same(n, 112 * 10**6, 4, 0.0247)
        ratio[n] = cost_model.ag_sparse(load).bytes / cost_model.all_reduce(load).bytes
    assert ratio[40] < 1 < ratio[41]
    # Indices as large as values double the cost.
    load = Workload.independent(128, 112 * 10**6, 4, 0.0247)
    ideal = cost_model.balanced_parallelism_without_index(load).bytes
    assert cost_model.balanced_parallelism(load).bytes == pytest.approx(2 * ideal)


def test_theorem_1_chooses():
    choose = cost_model.zen_optimum
    assert choose(Workload.same(8, 10**6, 4, 0.01)) == "balanced"
    assert choose(Workload.disjoint(8, 10**6, 4, 0.01)) == "hierarchical"
    assert choose(Workload.independent(2, 10**6, 4, 0.3)) == "hierarchical"
    # Half of the units, with indices: a set is as large as the array.
    assert choose(Workload.same(8, 10**6, 4, 0.5)) == "dense"
    assert choose(Workload.same(8, 10**6, 4, 0.49)) == "balanced"
    # Rows of 128 numbers: an index hardly counts.
    assert choose(Workload.same(8, 10**6, 512, 0.9)) == "balanced"


def test_dragonn_saves_what_the_two_models_differ_by():
    """On 4 ranks, 10**6 numbers of 4 bytes, compressed to a tenth: (4 - 1) (2/4 - 0.1)."""
    sparse = cost_tables.dragonn_sparse(10**6, 4, 0.1, 4).time(1e-3, 1e9)
    full = cost_tables.dragonn_full(10**6, 4, 4).time(1e-3, 1e9)
    # 3 * (1 ms + 0.4 * 4 ms) = 7.8 ms; the printed 1/K would give 4.8 ms.
    assert full - sparse == pytest.approx(0.0078)
    assert saved(4 * 10**6, 0.1, 4, alpha=1e-3, bandwidth=1e9) == pytest.approx(0.0078)
    # With 20 ranks a tenth is the 2/K that an all-reduce sends: only messages are saved.
    cost = cost_tables.dragonn_sparse(10**6, 4, 0.1, 20)
    full = cost_tables.dragonn_full(10**6, 4, 20)
    assert cost.bytes == pytest.approx(full.bytes)
    assert full.rounds - cost.rounds == 19


@pytest.mark.parametrize("d", [1, 3])
def test_the_lower_bound_that_spar_dl_prints_leaves_out_a_step(d):
    """Table I and equation (10) have d**2 where the sum of (6), (8) and (9) has d * P."""
    p, k = 12, 1200
    words = [cost.bytes / 4 for cost in cost_tables.spar_dl_b_sag(k, p, d)]
    printed = 2 * k * (d * d + p - 2 * d) / (p * d)
    reduce_scatter = 2 * k * (p - d) / p
    assert words[0] == pytest.approx(2 * k * (d * p + p - 2 * d) / (p * d))
    assert words[0] - printed == pytest.approx(reduce_scatter)
    assert words[1] == pytest.approx(2 * k * (d * d + 2 * p - 3 * d) / p)


# --- What cannot be.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 0}, "ranks must be at least 1, got 0"),
        ({"unit_bytes": 0}, "unit_bytes must be above 0, got 0"),
        ({"density": 1.5}, r"density must lie in \(0, 1\], got 1.5"),
        ({"index_bytes": -1}, "index_bytes must be at least 0, got -1"),
        ({"skewness": 5}, r"skewness must lie in \[1, 4\], got 5"),
        ({"growth": (1.5,)}, r"growth must hold a ratio for each of \(2, 4\) ranks"),
        ({"growth": (1.5, 1.2)}, "growth must not fall.*at 4 ranks.*between 1.5"),
        ({"density": 0.5, "growth": (1.5, 3)}, "at 4 ranks it must lie between 1.5 and 2"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(change, message):
    sound = {"ranks": 4, "units": 100, "unit_bytes": 4, "density": 0.1, "growth": (1.5, 2)}
    assert Workload(**sound).ranks == 4
    with pytest.raises(ArgumentError, match=message):
        Workload(**(sound | change))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LOAD.gamma(9), r"k must lie in \[1, 8\], got 9"),
        (lambda: Cost(1, 1).time(0, 0), "bandwidth must be above 0, got 0"),
        (
            lambda: cost_model.sparse_ps_broadcast(LOAD, "chain"),
            "algorithm must be one of 'binomial', 'scatter_all_gather', got 'chain'",
        ),
        (
            lambda: cost_model.hierarchy_parallelism_push(Workload.same(6, 9, 4, 0.1)),
            "ranks must be a power of two, got 6",
        ),
        (
            lambda: cost_tables.embrace_ps(10, 0.1, 8, 2, 4),
            "servers must not exceed nodes, got 4 servers and 2 nodes",
        ),
        (
            lambda: cost_tables.topk_dsa(10, 9, 8),
            "numbers must be at least 10, got 9",
        ),
        (
            lambda: cost_tables.spar_dl_b_sag(10, 8, 3),
            "teams must divide ranks.*got 3 teams and 8 ranks",
        ),
        (
            lambda: cost_tables.spar_dl_r_sag(10, 6, 3),
            "teams must be a power of two, got 3",
        ),
    ],
)
def test_an_argument_that_cannot_be_is_refused(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
