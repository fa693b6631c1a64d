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

from sparsejax import arguments
from sparsejax.schemes import base, row_lists
from sparsejax.schemes.forecast import Forecast, agreeing
from sparsejax.schemes.or_dense import or_dense
from sparsejax.units import bits
from sparsejax.units.slots import Slots
from sparsejax.units.units import Units, unit_bytes, wide
from sparsejax.wire import collectives, gathers, index_codes, ladder, messages
from sparsejax.wire.collectives import Wire


@dataclasses.dataclass(frozen=True)
class AGSparse(base.Scheme):
    """The all-gather of all entries.

    Attributes:
        gather: How messages are gathered: "auto", "ring", "doubling" or "bruck".
        code: How indices travel: "coo32" (the usual format, and the default), "coo16",
            "coo8", "bitmap", or "auto" for the cheapest.
        ratio: The ratio of successive message sizes.
        wire_dtype: The dtype of the values while they travel; that of x if None.

    Example:
        >>> tx = sparsejax.sync(sparsejax.schemes.AGSparse(gather="ring", code="auto"))
    """

    gather: str = "auto"
    code: str = "coo32"
    ratio: float = 2.0
    wire_dtype: jax.typing.DTypeLike | None = None

    def __post_init__(self):
        arguments.check_one_of("gather", self.gather, gathers.GATHERS)
        index_codes.parse(self.code)
        ladder.check_ratio(self.ratio)
        arguments.check_dtype("wire_dtype", self.wire_dtype)

    def __call__(self, x, state, wire):
        n = wire.ranks
        if n == 1 or x.size == 0:
            return base.nothing_to_send(x, state, wire)
        base.check_units(x)
        flags = x.present()
        most, agreed = wire.maximum(jnp.sum(flags, dtype=jnp.int32))
        total, traffic = self.add_up(x, flags, most, agreed, wire)
        return base.Reduced(total, None, state, traffic)

    def rows(self, tables, wire):
        """Lists go to all as they are, however many: the sum is never a dense array."""
        return row_lists.gathered(tables, wire.narrowed(self.wire_dtype), self.gather)

    def add_up(
        self,
        x: Units,
        present: jax.Array,
        most: jax.Array,
        agreed: float,
        wire: Wire,
    ) -> tuple[jax.Array, base.Traffic]:
        """The sum, and what was sent for it, once ranks have agreed on their counts.

        Args:
            x: [units, ...], on at least two ranks, not empty.
            present: Booleans [units]; all other units are zero.
            most: The most units that any rank has.
            agreed: Bytes that were sent to know it.
            wire: The ranks.
        """
        wire = wire.narrowed(self.wire_dtype)
        narrow = wire.travelling(x.dtype)
        dtype = wide(x.dtype)
        steps, dense = self._steps_of(x, wire), wire.dense_bytes(x.size, x.dtype)
        width = steps.width
        words = bits.pack(jnp.pad(present, (0, width - x.shape[0])))
        slots = Slots.of(words[None])
        channel = gathers.gather_channel(wire, self.gather)

        def add(total, sender, slots, values):
            del sender
            at = total.at[bits.apart(slots, slots < width, width)]
            return at.add(values.astype(dtype), mode="drop", unique_indices=True)

        def sparse(x):
            total, sent = messages.transmit(
                steps,
                channel,
                slots,
                x.source(narrow),
                most,
                messages.Fold(jnp.zeros(x.shape, dtype), add, in_order=True),
                typical=most.astype(jnp.float32)[None],
            )
            return total.astype(x.dtype), base.stage_of(sent)

        def all_reduce(x):
            total, sent = wire.all_reduce(x.dense())
            return total, base.stage(sent, sent, 1)

        entry_bytes = self._entry_bytes(steps, wire.ranks, most)
        done = or_dense(wire, entry_bytes, dense, sparse, all_reduce, x)
        total, push = wire.assume_same(done)
        return total, base.traffic(
            push,
            base.stage(),
            scalars=agreed,
            dense=dense,
            before=most.astype(jnp.float32) / x.shape[0],
            after=bits.density(total),
        )

    def expected_bytes(self, x: Units, wire: Wire, most: jax.Array) -> jax.Array:
        """Bytes that one rank sends where the fullest array like x has `most` units."""
        wire = wire.narrowed(self.wire_dtype)
        entries = self._entry_bytes(self._steps_of(x, wire), wire.ranks, most)
        return jnp.minimum(entries, wire.dense_bytes(x.size, x.dtype))

    def forecast(self, load):
        if load.listed:
            return row_lists.forecast(load, self.wire_dtype, self.gather)
        n, route = load.ranks, gathers.route(self.gather, load.ranks)
        room = load.units if load.room is None else load.room
        steps = self._steps(load.units, load.unit_bytes(self.wire_dtype), n, room)
        dense, need = load.all_reduce(self.wire_dtype), math.ceil(load.counts[0])
        if self._entry_bytes(steps, n, need) >= dense.bytes:
            return dense._replace(rounds=1)
        sent, turns, capacity = steps.sent(need, route)
        waits = agreeing(n) + turns * gathers.waits(self.gather, n)
        return Forecast(sent, 0.0, waits, capacity, rounds=turns * route.waits)

    def _entry_bytes(self, steps, n, most):
        # A folded doubling sends more than n - 1 messages, each with its rank's number.
        return gathers.route(self.gather, n).messages * (4 + steps.bytes(most))

    def _steps_of(self, x, wire):
        size = unit_bytes(x, wire.travelling(x.dtype))
        return self._steps(x.shape[0], size, wire.ranks, x.capacity)

    def _steps(self, units, unit_bytes, n, room):
        width = -(-units // bits.WORD) * bits.WORD
        # With more entries than that an all-reduce sends less.
        useful = min(min(width // 4, 2 * width // n) + 1, max(room, 1))
        if collectives.at_once():
            # There buffers are as large as the longest message: those of all ranks together
            # hold a quarter of the array.
            useful = min(useful, max(width // (4 * n), bits.WORD))
        return ladder.ladder(width, unit_bytes, n, self.code, self.ratio, useful)
