"""The papers' formulas against the bytes of runs, and against messages written down.

A scheme that is built runs on simulated ranks. For one that is not, the messages of its
algorithm are written down here, as long as its paper assumes.
"""

import functools
import math

import numpy as np
import pytest

from benchmarks.papers.formulas import cost_model, cost_tables
from benchmarks.papers.formulas.cost_model import Cost, Workload
from sparsejax import schemes
from sparsejax.advise.tensors import saved
from sparsejax.errors import ArgumentError
from tests import helpers


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


# --- Algorithms written down: messages that follow one another, and the words of each.

N = 8  # ranks
WORD = 4
K = 4096  # entries chosen, two words each
NUMBERS = 1 << 16
GROWTH = (1.5, 2.5, 4.0)
LOAD = Workload(N, NUMBERS, WORD, 1 / 16, GROWTH)
SKEWED = Workload(N, NUMBERS, WORD, 1 / 16, GROWTH, skewness=3.0)
SET = NUMBERS // 16  # entries of one rank
SUM = 4 * SET  # entries of the sum of all


def to_others(words):
    """To every other rank a message of so many words, its own or the same."""
    return N - 1, words


def gathered(block, ranks=N):
    """Bruck's all-gather of blocks: of all that a rank has, as far as others lack it."""
    have = 1
    while have < ranks:
        sent = min(have, ranks - have)
        yield 1, sent * block
        have += sent


def bags(block, ranks=N):
    """SparDL's reduce-scatter: of the blocks that are left, those beyond a power of two."""
    left = ranks
    while left > 1:
        kept = 1 << ((left - 1).bit_length() - 1)
        yield 1, (left - kept) * block
        left = kept


def r_sag(teams):
    size = N // teams
    block = 2 * K // size
    swaps = teams.bit_length() - 1, block
    return [*bags(block, size), swaps, *gathered(block, size)]


def b_sag(teams, chosen):
    """`chosen` in units of k/P entries, between teams and within them."""
    size, block = N // teams, chosen * 2 * K // N
    within = gathered(block, size)
    return [*bags(2 * K // size, size), *gathered(block, teams), *within]


by_tree = functools.partial(cost_model.sparse_ps_broadcast, algorithm="binomial")
low = lambda pair: pair[0]
high = lambda pair: pair[1]
ALL_REDUCE = [(2 * (N - 1), NUMBERS / N)]
HALVES = [(1, NUMBERS // N * distance) for distance in (4, 2, 1)]
# In one range are 3 of 8 parts of all entries, and all messages are as long as its.
PUSHED = to_others(2 * 3 * SET // N)
SPLIT = to_others(2 * K // N)
TO_SERVERS = NUMBERS // 16 // 4  # of four nodes each has a quarter
# The formula, the algorithm, and how many more rounds the formula counts.
WRITTEN = {
    "broadcast, tree": (by_tree(SKEWED), [PUSHED, (3, 2 * SUM)], 0),
    "broadcast, scatter": (
        cost_model.sparse_ps_broadcast(SKEWED),
        [PUSHED, *2 * [to_others(2 * SUM // N)]],
        0,
    ),
    "ring": (
        cost_model.ring_parallelism_push(LOAD),
        [(1, 2 * SET * LOAD.gamma(stage) / N) for stage in range(1, N)],
        0,
    ),
    # Every partition has a tree of its own: halving.
    "hierarchy": (
        cost_model.hierarchy_parallelism_push(LOAD),
        [(1, SET), (1, SET * 1.5 / 2), (1, SET * 2.5 / 4)],
        0,
    ),
    # Looked-up rows, and gradients.
    "EmbRace AlltoAll": (
        cost_tables.embrace_all_to_all(4 * NUMBERS, 1 / 16, N),
        2 * [to_others(NUMBERS // 16 // N)],
        0,
    ),
    "EmbRace AllReduce": (cost_tables.embrace_all_reduce(4 * NUMBERS, N), ALL_REDUCE, 0),
    # What the first server sends and gets.
    "EmbRace PS": (
        cost_tables.embrace_ps(4 * NUMBERS, 1 / 16, N, 4),
        [(2 * N, TO_SERVERS)],
        0,
    ),
    "EmbRace AllGather": (
        cost_tables.embrace_all_gather(4 * NUMBERS, 1 / 16, N),
        [to_others(NUMBERS // 16)],
        0,
    ),
    "Dense": (cost_tables.dense(NUMBERS, N), 2 * HALVES, 0),
    "TopkA": (cost_tables.topk_a(K, N), gathered(2 * K), 0),
    # The table counts P for the P - 1 of the split, and log P = 3 twice.
    "TopkDSA, low": (
        low(cost_tables.topk_dsa(K, NUMBERS, N)),
        [SPLIT, *gathered(2 * K // N)],
        1 + 3,
    ),
    "TopkDSA, high": (
        high(cost_tables.topk_dsa(K, NUMBERS, N)),
        [SPLIT, *gathered(NUMBERS // N)],
        1 + 3,
    ),
    # Up a tree, and down.
    "gTopk": (cost_tables.g_topk(K, N), [(6, 2 * K)], 0),
    # One number of rounds for both ends: no split and no balancing, and no sizes.
    "Ok-Topk, low": (low(cost_tables.ok_topk(K, N)), gathered(2 * K // N), 8 + 8 + 3),
    # One rank has all winners and hands each other rank a share. P for P - 1 twice, and the
    # 3 rounds in which sizes are gathered.
    "Ok-Topk, high": (
        high(cost_tables.ok_topk(K, N)),
        [SPLIT, to_others(2 * K // N), *gathered(2 * K // N)],
        1 + 1 + 3,
    ),
}
for teams in (1, 2, 4):
    bounds = cost_tables.spar_dl_b_sag(K, N, teams)
    WRITTEN |= {
        f"R-SAG, {teams} teams": (cost_tables.spar_dl_r_sag(K, N, teams), r_sag(teams), 0),
        f"B-SAG, {teams} teams, low": (low(bounds), b_sag(teams, 1), 0),
        f"B-SAG, {teams} teams, high": (high(bounds), b_sag(teams, teams), 0),
    }


def counted(messages):
    """How many messages follow one another, and their bytes."""
    messages = [*messages]
    words = sum(count * each for count, each in messages)
    return Cost(sum(count for count, _ in messages), WORD * words)


@pytest.mark.parametrize("name", WRITTEN)
def test_an_algorithm_sends_the_bytes_and_messages_of_its_formula(name):
    formula, messages, more_rounds = WRITTEN[name]
    found = counted(messages)
    assert found.bytes == pytest.approx(formula.bytes)
    assert found.rounds == formula.rounds - more_rounds


# --- Arithmetic by hand.


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


# --- What cannot be.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 0}, "ranks must be at least 1, got 0"),
        ({"density": 1.5}, r"density must lie in \(0, 1\], got 1.5"),
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
        (
            lambda: cost_model.sparse_ps_broadcast(LOAD, "chain"),
            "algorithm must be one of 'binomial', 'scatter_all_gather', got 'chain'",
        ),
        (
            lambda: cost_model.hierarchy_parallelism_push(Workload.same(6, 9, 4, 0.1)),
            "ranks must be a power of two, got 6",
        ),
        (
            lambda: cost_tables.spar_dl_b_sag(10, 8, 3),
            "teams must divide ranks.*got 3 teams and 8 ranks",
        ),
    ],
)
def test_an_argument_that_cannot_be_is_refused(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
