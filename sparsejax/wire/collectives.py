"""The only file that talks to other ranks, and the one that counts what it costs.

A `Wire` is a mesh axis with a method a collective. Each returns its result with the bytes
that one rank sends for it. The bytes are Python numbers, known when the program is traced:
they are read off the very operands that the collective is given. Where a program chooses
between collectives when it runs, each branch returns its own number, and the sum says what
was sent.

The counts are those of the usual algorithms, the ones that are optimal in volume: an
all-reduce of M bytes sends 2 (n-1)/n M (reduce-scatter, then all-gather), an all-gather
sends this rank's M bytes n-1 times, an all-to-all all of M but this rank's own part. What
arrives is as much as what is sent, summed over ranks.

Exchanges made of many `permute`s are in `gathers`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.platforms import by_platform, policy
from sparsejax.axes import (
    AxisName,
    as_varying,
    assume_same,
    axis_names,
    is_checking,
    manual_axes,
    resolve,
    varying_axes,
)
from sparsejax.units.units import wide


Permutation = tuple[tuple[int, int], ...]


def byte_count(x: jax.Array) -> int:
    """The bytes of an array."""
    return x.size * x.dtype.itemsize


def pays(entry_bytes: Any, dense_bytes: Any) -> Any:
    """Whether entries are sent, and not all, for these bytes of either.

    They are where they save more than what they cost beyond their bytes; see
    `Policy.overhead`.
    """
    return entry_bytes + policy().overhead < dense_bytes


def all_reduce_bytes(size: int, n: int) -> float:
    """Bytes that one rank sends to add up `size` bytes."""
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
    """Bytes that one rank sends for `all_reduce` of `size` numbers."""
    narrow = travelling(dtype, wire_dtype)
    if _summed_by_psum(dtype, narrow, size, n):
        return all_reduce_bytes(size * narrow.itemsize, n)
    return all_reduce_bytes(-(-size // n) * n * narrow.itemsize, n)


def _summed_by_psum(dtype, narrow, size: int, n: int) -> bool:
    """Whether XLA's own sum is wide enough, and sends no more than it should."""
    wide_enough = narrow.itemsize > 2 and narrow == jnp.dtype(dtype)
    return wide_enough or n == 1 or size == 0


def at_once() -> bool:
    """Whether a stage takes one choice and sends all at once, and not in rounds.

    In rounds, on CPUs, a message has the size of what the rounds before it have left, and
    work walks over its entries a tile at a time. At once, on GPUs, where the host waits for
    each number that a program looks at, a stage looks once, all parts are packed and
    unpacked together, and no loop's length is data. It follows from the platform for which
    the program is traced.
    """
    return policy().at_once


def on_cpus(x: jax.Array, cpu: Callable, default: Callable) -> jax.Array:
    """One way for messages on CPUs, another elsewhere.

    gloo sends to a rank only when that rank has said that it is ready, and has one
    connection for both ways. In XLA's all-to-all and permute a rank that comes late finds
    the others ready and sends its data; that it is ready itself goes out after them. So
    one way waits for the other.
    """
    return by_platform(x, cpu=cpu, default=default)


class Sent(NamedTuple):
    """Bytes, rounds and counts of one stage of an exchange.

    Attributes:
        wire: Bytes that one rank sent, padding included.
        payload: Bytes that the entries needed.
        rounds: How many messages, or pieces of one, followed one another, as float32.
        counts: int32 [sources]: how many entries each source had for this rank.
    """

    wire: jax.Array
    payload: jax.Array
    rounds: jax.Array
    counts: jax.Array


@dataclasses.dataclass(frozen=True)
class Wire:
    """The ranks that a scheme sums over: a mesh axis, and the dtype in which values travel.

    Attributes:
        axis: The name of the mesh axis, or the names of several that count as one.
        dtype: The dtype of the values while they travel; that of the array if None, or if
            that is narrower.
        deterministic: Whether sums over senders are ordered; see `ordered`.
    """

    axis: AxisName
    dtype: jax.typing.DTypeLike | None = None
    deterministic: bool | None = None

    @classmethod
    def over(
        cls,
        axis_name: AxisName | None,
        what: str,
        dtype: jax.typing.DTypeLike | None = None,
    ) -> "Wire":
        """The wire over the axis that a user named, or over the only one; else an error.

        Args:
            axis_name: The name, or names, that the caller gave; None for the only axis.
            what: The call as the user knows it, for the message.
            dtype: The dtype of the values while they travel.
        """
        return cls(resolve(axis_name, what), dtype)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return lax.axis_size(self.axis)

    @property
    def rank(self) -> jax.Array:
        """This rank's number."""
        return lax.axis_index(self.axis)

    @property
    def at_once(self) -> bool:
        """Whether a stage takes one choice and sends all at once: see `at_once`."""
        return at_once()

    def along(self, axis: AxisName) -> "Wire":
        """The wire over another axis, with this one's dtype."""
        return dataclasses.replace(self, axis=axis)

    def narrowed(self, dtype: jax.typing.DTypeLike | None) -> "Wire":
        """The wire on which values travel in this dtype, if it is narrower than here."""
        if dtype is None:
            return self
        narrow = dtype if self.dtype is None else travelling(self.dtype, dtype)
        return dataclasses.replace(self, dtype=narrow)

    def travelling(self, dtype: jax.typing.DTypeLike) -> jnp.dtype:
        """The dtype in which numbers of a dtype travel: the narrower of the two."""
        return travelling(dtype, self.dtype)

    def dense_bytes(self, size: int, dtype: jax.typing.DTypeLike) -> float:
        """The bytes that one rank sends for `all_reduce` of `size` numbers."""
        return all_reduce_cost(size, dtype, self.dtype, self.ranks)

    def per_rank(self, tree):
        """Makes leaves vary over the axis, where checking is on: a type, not a message."""
        if is_checking(self.axis):
            return as_varying(tree, frozenset(axis_names(self.axis)))
        return tree

    def assume_same(self, tree):
        """Declares leaves equal on all ranks; the caller has made sure that they are."""
        return jax.tree.map(lambda x: assume_same(x, self.axis), tree)

    def psum(self, x: jax.Array) -> tuple[jax.Array, float]:
        """The dense sum over all ranks, the same on every rank."""
        return lax.psum(x, self.axis), all_reduce_bytes(byte_count(x), self.ranks)

    def all_reduce(self, x: jax.Array) -> tuple[jax.Array, float]:
        """The dense sum over all ranks in x's dtype, added up in float32 or wider.

        An all-reduce of 16-bit numbers would add them up in 16 bits. Instead the ranks
        exchange parts, each adds up its own in float32, and the sums are gathered: the same
        bytes. The dtype of the wire narrows the numbers while they travel.
        """
        narrow = self.travelling(x.dtype)
        n = self.ranks
        if _summed_by_psum(x.dtype, narrow, x.size, n):
            return self.psum(x)
        flat = x.astype(narrow).reshape(-1)
        parts = jnp.pad(flat, (0, -flat.size % n)).reshape(n, -1)
        received, pushed = self.all_to_all(parts)
        total = jnp.sum(received.astype(wide(x.dtype)), axis=0).astype(narrow)
        gathered, pulled = self.all_gather(total)
        total = gathered.reshape(-1)[: x.size].reshape(x.shape)
        return total.astype(x.dtype), pushed + pulled

    def mean_of(self, total: jax.Array) -> jax.Array:
        """A sum over the ranks as their mean, divided in float32 or wider."""
        return (total.astype(wide(total.dtype)) / self.ranks).astype(total.dtype)

    def maximum(self, x: jax.Array) -> tuple[jax.Array, float]:
        """The largest over all ranks, element by element, the same on every rank.

        The result decides which branch a program takes, so it must be equal on every
        device, those of other mesh axes over which x varies included.
        """
        cost = all_reduce_bytes(byte_count(x), self.ranks)
        axes = varying_axes(x) | _unseen() | frozenset(axis_names(self.axis))
        return lax.pmax(x, tuple(sorted(axes))), cost

    def agree(self, tree):
        """Makes scalars that differ over other mesh axes equal: the largest of each.

        One collective if any of them varies, or may with checking off; none otherwise.
        """
        leaves, structure = jax.tree.flatten(tree)
        axes = frozenset[str]().union(*(varying_axes(leaf) for leaf in leaves))
        axes |= _unseen() - frozenset(axis_names(self.axis))
        if not (leaves and axes):
            return tree
        largest = lax.pmax(jnp.stack(as_varying(leaves, axes)), tuple(sorted(axes)))
        return structure.unflatten(list(largest))

    def same_elsewhere(self, x: jax.Array) -> jax.Array:
        """The largest over all other manual axes, so that x may decide what a program does.

        x is equal on all ranks of the axis; on a mesh of one axis nothing is sent.
        """
        axes = (varying_axes(x) | _unseen()) - frozenset(axis_names(self.axis))
        return lax.pmax(x, tuple(sorted(axes))) if axes else x

    def reduce_scatter(self, x: jax.Array) -> tuple[jax.Array, float]:
        """On rank i the sum over all ranks of row i of x [n, ...], in float32 or wider.

        On CPUs rows are sent and added up here: gloo's reduce-scatter writes its result
        over what it has not sent yet (github.com/jax-ml/jax/issues/40830), and now and then
        the end of rank 0's sum is made of other numbers.
        """
        n = self.ranks
        cost = (n - 1) / n * byte_count(x)

        def here(x):
            received, _ = self.all_to_all(x)
            return jnp.sum(received.astype(wide(x.dtype)), axis=0)

        if x.dtype.itemsize <= 2:
            return here(x), cost
        scattered = lambda x: lax.psum_scatter(x, self.axis, scatter_dimension=0)
        return on_cpus(x, here, scattered), cost

    def all_to_all(self, x: jax.Array) -> tuple[jax.Array, float]:
        """Row i of x [n, ...] goes to rank i; row i of the result came from rank i."""
        n = self.ranks
        return self.to_each(x), (n - 1) / n * byte_count(x)

    def to_each(self, x: jax.Array) -> jax.Array:
        """What `all_to_all` brings, for a caller that knows its bytes: a channel."""
        if not set(axis_names(self.axis)) <= set(manual_axes()):
            # Under vmap JAX returns another shape for an array that is the same on all
            # ranks, as a constant is: so it is chosen, by rank, from two equal ones.
            x = jnp.where(self.rank >= 0, x, x)
        return lax.all_to_all(x, self.axis, split_axis=0, concat_axis=0, tiled=True)

    def all_gather(self, x: jax.Array, same: bool = True) -> tuple[jax.Array, float]:
        """Row i of the result [n, ...] is rank i's x; the same on every rank.

        Args:
            x: This rank's row.
            same: Whether the result is typed as the same on every rank.
        """
        cost = (self.ranks - 1) * byte_count(x)
        if same and is_checking(self.axis):
            return lax.all_gather(x, self.axis, to="invarying"), cost
        return lax.all_gather(x, self.axis), cost

    def permute(self, x: jax.Array, permutation: Permutation) -> tuple[jax.Array, float]:
        """Sends x from rank a to rank b for every pair (a, b); zeros where nothing came."""
        cost, n = float(byte_count(x)), self.ranks
        if len(permutation) == n or set(axis_names(self.axis)) <= set(manual_axes()):
            return lax.ppermute(x, self.axis, permutation), cost
        # Under vmap JAX moves all ranks or none: move the others too, and drop what they
        # send.
        sources, targets = zip(*permutation, strict=True)
        idle = zip(
            sorted(set(range(n)) - set(sources)),
            sorted(set(range(n)) - set(targets)),
            strict=True,
        )
        moved = lax.ppermute(x, self.axis, (*permutation, *idle))
        meant = jnp.isin(self.rank, jnp.array(targets))
        return jnp.where(meant, moved, jnp.zeros_like(moved)), cost


def _unseen() -> frozenset[str]:
    """The axes over which anything may vary, since with checking off no type tells."""
    return frozenset(name for name in manual_axes() if not is_checking(name))


# Rows of a message on CPUs that are cut out one by one: each is an operation in every
# branch of a program, which on many ranks would hold little else.
_MOST_ROWS = 32


def unseen_numbers(count: int) -> tuple[jax.Array, ...]:
    """0, 1, 2, ... as scalars that XLA does not take for constants; see `heads`.

    None of more rows than are cut out one by one.
    """
    if count > _MOST_ROWS:
        return ()
    return lax.optimization_barrier(tuple(jnp.int32(i) for i in range(count)))


def heads(x: jax.Array, count: int, words: int, rows: tuple[jax.Array, ...]) -> jax.Array:
    """The first words of the first rows of x, [count, words].

    XLA:CPU sends the rows of an all-to-all as arrays of their own, each cut out by a kernel
    of its own. Where a row's number is an operand, all of them are one and the same kernel,
    and that is compiled once; so is the row of a message that goes to all. Many rows are
    cut out together, so that programs do not grow with the ranks: what XLA:CPU makes of
    that grows with them all the same.

    Args:
        x: [at least count, at least words].
        count: How many rows.
        words: How many words.
        rows: The numbers of the rows, from `unseen_numbers`, handed to the branch of a
            program that this is called in.
    """

    def row_by_row(x):
        cut = lambda row: lax.dynamic_slice(
            x, (row, jnp.int32(0)), (1, words), allow_negative_indices=False
        )
        return jnp.concatenate([cut(row) for row in rows])

    if not rows:
        return x[:count, :words]
    return on_cpus(x, row_by_row, lambda x: x[:count, :words])
