"""Collectives over messages uint32 [parts, words], which are used at several sizes.

The bytes that a channel sends follow from the size of its messages alone, so they can be
computed from the plan of an exchange without tracing.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import rank_select
from sparsejax.axes import assume_same, axis_names
from sparsejax.wire.collectives import Permutation, Wire, byte_count, on_cpus


class Route(NamedTuple):
    """The number of messages of a collective, known without the collective.

    Attributes:
        messages: The number of messages that one rank sends.
        waits: The number of them that follow one another; 1 where the backend chooses the
            algorithm of the collective.
        extra: Words that are sent with each message in addition to its own.
    """

    messages: int
    waits: int = 1
    extra: int = 0

    def bytes(self, words: int) -> float:
        """Returns the bytes that one rank sends, for messages of `words` words each."""
        return 4.0 * self.messages * (words + self.extra)


class Channel(NamedTuple):
    """A collective over messages uint32 [parts, words, ...], used at several sizes.

    Attributes:
        send: A function of this rank's messages that returns the messages received.
        sources: The number of messages that this rank receives.
        route: The number of messages that one rank sends.
        same: The mesh axes over which the messages received are equal.
    """

    send: Callable[[jax.Array], jax.Array]
    sources: int
    route: Route
    same: frozenset[str] = frozenset()

    def received(self, x: jax.Array) -> jax.Array:
        """Types a received array as equal over the axes `same`."""
        return assume_same(x, tuple(sorted(self.same)))


# Bytes of a message from which, with gloo, it is faster to use both directions of a link
# at the same time (`benchmarks.network.messages`; between 32 KB and 256 KB they are level).
_LONG = 1 << 17


def _swapped(x: jax.Array, wire: Wire) -> jax.Array:
    """Returns the other rank's array: the sum of both, minus this rank's own.

    Between two ranks an all-reduce sends as many bytes as a swap, and gloo's sends in both
    directions at the same time. The bits are added as integers that wrap around, so the
    array received is exact.
    """
    bits = rank_select.unsigned(x)
    both, _ = wire.psum(bits)
    return lax.bitcast_convert_type(both - bits, x.dtype)


def push(wire: Wire) -> Channel:
    """Makes a channel that sends message i to rank i.

    On CPUs, between two ranks, long messages are sent by `_swapped`.
    """
    n = wire.ranks
    if n != 2:
        return Channel(wire.to_each, n, Route(n - 1))

    def exchange(x):
        me = wire.rank
        other = lax.dynamic_slice_in_dim(x, 1 - me, 1)
        return lax.dynamic_update_slice_in_dim(x, _swapped(other, wire), 1 - me, 0)

    def send(x):
        is_long = byte_count(x) >= 2 * _LONG
        return on_cpus(x, exchange, wire.to_each) if is_long else wire.to_each(x)

    return Channel(send, n, Route(n - 1))


def pull(wire: Wire) -> Channel:
    """Makes a channel that sends this rank's one message to all ranks.

    On CPUs short messages are sent as an all-to-all of copies: gloo gathers around a ring,
    in n - 1 messages that wait for one another, but sends an all-to-all at once. Long
    messages are gathered around the ring, where each rank sends to one neighbour and
    receives from the other, so that both directions of a link are in use. Between two
    ranks, where the ring is one connection, they are swapped. The bytes are the same.
    """
    n = wire.ranks

    def copies(x):
        return wire.to_each(jnp.broadcast_to(x, (n, *x.shape[1:])))

    def gather(x):
        return wire.all_gather(x[0], same=False)[0]

    def exchange(x):
        both = jnp.concatenate([x, _swapped(x, wire)])
        return jnp.where(wire.rank == 0, both, both[::-1])

    def send(x):
        if byte_count(x) < _LONG:
            return on_cpus(x, copies, gather)
        return on_cpus(x, exchange, gather) if n == 2 else gather(x)

    return Channel(send, n, Route(n - 1), frozenset(axis_names(wire.axis)))


def swap(
    wire: Wire, permutations: Sequence[Permutation], which: jax.Array | int = 0
) -> Channel:
    """Makes a channel that sends this rank's one message to its partner in a permutation.

    Args:
        wire: The ranks.
        permutations: The permutations to choose from, known at trace time.
        which: The index of the permutation to use, equal on all ranks; it may be traced.
    """
    n = wire.ranks

    def directly(x):
        return wire.permute(x, permutations[0])[0]

    def send(x):
        bits = jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == jnp.uint32
        both_swap = list(permutations) == [((0, 1), (1, 0))]
        if n == 2 and both_swap and bits and byte_count(x) >= _LONG:
            return on_cpus(x, lambda x: _swapped(x, wire), directly)
        if len(permutations) == 1:
            return directly(x)
        branches = [
            lambda x, pairs=pairs: wire.permute(x, pairs)[0] for pairs in permutations
        ]
        return lax.switch(which, branches, x)

    return Channel(send, 1, Route(1))
