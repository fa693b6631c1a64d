"""Which sizes a message may have, and a message of one of them.

Buffers have the length that is known when a program is traced: room for all that may have
to be sent. What is sent is known when it runs. So there are a few sizes to choose from,
each a branch of the program that holds little but its collective, and all ranks take the
smallest that fits the fullest message, on whose need they agreed.
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
from sparsejax.wire import collectives
from sparsejax.wire.channels import Channel


# A count of entries: on the device, or known in Python.
Count = jax.Array | np.integer | int


def numpy_of(count: Count) -> Any:
    """The NumPy in which a count is treated: JAX's for an array of JAX."""
    return jnp if isinstance(count, jax.Array) else np


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that a message may have.

    Attributes:
        rooms: For how many entries there is room, ascending.
        one_by_one: Whether a need is compared with them one by one: on GPUs a sum of more
            than a few comparisons is a kernel of its own.
    """

    rooms: tuple[int, ...]
    one_by_one: bool = False

    @classmethod
    def up_to(cls, most: int, ratio: float, count: int) -> "Sizes":
        """At most `count` sizes, each `ratio` times the one before, the last `most`."""
        rooms = {max(1, math.ceil(most / ratio**step)) for step in range(count)}
        return cls(tuple(sorted(rooms)))

    @classmethod
    def down_to_share(cls, most: int, ranks: int) -> "Sizes":
        """Sizes from `most` down to less than an n-th of it, where parts may be uneven.

        Args:
            most: Entries that a message may have, all that a rank has.
            ranks: Among how many messages they are divided.
        """
        return cls.up_to(most, 2**0.5, 2 * math.ceil(math.log2(ranks)) + 2)

    def number(self, need: Count) -> Any:
        """The number of the smallest that holds `need` entries; the last if none does."""
        xp = numpy_of(need)
        if self.one_by_one:
            rooms = map(np.int32, self.rooms)
            below = sum((need > room).astype(jnp.int32) for room in rooms)
        else:
            below = xp.sum(xp.array(self.rooms, np.int32) < need, dtype=np.int32)
        return xp.minimum(below, len(self.rooms) - 1)


def sender(channel: Channel, words: int, count: int) -> Callable[..., jax.Array]:
    """A branch that sends the first words of each message: the size with that many.

    Args:
        channel: Where the messages go.
        words: How many words.
        count: How many messages this rank sends.

    Returns:
        From uint32 [rows, room], this rank's messages in the first rows, and what
        `collectives.unseen_numbers` returns, if anything, to those received, in as much
        room. In rounds they are written over what was sent, if there is a row for each;
        else, and at once, where a branch would copy that buffer, into zeros.
    """

    def send(messages, *rows):
        heads = collectives.heads(messages, count, words, rows)
        received = as_varying(channel.send(heads), varying_axes(messages))
        if collectives.at_once() or len(messages) < channel.sources:
            edges = [(0, 0)] * messages.ndim
            edges[1] = 0, messages.shape[1] - words
            return jnp.pad(received, edges)
        return lax.dynamic_update_slice(messages, received, [0] * messages.ndim)

    return send


def send_heads(
    channel: Channel,
    messages: jax.Array,
    words: Sequence[int],
    number: jax.Array,
    count: int,
) -> jax.Array:
    """Sends the first words of each message, as many as one of several sizes has.

    Args:
        channel: Where the messages go.
        messages: uint32 [rows, room, ...], this rank's in the first rows.
        words: The sizes, each at most `room`.
        number: Which of them, equal on all ranks.
        count: How many messages this rank sends.

    Returns:
        uint32 [sources, room, ...], the messages received; after the words that were sent
        anything, or zeros where `messages` has fewer rows than there are sources.
    """
    rows = collectives.unseen_numbers(count)
    senders = [sender(channel, size, count) for size in words]
    received = lax.switch(number, senders, messages, *rows)
    return channel.received(received[: channel.sources])
