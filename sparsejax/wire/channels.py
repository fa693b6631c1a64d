"""Collectives over messages uint32 [parts, words], to be used at several sizes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import rank_select
from sparsejax.axes import AxisName, assume_same, axis_names
from sparsejax.wire.collectives import (
    Permutation,
    all_gather,
    all_to_all,
    byte_count,
    on_cpus,
    permute,
    psum,
    rank,
    ranks,
)


class Channel(NamedTuple):
    """A collective over messages uint32 [parts, words], to be used at several sizes.

    Attributes:
        send: From this rank's messages to those received and the bytes sent.
        sources: From how many ranks this rank receives.
        messages: How many messages this rank puts on the wire.
        same: The axes over which what is received is the same.
        waits: How many of these messages follow one another; one where how a collective
            goes is the back end's own affair.
    """

    send: Callable[[jax.Array], tuple[jax.Array, float]]
    sources: int
    messages: int
    same: frozenset[str] = frozenset()
    waits: int = 1

    def received(self, x: jax.Array) -> jax.Array:
        """What was received, typed as the same where it is."""
        return assume_same(x, tuple(sorted(self.same)))


# Bytes of a message from which, with gloo, it is faster to use both ways of a link at the
# same time (`benchmarks.messages`; between 32 KB and 256 KB it hardly matters).
_LONG = 1 << 17


def _swapped(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """What the other of two ranks has: what both have together, less one's own.

    Of two ranks an all-reduce sends what any swap sends, and gloo's sends both ways at the
    same time. Bits are added up, as integers that wrap, so that they arrive as they are.
    """
    bits = rank_select.unsigned(x)
    both, _ = psum(bits, axis_name)
    return lax.bitcast_convert_type(both - bits, x.dtype)


def push_channel(axis_name: AxisName) -> Channel:
    """Message i goes to rank i; between two ranks, a long one by `_swapped` on CPUs."""
    n = ranks(axis_name)

    def swap(x):
        me = rank(axis_name)
        other = lax.dynamic_slice_in_dim(x, 1 - me, 1)
        return lax.dynamic_update_slice(x, _swapped(other, axis_name), (1 - me, 0))

    def send(x):
        if n != 2 or byte_count(x) < 2 * _LONG:
            return all_to_all(x, axis_name)
        sent = float(byte_count(x)) / 2
        return on_cpus(x, swap, lambda x: all_to_all(x, axis_name)[0]), sent

    return Channel(send, n, n - 1)


def pull_channel(axis_name: AxisName) -> Channel:
    """This rank's one message goes to all.

    On CPUs short ones go as an all-to-all of copies: gloo gathers around a ring, in n - 1
    messages that wait for one another, and sends an all-to-all at once. Long ones go around
    the ring, where each rank sends one way and receives the other, so that both ways are
    used at the same time; between two ranks, where the ring is one connection, as a swap.
    The bytes are the same.
    """
    n = ranks(axis_name)

    def copies(x):
        return all_to_all(jnp.broadcast_to(x, (n, x.shape[1])), axis_name)[0]

    def gather(x):
        return all_gather(x[0], axis_name, same=False)[0]

    def swap(x):
        both = jnp.concatenate([x, _swapped(x, axis_name)])
        return jnp.where(rank(axis_name) == 0, both, both[::-1])

    def send(x):
        sent = (n - 1) * float(byte_count(x))
        if byte_count(x) < _LONG:
            return on_cpus(x, copies, gather), sent
        return (on_cpus(x, swap, gather) if n == 2 else gather(x)), sent

    return Channel(send, n, n - 1, frozenset(axis_names(axis_name)))


def swap_channel(
    axis_name: AxisName, permutations: Sequence[Permutation], which: jax.Array | int = 0
) -> Channel:
    """This rank's one message goes to its partner in the chosen permutation.

    Args:
        axis_name: The axis.
        permutations: The permutations to choose from, known when the program is traced.
        which: The number of the one to use, equal on all ranks; it may be known only when
            the program runs.
    """
    n = ranks(axis_name)

    def directly(x):
        return permute(x, axis_name, permutations[0])[0]

    def send(x):
        bits = jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == jnp.uint32
        both_swap = list(permutations) == [((0, 1), (1, 0))]
        if n == 2 and both_swap and bits and byte_count(x) >= _LONG:
            swapped = on_cpus(x, lambda x: _swapped(x, axis_name), directly)
            return swapped, float(byte_count(x))
        if len(permutations) == 1:
            return permute(x, axis_name, permutations[0])
        branches = [
            lambda x, pairs=pairs: permute(x, axis_name, pairs)[0] for pairs in permutations
        ]
        return lax.switch(which, branches, x), float(byte_count(x))

    return Channel(send, 1, 1)
