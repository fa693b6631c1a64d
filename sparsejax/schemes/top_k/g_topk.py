"""gTopk: the k largest elements of the sum, by meetings of two ranks that keep k each.

On the wire, with n ranks, messages of k entries:

    fold    ranks beyond the largest power of two p send their selections to a partner
    swap    log2 p meetings: partners exchange selections, add up, select k
    unfold  the folded ranks receive the result

The paper reduces along a binary tree to one rank and broadcasts along a tree: 2 log2 n
messages, 4 k log2 n words. Swaps send in both directions at the same time and need no
broadcast: log2 n messages and half the words if n is a power of two, and two messages more
otherwise. What a meeting leaves out is added to the residual of one of its ranks
(`meetings`). In the paper a rank only keeps its elements whose indices are not in the
result, so what was left out at an index that is in the result is lost.
"""

import dataclasses

import jax.numpy as jnp

from sparsejax.schemes import base
from sparsejax.schemes.forecast import Forecast
from sparsejax.schemes.top_k import base as top_k, meetings
from sparsejax.units import bits
from sparsejax.units.units import wide
from sparsejax.wire import channels, gathers, index_codes


@dataclasses.dataclass(frozen=True)
class GTopk(top_k.TopKScheme):
    """Sums the largest elements by exchanges of pairs of ranks, as gTopk does.

    log2 n times, partners exchange k elements, add them up, and keep the k largest of the
    sum. If n is no power of two, there are two messages more.

    Attributes:
        density: The share of elements that are not zero in the sum; smaller sends less.
        code: How indices are sent: "coo32" (the paper's), "coo16", "coo8", "bitmap", or
            "auto" for the cheapest.

    Example:
        >>> tx = sparsejax.sync(sparsejax.schemes.GTopk(density=0.01))
        >>> opt_state = sparsejax.init(tx, params, mesh)

    References:
        Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification
        for Low Bandwidth Networks, ICDCS 2019

    See Also:
        `sparsejax.sparsifiers.TopK`: the k largest of each rank's array, for any scheme.
        `sparsejax.sparsifiers.MSTopK`: nearly the k largest of each rank's array.
    """

    def __post_init__(self):
        super().__post_init__()
        index_codes.parse(self.code)

    def init(self, like, wire):
        return top_k.StepCount(jnp.int32(0))

    def __call__(self, x, state, wire):
        base.check_state(self, state, top_k.StepCount)
        if x.size == 0:
            return base.nothing_to_send(x, state, wire)
        accumulated = x.dense().reshape(-1)
        base.check_units(accumulated)
        size, me = accumulated.size, wire.rank
        k, seed = self.k(size), top_k.seed_of(state.step)
        fold, swaps, unfold = gathers.doubling_schedule(wire.ranks)
        core = 1 << len(swaps)
        meet = lambda selected, pairs, keeper: meetings.meet(
            selected, pairs, k, seed, self.code, wire, keeper
        )
        selected = meetings.start(accumulated, k, seed)
        if fold:
            # Only the partner knows what its selection leaves out, and a folded rank has
            # nothing more to send.
            selected = meet(selected, fold, me < core)
            selected = selected._replace(kept=jnp.where(me < core, selected.kept, 0))
        for turn, pairs in enumerate(swaps):
            holders = 2 << turn
            keeper = meetings.keepers(size, me % holders, holders) & (me < core)
            selected = meet(selected, pairs, keeper)
        push, pull = selected.stage, base.stage()
        if unfold:
            selected = meet(selected, unfold, False)
            pull = base.Stage(*(a - b for a, b in zip(selected.stage, push, strict=True)))
            pull = pull._replace(imbalance=push.imbalance)
        total = wire.assume_same(selected.kept)
        left = top_k.residual(accumulated, selected.left_out, total)
        traffic = base.traffic(
            push,
            pull,
            dense=wire.dense_bytes(x.size, x.dtype),
            before=k / size,
            after=bits.density(total),
        )
        state = top_k.StepCount(state.step + 1)
        return base.Reduced(total.reshape(x.shape), left.reshape(x.shape), state, traffic)

    def forecast(self, load):
        folded, swaps = gathers.doubling_counts(load.ranks)
        size, k = load.size, self.k(load.size)
        sizes = meetings.message_sizes(size, k, wide(load.dtype), self.code)
        message, _, _ = sizes.sent(sizes.top, channels.Route(1))
        forth, back = swaps + bool(folded), bool(folded)
        rounds = forth + back
        return Forecast(forth * message, back * message, rounds, k, rounds=rounds)
