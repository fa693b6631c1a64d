"""Lists of rows on the wire, and their sum where every rank sends its list to all.

A list has distinct slots, ascending, with a row of numbers for each. A message is a list
whose slots stand in front of their rows; it has one of a few sizes, and takes the smallest
that the fullest list of all ranks fits.

`gathered` is the sum in one round. On the wire, with n ranks:

    agree   one pmax: the rows of the rank that lists most
    gather  all_gather of the lists

Every rank adds up the same lists in the order of the ranks, so all hold the same bits. A
row counts as there because it is listed, whatever is in it.

On GPUs what all ranks send of a long message is about as much as the rows that come of it,
and both would be in memory at once. There it goes in runs, one after the other, each put in
its place before the next is sent: see `Lists.place` and `length_of_runs`. On TPUs slots and
rows are two messages, of the same bytes in all: a row after its slot would lie across the
lanes, and each of its numbers would move where they are joined and split. Nor are rows
flattened there.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.platforms import policy
from sparsejax.axes import as_varying, varying_axes
from sparsejax.branches import at_number, together
from sparsejax.errors import ArgumentError
from sparsejax.schemes import base
from sparsejax.schemes.forecast import Forecast, Load, agreeing
from sparsejax.units import bits
from sparsejax.units.indices import MOST_NUMBERED
from sparsejax.units.merging import merge, union
from sparsejax.units.row_grads import RowGrads
from sparsejax.units.stacked import apart, stacked
from sparsejax.units.units import wide
from sparsejax.wire import gathers
from sparsejax.wire.channels import Channel, Route
from sparsejax.wire.collectives import Wire
from sparsejax.wire.ladder import ROUND
from sparsejax.wire.sizes import Sizes, send_heads


# The ratio of successive message sizes, and how many there are, down to some seventh of
# the longest: more where that is so long that padding weighs more than compiling.
_FINE, _COARSE = (1.25, 10), (1.5, 6)
_LONG = 1 << 16
# On GPUs a run of what all ranks send is no more than such a share of the rows that come of
# it, unless it has fewer bytes than take as long as a round.
_SHARE_OF_RUN = 3


@dataclasses.dataclass(frozen=True)
class Lists:
    """How lists of rows travel.

    Attributes:
        wire: The ranks, and the dtype in which rows travel.
        like: Rows such as those that are to be added up.
        sizes: Of messages that `send` sends; `message_sizes` of their room if None.
    """

    wire: Wire
    like: RowGrads
    sizes: Sizes | None = None

    @functools.cached_property
    def numbers(self) -> int:
        """How many numbers a row has."""
        return math.prod(self.like.shape[1:])

    @property
    def dtype(self) -> jnp.dtype:
        """Of the rows while they travel."""
        return self.wire.travelling(self.like.dtype)

    @property
    def row_words(self) -> int:
        """Words of a row on the wire, with its slot."""
        return row_words(self.numbers * self.dtype.itemsize)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on the wire, with its slot."""
        return 4 * self.row_words

    def send(
        self,
        channel: Channel,
        slots: jax.Array,
        values: jax.Array,
        need: jax.Array,
        nowhere: int,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Sends the first slots and values of each message, as many as the fullest has.

        Args:
            channel: Where the messages go.
            slots: int32 [messages, room].
            values: [messages, room, numbers].
            need: Slots of the fullest message, equal on all ranks.
            nowhere: The slot of no row.

        Returns:
            The slots and values received, with as much room, and the bytes sent. A value
            without a slot is zero where one message goes to all, else anything.
        """
        room = slots.shape[1]
        sizes = self.sizes or message_sizes(room, self.row_bytes)
        number = sizes.number(need)
        message, received = self._to_words(slots, values), []
        for part in message:
            each = part.shape[1] // room
            lengths = [columns * each for columns in sizes.rooms]
            received += [send_heads(channel, part, lengths, number, len(slots))]
        sent = _sent(channel, message, room, sizes)
        slots, values = self._from_words(received, room)
        inside = lax.iota(jnp.int32, room) < at_number(
            jnp.array(sizes.rooms, jnp.int32), number
        )
        slots = jnp.where(inside, slots, nowhere)
        return slots, values, at_number(jnp.array(sent, jnp.float32), number)

    def run(self, room: int) -> int:
        """Rows of a run of `place`, of a list with this much room."""
        of_all = self.wire.ranks * self.row_bytes
        return length_of_runs(self.wire, room, of_all, room * of_all)

    def place(
        self,
        channel: Channel,
        slots: jax.Array,
        values: jax.Array,
        need: jax.Array,
        nowhere: int,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """`send` of one message to all, for GPUs: a run of its rows before the next.

        Of what all ranks send only a run is in memory beside the rows in their places.

        Args:
            channel: Where the message goes.
            slots: int32 [room].
            values: [room, numbers].
            need: Slots of the fullest message, equal on all ranks.
            nowhere: The slot of no row.

        Returns:
            The slots [ranks, room] and values received, these in the dtype of `like`; the
            bytes sent, and in how many messages.
        """
        room = slots.shape[0]
        sizes, length = message_sizes(room, self.row_bytes), self.run(room)
        message = self._to_words(slots[None], values[None])
        lengths = [part.shape[1] // room for part in message]
        messages = [-(-columns // length) for columns in sizes.rooms]

        def branch(number):
            columns = sizes.rooms[number]
            # First what is left of whole runs, which are the same for all sizes: so few
            # kernels are.
            rest = (columns - 1) // length * length

            def receive(message, first, last):
                received = []
                for part, each in zip(message, lengths, strict=True):
                    cut = channel.send(part[:, first * each : last * each])
                    received.append(channel.received(cut))
                found, rows = self._from_words(received, last - first)
                return found, rows.astype(self.like.dtype)

            def of(message):
                found, rows = receive(message, rest, columns)
                edges = (0, 0), (rest, room - columns)
                found = jnp.pad(found, edges, constant_values=nowhere)
                rows = jnp.pad(rows, (*edges, (0, 0)))
                for first in range(0, rest, length):
                    # Else XLA would have all of them there at the same time.
                    found, rows, *message = together(found, rows, *message)
                    more, run = receive(message, first, first + length)
                    found = lax.dynamic_update_slice(found, more, (0, first))
                    rows = lax.dynamic_update_slice(rows, run, (0, first, 0))
                return found, rows

            return of

        number = sizes.number(need)
        branches = [branch(number) for number in range(len(sizes.rooms))]
        slots, rows = lax.switch(number, branches, message)
        # One table: a look into each would be a kernel of its own.
        sent = _sent(channel, message, room, sizes)
        return slots, rows, *jnp.asarray(np.array([sent, messages], np.float32))[:, number]

    def add_up(self, of_row: jax.Array, rows: jax.Array, capacity: int) -> jax.Array:
        """The sum of lists that all ranks have, taken in the order of the ranks.

        Args:
            of_row: int32 [ranks, k], where each row goes; `capacity` is nowhere. No two of
                a rank go to one place.
            rows: [ranks, k, ...].
            capacity: How many places there are.

        Returns:
            [capacity, ...], in float32 or wider.
        """
        n, size = of_row.shape
        dtype = wide(self.like.dtype)

        def one(source, total):
            # An index of its own for each that is dropped.
            apart = capacity + lax.iota(jnp.int32, size)
            at = jnp.where(of_row[source] < capacity, of_row[source], apart)
            values = rows[source].astype(dtype)
            return total.at[at].add(values, mode="drop", unique_indices=True)

        start = jnp.zeros((capacity, *rows.shape[2:]), dtype)
        over = varying_axes(rows) | varying_axes(of_row)
        return lax.fori_loop(0, n, one, as_varying(start, over))

    def _to_words(self, slots, values):
        """Messages uint32 [messages, room * row_words]: every slot followed by its row.

        Where rows have lanes, two of them: the slots, and the rows [messages, room, words],
        of which each begins with a lane.
        """
        words = bits.words_of(values.astype(self.dtype))
        slots = lax.bitcast_convert_type(slots, jnp.uint32)[..., None]
        if policy().row > 1:
            return [slots[..., 0], words]
        message = jnp.concatenate([slots, words], axis=-1)
        return [message.reshape(len(slots), -1)]

    def _from_words(self, messages, room):
        """Inverse of `_to_words`."""
        parts = [words.reshape(len(words), room, -1) for words in messages]
        slots = lax.bitcast_convert_type(parts[0][..., 0], jnp.int32)
        words = parts[1] if len(parts) == 2 else parts[0][..., 1:]
        return slots, bits.rows_of(words, self.dtype, self.numbers)


def _sent(channel, message, room, sizes):
    """Bytes that one rank sends for the parts of a message, at each size."""
    words = [part[0].size // room for part in message]
    return [
        sum(channel.route.bytes(columns * each) for each in words)
        for columns in sizes.rooms
    ]


def gathered(
    tables: Sequence[RowGrads], wire: Wire, gather: str = "auto", distinct: bool = False
) -> base.SummedRows:
    """The sums of listed rows, by a gather of all lists; the same on all ranks.

    Args:
        tables: This rank's rows of each table; ids may repeat.
        wire: The ranks, and the dtype in which rows travel.
        gather: One of `wire.gathers.GATHERS`.
        distinct: Whether no id repeats, and all are in front of places without a row.

    Returns:
        Rows of distinct ids, with room for all that ranks list, and no more than the table
        has.
    """
    if is_trivial(tables, wire):
        return of_one_rank(tables, wire)
    check_listed(sum(table.capacity for table in tables), wire)
    grads = stacked(tables)
    height = grads.shape[0]
    merged = grads if distinct else merge(grads)
    lists = Lists(wire, grads)
    most, agreed = wire.maximum(jnp.sum(merged.ids < height, dtype=jnp.int32))
    channel = gathers.gather_channel(wire, gather)
    values = merged.rows.reshape(1, merged.capacity, lists.numbers)
    keys, rows, sent = lists.send(channel, merged.ids[None], values, most, height)
    ids, of_row = union(keys, min(keys.size, height), height)
    sums = lists.add_up(of_row, rows, ids.size)
    # As every other way has it: rounded to what travels.
    sums = sums.astype(lists.dtype).astype(grads.dtype)
    ids, sums = wire.assume_same((ids, sums.reshape(-1, *grads.shape[1:])))
    after = jnp.sum(ids < height).astype(jnp.float32)
    payload = channel.route.messages * lists.row_bytes * most.astype(jnp.float32)
    sent = wire.assume_same(sent)
    traffic = base.traffic(
        base.stage(sent, payload, 1),
        base.stage(),
        scalars=agreed,
        dense=wire.dense_bytes(grads.size, grads.dtype),
        before=most.astype(jnp.float32) / height,
        after=after / height,
    )
    heights = [table.shape[0] for table in tables]
    rooms = [wire.ranks * table.capacity for table in tables]
    found = apart(
        ids, sums, heights, [min(pair) for pair in zip(rooms, heights, strict=True)]
    )
    totals = [RowGrads(*f, t.shape) for f, t in zip(found, tables, strict=True)]
    return base.SummedRows(totals, traffic)


def check_listed(listed: int, wire: Wire) -> None:
    """Raises if int32 cannot number the rows that all ranks list together."""
    n = wire.ranks
    if n * listed > MOST_NUMBERED:
        raise ArgumentError(
            f"the {listed:,} rows that each of {n} ranks lists are {n * listed:,} in all, "
            f"more than int32 can number, which goes to {MOST_NUMBERED:,}: list fewer a "
            "step (capacity= of distinct rows, or a smaller batch), or shard the batch "
            "over a second mesh axis."
        )


def is_trivial(tables: Sequence[RowGrads], wire: Wire) -> bool:
    """Whether nothing needs to be sent: there is one rank, or there are no rows."""
    return wire.ranks == 1 or not any(table.capacity and table.size for table in tables)


def of_one_rank(tables: Sequence[RowGrads], wire: Wire) -> base.SummedRows:
    """The sums where nothing needs to be sent."""
    _, sent = wire.psum(jnp.float32(0))
    merged = [wire.assume_same(merge(table)) for table in tables]
    return base.SummedRows(merged, base.traffic(base.stage(), base.stage(), scalars=sent))


def sent_by_lists(unit_bytes: int, room: int, need: int, route: Route) -> tuple[float, int]:
    """Bytes that one rank sends for lists of rows, and how many rows a message has.

    Args:
        unit_bytes: Bytes of a row as it travels, without its slot.
        room: For how many rows there is room at most.
        need: How many the fullest message has.
        route: How messages go.
    """
    words = row_words(unit_bytes)
    sizes = message_sizes(room, 4 * words)
    columns = sizes.rooms[sizes.number(need)]
    return route.bytes(columns * words), columns


def forecast(
    load: Load, wire_dtype: jax.typing.DTypeLike | None, gather: str = "auto"
) -> Forecast:
    """Reckons what one rank would send for lists of rows that all ranks gather."""
    if load.ranks == 1 or not load.room or not load.size:
        return Forecast(0.0, 0.0, agreeing(load.ranks))
    need, route = math.ceil(load.counts[0]), gathers.route(gather, load.ranks)
    size = load.unit_bytes(wire_dtype)
    sent, columns = sent_by_lists(size, load.room, need, route)
    waits = agreeing(load.ranks) + gathers.waits(gather, load.ranks)
    return Forecast(sent, 0.0, waits, columns, rounds=1)


def length_of_runs(wire: Wire, count: int, each: int, result: int) -> int:
    """How many parts of what all ranks send are received at a time: all, on CPUs.

    Args:
        wire: The ranks.
        count: Of how many equal parts it consists.
        each: Bytes of one of them, of all ranks.
        result: Bytes of all rows that there is room for in the end.
    """
    if not wire.at_once:
        return count
    runs = -(-count * each * _SHARE_OF_RUN // max(result, _SHARE_OF_RUN * ROUND))
    # In fours, which are read at once where they are numbers.
    return 4 * -(-count // (4 * max(runs, 1)))


def row_words(unit_bytes: int) -> int:
    """Words of a row on the wire, with its slot; rows of odd length are padded."""
    return 1 + -(-unit_bytes // 4)


def message_sizes(room: int, row_bytes: int) -> Sizes:
    """Message sizes up to `room` rows."""
    return Sizes.up_to(room, *(_FINE if room * row_bytes >= _LONG else _COARSE))
