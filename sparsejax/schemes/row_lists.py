"""Messages of lists of rows, and their sum where every rank sends its list to all ranks.

A list has distinct, ascending slots, with a row of numbers for each. In a message each slot
is followed by its row. A message has one of a few sizes, the smallest that holds the
longest list of all ranks.

`gathered` is the sum in one round. On the wire, with n ranks:

    agree   one pmax: the number of rows of the rank that lists most
    gather  all_gather of the lists

Every rank adds up the same lists in the order of the ranks, so all hold the same bits. A
listed row counts as present even if all its numbers are zero.

On GPUs the long messages of all ranks are together about as large as the resulting rows,
and both would be in memory at once. So they are sent in runs of rows, each written to its
place before the next is sent: see `Lists.place` and `length_of_runs`. On TPUs slots and
rows are two messages, with the same bytes in all: a row that follows its slot would not be
aligned to the lanes, so joining and splitting them would move each number. For the same
reason rows are not flattened on TPUs.
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
from sparsejax.units.stacked import by_table, stacked
from sparsejax.units.units import wide
from sparsejax.wire import gathers
from sparsejax.wire.channels import Channel, Route
from sparsejax.wire.collectives import Wire, at_once
from sparsejax.wire.ladder import ROUND
from sparsejax.wire.sizes import Sizes, send_heads


# The ratio of successive message sizes and their number, down to about a seventh of the
# longest. Sizes are finer for messages of _LONG bytes or more, where padding costs more
# than compiling.
_FINE, _COARSE = (1.25, 10), (1.5, 6)
_LONG = 1 << 16
# On GPUs one run of the messages of all ranks has at most this share (1 / 3) of the bytes
# of the resulting rows, unless it has fewer bytes than are sent in the time of a round.
_SHARE_OF_RUN = 3


@dataclasses.dataclass(frozen=True)
class Lists:
    """The format of messages of lists of rows.

    Attributes:
        wire: The ranks, and the dtype in which rows travel.
        like: Rows with the shape and dtype of those to add up.
        sizes: The sizes of messages of `send`; those of `message_sizes` if None.
    """

    wire: Wire
    like: RowGrads
    sizes: Sizes | None = None

    @functools.cached_property
    def numbers(self) -> int:
        """The number of numbers in a row."""
        return math.prod(self.like.shape[1:])

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the rows on the wire."""
        return self.wire.travelling(self.like.dtype)

    @property
    def row_words(self) -> int:
        """The words of a row on the wire, with its slot."""
        return row_words(self.numbers * self.dtype.itemsize)

    @property
    def row_bytes(self) -> int:
        """The bytes of a row on the wire, with its slot."""
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
            channel: The channel that sends the messages.
            slots: int32 [messages, room].
            values: [messages, room, numbers].
            need: int32 [], the slots of the fullest message, equal on all ranks.
            nowhere: The sentinel slot of no row.

        Returns:
            The slots and values received, with the same capacity, and the bytes sent.
            Values without a slot are zero where one message goes to all, else unspecified.
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
        """Returns the number of rows of a run of `place`, for a list of this capacity."""
        of_all = self.wire.ranks * self.row_bytes
        return length_of_runs(room, of_all, room * of_all)

    def place(
        self,
        channel: Channel,
        slots: jax.Array,
        values: jax.Array,
        need: jax.Array,
        nowhere: int,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Sends one message to all ranks in runs of rows, for GPUs; see `send`.

        Each run is written to its place before the next is sent. So only one run of what
        all ranks send is in memory beside the resulting rows.

        Args:
            channel: The channel that sends the message.
            slots: int32 [room].
            values: [room, numbers].
            need: int32 [], the slots of the fullest message, equal on all ranks.
            nowhere: The sentinel slot of no row.

        Returns:
            The slots received, int32 [ranks, room]; the values received, in the dtype of
            `like`; the bytes sent; and the number of messages.
        """
        room = slots.shape[0]
        sizes, length = message_sizes(room, self.row_bytes), self.run(room)
        message = self._to_words(slots[None], values[None])
        lengths = [part.shape[1] // room for part in message]
        messages = [-(-columns // length) for columns in sizes.rooms]

        def branch(number):
            columns = sizes.rooms[number]
            # The remainder after whole runs is sent first. Whole runs have the same shapes
            # at all sizes, so they share kernels.
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
                    # Without the barrier XLA could hold all runs in memory at one time.
                    found, rows, *message = together(found, rows, *message)
                    more, run = receive(message, first, first + length)
                    found = lax.dynamic_update_slice(found, more, (0, first))
                    rows = lax.dynamic_update_slice(rows, run, (0, first, 0))
                return found, rows

            return of

        number = sizes.number(need)
        branches = [branch(number) for number in range(len(sizes.rooms))]
        slots, rows = lax.switch(number, branches, message)
        # One table, since a lookup in each of two would be a kernel of its own.
        sent = _sent(channel, message, room, sizes)
        return slots, rows, *jnp.asarray(np.array([sent, messages], np.float32))[:, number]

    def add_up(self, of_row: jax.Array, rows: jax.Array, capacity: int) -> jax.Array:
        """Sums lists that all ranks have, in the order of the ranks.

        Args:
            of_row: int32 [ranks, k], the place of each row, or `capacity` for no place. No
                two rows of a rank have the same place.
            rows: [ranks, k, ...].
            capacity: The number of places.

        Returns:
            The sums, [capacity, ...], in float32 or wider.
        """
        n, size = of_row.shape
        dtype = wide(self.like.dtype)

        def one(source, total):
            # Rows without a place have indices out of range, which must be unique, too.
            outside = capacity + lax.iota(jnp.int32, size)
            at = jnp.where(of_row[source] < capacity, of_row[source], outside)
            values = rows[source].astype(dtype)
            return total.at[at].add(values, mode="drop", unique_indices=True)

        start = jnp.zeros((capacity, *rows.shape[2:]), dtype)
        over = varying_axes(rows) | varying_axes(of_row)
        return lax.fori_loop(0, n, one, as_varying(start, over))

    def _to_words(self, slots, values):
        """Packs messages, uint32 [messages, room * row_words]: each slot, then its row.

        Where rows are padded to lanes (TPUs), there are two messages: the slots, and the
        rows [messages, room, words], each aligned to the lanes.
        """
        words = bits.words_of(values.astype(self.dtype))
        slots = lax.bitcast_convert_type(slots, jnp.uint32)[..., None]
        if policy().row > 1:
            return [slots[..., 0], words]
        message = jnp.concatenate([slots, words], axis=-1)
        return [message.reshape(len(slots), -1)]

    def _from_words(self, messages, room):
        """Unpacks messages into slots and rows; inverts `_to_words`."""
        parts = [words.reshape(len(words), room, -1) for words in messages]
        slots = lax.bitcast_convert_type(parts[0][..., 0], jnp.int32)
        words = parts[1] if len(parts) == 2 else parts[0][..., 1:]
        return slots, bits.rows_of(words, self.dtype, self.numbers)


def _sent(channel, message, room, sizes):
    """Returns the bytes that one rank sends for all parts of a message, at each size."""
    words = [part[0].size // room for part in message]
    return [
        sum(channel.route.bytes(columns * each) for each in words)
        for columns in sizes.rooms
    ]


def gathered(
    tables: Sequence[RowGrads],
    wire: Wire,
    gather: str = "auto",
    distinct: bool = False,
    mean: bool = False,
) -> base.SummedRows:
    """Sums listed rows by a gather of all lists; the sums are the same on all ranks.

    Args:
        tables: This rank's rows of each table; ids may repeat.
        wire: The ranks, and the dtype in which rows travel.
        gather: One of `wire.gathers.GATHERS`.
        distinct: Whether no id repeats, and all ids precede the sentinels.
        mean: Whether the sums are divided by the number of ranks.

    Returns:
        Rows of distinct ids, with a capacity for all rows that ranks list, or for all rows
        of the table, if these are fewer.
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
    # Rounded to the dtype of the wire, as the sums of other exchanges are.
    sums = wire.mean_of(sums.astype(lists.dtype).astype(grads.dtype), mean)
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
    rooms = [min(wire.ranks * table.capacity, table.shape[0]) for table in tables]
    found = by_table(ids, sums, heights, rooms)
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
    """Returns whether nothing needs to be sent: there is one rank, or there are no rows."""
    return wire.ranks == 1 or not any(table.capacity and table.size for table in tables)


def of_one_rank(tables: Sequence[RowGrads], wire: Wire) -> base.SummedRows:
    """Returns the sums where nothing needs to be sent."""
    _, sent = wire.psum(jnp.float32(0))
    merged = [wire.assume_same(merge(table)) for table in tables]
    return base.SummedRows(merged, base.traffic(base.stage(), base.stage(), scalars=sent))


def sent_by_lists(unit_bytes: int, room: int, need: int, route: Route) -> tuple[float, int]:
    """Returns the bytes that one rank sends for lists of rows, and the rows of a message.

    Args:
        unit_bytes: Bytes of a row on the wire, without its slot.
        room: The capacity of the longest message, in rows.
        need: The rows of the fullest message.
        route: The number of messages that one rank sends.
    """
    words = row_words(unit_bytes)
    sizes = message_sizes(room, 4 * words)
    columns = sizes.rooms[sizes.number(need)]
    return route.bytes(columns * words), columns


def forecast(
    load: Load, wire_dtype: jax.typing.DTypeLike | None, gather: str = "auto"
) -> Forecast:
    """Forecasts what one rank would send for lists of rows that all ranks gather."""
    if load.ranks == 1 or not load.room or not load.size:
        return Forecast(0.0, 0.0, agreeing(load.ranks))
    need, route = math.ceil(load.counts[0]), gathers.route(gather, load.ranks)
    size = load.unit_bytes(wire_dtype)
    sent, columns = sent_by_lists(size, load.room, need, route)
    waits = agreeing(load.ranks) + gathers.waits(gather, load.ranks)
    return Forecast(sent, 0.0, waits, columns, rounds=1)


def length_of_runs(count: int, each: int, result: int) -> int:
    """Returns how many parts of the messages of all ranks are received at a time.

    On CPUs that is all parts.

    Args:
        count: The number of equal parts of a message: rows, or columns.
        each: Bytes of one part, summed over all ranks.
        result: Bytes of the buffer of the resulting rows.
    """
    if not at_once():
        return count
    runs = -(-count * each * _SHARE_OF_RUN // max(result, _SHARE_OF_RUN * ROUND))
    # A multiple of four: kernels read four numbers at a time.
    return 4 * -(-count // (4 * max(runs, 1)))


def row_words(unit_bytes: int) -> int:
    """Returns the words of a row with its slot; rows are padded to whole words."""
    return 1 + -(-unit_bytes // 4)


def message_sizes(room: int, row_bytes: int) -> Sizes:
    """Returns the message sizes up to `room` rows."""
    return Sizes.up_to(room, *(_FINE if room * row_bytes >= _LONG else _COARSE))
