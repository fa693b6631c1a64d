"""The cost formulas of EmbRace, DRAGONN, Ok-Topk and SparDL, on the model of `cost_model`.

In order: EmbRace, table 2; DRAGONN, equation (1); Ok-Topk, table 1, and SparDL, table I,
which list the same schemes. The last two count words; an entry is two, k entries are k
values and k indices. The schemes that choose k entries are lossy: a formula says what is
sent, and not how much of the sum arrives.

Where a cost depends on how sets overlap, the papers give its ends: a pair (low, high).
Logarithms are rounded up to whole rounds. The tables print them bare, and SparDL's own
derivation rounds them up. The k/P entries of a part are not rounded.
"""

from benchmarks.papers.formulas.cost_model import Cost, check_power_of_two, doublings, total
from sparsejax import arguments
from sparsejax.errors import ArgumentError


# --- EmbRace, table 2. There the latency is beta, and B the bandwidth.


def embrace_all_to_all(size: float, density: float, ranks: int) -> Cost:
    """EmbRace, table 2, AlltoAll: 2 (N - 1) (a M/(N B) + beta).

    Twice, for the looked-up rows and for their gradients. The size a M is that of the rows
    alone, without indices.

    Args:
        size: M, bytes of the table.
        density: a, the share of it that a rank's gradient holds.
        ranks: N.
    """
    _check_embrace(size, density, ranks)
    return Cost(2 * (ranks - 1), 2 * (ranks - 1) / ranks * density * size)


def embrace_all_reduce(size: float, ranks: int) -> Cost:
    """EmbRace, table 2, AllReduce: 2 (N - 1) (M/(N B) + beta), a dense ring."""
    _check_embrace(size, 1.0, ranks)
    return Cost(2 * (ranks - 1), 2 * (ranks - 1) / ranks * size)


def embrace_ps(
    size: float, density: float, ranks: int, nodes: int, servers: int | None = None
) -> Cost:
    """EmbRace, table 2, PS: 2 N (a M/(S B) + beta), at one of S servers.

    The table prints the lower bound, S = n, a server on every node; so it is here if
    `servers` is None. The server exchanges with all N ranks, those of its node included.
    """
    _check_embrace(size, density, ranks)
    arguments.check_at_least("nodes", nodes, 1)
    if nodes > ranks:
        raise ArgumentError(
            f"nodes must not exceed ranks, got {nodes!r} nodes and {ranks!r} ranks."
        )
    count = nodes if servers is None else servers
    arguments.check_at_least("servers", count, 1)
    if count > nodes:
        raise ArgumentError(
            f"servers must not exceed nodes, got {servers!r} servers and {nodes!r} nodes."
        )
    return Cost(2 * ranks, 2 * ranks * density * size / count)


def embrace_all_gather(size: float, density: float, ranks: int) -> Cost:
    """EmbRace, table 2, AllGather: (N - 1) (a M/B + beta)."""
    _check_embrace(size, density, ranks)
    return Cost(ranks - 1, (ranks - 1) * density * size)


def _check_embrace(size, density, ranks):
    arguments.check_positive("size", size)
    arguments.check_share("density", density)
    arguments.check_at_least("ranks", ranks, 1)


# --- DRAGONN, section 4.2. What they differ by is `sparsejax.advise.tensors.saved`.


def dragonn_full(numbers: int, number_bytes: float, ranks: int) -> Cost:
    """DRAGONN 4.2, T_full: 2 (K - 1) (alpha + d A/(K B)), a dense ring all-reduce.

    Args:
        numbers: d, numbers in the tensor.
        number_bytes: A, bytes of each.
        ranks: K.
    """
    _check_dragonn(numbers, number_bytes, ranks)
    size = numbers * number_bytes
    return Cost(2 * (ranks - 1), 2 * (ranks - 1) / ranks * size)


def dragonn_sparse(numbers: int, number_bytes: float, ratio: float, ranks: int) -> Cost:
    """DRAGONN 4.2, T_spr: (K - 1) (alpha + c d A/B), an all-gather of compressed tensors.

    The paper prints T_comp for this one; by its equation (1) it is T_spr. `ratio` is c,
    the compressed size over d A, indices included.
    """
    _check_dragonn(numbers, number_bytes, ranks)
    arguments.check_positive("ratio", ratio)
    return Cost(ranks - 1, (ranks - 1) * ratio * numbers * number_bytes)


def _check_dragonn(numbers, number_bytes, ranks):
    arguments.check_at_least("numbers", numbers, 1)
    arguments.check_positive("number_bytes", number_bytes)
    arguments.check_at_least("ranks", ranks, 1)


# --- Ok-Topk, table 1, and SparDL, table I: P ranks, n numbers, k chosen ones.


def dense(numbers: int, ranks: int, word_bytes: int = 4) -> Cost:
    """Ok-Topk, table 1, Dense: 2 log P rounds, 2 (P - 1)/P n words.

    Rabenseifner's algorithm, by halving and doubling: fewer messages than a ring.
    """
    _check_table("numbers", numbers, ranks, word_bytes)
    rounds = 2 * doublings(ranks)
    return Cost(rounds, word_bytes * 2 * (ranks - 1) / ranks * numbers)


def topk_a(k: int, ranks: int, word_bytes: int = 4) -> Cost:
    """Ok-Topk, table 1, and SparDL, table I, TopkA: log P rounds, 2 (P - 1) k words."""
    _check_table("k", k, ranks, word_bytes)
    return Cost(doublings(ranks), word_bytes * 2 * (ranks - 1) * k)


def gaussian_k(k: int, ranks: int, word_bytes: int = 4) -> Cost:
    """Ok-Topk, table 1, Gaussiank: 2 (P - 1) k words.

    It differs from TopkA in how entries are chosen and sums them the same way, so it has
    TopkA's rounds here. Its threshold is an estimate, so k is what it chose.
    """
    return topk_a(k, ranks, word_bytes)


def topk_dsa(k: int, numbers: int, ranks: int, word_bytes: int = 4) -> tuple[Cost, Cost]:
    """Ok-Topk, table 1, and SparDL, table I, TopkDSA (SparCML's split all-gather).

    P + 2 log P rounds, from 4 (P - 1)/P k words, if all ranks have the same evenly spread
    entries, to (P - 1)/P (2k + n), if sums fill up and are gathered densely. The rounds
    are a little more than the P - 1 + log P that a split and one all-gather need.
    """
    _check_table("k", k, ranks, word_bytes)
    arguments.check_at_least("numbers", numbers, k)
    rounds = ranks + 2 * doublings(ranks)
    share = word_bytes * (ranks - 1) / ranks
    return Cost(rounds, share * 4 * k), Cost(rounds, share * (2 * k + numbers))


def g_topk(k: int, ranks: int, word_bytes: int = 4) -> Cost:
    """Ok-Topk, table 1, and SparDL, table I, gTopk: 2 log P rounds, 4 k log P words.

    A tree to one rank, with the k largest kept at each meeting, and a tree back.
    """
    _check_table("k", k, ranks, word_bytes)
    rounds = 2 * doublings(ranks)
    return Cost(rounds, word_bytes * rounds * 2 * k)


def ok_topk(k: int, ranks: int, word_bytes: int = 4) -> tuple[Cost, Cost]:
    """Ok-Topk, table 1 and equations (1) to (3): 2 P + 2 log P rounds.

    From 2 (P - 1)/P k words, if every rank holds the evenly spread winners of its own
    range, to 6 (P - 1)/P k: as many to reduce, to balance, and to gather. The sizes that
    are gathered first count as rounds and not as words, and P stands for P - 1 twice.
    Finding thresholds and ranges anew, once in many steps, is left out.
    """
    _check_table("k", k, ranks, word_bytes)
    rounds = 2 * (ranks + doublings(ranks))
    share = word_bytes * (ranks - 1) / ranks
    return Cost(rounds, share * 2 * k), Cost(rounds, share * 6 * k)


def spar_dl(k: int, ranks: int, word_bytes: int = 4) -> Cost:
    """SparDL, table I: 2 log P rounds, 4 (P - 1)/P k words, for any number of ranks.

    A reduce-scatter that keeps k/P entries of each block at each step, equation (2), and
    a Bruck all-gather of the blocks.
    """
    return spar_dl_r_sag(k, ranks, 1, word_bytes)


def spar_dl_r_sag(k: int, ranks: int, teams: int, word_bytes: int = 4) -> Cost:
    """SparDL, equations (5) to (7) and table I, R-SAG with d teams, a power of two.

    2 log(P/d) + log d rounds, 2 ((2P - 2d)/P + d/P log d) k words: a reduce-scatter in
    each team, a recursive doubling between teams that keeps d k/P entries, and an
    all-gather in each team.
    """
    _check_teams(k, ranks, teams, word_bytes)
    check_power_of_two("teams", teams)
    within = _in_team(k, ranks, teams, word_bytes)
    swaps = doublings(teams)
    between = Cost(swaps, word_bytes * swaps * 2 * teams * k / ranks)
    return total(within, between, within)


def spar_dl_b_sag(k: int, ranks: int, teams: int, word_bytes: int = 4) -> tuple[Cost, Cost]:
    """SparDL, equations (6), (8), (9), B-SAG: any number of teams d that divides P.

    2 log(P/d) + log d rounds. Between the teams a Bruck all-gather of h entries, from k/P,
    if no two teams share one, to d k/P; after it a block holds from k/P to d k/P. As sums
    of the three steps:

        low   2 k (dP + P - 2d)/(dP)
        high  2 k (d^2 + 2P - 3d)/P

    Equation (10) and table I print d^2 for dP in the low one. That is the sum without its
    first step, 2 k (P - d)/P; with one team it would be half of SparDL's own cost. The low
    end lasts only until h has been adapted: h grows until a block holds d k/P.
    """
    _check_teams(k, ranks, teams, word_bytes)
    reduce = _in_team(k, ranks, teams, word_bytes)
    gathered = Cost(doublings(teams), word_bytes * 2 * k * (teams - 1) / ranks)
    low = total(reduce, gathered, reduce._replace(bytes=reduce.bytes / teams))
    high = total(reduce, gathered._replace(bytes=gathered.bytes * teams), reduce)
    return low, high


def _in_team(k, ranks, teams, word_bytes) -> Cost:
    """SparDL, equation (6): P/d - 1 blocks of d k/P entries, in log(P/d) rounds."""
    words = 2 * k * (ranks - teams) / ranks
    return Cost(doublings(ranks // teams), word_bytes * words)


def _check_teams(k, ranks, teams, word_bytes):
    _check_table("k", k, ranks, word_bytes)
    arguments.check_at_least("teams", teams, 1)
    if ranks % teams:
        raise ArgumentError(
            "teams must divide ranks into teams of the same size, "
            f"got {teams!r} teams and {ranks!r} ranks."
        )


def _check_table(name, value, ranks, word_bytes):
    arguments.check_at_least(name, value, 1)
    arguments.check_at_least("ranks", ranks, 1)
    arguments.check_positive("word_bytes", word_bytes)
