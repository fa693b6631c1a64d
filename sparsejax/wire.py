"""The only file that talks to other ranks, and the one that counts what it costs.

Every function takes an axis name and returns its result with the bytes that one rank sends
for it. The bytes are Python numbers, known when the program is traced: they are read off
the very operands that the collective is given. Where a program chooses between collectives
when it runs, each branch returns its own number, and the sum says what was sent.

The counts are those of the usual algorithms, the ones that are optimal in volume: an
all-reduce of M bytes sends 2 (n-1)/n M (reduce-scatter, then all-gather), an all-gather
sends this rank's M bytes n-1 times, an all-to-all all of M but this rank's own part. What
arrives is as much as what is sent, summed over ranks.

Besides XLA's own collectives there are exchanges built on `ppermute`, for any number of
ranks: the Bruck all-gather and all-to-all (log2 n messages, where latency counts), and the
schedule of a recursive doubling.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax._compat import (
    AxisName,
    as_varying,
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


def maximum(x: jax.Array, axis_name: AxisName) -> tuple[jax.Array, float]:
    """The largest over all ranks, element by element, the same on every rank.

    What comes out decides which branch a program takes, so it must be equal on every
    device, those of other mesh axes over which x varies included.
    """
    cost = all_reduce_bytes(_bytes(x), ranks(axis_name))
    # With checking off types do not say over which axes x varies; it may be any.
    unseen = frozenset(name for name in manual_axes() if not is_checking(name))
    axes = varying_axes(x) | unseen | frozenset(axis_names(axis_name))
    return lax.pmax(x, tuple(sorted(axes))), cost


def agree(tree):
    """Makes scalars that differ over other mesh axes equal: the largest of each.

    One collective if any of them varies, none otherwise.
    """
    leaves, structure = jax.tree.flatten(tree)
    axes = frozenset[str]().union(*(varying_axes(leaf) for leaf in leaves))
    if not axes:
        return tree
    largest = lax.pmax(jnp.stack(as_varying(leaves, axes)), tuple(sorted(axes)))
    return structure.unflatten(list(largest))


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
    return lax.ppermute(x, axis_name, permutation), float(_bytes(x))


def bruck_all_gather(x: jax.Array, axis_name: AxisName) -> tuple[jax.Array, float]:
    """`all_gather` in ceil(log2 n) messages for any n; the result is typed as varying.

    After k rounds a rank holds the rows of itself and its next 2**k - 1 neighbours. Each
    round it gets as many again (fewer in the last) from the rank that far ahead.
    """
    n = ranks(axis_name)
    rows, cost = x[None], 0.0
    while len(rows) < n:
        have = len(rows)
        send = rows[: min(have, n - have)]
        back = tuple((source, (source - have) % n) for source in range(n))
        got, sent = permute(send, axis_name, back)
        rows, cost = jnp.concatenate([rows, got]), cost + sent
    return jnp.roll(rows, rank(axis_name), axis=0), cost


def bruck_all_to_all(x: jax.Array, axis_name: AxisName) -> tuple[jax.Array, float]:
    """`all_to_all` in ceil(log2 n) messages of n/2 rows each, for any n.

    A row that has j ranks to go travels by the powers of two in j, all rows with the same
    power together: more bytes than a direct exchange, and far fewer messages.
    """
    n = ranks(axis_name)
    me = rank(axis_name)
    rows, cost = jnp.roll(x, -me, axis=0), 0.0
    distance = 1
    while distance < n:
        move = [j for j in range(n) if j & distance]
        forth = tuple((source, (source + distance) % n) for source in range(n))
        got, sent = permute(rows[jnp.array(move)], axis_name, forth)
        rows, cost = rows.at[jnp.array(move)].set(got), cost + sent
        distance *= 2
    # Row j has come from the rank j behind.
    return rows[(me - jnp.arange(n)) % n], cost


def doubling_all_gather(x: jax.Array, axis_name: AxisName) -> tuple[jax.Array, float]:
    """`all_gather` by recursive doubling, folded for any n; typed as varying.

    Partners swap everything they hold, log2 n times. Ranks beyond the largest power of
    two hand their row to a partner first and are given everything at the end.
    """
    n, me = ranks(axis_name), rank(axis_name)
    # A row travels with the number of the rank it came from, plus one: what a rank that
    # gets no message receives is zeros, and says so.
    rows, names = per_rank(
        (jnp.zeros((n, *x.shape), x.dtype), jnp.zeros(n, jnp.int32)), axis_name
    )
    rows, names = rows.at[me].set(x), names.at[me].set(me.astype(jnp.int32) + 1)
    fold, swaps, unfold = doubling_schedule(n)
    first = 2 if fold else 1
    held = [1, *(min(n, first << k) for k in range(len(swaps))), n]
    cost = 0.0
    for pairs, count in zip([fold, *swaps, unfold], held, strict=True):
        if not pairs:
            continue
        mine = jnp.nonzero(names, size=count, fill_value=n)[0].astype(jnp.int32)
        row = rows.at[mine].get(mode="fill", fill_value=0)
        name = names.at[mine].get(mode="fill", fill_value=0)
        row, row_bytes = permute(row, axis_name, pairs)
        name, name_bytes = permute(name, axis_name, pairs)
        where = jnp.where(name > 0, name - 1, n)
        rows = rows.at[where].set(row, mode="drop")
        names = names.at[where].set(name, mode="drop")
        cost += row_bytes + name_bytes
    return rows, cost


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
        axes_after: From the axes over which a message varies to those after it.
    """

    send: Callable[[jax.Array], tuple[jax.Array, float]]
    sources: int
    messages: int
    axes_after: Callable[[frozenset[str]], frozenset[str]]


def push_channel(axis_name: AxisName) -> Channel:
    """Message i goes to rank i."""
    n = ranks(axis_name)
    return Channel(lambda x: all_to_all(x, axis_name), n, n - 1, lambda axes: axes)


def pull_channel(axis_name: AxisName) -> Channel:
    """This rank's one message goes to all."""
    n = ranks(axis_name)
    names = frozenset(axis_names(axis_name))

    def send(x):
        received, sent = all_gather(x, axis_name)
        return received.reshape(n, x.shape[1]), sent

    return Channel(send, n, n - 1, lambda axes: axes - names)


def swap_channel(axis_name: AxisName, permutation: Permutation) -> Channel:
    """This rank's one message goes to its partner."""
    return Channel(lambda x: permute(x, axis_name, permutation), 1, 1, lambda axes: axes)


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
