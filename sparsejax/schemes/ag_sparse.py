"""AGsparse: every rank sends all its entries to all, and all add them up.

One-shot and centralized in Zen's terms (table 3); what PyTorch's and Horovod's sparse
gradients do, and TopkA. On the wire, with n ranks:

    agree   one pmax of the most entries
    gather  all_gather of the entries, each rank's message as long as the longest

Every rank adds up the same messages in the order of the ranks, one rank's at a time: so all
end with the same bits. A unit that many ranks have is sent by each of them to all: bytes
grow with n, and where they would exceed an all-reduce the whole is one.

The gather goes by one of several algorithms, which send the same bytes:

    auto      the collective of XLA
    ring      n - 1 messages to the next neighbour, each what came last
    doubling  log2 n messages, each all that is held; a fold for other numbers of ranks
    bruck     ceil(log2 n) messages for any n
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import wire
from sparsejax.axes import as_varying, assume_same
from sparsejax.schemes import base
from sparsejax.schemes.forecast import Forecast, agreeing, sent_bytes
from sparsejax.units import bits, entries
from sparsejax.wire import gathers, index_codes, ladder, messages as exchange


@dataclasses.dataclass(frozen=True)
class AGSparse(base.Scheme):
    """The all-gather of all entries.

    Attributes:
        gather: How messages are gathered: "auto", "ring", "doubling" or "bruck".
        code: How indices travel: "coo32" (the usual format, and the default), "coo16",
            "coo8", "bitmap", or "auto" for the cheapest.
        ratio: How far apart the message sizes are.
        wire_dtype: The dtype of the values while they travel; that of x if None.
    """

    takes_entries = True
    gather: str = "auto"
    code: str = "coo32"
    ratio: float = 2.0
    wire_dtype: jax.typing.DTypeLike | None = None

    def __post_init__(self):
        base.check_choice("gather", self.gather, gathers.GATHERS)
        index_codes.parse(self.code)
        ladder.check_ratio(self.ratio)
        base.check_wire_dtype(self.wire_dtype)

    def __call__(self, x, state, axis_name, *, present=None):
        n = wire.ranks(axis_name)
        if n == 1 or x.size == 0:
            return base.nothing_to_send(x, state, axis_name)
        base.check_units(x)
        flags = entries.present(x) if present is None else present
        most, agreed = wire.maximum(jnp.sum(flags, dtype=jnp.int32), axis_name)
        total, traffic = self.add_up(x, flags, most, agreed, axis_name)
        return base.Reduced(total, None, state, traffic)

    def add_up(
        self,
        x: entries.Units,
        present: jax.Array,
        most: jax.Array,
        agreed: float,
        axis_name: wire.AxisName,
    ) -> tuple[jax.Array, base.Traffic]:
        """The sum, and what was sent for it, once ranks have agreed on their counts.

        Args:
            x: [units, ...], on at least two ranks, not empty.
            present: Booleans [units]; all other units are zero.
            most: The most units that any rank has.
            agreed: Bytes that were sent to know it.
            axis_name: The axis to add up over.
        """
        n = wire.ranks(axis_name)
        narrow = wire.travelling(x.dtype, self.wire_dtype)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        steps = self._steps(x, n)
        width = steps.width
        words = bits.pack(jnp.pad(present, (0, width - x.shape[0])))
        sets = bits.bit_sets(words[None], steps.tile)
        dense = wire.all_reduce_cost(x.size, x.dtype, narrow, n)
        channel = gathers.gather_channel(axis_name, self.gather)
        axes = entries.axes_of(x)

        def add(total, slots, values):
            values = values.astype(wide).reshape(*slots.shape, *x.shape[1:])

            def one(source, total):
                at = total.at[slots[source]]
                return at.add(values[source], mode="drop", unique_indices=True)

            slots = bits.apart(slots, slots < width, width)
            return lax.fori_loop(0, n, one, total)

        def sparse(x):
            total, sent = exchange.transmit(
                steps,
                channel,
                sets,
                entries.source(x, narrow),
                most,
                add,
                jnp.zeros(x.shape, wide),
                typical=most.astype(jnp.float32)[None],
            )
            return as_varying((total.astype(x.dtype), base.stage_of(sent)), axes)

        def all_reduce(x):
            total, sent = wire.all_reduce(entries.dense(x), axis_name, self.wire_dtype)
            return as_varying((total, base.stage(sent, sent, 1)), axes)

        worth = self._sparse_bytes(steps, channel.messages, most) < dense
        done = lax.cond(worth, sparse, all_reduce, x)
        total, push = jax.tree.map(lambda y: assume_same(y, axis_name), done)
        return total, base.traffic(
            push,
            base.stage(),
            scalars=agreed,
            dense=dense,
            before=most.astype(jnp.float32) / x.shape[0],
            after=bits.density(total),
        )

    def expected_bytes(self, x, axis_name, most: jax.Array) -> jax.Array:
        """Bytes that one rank sends where the fullest array like x has so many units."""
        n = wire.ranks(axis_name)
        narrow = wire.travelling(x.dtype, self.wire_dtype)
        rows, _ = gathers.rows_and_waits(self.gather, n)
        dense = wire.all_reduce_cost(x.size, x.dtype, narrow, n)
        return jnp.minimum(self._sparse_bytes(self._steps(x, n), rows, most), dense)

    def _sparse_bytes(self, steps, messages, most):
        # A folded doubling sends more than n - 1 messages, each with its rank's number.
        return messages * (4 + steps.bytes(most))

    def forecast(self, load):
        n, unit_bytes = load.ranks, load.unit_bytes(self.wire_dtype)
        steps = self._ladder(load.units, unit_bytes, n, load.units)
        rows, waits = gathers.rows_and_waits(self.gather, n)
        sent, turns, capacity = sent_bytes(steps, math.ceil(load.counts[0]), rows)
        dense = load.all_reduce(self.wire_dtype)
        if sent >= dense.bytes:
            return dense
        return Forecast(sent, 0.0, agreeing(n) + turns * waits, capacity)

    def _steps(self, x, n):
        narrow = wire.travelling(x.dtype, self.wire_dtype)
        unit_bytes = x.size // x.shape[0] * narrow.itemsize
        room = x.values.shape[0] if isinstance(x, entries.Entries) else x.shape[0]
        return self._ladder(x.shape[0], unit_bytes, n, room)

    def _ladder(self, units, unit_bytes, n, room):
        width = -(-units // bits.WORD) * bits.WORD
        # With more entries than that an all-reduce sends less.
        useful = min(min(width // 4, 2 * width // n) + 1, max(room, 1))
        return ladder.ladder(width, unit_bytes, n, self.code, self.ratio, useful)
