"""Hierarchical Centralization: partners swap all they have, log2 n times.

Zen, definition 7; SparCML's sparse recursive doubling. On the wire, with n ranks:

    fold    ranks beyond the largest power of two p send their entries to a partner
    swap    log2 p times: each rank sends its partial sum to the rank 2**k away
    unfold  the folded ranks are sent the total

Before each message one pmax agrees on the fullest partial sum. A partial sum that has
become so full that its entries take more bytes than the dense array travels densely, and
where the first messages alone would exceed an all-reduce, the whole is an all-reduce. How
full the sums get is known only on the way, so with more than two ranks this scheme may
send more than an all-reduce; Balanced Parallelism never does.

Every rank ends with the same bits: in each swap both partners add the same two numbers, and
addition commutes. What each keeps is first rounded as what it sends. A NaN may carry
either partner's payload, so NaNs are made one. No collective has declared the result equal,
so it is declared here (`_compat.assume_same`).

Under `jax.vmap` with an axis name JAX permutes all ranks or none, so there the number of
ranks must be a power of two; inside `jax.shard_map` it may be any.

It is the better optimum of Theorem 1 where sets hardly overlap and ranks are few: with two
ranks it always is.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import bits, exchange, index_codes, ladder, wire
from sparsejax._compat import as_varying, assume_same, varying_axes
from sparsejax.schemes import base


@dataclasses.dataclass(frozen=True)
class HierarchicalCentralization(base.Scheme):
    """Recursive doubling of sparse sums, for any number of ranks.

    Attributes:
        code: How indices travel: "coo32", "coo16", "coo8", "bitmap", or "auto".
        ratio: How far apart the message sizes are; larger compiles faster, and pads more or
            takes more rounds.
        wire_dtype: The dtype of the values while they travel. If None, the first message
            has x's dtype, and partial sums have float32 or wider.
    """

    code: str = "auto"
    ratio: float = 2.0
    wire_dtype: jax.typing.DTypeLike | None = None

    def __post_init__(self):
        index_codes.parse(self.code)
        ladder.check_ratio(self.ratio)

    def __call__(self, x, state, axis_name, *, present=None):
        n = wire.ranks(axis_name)
        if n == 1 or x.size == 0:
            return base.nothing_to_send(x, state, axis_name)
        base.check_units(x)
        narrow = wire.travelling(x.dtype, self.wire_dtype)
        flags = bits.nonzero_units(x) if present is None else present
        count = jnp.sum(flags, dtype=jnp.int32)
        most, agreed = wire.maximum(count, axis_name)
        fold, swaps, unfold = wire.doubling_schedule(n)
        hops = len(swaps) + bool(fold) + bool(unfold)
        dense = wire.all_reduce_cost(x.size, x.dtype, narrow, n)
        worth = hops * self._ladder(x, narrow).bytes(most) < dense
        axes = varying_axes(x)

        def sparse(x):
            return as_varying(self._doubling(x, axis_name, fold, swaps, unfold), axes)

        def all_reduce(x):
            total, sent = wire.all_reduce(x, axis_name, self.wire_dtype)
            half = base.stage(sent / 2, sent / 2, 1)
            return as_varying((total, half, half, jnp.float32(0)), axes)

        total, push, pull, scalars = lax.cond(worth, sparse, all_reduce, x)
        total, push, pull, scalars = jax.tree.map(
            lambda y: assume_same(y, axis_name), (total, push, pull, scalars)
        )
        after = jnp.mean(bits.nonzero_units(total).astype(jnp.float32))
        traffic = base.traffic(
            push,
            pull,
            scalars=scalars + agreed,
            dense=dense,
            before=most.astype(jnp.float32) / x.shape[0],
            after=after,
        )
        return base.Reduced(total, None, state, traffic)

    def _ladder(self, x, dtype):
        width = -(-x.shape[0] // bits.WORD) * bits.WORD
        unit_bytes = x.size // x.shape[0] * dtype.itemsize
        return ladder.ladder(width, unit_bytes, 1, self.code, self.ratio)

    def _doubling(self, x, axis_name, fold, swaps, unfold):
        wide = jnp.promote_types(x.dtype, jnp.float32)
        set_dtype = wire.travelling(x.dtype, self.wire_dtype) if self.wire_dtype else None
        total, push, scalars = x.astype(wide), base.stage(), jnp.float32(0)
        dtype = set_dtype or x.dtype
        core = 1 << len(swaps)
        for pairs in [fold, *swaps]:
            if not pairs:
                continue
            total, stage, cost = self._hop(total, dtype, axis_name, pairs)
            if pairs is fold:
                # What the folded ranks had is with their partners now.
                total = jnp.where(wire.rank(axis_name) < core, total, 0)
            push, scalars = base.add_stages(push, stage), scalars + cost
            dtype = set_dtype or wide
        total = _one_nan(total.astype(x.dtype if set_dtype is None else set_dtype))
        pull = base.stage()
        if unfold:
            total = total.astype(wide)
            total, pull, cost = self._hop(total, set_dtype or x.dtype, axis_name, unfold)
            scalars = scalars + cost
        return _one_nan(total.astype(x.dtype)), push, pull, scalars

    def _hop(self, total, dtype, axis_name, pairs):
        """Sends the partial sum along `pairs` and adds what arrives."""
        dtype = jnp.dtype(dtype)
        rounded = total.astype(dtype)
        total = rounded.astype(total.dtype)
        size = total.shape[0]
        steps = self._ladder(total, dtype)
        flags = bits.nonzero_units(rounded)
        padded = jnp.pad(flags, (0, steps.width - size))
        sets = bits.bit_sets(bits.pack(padded)[None])
        most, cost = wire.maximum(sets.counts[0], axis_name)
        axes = varying_axes(total)

        def add(total, slots, values):
            values = values.astype(total.dtype).reshape(-1, *total.shape[1:])
            return total.at[slots.reshape(-1)].add(values, mode="drop")

        def sparse(total):
            total, sent = exchange.transmit(
                steps,
                wire.swap_channel(axis_name, pairs),
                sets,
                lambda slots: rounded.at[slots].get(mode="clip"),
                most,
                add,
                total,
                typical=most.astype(jnp.float32)[None],
            )
            return as_varying((total, base.stage_of(sent)), axes)

        def dense(total):
            arrived, sent = wire.permute(rounded, axis_name, pairs)
            total = total + arrived.astype(total.dtype)
            return as_varying((total, base.stage(sent, sent, 1)), axes)

        worth = steps.bytes(most) < rounded.size * dtype.itemsize
        total, stage = lax.cond(worth, sparse, dense, total)
        return total, stage, cost


def _one_nan(x):
    """One bit pattern for NaN and one for zero, whatever the order of the additions."""
    x = jnp.where(jnp.isnan(x), jnp.full_like(x, jnp.nan), x)
    return jnp.where(bits.nonzero(x), x, jnp.zeros_like(x))
