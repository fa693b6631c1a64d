"""gTopk: the k largest of the sum, by meetings of two that keep k each.

On the wire, with n ranks, messages of k entries:

    fold    ranks beyond the largest power of two p send theirs to a partner
    swap    log2 p times: partners swap theirs, add them up and keep the k largest
    unfold  the folded ranks are sent the result

The paper has a tree to one rank and a tree back: 2 log2 n messages, 4 k log2 n words.
Swaps send each way at the same time and need no way back: log2 n messages and half the
words, where n is a power of two, and two messages more where it is not. What a meeting
leaves out is kept by one of those that met (`swapping`); the paper's ranks look only
whether an index of theirs is in the result, and lose what was left out of it on the way.
"""

import dataclasses

import jax.numpy as jnp

from sparsejax import wire
from sparsejax.axes import assume_same
from sparsejax.schemes import base
from sparsejax.schemes.forecast import Forecast
from sparsejax.schemes.top_k import base as top_k, meetings
from sparsejax.units import bits
from sparsejax.wire import index_codes


@dataclasses.dataclass(frozen=True)
class GTopk(top_k.Selecting):
    """The k largest elements of the sums of k; see `selecting.Selecting`."""

    def __post_init__(self):
        super().__post_init__()
        index_codes.parse(self.code)

    def init(self, like, ranks):
        return top_k.Counted(jnp.int32(0))

    def __call__(self, x, state, axis_name, *, present=None):
        if x.size == 0:
            return base.nothing_to_send(x, state, axis_name)
        n, me = wire.ranks(axis_name), wire.rank(axis_name)
        flat = x.reshape(-1)
        base.check_units(flat)
        k, seed = self.k(flat.size), state.seed
        fold, swaps, unfold = wire.doubling_schedule(n)
        core = 1 << len(swaps)
        held = meetings.start(flat, k, seed)
        meet = lambda held, pairs, mine: meetings.meet(
            held, pairs, k, seed, self.code, axis_name, mine
        )
        if fold:
            # The partner alone knows what it leaves out; who was folded has nothing left.
            held = meet(held, fold, me < core)
            held = held._replace(kept=jnp.where(me < core, held.kept, 0))
        for turn, pairs in enumerate(swaps):
            holders = 2 << turn
            mine = meetings.keepers(flat.size, me % holders, holders) & (me < core)
            held = meet(held, pairs, mine)
        push, pull = held.stage, base.stage()
        if unfold:
            held = meet(held, unfold, False)
            pull = base.Stage(*(a - b for a, b in zip(held.stage, push, strict=True)))
            pull = pull._replace(imbalance=push.imbalance)
        total = assume_same(held.kept, axis_name)
        residual = top_k.left_over(flat, held.left, total).reshape(x.shape)
        share = k / flat.size
        traffic = base.traffic(
            push,
            pull,
            dense=wire.all_reduce_cost(x.size, x.dtype, None, n),
            before=share,
            after=bits.density(total),
        )
        return base.Reduced(total.reshape(x.shape), residual, state.after(), traffic)

    def forecast(self, load):
        n = load.ranks
        fold, swaps, unfold = wire.doubling_schedule(n)
        cut = top_k.Blocks(1, load.size)
        dtype = jnp.promote_types(load.dtype, jnp.float32)
        message = 4.0 * cut.ladder(1, self.k(load.size), dtype, self.code).rungs[-1].words
        hops, back = len(swaps) + bool(fold), bool(unfold)
        k = self.k(load.size)
        return Forecast(hops * message, back * message, hops + back, k)
