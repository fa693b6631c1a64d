"""Sends lists of several tables in one message: ids to all ranks, or columns to readers.

A list has the capacity for the most entries that are possible, and usually holds fewer. So
lists are cut to one of a few lengths: a message has one of a few sizes, on which all ranks
agree.

On the wire: an all_gather of ids, or an all_to_all of columns, of all tables whatever their
dtypes. If there are several sizes, these are preceded by one pmax of a number.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax.axes import as_varying, varying_axes
from sparsejax.branches import at_number
from sparsejax.units import bits
from sparsejax.wire.channels import Channel, pull, push
from sparsejax.wire.collectives import Wire
from sparsejax.wire.sizes import Sizes


@dataclasses.dataclass(frozen=True)
class TableLists:
    """The format of messages of lists of several tables.

    Attributes:
        wire: The wire.
        lengths: For each size of a message, ascending, the length of the list of each
            table. Those of the last size are the capacities of the lists.
    """

    wire: Wire
    lengths: Sequence[Sequence[int]]

    @classmethod
    def of(cls, wire: Wire, *lengths: Sequence[int]) -> "TableLists":
        """Makes the format from distinct lengths by size; one rank needs only the last."""
        different = list(dict.fromkeys(map(tuple, lengths)))
        return cls(wire, different[-1:] if wire.ranks == 1 else different)

    def number(self, found: Sequence[jax.Array]) -> jax.Array:
        """Returns the number of the smallest size that holds `found` entries by table."""
        sizes = map(Sizes, zip(*self.lengths, strict=True))
        pairs = zip(sizes, self.wire.per_rank(found), strict=True)
        return jnp.max(jnp.stack([each.number(count) for each, count in pairs]))

    def agreed(self, found: Sequence[jax.Array]) -> tuple[Any, float]:
        """Returns the largest `number` of all ranks, and the bytes sent to agree on it.

        Args:
            found: int32 [], for each table the number of entries that this rank has.
        """
        if len(self.lengths) == 1:
            return 0, 0.0
        return self.wire.maximum(self.number(found))

    def gathered(
        self, ids: Sequence[jax.Array], number: Any
    ) -> tuple[list[jax.Array], jax.Array]:
        """Gathers the ids of all ranks, [n, room] by table; also returns the bytes sent.

        Args:
            ids: int32 [room] for each table.
            number: The number of a size, equal on all ranks.
        """
        lists = [x[None] for x in ids]
        # Shorter lists are padded with an id that is out of range for all tables.
        return self.sent(pull(self.wire), lists, number, fill=2**31 - 1)

    def exchanged(
        self, columns: Sequence[jax.Array], number: Any
    ) -> tuple[list[jax.Array], jax.Array]:
        """Exchanges columns of the rows that each rank reads for whole vectors.

        Args:
            columns: [n, room, columns] for each table.
            number: The number of a size, equal on all ranks.

        Returns:
            [room, n * columns] for each table, the vectors of this rank's ids, and the
            bytes sent.
        """
        channel = push(self.wire)

        # Bit casts have no gradient: that of received columns returns by the same exchange.
        @jax.custom_vjp
        def exchange(number, *columns):
            return self.sent(channel, columns, number)

        def back(number, g):
            return None, *exchange(number, *g[0])[0]

        exchange.defvjp(lambda number, *x: (exchange(number, *x), number), back)
        axes = frozenset[str]().union(*map(varying_axes, columns))
        parts, sent = exchange(number, *as_varying(self.wire.per_rank(columns), axes))
        whole = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], len(x) * x.shape[2])
        return [whole(x) for x in parts], sent

    def sent(
        self, channel: Channel, lists: Sequence[jax.Array], number: Any, fill: int = 0
    ) -> tuple[list[jax.Array], jax.Array]:
        """Sends the heads of lists.

        Args:
            channel: The channel that sends the messages.
            lists: [messages, room, ...] for each table, of any dtypes.
            number: The number of a size, equal on all ranks.
            fill: The padding of lists that are received with a shorter length.

        Returns:
            [sources, room, ...] for each table, and the bytes sent.
        """
        if not any(self.lengths[-1]):
            of_all = [jnp.repeat(x[:1], channel.sources, axis=0) for x in lists]
            return [channel.received(x) for x in of_all], jnp.float32(0)
        # Each size packs its own message: to pack a message of the full capacity, of which
        # `send_heads` sends the head, would cost more than sending it.
        senders = [_sender(channel, lengths, fill) for lengths in self.lengths]
        received = lax.switch(number, senders, *lists)
        rows = [math.prod(x.shape[2:]) * x.dtype.itemsize for x in lists]
        words = [
            sum(-(-k * row // 4) for k, row in zip(lengths, rows, strict=True))
            for lengths in self.lengths
        ]
        sent = jnp.array([channel.route.bytes(size) for size in words], jnp.float32)
        return [channel.received(x) for x in received], at_number(sent, number)


def _sender(channel: Channel, lengths: Sequence[int], fill: int) -> Callable[..., Any]:
    """Makes the branch that sends these lengths of lists, as uint32 [messages, words]."""

    def send(*lists):
        cut = [x[:, :k] for x, k in zip(lists, lengths, strict=True)]
        flat = [bits.words_of(x.reshape(len(x), -1)) for x in cut]
        ends = np.cumsum([x.shape[1] for x in flat])
        received = channel.send(jnp.concatenate(flat, axis=1))
        arrived = []
        pieces = jnp.split(received, ends[:-1], axis=1)
        for piece, x, whole in zip(pieces, cut, lists, strict=True):
            numbers = math.prod(x.shape[1:])
            piece = bits.rows_of(piece, x.dtype, numbers)
            piece = piece.reshape(channel.sources, *x.shape[1:])
            edges = [(0, 0), (0, whole.shape[1] - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
            arrived.append(jnp.pad(piece, edges, constant_values=fill))
        return arrived

    return send
