"""The sizes that a message may have, and sending a message of one of these sizes.

The length of a buffer is fixed at trace time, with a capacity for the most that may have to
be sent. The number of entries to send is known only at run time. So a program has a branch
for each of a few sizes, which holds little more than its collective. All ranks take the
smallest size that holds the fullest message, whose need they have agreed on.
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
    """Returns `jax.numpy` for a JAX array, and `numpy` for a Python or NumPy number."""
    return jnp if isinstance(count, jax.Array) else np


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that a message may have.

    Attributes:
        rooms: The capacities, in entries, ascending.
        one_by_one: Whether a need is compared with one capacity at a time: on GPUs a
            vectorized comparison and its sum would be a kernel of its own.
    """

    rooms: tuple[int, ...]
    one_by_one: bool = False

    @classmethod
    def up_to(cls, most: int, ratio: float, count: int) -> "Sizes":
        """Makes at most `count` sizes, each `ratio` times the previous, up to `most`."""
        rooms = {max(1, math.ceil(most / ratio**step)) for step in range(count)}
        return cls(tuple(sorted(rooms)))

    @classmethod
    def down_to_share(cls, most: int, ranks: int) -> "Sizes":
        """Makes sizes from `most` down to less than most / ranks, for parts of any balance.

        Args:
            most: The most entries of a message: all entries of a rank.
            ranks: The number of messages among which these are divided.
        """
        return cls.up_to(most, 2**0.5, 2 * math.ceil(math.log2(ranks)) + 2)

    def number(self, need: Count) -> Any:
        """Returns the number of the smallest size for `need` entries, or of the largest."""
        xp = numpy_of(need)
        if self.one_by_one:
            rooms = map(np.int32, self.rooms)
            below = sum((need > room).astype(jnp.int32) for room in rooms)
        else:
            below = xp.sum(xp.array(self.rooms, np.int32) < need, dtype=np.int32)
        return xp.minimum(below, len(self.rooms) - 1)


def sender(channel: Channel, words: int, count: int) -> Callable[..., jax.Array]:
    """Makes the branch for one size, which sends the first words of each message.

    Args:
        channel: The channel that sends the messages.
        words: The number of words of a message of this size.
        count: The number of messages that this rank sends.

    Returns:
        A function of uint32 [rows, room], with this rank's messages in the first rows, and
        of the scalars of `collectives.unseen_numbers`. It returns the messages received, in
        rows of the same length. In rounds these overwrite the messages sent, if the buffer
        has a row for each source. Otherwise they are padded with zeros, as they are when
        all is sent at once, where a branch would copy the buffer.
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
    """Sends the first words of each message, in one of several sizes.

    Args:
        channel: The channel that sends the messages.
        messages: uint32 [rows, room, ...], with this rank's messages in the first rows.
        words: The sizes in words, each at most `room`.
        number: The index of the size to send, equal on all ranks.
        count: The number of messages that this rank sends.

    Returns:
        uint32 [sources, room, ...], the messages received. The words after those sent are
        unspecified, or zeros where `messages` has fewer rows than there are sources.
    """
    rows = collectives.unseen_numbers(count)
    senders = [sender(channel, size, count) for size in words]
    received = lax.switch(number, senders, messages, *rows)
    return channel.received(received[: channel.sources])
