"""The only file that talks to other ranks, and the one that counts what it costs.

Every function takes an axis name and returns its result with the bytes that one rank sends
for it. The bytes are Python numbers, known when the program is traced: they are read off
the very operands that the collective is given. Where a program chooses between collectives
when it runs, each branch returns its own number, and the sum says what was sent.

The counts are those of the usual algorithms, the ones that are optimal in volume: an
all-reduce of M bytes sends 2 (n-1)/n M (reduce-scatter, then all-gather), an all-gather
sends this rank's M bytes n-1 times, an all-to-all all of M but this rank's own part. What
arrives is as much as what is sent, summed over ranks.

Exchanges made of many `permute`s are in `gathers`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import rank_select
from sparsejax._compat import (
    AxisName,
    as_varying,
    assume_same,
    axis_names,
    is_checking,
    manual_axes,
    varying_axes,
)


Permutation = tuple[tuple[int, int], ...]


def ranks(axis_name: AxisName) -> int:
    """The number of ranks along the axis."""
    return lax.axis_size(axis_name)


def rank(axis_name: AxisName) -> jax.Array:
    """This rank's number along the axis."""
    return lax.axis_index(axis_name)


def per_rank(tree, axis_name: AxisName):
    """Makes the leaves vary over the axis, where checking is on: a type, not a message."""
    if is_checking(axis_name):
        return as_varying(tree, frozenset(axis_names(axis_name)))
    return tree


def _bytes(x: jax.Array) -> int:
    return x.size * x.dtype.itemsize


def all_reduce_bytes(size: int, n: int) -> float:
    """What one rank sends to add up `size` bytes."""
    return 2 * (n - 1) / n * size


def travelling(
    dtype: jax.typing.DTypeLike, wire_dtype: jax.typing.DTypeLike | None
) -> jnp.dtype:
    """The dtype in which numbers travel: the narrower of their own and the one wanted."""
    own, wanted = jnp.dtype(dtype), jnp.dtype(wire_dtype or dtype)
    return wanted if wanted.itemsize < own.itemsize else own


def all_reduce_cost(
    size: int,
    dtype: jax.typing.DTypeLike,
    wire_dtype: jax.typing.DTypeLike | None,
    n: int,
) -> float:
    """What one rank sends for `all_reduce` of so many numbers."""
    narrow = travelling(dtype, wire_dtype)
    if _summed_by_psum(dtype, narrow, size, n):
        return all_reduce_bytes(size * narrow.itemsize, n)
    return all_reduce_bytes(-(-size // n) * n * narrow.itemsize, n)


def _summed_by_psum(dtype, narrow, size: int, n: int) -> bool:
    """Whether XLA's own sum is wide enough, and sends no more than it should."""
    wide_enough = narrow.itemsize > 2 and narrow == jnp.dtype(dtype)
    return wide_enough or n == 1 or size == 0


def psum(x: jax.Array, axis_name: AxisName) -> tuple[jax.Array, float]:
    """The dense sum over all ranks, the same on every rank."""
    return lax.psum(x, axis_name), all_reduce_bytes(_bytes(x), ranks(axis_name))


def all_reduce(
    x: jax.Array, axis_name: AxisName, wire_dtype: jax.typing.DTypeLike | None = None
) -> tuple[jax.Array, float]:
    """The dense sum over all ranks in x's dtype, added up in float32 or wider.

    An all-reduce of 16-bit numbers would add them up in 16 bits. Instead the ranks
    exchange parts, each adds up its own in float32, and the sums are gathered: the same
    bytes. `wire_dtype` narrows the numbers while they travel.
    """
    narrow = travelling(x.dtype, wire_dtype)
    n = ranks(axis_name)
    if _summed_by_psum(x.dtype, narrow, x.size, n):
        return psum(x, axis_name)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    flat = x.astype(narrow).reshape(-1)
    parts = jnp.pad(flat, (0, -flat.size % n)).reshape(n, -1)
    received, pushed = all_to_all(parts, axis_name)
    total = jnp.sum(received.astype(wide), axis=0).astype(narrow)
    gathered, pulled = all_gather(total, axis_name)
    total = gathered.reshape(-1)[: x.size].reshape(x.shape)
    return total.astype(x.dtype), pushed + pulled


def mean_of(total: jax.Array, axis_name: AxisName) -> jax.Array:
    """A sum over the ranks as their mean, divided in float32 or wider."""
    wide = jnp.promote_types(total.dtype, jnp.float32)
    return (total.astype(wide) / ranks(axis_name)).astype(total.dtype)


def _unseen() -> frozenset[str]:
    """The axes over which anything may vary, since with checking off no type tells."""
    return frozenset(name for name in manual_axes() if not is_checking(name))


def maximum(x: jax.Array, axis_name: AxisName) -> tuple[jax.Array, float]:
    """The largest over all ranks, element by element, the same on every rank.

    What comes out decides which branch a program takes, so it must be equal on every
    device, those of other mesh axes over which x varies included.
    """
    cost = all_reduce_bytes(_bytes(x), ranks(axis_name))
    axes = varying_axes(x) | _unseen() | frozenset(axis_names(axis_name))
    return lax.pmax(x, tuple(sorted(axes))), cost


def agree(tree, axis_name: AxisName):
    """Makes scalars that differ over other mesh axes equal: the largest of each.

    One collective if any of them varies, or may with checking off; none otherwise.
    """
    leaves, structure = jax.tree.flatten(tree)
    axes = frozenset[str]().union(*(varying_axes(leaf) for leaf in leaves))
    axes |= _unseen() - frozenset(axis_names(axis_name))
    if not axes:
        return tree
    largest = lax.pmax(jnp.stack(as_varying(leaves, axes)), tuple(sorted(axes)))
    return structure.unflatten(list(largest))


def same_elsewhere(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """The largest over all other manual axes, so that x may decide what a program does.

    x is equal on all ranks of the axis; on a mesh of one axis nothing is sent.
    """
    axes = (varying_axes(x) | _unseen()) - frozenset(axis_names(axis_name))
    return lax.pmax(x, tuple(sorted(axes))) if axes else x


def reduce_scatter(x: jax.Array, axis_name: AxisName) -> tuple[jax.Array, float]:
    """On rank i the sum over all ranks of row i of x [n, ...], in float32 or wider.

    On CPUs rows are sent and added up here: gloo's reduce-scatter writes its result over
    what it has not sent yet (github.com/jax-ml/jax/issues/40830), and now and then the end
    of rank 0's sum is made of other numbers.
    """
    n = ranks(axis_name)
    cost = (n - 1) / n * _bytes(x)

    def here(x):
        received, _ = all_to_all(x, axis_name)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return jnp.sum(received.astype(wide), axis=0)

    if x.dtype.itemsize <= 2:
        return here(x), cost
    scattered = lambda x: lax.psum_scatter(x, axis_name, scatter_dimension=0)
    return _on_cpus(x, here, scattered), cost


def all_to_all(x: jax.Array, axis_name: AxisName) -> tuple[jax.Array, float]:
    """Row i of x [n, ...] goes to rank i; row i of the result came from rank i."""
    n = ranks(axis_name)
    got = lax.all_to_all(x, axis_name, split_axis=0, concat_axis=0, tiled=True)
    return got, (n - 1) / n * _bytes(x)


def all_gather(x: jax.Array, axis_name: AxisName) -> tuple[jax.Array, float]:
    """Row i of the result [n, ...] is rank i's x; the same on every rank."""
    cost = (ranks(axis_name) - 1) * _bytes(x)
    if is_checking(axis_name):
        return lax.all_gather(x, axis_name, to="invarying"), cost
    return lax.all_gather(x, axis_name), cost


def permute(
    x: jax.Array, axis_name: AxisName, permutation: Permutation
) -> tuple[jax.Array, float]:
    """Sends x from rank a to rank b for every pair (a, b); zeros where nothing came."""
    cost, n = float(_bytes(x)), ranks(axis_name)
    if len(permutation) == n or set(axis_names(axis_name)) <= set(manual_axes()):
        return lax.ppermute(x, axis_name, permutation), cost
    # Under vmap JAX moves all ranks or none: move the others too, and drop what they send.
    sources, targets = zip(*permutation, strict=True)
    idle = zip(
        sorted(set(range(n)) - set(sources)),
        sorted(set(range(n)) - set(targets)),
        strict=True,
    )
    moved = lax.ppermute(x, axis_name, (*permutation, *idle))
    meant = jnp.isin(rank(axis_name), jnp.array(targets))
    return jnp.where(meant, moved, jnp.zeros_like(moved)), cost


def doubling_schedule(n: int) -> tuple[Permutation, tuple[Permutation, ...], Permutation]:
    """Who swaps with whom in a recursive doubling over any number of ranks.

    Returns:
        The fold (ranks from the largest power of two on send to a partner below), the
        swaps, and the unfold (the same pairs, back).
    """
    core = 1 << (n.bit_length() - 1)
    fold = tuple((extra, extra - core) for extra in range(core, n))
    swaps = tuple(
        tuple((me, me ^ (1 << k)) for me in range(core))
        for k in range(core.bit_length() - 1)
    )
    return fold, swaps, tuple((low, high) for high, low in fold)


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


def _on_cpus(x: jax.Array, cpu: Callable, default: Callable) -> jax.Array:
    """One way for messages on CPUs, another elsewhere.

    gloo sends to a rank only when that rank has said that it is ready, and has one
    connection for both ways. In XLA's all-to-all and permute a rank that comes late finds
    the others ready and sends its data; that it is ready itself goes out behind them. So
    one way waits for the other.
    """
    return lax.platform_dependent(x, cpu=cpu, default=default)


def _swapped(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """What the other of two ranks has: what both have together, less one's own.

    Of two ranks an all-reduce sends what any swap sends, and gloo's sends both ways at the
    same time. Bits are added up, as integers that wrap, so that they arrive as they are.
    """
    bits = rank_select.unsigned(x)
    both = lax.psum(bits, axis_name)
    return lax.bitcast_convert_type(both - bits, x.dtype)


def push_channel(axis_name: AxisName) -> Channel:
    """Message i goes to rank i; between two ranks, a long one by `_swapped` on CPUs."""
    n = ranks(axis_name)

    def swap(x):
        me = rank(axis_name)
        other = lax.dynamic_slice_in_dim(x, 1 - me, 1)
        return lax.dynamic_update_slice(x, _swapped(other, axis_name), (1 - me, 0))

    def send(x):
        if n != 2 or _bytes(x) < 2 * _LONG:
            return all_to_all(x, axis_name)
        sent = float(_bytes(x)) / 2
        return _on_cpus(x, swap, lambda x: all_to_all(x, axis_name)[0]), sent

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
        return lax.all_gather(x[0], axis_name)

    def swap(x):
        both = jnp.concatenate([x, _swapped(x, axis_name)])
        return jnp.where(rank(axis_name) == 0, both, both[::-1])

    def send(x):
        sent = (n - 1) * float(_bytes(x))
        if _bytes(x) < _LONG:
            return _on_cpus(x, copies, gather), sent
        return (_on_cpus(x, swap, gather) if n == 2 else gather(x)), sent

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
        if n == 2 and both_swap and bits and _bytes(x) >= _LONG:
            swapped = _on_cpus(x, lambda x: _swapped(x, axis_name), directly)
            return swapped, float(_bytes(x))
        if len(permutations) == 1:
            return permute(x, axis_name, permutations[0])
        branches = [
            lambda x, pairs=pairs: permute(x, axis_name, pairs)[0] for pairs in permutations
        ]
        return lax.switch(which, branches, x), float(_bytes(x))

    return Channel(send, 1, 1)


def branch(
    index: jax.Array, branches: list[Callable], *operands
) -> tuple[jax.Array, jax.Array]:
    """`lax.switch` over functions that return (arrays, bytes); the bytes become float32."""

    def counted(function):
        def run(*operands):
            result, sent = function(*operands)
            return result, jnp.float32(sent)

        return run

    return lax.switch(index, [counted(function) for function in branches], *operands)
