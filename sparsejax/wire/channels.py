"""Collectives over messages uint32 [parts, words], to be used at several sizes.

What a channel sends follows from the size of its messages, so bytes are arithmetic on the
plan of an exchange: nothing has to be traced to know them.
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
    """What a collective puts on the wire, known before there is one.

    Attributes:
        messages: How many messages a rank puts on the wire.
        waits: How many of them follow one another; one where how a collective goes is the
            back end's own affair.
        extra: Words that travel with each message beside its own.
    """

    messages: int
    waits: int = 1
    extra: int = 0

    def bytes(self, words: int) -> float:
        """Bytes that one rank sends where each message has `words` words."""
        return 4.0 * self.messages * (words + self.extra)


class Channel(NamedTuple):
    """A collective over messages uint32 [parts, words, ...], to be used at several sizes.

    Attributes:
        send: From this rank's messages to those received.
        sources: From how many ranks this rank receives.
        route: What it puts on the wire.
        same: The axes over which what is received is the same.
    """

    send: Callable[[jax.Array], jax.Array]
    sources: int
    route: Route
    same: frozenset[str] = frozenset()

    def received(self, x: jax.Array) -> jax.Array:
        """Types a received array as equal on the ranks on which it is."""
        return assume_same(x, tuple(sorted(self.same)))


# Bytes of a message from which, with gloo, it is faster to use both ways of a link at the
# same time (`benchmarks.network.messages`; between 32 KB and 256 KB it hardly matters).
_LONG = 1 << 17


def _swapped(x: jax.Array, wire: Wire) -> jax.Array:
    """Returns the other rank's array: the sum of both, less this rank's own.

    Of two ranks an all-reduce sends what any swap sends, and gloo's sends both ways at the
    same time. Bits are added up, as integers that wrap, so that they arrive as they are.
    """
    bits = rank_select.unsigned(x)
    both, _ = wire.psum(bits)
    return lax.bitcast_convert_type(both - bits, x.dtype)


def push(wire: Wire) -> Channel:
    """Message i goes to rank i; between two ranks, a long one by `_swapped` on CPUs."""
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
    """This rank's one message goes to all.

    On CPUs short ones go as an all-to-all of copies: gloo gathers around a ring, in n - 1
    messages that wait for one another, and sends an all-to-all at once. Long ones go around
    the ring, where each rank sends one way and receives the other, so that both ways are
    used at the same time; between two ranks, where the ring is one connection, as a swap.
    The bytes are the same.
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
    """This rank's one message goes to its partner in the chosen permutation.

    Args:
        wire: The ranks.
        permutations: The permutations to choose from, known when the program is traced.
        which: The number of the one to use, equal on all ranks; it may be known only when
            the program runs.
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
