"""Zen's Theorem 1: nothing sends less than the better of two schemes. Where it holds.

The two are Balanced Parallelism and Hierarchical Centralization. The theorem is about
perfect balance and ranks that are all alike. Here it is tried over a grid of drawn sets,
once with perfect balance, where it holds, and once with hashing, where it holds up to the
balance of the hash. Where it does not hold, the case is pinned below with what it costs.
"""

import functools
import math

import numpy as np
import pytest

from benchmarks.papers.formulas import design_space as ds
from benchmarks.papers.formulas.design_space import (
    BALANCED_PARALLELISM,
    HIERARCHICAL_CENTRALIZATION,
    Point,
)
from tests import helpers


RANKS = (2, 4, 8, 16, 32, 64, 128, 256)
DENSITIES = (0.001, 0.01, 0.1, 0.3)
OVERLAPS = ("disjoint", "independent", "shared core", "identical")
SKEWS = ("uniform", "Zipf", "one range")


# --- Over a grid.


def draw(n, size, density, overlap, skew, seed=0):
    """Sets [n, size] of about this density, less where disjoint sets have no room."""
    rng = np.random.default_rng([seed, n])
    hit = functools.partial(chances, size, skew)
    if overlap == "identical":
        return np.repeat(rng.random((1, size)) < hit(density), n, axis=0)
    if overlap == "independent":
        return rng.random((n, size)) < hit(density)
    if overlap == "shared core":
        return (rng.random((n, size)) < hit(density / 2)) | (
            rng.random(size) < hit(density / 2)
        )
    of_somebody = rng.random(size) < hit(min(0.9, density * n))
    return (rng.integers(0, n, size) == np.arange(n)[:, None]) & of_somebody


@functools.cache
def chances(size, skew, density):
    """The chance of each unit to be there: `density` on average."""
    if skew == "uniform":
        return np.full(size, density)
    weight = 1 / (np.arange(size) + 10.0)
    if skew == "one range":
        weight = (np.arange(size) < max(size // 8, 2 * density * size)).astype(float)
    low, high = 1e-9, 1e12
    for _ in range(80):
        middle = math.sqrt(low * high)
        enough = -np.expm1(-middle * weight).mean() > density
        low, high = (low, middle) if enough else (middle, high)
    return -np.expm1(-high * weight)


@functools.cache
def costs(n, size, density, overlap, skew):
    """Of one draw: the traffic of every point, mean entries, and perfect balance."""
    sets = draw(n, size, density, overlap, skew)
    found = {point: ds.traffic(point, sets) for point in ds.points()}
    # An n-th of every set, and of the union, in each part.
    entries, union = sets.sum(axis=1).mean(), sets.any(axis=0).sum()
    return found, entries, (n - 1) / n * (entries + union)


def imbalance(n, entries):
    """How much above its mean a hash's fullest part may be, with probability 1 - 1/n.

    Bernstein's inequality for entries/n balls a part, over all n parts: the first term is
    Theorem 2's sqrt(n log(n) / entries), the second matters where parts are nearly empty.
    """
    mean, log = max(entries / n, 1e-9), 2 * math.log(n)
    return math.sqrt(2 * log / mean) + 2 * log / (3 * mean)


def check_theorem(n, size, overlap):
    for density in DENSITIES:
        for skew in SKEWS:
            found, entries, perfect = costs(n, size, density, overlap, skew)
            received = {point: x.most_received for point, x in found.items()}
            links = {point: x.link_bytes for point, x in found.items()}
            least = min(received.values())
            # With perfect balance it holds, but for entries that their owner happens to
            # have: an n-th of each set, give or take. They need not be sent to it.
            luck = 4 * math.sqrt(entries) / n
            best = min(perfect - luck, received[HIERARCHICAL_CENTRALIZATION])
            assert least >= best
            # With a hash, up to its imbalance: all of a rank's load where a heavy part is
            # also sent back by its owner, and half of it, the push, where that is not
            # counted (the push is no longer than the pull).
            room = imbalance(n, entries)
            assert optimum(received) <= least * (1 + room / 2)
            assert optimum(links) <= min(links.values()) * (1 + room)


def optimum(cost):
    return min(cost[BALANCED_PARALLELISM], cost[HIERARCHICAL_CENTRALIZATION])


def check_best_centralization(n, overlap):
    """Lemma 2, and exactly: a union is never larger than its sets one by one."""
    for density in DENSITIES:
        for skew in SKEWS:
            found, _, _ = costs(n, 16384, density, overlap, skew)
            best = found[HIERARCHICAL_CENTRALIZATION].received.sum(axis=0)
            for point, other in found.items():
                if point.partition == "centralization":
                    assert (best <= other.received.sum(axis=0)).all(), point


def check_least_in_all(n, overlap):
    """B.1's orderings. With the same parts they are exact for the sum over ranks.

    In a chain and in a tree each rank but the owner sends once, and no less than it has. So
    only a rank with more load than others makes room for exceptions to the theorem.
    """
    for density in DENSITIES:
        for skew in SKEWS:
            found, _, _ = costs(n, 16384, density, overlap, skew)
            total = {point: x.received.sum() for point, x in found.items()}
            for point, own in total.items():
                pattern, when, *where = (
                    point.communication,
                    point.aggregation,
                    point.partition,
                    point.balance,
                )
                if where[0] == "parallelism":
                    assert total[Point("point_to_point", when, *where)] <= own
                chains = (pattern, where[0]) == ("ring", "centralization")
                if when == "one_shot" and not chains:
                    assert total[Point(pattern, "incremental", *where)] <= own


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("n", [4, *helpers.slow(16)])
def test_the_theorem_and_what_it_stands_on_hold_over_the_grid(n, overlap):
    """All three of the same draws, as to count these takes longest."""
    check_theorem(n, 16384, overlap)
    check_best_centralization(n, overlap)
    check_least_in_all(n, overlap)


# --- Where the theorem does not hold: each with its price.


def test_few_entries_are_not_balanced_by_hashing():
    """16 entries, the same on 256 ranks: a ring sends a quarter of the better of the two.

    Someone owns at least one entry and receives 255 copies of it, which one tree, eight
    stages of 16 entries, undercuts. But along a chain an entry comes by once on each rank,
    and the owner gets one sum: 16 in, 16 back, however they are spread.
    """
    sets = np.repeat((np.arange(16384) % 1024 == 5)[None], 256, axis=0)
    assert ds.traffic(BALANCED_PARALLELISM, sets).most_received >= 16 + 254
    assert ds.traffic(HIERARCHICAL_CENTRALIZATION, sets).most_received == 8 * 16
    ring = Point("ring", "incremental", "parallelism", "balanced")
    assert ds.traffic(ring, sets).most_received == 16 + 16


def test_ranks_that_own_what_they_have_need_not_send_it():
    """Entries that only their owner has are not pushed; hashing scatters them.

    Four ranges of 1100 units: 800 that the range's owner alone has, 300 that all have.
    Equal ranges: 3 * 300 in; back, 3 * 1100. The two: 3/4 of 2000 + 4400 with perfect
    balance, and in trees 2000, then 2 * 800 + 1200. So the theorem is off by a seventh.
    The push of an n-th is what is saved, so it fades with more ranks: of L entries of its
    own and C that all have, L / (n L + 2 C) at most.
    """
    place = np.arange(4400) % 1100
    mine = np.arange(4400) // 1100 == np.arange(4)[:, None]
    sets = (mine & (place < 800)) | (place >= 800)
    ranges = Point("point_to_point", "incremental", "parallelism", "imbalanced")
    assert ds.traffic(ranges, sets).most_received == 900 + 3300
    assert ds.traffic(HIERARCHICAL_CENTRALIZATION, sets).most_received == 2000 + 2800
    balanced = ds.traffic(BALANCED_PARALLELISM, sets).most_received
    assert balanced == pytest.approx(4800, rel=0.01)


def test_a_rank_that_sends_less_receives_more():
    """Equal parts are not equal loads where sets are not of one size.

    Rank 0 has nothing, the others the same 700 entries: an owner pays for every copy that
    is not its own, rank 0 for 3 an entry, others for 2, and each saves one in the pull.
    Parts of 100, 200, 200 and 200 even that out, at 700 + 200; equal ones cost a sixth
    more, 3 * 175 + 525.
    """
    place, part = np.arange(1200) % 300, np.arange(1200) // 300
    union = place < np.array([100, 200, 200, 200])[part]
    sets = np.stack([np.zeros(1200, bool), union, union, union])
    ranges = Point("point_to_point", "incremental", "parallelism", "imbalanced")
    assert ds.traffic(ranges, sets).received.sum(axis=0).tolist() == [900] * 4
    assert ds.traffic(HIERARCHICAL_CENTRALIZATION, sets).most_received == 1400
    perfect = 3 * 175 + 525
    found = ds.traffic(BALANCED_PARALLELISM, sets).most_received
    assert found / perfect == pytest.approx(1, abs=imbalance(4, 700))
    assert found / 900 > 1.1
