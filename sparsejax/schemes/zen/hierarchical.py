"""Hierarchical Centralization: partners swap all they have, log2 n times.

Zen, definition 7; SparCML's sparse recursive doubling. What goes over the wire is in
`doubling`; where the first messages alone would exceed an all-reduce, the whole is one. How
full the sums get is known only on the way, so with more than two ranks this scheme may
send more than an all-reduce; Balanced Parallelism never does.

It is the better optimum of Theorem 1 where sets hardly overlap and ranks are few: with two
ranks it always is. The state is the share of units that the fullest partial sum had before
each hop of the last step, and the total at its end: how sums grow, which `Zen` chooses by.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import wire
from sparsejax.axes import as_varying, assume_same, varying_axes
from sparsejax.schemes import base, doubling
from sparsejax.schemes.zen import growth
from sparsejax.units import bits
from sparsejax.wire import index_codes, ladder


@dataclasses.dataclass(frozen=True)
class HierarchicalCentralization(base.Scheme):
    """Recursive doubling of sparse sums, for any number of ranks.

    Attributes:
        code: How indices travel: "coo32", "coo16", "coo8", "bitmap", or "auto".
        ratio: How far apart the message sizes are; larger compiles faster, and pads more or
            takes more rounds.
        wire_dtype: The dtype of the values while they travel. If None, the first message
            has x's dtype, and partial sums have float32 or wider.
        switch: When a partial sum goes densely: "count" if its own entries do not pay, or
            "bound", SparCML's rule: as soon as twice the entries of its two halves would
            not, and then for good.
    """

    code: str = "auto"
    ratio: float = 2.0
    wire_dtype: jax.typing.DTypeLike | None = None
    switch: str = "count"

    def __post_init__(self):
        index_codes.parse(self.code)
        ladder.check_ratio(self.ratio)
        base.check_wire_dtype(self.wire_dtype)
        base.check_choice("switch", self.switch, ("count", "bound"))

    def init(self, like, ranks):
        del like, ranks
        return growth.unknown()

    def __call__(self, x, state, axis_name, *, present=None):
        n = wire.ranks(axis_name)
        if n == 1 or x.size == 0:
            return base.nothing_to_send(x, state, axis_name)
        base.check_units(x)
        narrow = wire.travelling(x.dtype, self.wire_dtype)
        double = self._double(axis_name)
        flags = bits.nonzero_units(x)
        if present is not None:
            # What the caller did not name is not sent, here as in other schemes.
            flags = flags & present
            x = jnp.where(present.reshape(-1, *[1] * (x.ndim - 1)), x, 0)
        count = jnp.sum(flags, dtype=jnp.int32)
        most, agreed = wire.maximum(count, axis_name)
        hops = doubling.hops(n)
        dense = wire.all_reduce_cost(x.size, x.dtype, narrow, n)
        worth = _messages(n) * double.ladder(x, narrow).bytes(most) < dense
        axes = varying_axes(x)

        def sparse(x):
            return as_varying(double(x, doubling.Known(flags, most)), axes)

        def all_reduce(x):
            total, sent = wire.all_reduce(x, axis_name, self.wire_dtype)
            half = base.stage(sent / 2, sent / 2, 1)
            unseen = jnp.zeros(hops, jnp.int32)
            none = jnp.float32(0)
            return as_varying(doubling.Doubled(total, half, half, none, unseen), axes)

        done = lax.cond(worth, sparse, all_reduce, x)
        done = jax.tree.map(lambda y: assume_same(y, axis_name), done)
        after = bits.density(done.total)
        before = most.astype(jnp.float32) / x.shape[0]
        traffic = base.traffic(
            done.push,
            done.pull,
            scalars=done.scalars + agreed,
            dense=dense,
            before=before,
            after=after,
        )
        curve = state if isinstance(state, jax.Array) else growth.unknown()
        seen = jnp.append(done.counts.astype(jnp.float32) / x.shape[0], after)
        seen = wire.same_elsewhere(seen, axis_name)
        curve = jnp.where(
            worth, growth.measured(seen), growth.stretched(curve, n, before, seen[-1])
        )
        return base.Reduced(done.total, None, curve, traffic)

    def forecast(self, load):
        return doubling.forecast(
            load, self.code, self.ratio, self.wire_dtype, self.switch == "bound"
        )

    def expected_bytes(self, x, axis_name, counts: jax.Array) -> jax.Array:
        """Bytes that one rank sends where partial sums of arrays like x have `counts`.

        Args:
            x: The array.
            axis_name: The axis.
            counts: int32 [hops + 1]: entries before each hop, and in the total.
        """
        double = self._double(axis_name)
        narrow = wire.travelling(x.dtype, self.wire_dtype)
        dense = wire.all_reduce_cost(x.size, x.dtype, narrow, wire.ranks(axis_name))
        first = double.ladder(x, narrow).bytes(counts[0])
        sparsely = _messages(wire.ranks(axis_name)) * first < dense
        return jnp.where(sparsely, double.expected_bytes(x, counts), dense)

    def _double(self, axis_name):
        by_bound = self.switch == "bound"
        return doubling.Doubling(
            axis_name, self.code, self.ratio, self.wire_dtype, by_bound
        )


def _messages(n):
    """Hops, the unfold included."""
    return doubling.hops(n) + (n & (n - 1) != 0)
