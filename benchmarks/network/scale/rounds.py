"""The collectives of a step and their bytes, counted from the sets of all ranks.

Nothing runs: which unit each rank has is known, so are the owners, how full each part is,
and by the scheme's own message sizes what is sent. What a rank sends is therefore what the
library counts when the step runs (`sides` of `benchmarks.network.communication`), but for
1,024 ranks as well. An array is a table of float32 rows; all of its numbers are one leaf.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from benchmarks.network.schemes import SCHEMES
from sparsejax import schemes
from sparsejax.schemes.baselines.omni_reduce import OmniReduce
from sparsejax.schemes.forecast import merged
from sparsejax.schemes.owners.push_pull import PushPull
from sparsejax.units import bits
from sparsejax.units.ownership import Contiguous, Ownership
from sparsejax.wire import collectives, ladder


# A gather of shorter messages goes as an all-to-all of copies with gloo (`wire.channels`).
LONG = 1 << 17


class Round(NamedTuple):
    """One collective.

    Attributes:
        collective: As `benchmarks.network.messages` names it.
        bytes: Of one message: to each rank of an all-to-all, from each of a gather, of the
            array of a sum.
    """

    collective: str
    bytes: int

    def sent(self, ranks: int) -> float:
        """Bytes that one rank sends."""
        if self.collective in ("all_to_all", "all_gather"):
            return float((ranks - 1) * self.bytes)
        if self.collective == "ppermute":
            return float(self.bytes)
        return collectives.all_reduce_bytes(self.bytes, ranks)


def of_step(name: str, sets: np.ndarray, width: int) -> list[Round]:
    """The rounds of a step of a side of `benchmarks.network.schemes`.

    Args:
        name: Of the side.
        sets: Booleans [ranks, units], the rows that each rank has.
        width: Numbers in a row.
    """
    return list(_of(SCHEMES[name], sets, width))


def _of(scheme, sets, width) -> Iterator[Round]:
    ranks, units = sets.shape
    if scheme is None:
        yield Round("psum", 4 * units * width)
        return
    if isinstance(scheme, schemes.Zen):
        two = ranks == 2
        scheme = scheme._hierarchical(ranks) if two else scheme._balanced
    if isinstance(scheme, schemes.SparCML | schemes.SparsePS):
        scheme = scheme._scheme
    if isinstance(scheme, OmniReduce):
        together = scheme._units(width)
        blocks = -(-units // together)
        padded = np.pad(sets, ((0, 0), (0, blocks * together - units)))
        sets = padded.reshape(ranks, blocks, together).any(2)
        layout = Contiguous(scheme.aggregators)
        yield from _by_owners(layout, scheme._push_pull, sets, together * width)
        yield Round("pmax", 4)
    elif isinstance(scheme, schemes.BalancedParallelism):
        yield from _by_owners(scheme.ownership, scheme.push_pull, sets, width)
    elif isinstance(scheme, schemes.HierarchicalCentralization):
        yield from _by_doubling(scheme, sets, width)
    elif isinstance(scheme, schemes.AGSparse):
        yield Round("pmax", 4)
        steps = scheme._plan(units, 4 * width, ranks, units, None).steps
        need = int(sets.sum(1).max())
        sent = (ranks - 1) * 4 + _bytes(steps.messages_for(need, ranks - 1), ranks - 1)
        if sent >= collectives.all_reduce_bytes(4 * units * width, ranks):
            yield Round("psum", 4 * units * width)
            return
        yield from _gathered(steps, need, ranks)
    else:
        raise ValueError(f"the rounds of {scheme} are not counted")


def _by_owners(
    ownership: Ownership, how: PushPull, sets: np.ndarray, width: int
) -> Iterator[Round]:
    ranks, units = sets.shape
    layout = ownership.over(units, ranks)
    unit_bytes = 4 * width
    owner = np.asarray(layout.assign(jnp.arange(units, dtype=jnp.int32))[0])
    counted = lambda row: np.bincount(owner[row], minlength=ranks).max()
    dense = collectives.all_reduce_bytes(units * unit_bytes, ranks)
    plan = how.plan(units, ranks, layout.width, unit_bytes, dense, None)
    need = int(max(map(counted, sets)))
    assert plan.has_even_parts
    if plan.may_pay:  # else nothing is counted
        yield Round("pmax", 12)
    if not plan.may_pay or plan.entry_bytes(need) >= dense:
        yield Round("psum", units * unit_bytes)
        return
    for rung in plan.push.messages_for(need, ranks - 1):
        yield Round("all_to_all", 4 * rung.words)
    yield Round("pmax", 4)
    fullest = int(counted(sets.any(0)))
    if plan.pull_bytes(fullest) >= plan.whole_bytes:
        yield Round("all_gather", layout.width * unit_bytes)
        return
    yield from _gathered(plan.pull, fullest, ranks)


def _gathered(steps: ladder.Ladder, need: int, ranks: int) -> Iterator[Round]:
    for rung in steps.messages_for(need, ranks - 1):
        size = 4 * rung.words
        yield Round("all_gather" if size >= LONG else "all_to_all", size)


def _by_doubling(
    scheme: schemes.HierarchicalCentralization, sets: np.ndarray, width: int
) -> Iterator[Round]:
    ranks, units = sets.shape
    unit_bytes = 4 * width
    if ranks & (ranks - 1):
        raise ValueError(f"hierarchies are counted for powers of two, not {ranks} ranks")
    padded = -(-units // bits.WORD) * bits.WORD
    steps = ladder.Message(scheme.code, scheme.ratio).ladder(padded, unit_bytes, 1)
    hops, full = merged(ranks)[:-1], False
    yield Round("pmax", 4)
    first = _bytes(steps.messages_for(int(sets.sum(1).max()), 1), 1)
    if len(hops) * first >= collectives.all_reduce_bytes(units * unit_bytes, ranks):
        yield Round("psum", units * unit_bytes)
        return
    for held in hops:
        if ranks > 2:  # of two, the first count is known
            yield Round("pmax", 4)
        groups = [sets[i : i + held].any(0).sum() for i in range(0, ranks, held)]
        need = int(max(groups))
        taken = [] if full else steps.messages_for(need, 1)
        if full or _bytes(taken, 1) >= units * unit_bytes:
            yield Round("ppermute", units * unit_bytes)
        for rung in taken if _bytes(taken, 1) < units * unit_bytes else ():
            yield Round("ppermute", 4 * rung.words)
        if scheme.switch == "bound":
            full = full or 2 * (unit_bytes + 4) * need >= units * unit_bytes


def _bytes(rungs, messages: int) -> float:
    return 4.0 * messages * sum(rung.words for rung in rungs)
