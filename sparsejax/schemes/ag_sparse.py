"""AGsparse: every rank sends all its entries to all ranks, and each rank adds them up.

It is one-shot and centralized in Zen's terms (table 3). PyTorch's and Horovod's sparse
gradients do the same, and so does TopkA. On the wire, with n ranks:

    agree   one pmax of the number of entries
    tables  for values in a code of few bits: all_gather of the tables of the code
    gather  all_gather of the entries, with each message as long as the longest

Entries are a rank's own and not partial sums. So where a sparsifier rounded them to a code
(`values=`), the codes are sent, in the low bits of slots or as bytes (`wire.value_codes`),
and all ranks add up exactly the numbers that the sparsifier selected. A dense sum has no
code.

Every rank adds up the same messages in the order of the ranks, one rank at a time, so all
ranks compute the same bits. A unit that many ranks have is sent by each of them to all. So
bytes grow with n, and where they would exceed those of an all-reduce, it is an all-reduce.

The gather has one of several algorithms, which send the same bytes:

    auto      the collective of XLA
    ring      n - 1 messages to the next neighbour, each the one received last
    doubling  log2 n messages, each all that is held; a fold for other numbers of ranks
    bruck     ceil(log2 n) messages for any n
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import arguments
from sparsejax.schemes import base, row_lists
from sparsejax.schemes.forecast import Forecast, agreeing
from sparsejax.schemes.or_dense import or_dense
from sparsejax.schemes.owners.pieces import SparseScheme
from sparsejax.units import bits
from sparsejax.units.bits import Slots
from sparsejax.units.units import Units, unit_bytes, wide
from sparsejax.wire import channels, collectives, gathers, index_codes, ladder, messages
from sparsejax.wire.collectives import Wire
from sparsejax.wire.value_codes import CodedMessages


@dataclasses.dataclass(frozen=True)
class AGSparse(SparseScheme):
    """Sums entries by an all-gather.

    Each rank sends its entries to all ranks, and each adds them up. It takes one round. The
    bytes grow with the number of ranks. Where they would exceed those of an all-reduce, it
    is one.

    Attributes:
        gather: The algorithm of the all-gather: "auto" (XLA's), "ring", "doubling" or
            "bruck".
        code: How indices are sent: "coo32" (the usual format), "coo16", "coo8", "bitmap",
            or "auto" for the cheapest.
        ratio: The ratio of successive message sizes.
        wire_dtype: The dtype of the values on the wire; that of x if None.

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
        if wire.ranks == 1 or x.size == 0:
            return base.nothing_to_send(x, state, wire)
        base.check_units(x)
        flags = x.present()
        most, agreed = wire.maximum(jnp.sum(flags, dtype=jnp.int32))
        total, traffic = self.add_up(x, flags, most, agreed, wire)
        return base.Reduced(total, None, state, traffic)

    def rows(self, tables, wire, mean=False):
        """Gathers all lists, of any length: the sum is never a dense array."""
        wire = wire.narrowed(self.wire_dtype)
        return row_lists.gathered(tables, wire, self.gather, mean=mean)

    def add_up(
        self,
        x: Units,
        present: jax.Array,
        most: jax.Array,
        agreed: float,
        wire: Wire,
    ) -> tuple[jax.Array, base.Traffic]:
        """Sums entries, after ranks have agreed on their largest number.

        Args:
            x: [units, ...], on at least two ranks, not empty.
            present: Booleans [units], the units that are not zero.
            most: int32 [], the largest number of such units of any rank.
            agreed: Bytes that were sent to agree on `most`.
            wire: The ranks.

        Returns:
            The sum, and the traffic.
        """
        wire, dtype = wire.narrowed(self.wire_dtype), wide(x.dtype)
        plan, dense = self._plan_of(x, wire), wire.dense_bytes(x.size, x.dtype)
        channel = gathers.gather_channel(wire, self.gather)

        def sparse(x):
            slots, source, read = _outgoing(x, present, plan, wire)

            def add(total, sender, slots, values):
                units, values = read(sender, slots, values)
                at = total.at[bits.unique_places(units, units < plan.width, plan.width)]
                return at.add(values.astype(dtype), mode="drop", unique_indices=True)

            total, sent = messages.transmit(
                plan.steps,
                channel,
                slots,
                source,
                most,
                messages.Fold(jnp.zeros(x.shape, dtype), add, in_order=True),
                typical=most.astype(jnp.float32)[None],
            )
            return total.astype(x.dtype), plan.with_tables(base.stage_of(sent))

        def all_reduce(x):
            total, sent = wire.all_reduce(x.dense())
            return total, base.stage(sent, sent, 1)

        pays = collectives.pays(plan.bytes(most), dense)
        done = or_dense(pays, sparse, all_reduce, x)
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
        """Forecasts the bytes that one rank sends.

        Args:
            x: An array of this shape and dtype.
            wire: The ranks.
            most: The largest number of non-zero units of any rank.
        """
        wire = wire.narrowed(self.wire_dtype)
        entries = self._plan_of(x, wire).bytes(most)
        return jnp.minimum(entries, wire.dense_bytes(x.size, x.dtype))

    def forecast(self, load):
        if load.listed:
            return row_lists.forecast(load, self.wire_dtype, self.gather)
        n, room = load.ranks, load.units if load.room is None else load.room
        narrow = collectives.travelling(load.dtype, self.wire_dtype)
        codes = CodedMessages.of(load.values, load.units, load.arrays, narrow)
        plan = self._plan(load.units, load.unit_bytes(self.wire_dtype), n, room, codes)
        dense, need = load.all_reduce(self.wire_dtype), math.ceil(load.counts[0])
        if not collectives.pays(plan.bytes(need), dense.bytes):
            return dense._replace(rounds=1)
        sent, turns, capacity = plan.steps.sent(need, plan.route)
        waits = agreeing(n) + turns * gathers.waits(self.gather, n)
        waits += gathers.waits("auto", n) * plan.has_tables
        rounds = turns * plan.route.waits + plan.has_tables
        sent += plan.table_bytes
        known = {"rounds": rounds, "coded": codes is not None}
        return Forecast(sent, 0.0, waits, capacity, **known)

    def _plan_of(self, x, wire):
        narrow, coded, units = wire.travelling(x.dtype), x.coded, x.shape[0]
        codes = coded and CodedMessages.of(coded.code, units, len(coded.table), narrow)
        return self._plan(units, unit_bytes(x, narrow), wire.ranks, x.capacity, codes)

    def _plan(self, units, unit_bytes, n, room, codes):
        width = -(-units // bits.WORD) * bits.WORD
        extra, size = (codes.slot_bits, codes.unit_bytes) if codes else (0, unit_bytes)
        # With more entries than that an all-reduce sends less. With codes an entry takes at
        # least a byte, except in a bitmap, whose size is that of a full set.
        useful = min(width, 8 * width // n) if codes else min(width // 4, 2 * width // n)
        useful = min(useful + 1, max(room, 1))
        if collectives.at_once():
            # At once, buffers are as large as the longest message: those of all ranks
            # together hold a quarter of the array.
            useful = min(useful, max(width // (4 * n), bits.WORD))
        steps = ladder.Message(self.code, self.ratio, useful).ladder(
            width << extra, size, n
        )
        return _GatherPlan(steps, codes, width, n, gathers.route(self.gather, n))


@dataclasses.dataclass(frozen=True)
class _GatherPlan:
    """The message sizes and the bytes of a gather of entries.

    Attributes:
        steps: The message sizes.
        codes: The format of values in a code; None where values have no code.
        width: The number of slots of the array, without codes.
        ranks: The number of ranks.
        route: The number of messages that one rank sends.
    """

    steps: ladder.Ladder
    codes: CodedMessages | None
    width: int
    ranks: int
    route: channels.Route

    @property
    def table_bytes(self) -> int:
        """Bytes that a rank sends for its tables."""
        return self.codes.table_bytes(self.ranks) if self.codes else 0

    @property
    def has_tables(self) -> bool:
        """Whether tables are sent."""
        return self.table_bytes > 0

    def bytes(self, most: ladder.Count) -> Any:
        """Returns the bytes that a rank sends if the fullest rank has `most` entries."""
        # `route` counts the messages of a folded doubling, which are more than n - 1. The 4
        # is an upper bound of what each carries beside its own: the number of its rank.
        entries = self.route.messages * (4 + self.steps.bytes(most))
        return entries + self.table_bytes

    def with_tables(self, stage: base.Stage) -> base.Stage:
        """Adds the stage in which the tables were sent to that of the entries."""
        of_tables = base.stage(self.table_bytes, self.table_bytes, self.has_tables)
        return base.add_stages(stage, of_tables)


def _outgoing(x, present, plan, wire):
    """Returns this rank's slots, the source of their values, and a decoder of entries."""
    if plan.codes is not None:
        read = plan.codes.reader(x, wire, x.dtype)
        return plan.codes.slots(x, plan.width), plan.codes.source(x), read
    words = bits.pack(jnp.pad(present, (0, plan.width - x.shape[0])))
    source = x.source(wire.travelling(x.dtype))
    return Slots.of(words[None]), source, lambda sender, slots, values: (slots, values)
