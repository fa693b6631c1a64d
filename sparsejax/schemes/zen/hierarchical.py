"""Hierarchical Centralization: partners swap their partial sums, log2 n times.

Zen, definition 7; SparCML's sparse recursive doubling. `doubling` describes the messages.
If all messages would exceed an all-reduce even at the length of the first, the sum is an
all-reduce. The entries of later partial sums are not known in advance, so with more than
two ranks this scheme may send more than an all-reduce; Balanced Parallelism never does.

It is the better optimum of Theorem 1 where sets hardly overlap and ranks are few, and
always with two ranks. The state is the share of units of the fullest partial sum before
each hop of the last step, and that of the total: `Zen` chooses by this growth of sums.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from sparsejax import arguments
from sparsejax.schemes import base, doubling, row_lists
from sparsejax.schemes.forecast import agreeing
from sparsejax.schemes.or_dense import or_dense
from sparsejax.schemes.owners.pieces import SparseScheme
from sparsejax.schemes.zen import growth
from sparsejax.units import bits
from sparsejax.units.units import Units
from sparsejax.wire import collectives, index_codes, ladder
from sparsejax.wire.collectives import Wire


@dataclasses.dataclass(frozen=True)
class HierarchicalCentralization(SparseScheme):
    """Sums entries by recursive doubling: partners exchange partial sums, log2 n times.

    The number of ranks n may be any. With more than two ranks it may send more than an
    all-reduce, since how full partial sums are is known only on the way.

    Attributes:
        code: How indices are sent: "coo32", "coo16", "coo8", "bitmap", or "auto" for the
            cheapest.
        ratio: The ratio of successive message sizes. A larger one compiles faster, and pads
            more or takes more rounds.
        wire_dtype: The dtype of the values on the wire. If None, the first message has x's
            dtype, and partial sums have float32 or wider.
        switch: When a partial sum is sent densely. "count": when its own entries would take
            more bytes. "bound": SparCML's rule, as soon as twice the entries of its two
            halves would, and in all exchanges after it.

    Example:
        >>> tx = sparsejax.sync(sparsejax.schemes.HierarchicalCentralization())

    References:
        Wang et al., Zen: Empowering Distributed Training with Sparsity-driven Data
        Synchronization, OSDI 2025, definition 7

        Renggli et al., SparCML: High-Performance Sparse Communication for Machine Learning,
        SC 2019

    See Also:
        `sparsejax.schemes.Zen`: chooses between this and the others.
        `sparsejax.schemes.BalancedParallelism`: owners of units, balanced by a hash.
    """

    code: str = "auto"
    ratio: float = 2.0
    wire_dtype: jax.typing.DTypeLike | None = None
    switch: str = "count"

    def __post_init__(self):
        index_codes.parse(self.code)
        ladder.check_ratio(self.ratio)
        arguments.check_dtype("wire_dtype", self.wire_dtype)
        arguments.check_one_of("switch", self.switch, ("count", "bound"))

    def init(self, like, wire):
        del like, wire
        return growth.unknown()

    def __call__(self, x, state, wire):
        n = wire.ranks
        if n == 1 or x.size == 0:
            return base.nothing_to_send(x, state, wire)
        base.check_units(x)
        base.check_state(self, state, jax.Array)
        wire = wire.narrowed(self.wire_dtype)
        plan = self.plan_of(x, wire)
        named, x = x.flags, x.dense()
        flags = bits.nonzero_units(x)
        if named is not None:
            # Units that the caller did not name are not sent, here as in other schemes.
            flags = flags & named
            x = jnp.where(named.reshape(-1, *[1] * (x.ndim - 1)), x, 0)
        count = jnp.sum(flags, dtype=jnp.int32)
        most, agreed = wire.maximum(count)
        hops = doubling.hops(n)
        pays = collectives.pays(plan.entry_bytes(most), plan.dense_bytes)

        def sparse(x):
            return doubling.add_up(x, wire, plan, doubling.AgreedCounts(flags, most))

        def all_reduce(x):
            total, sent = wire.all_reduce(x)
            half = base.stage(sent / 2, sent / 2, 1)
            unseen = jnp.zeros(hops, jnp.int32)
            none = jnp.float32(0)
            return doubling.DoublingResult(total, half, half, none, unseen)

        done = or_dense(pays, sparse, all_reduce, x)
        done = wire.assume_same(done)
        after = bits.density(done.total)
        before = most.astype(jnp.float32) / x.shape[0]
        traffic = base.traffic(
            done.push,
            done.pull,
            scalars=done.scalars + agreed,
            dense=plan.dense_bytes,
            before=before,
            after=after,
        )
        seen = jnp.append(done.counts.astype(jnp.float32) / x.shape[0], after)
        seen = wire.same_elsewhere(seen)
        curve = jnp.where(
            pays,
            growth.measured(seen),
            growth.stretched(state, n, before, seen[-1]),
        )
        return base.Reduced(done.total, None, curve, traffic)

    def rows(self, tables, wire, mean=False):
        """Gathers all lists in one round, which between two ranks is the swap."""
        return row_lists.gathered(tables, wire.narrowed(self.wire_dtype), mean=mean)

    def forecast(self, load):
        if load.listed:
            return row_lists.forecast(load, self.wire_dtype)
        n, dense = load.ranks, load.all_reduce(self.wire_dtype)
        like = load.units, load.numbers, load.dtype, self.wire_dtype
        plan = self._plan(n, *like, dense.bytes)
        needs = load.fullest or [math.ceil(load.count(k)) for k in doubling.held(n)]
        if plan.sizes and not collectives.pays(plan.entry_bytes(needs[0]), dense.bytes):
            return dense
        forecast = plan.forecast(needs)
        # If the first hop is in a loop, its pmax repeats the one before the hops.
        again = plan.sizes[:1] == plan.sizes[1:2]
        agreed = (len(plan.sizes) + again) * agreeing(n)
        return forecast._replace(messages=forecast.messages + agreed)

    def plan_of(self, x: Units, wire: Wire) -> doubling.DoublingPlan:
        """Returns the plan of the exchange: its message sizes and bytes.

        Args:
            x: An array of this shape and dtype.
            wire: The ranks.
        """
        wire, numbers = wire.narrowed(self.wire_dtype), x.size // x.shape[0]
        dense = wire.dense_bytes(x.size, x.dtype)
        return self._plan(wire.ranks, x.shape[0], numbers, x.dtype, wire.dtype, dense)

    def _plan(self, n, units, numbers, dtype, wire_dtype, dense):
        dtypes = doubling.dtypes_of(n, jnp.dtype(dtype), wire_dtype)
        sizes = tuple(numbers * each.itemsize for each in dtypes)
        how = dense, self.code, self.ratio, self.switch == "bound"
        return doubling.DoublingPlan(n, units, sizes, *how)
