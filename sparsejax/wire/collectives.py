"""The only calls of `lax` collectives, each with a count of the bytes that it sends.

A `Wire` is a mesh axis with one method for each collective. Each method returns its result
and the bytes that one rank sends for it. The bytes are Python numbers, known at trace time:
they are computed from the shape and dtype of the collective's operand. Where a program
chooses between collectives when it runs, each branch returns its own number, and the sum
over the branches taken is what was sent.

The counts are those of the usual algorithms with the least volume: an all-reduce of M bytes
sends 2 (n-1)/n M (reduce-scatter, then all-gather), an all-gather sends this rank's M bytes
n-1 times, and an all-to-all sends all of M except this rank's own part. Summed over ranks,
the bytes received equal the bytes sent.

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
    """Returns the bytes of an array."""
    return x.size * x.dtype.itemsize


def pays(entry_bytes: Any, dense_bytes: Any) -> Any:
    """Returns whether to send entries and not the dense array, from the bytes of each.

    Entries are sent where they save more bytes than `Policy.overhead`, which stands for
    their cost in time beside the bytes.
    """
    return entry_bytes + policy().overhead < dense_bytes


def all_reduce_bytes(size: int, n: int) -> float:
    """Returns the bytes that one of `n` ranks sends in an all-reduce of `size` bytes."""
    return 2 * (n - 1) / n * size


def travelling(
    dtype: jax.typing.DTypeLike, wire_dtype: jax.typing.DTypeLike | None
) -> jnp.dtype:
    """Returns the dtype in which values travel: `wire_dtype` if narrower, else `dtype`."""
    own, wanted = jnp.dtype(dtype), jnp.dtype(wire_dtype or dtype)
    return wanted if wanted.itemsize < own.itemsize else own


def all_reduce_cost(
    size: int,
    dtype: jax.typing.DTypeLike,
    wire_dtype: jax.typing.DTypeLike | None,
    n: int,
) -> float:
    """Returns the bytes that one of `n` ranks sends in `all_reduce` of `size` numbers."""
    narrow = travelling(dtype, wire_dtype)
    if _summed_by_psum(dtype, narrow, size, n):
        return all_reduce_bytes(size * narrow.itemsize, n)
    return all_reduce_bytes(-(-size // n) * n * narrow.itemsize, n)


def _summed_by_psum(dtype, narrow, size: int, n: int) -> bool:
    """Returns whether `psum` adds up in a wide enough dtype and sends the least bytes."""
    wide_enough = narrow.itemsize > 2 and narrow == jnp.dtype(dtype)
    return wide_enough or n == 1 or size == 0


def at_once() -> bool:
    """Returns whether a stage sends all entries at once, after one choice, not in rounds.

    In rounds, on CPUs, each message has the size of what earlier rounds have left, and its
    entries are packed and unpacked one tile at a time. At once, on GPUs, all parts are
    packed and unpacked together, a stage branches on data once, and no loop has a length
    that depends on data: the host would wait for each such number. The answer follows from
    the platform for which the program is traced.
    """
    return policy().at_once


def on_cpus(x: jax.Array, cpu: Callable, default: Callable) -> jax.Array:
    """Applies `cpu` to x on CPUs, and `default` on other platforms.

    The two differ because of gloo, which sends to a rank only after that rank has reported
    that it is ready, and has one connection for both directions. In XLA's all-to-all and
    permute a late rank finds the others ready and sends its data first; its own report goes
    out after that data. So one direction waits for the other.
    """
    return by_platform(x, cpu=cpu, default=default)


class Sent(NamedTuple):
    """Bytes, rounds and counts of one stage of an exchange.

    Attributes:
        wire: Bytes that one rank sent, padding included.
        payload: Bytes that the entries needed.
        rounds: The number of messages, or of pieces of one, sent one after another, as
            float32.
        counts: int32 [sources], the number of entries that each source had for this rank.
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
        """Makes a wire over the axis that a user named, or over the only axis there is.

        Raises if a name is not that of a manual axis, or if None does not determine one.

        Args:
            axis_name: The axis name or names that the caller gave; None for the only axis.
            what: The name of the call in the user's code, for the error message.
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

    def along(self, axis: AxisName) -> "Wire":
        """Returns the wire over another axis, with the same dtype."""
        return dataclasses.replace(self, axis=axis)

    def narrowed(self, dtype: jax.typing.DTypeLike | None) -> "Wire":
        """Returns the wire with this dtype for values, where it is the narrower one."""
        if dtype is None:
            return self
        narrow = dtype if self.dtype is None else travelling(self.dtype, dtype)
        return dataclasses.replace(self, dtype=narrow)

    def travelling(self, dtype: jax.typing.DTypeLike) -> jnp.dtype:
        """Returns the dtype in which values of a dtype travel: the narrower of the two."""
        return travelling(dtype, self.dtype)

    def dense_bytes(self, size: int, dtype: jax.typing.DTypeLike) -> float:
        """Returns the bytes that one rank sends in `all_reduce` of `size` numbers."""
        return all_reduce_cost(size, dtype, self.dtype, self.ranks)

    def per_rank(self, tree):
        """Casts leaves to vary over the axis, where VMA is checked; sends nothing."""
        if is_checking(self.axis):
            return as_varying(tree, frozenset(axis_names(self.axis)))
        return tree

    def assume_same(self, tree):
        """Types leaves as equal on all ranks; the caller guarantees that they are."""
        return jax.tree.map(lambda x: assume_same(x, self.axis), tree)

    def psum(self, x: jax.Array) -> tuple[jax.Array, float]:
        """Returns the dense sum over all ranks, the same on every rank, and its bytes."""
        return lax.psum(x, self.axis), all_reduce_bytes(byte_count(x), self.ranks)

    def all_reduce(self, x: jax.Array) -> tuple[jax.Array, float]:
        """Returns the dense sum over all ranks in x's dtype, summed in float32 or wider.

        An all-reduce of 16-bit numbers would sum in 16 bits. Instead the ranks exchange
        parts by an all-to-all, each sums its own part in float32, and the sums are
        gathered, for the same bytes. Values travel in the dtype of the wire, if narrower.
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

    def mean_of(self, total: jax.Array, mean: bool = True) -> jax.Array:
        """Divides a sum over the ranks by their number, in float32 or wider, for a mean."""
        if not mean:
            return total
        return (total.astype(wide(total.dtype)) / self.ranks).astype(total.dtype)

    def maximum(self, x: jax.Array) -> tuple[jax.Array, float]:
        """Returns the elementwise maximum over all ranks, the same on every rank.

        The result decides which branch a program takes, so it must be equal on every
        device. The maximum is therefore also over other mesh axes over which x varies.
        """
        cost = all_reduce_bytes(byte_count(x), self.ranks)
        axes = varying_axes(x) | _unseen() | frozenset(axis_names(self.axis))
        return lax.pmax(x, tuple(sorted(axes))), cost

    def agree(self, tree):
        """Replaces scalars that differ over mesh axes by their maxima over these axes.

        Takes one collective if any of them varies, or may vary because VMA is not checked
        on another axis; otherwise none.
        """
        leaves, structure = jax.tree.flatten(tree)
        axes = frozenset[str]().union(*(varying_axes(leaf) for leaf in leaves))
        axes |= _unseen() - frozenset(axis_names(self.axis))
        if not (leaves and axes):
            return tree
        largest = lax.pmax(jnp.stack(as_varying(leaves, axes)), tuple(sorted(axes)))
        return structure.unflatten(list(largest))

    def same_elsewhere(self, x: jax.Array) -> jax.Array:
        """Returns the maximum over all other manual axes, so that a branch may depend on x.

        x is already equal on all ranks of the wire. On a mesh of one axis nothing is sent.
        """
        axes = (varying_axes(x) | _unseen()) - frozenset(axis_names(self.axis))
        return lax.pmax(x, tuple(sorted(axes))) if axes else x

    def reduce_scatter(self, x: jax.Array) -> tuple[jax.Array, float]:
        """Returns, on rank i, the sum over all ranks of row i of x [n, ...].

        The sum is taken in float32 or wider. On CPUs it is an all-to-all and a local sum:
        gloo's reduce-scatter overwrites data that it has not sent yet
        (github.com/jax-ml/jax/issues/40830), so that the end of rank 0's sum is sometimes
        wrong.
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
        """Sends row i of x [n, ...] to rank i; row i of the result is from rank i."""
        n = self.ranks
        return self.to_each(x), (n - 1) / n * byte_count(x)

    def to_each(self, x: jax.Array) -> jax.Array:
        """Returns the result of `all_to_all` alone, for channels, which count bytes."""
        if not set(axis_names(self.axis)) <= set(manual_axes()):
            # Under vmap JAX returns another shape for an array that is not batched, such
            # as a constant. Selecting from two equal arrays by the rank batches it.
            x = jnp.where(self.rank >= 0, x, x)
        return lax.all_to_all(x, self.axis, split_axis=0, concat_axis=0, tiled=True)

    def all_gather(self, x: jax.Array, same: bool = True) -> tuple[jax.Array, float]:
        """Returns [n, ...], of which row i is rank i's x, the same on every rank.

        Args:
            x: This rank's row.
            same: Whether the result is typed as equal on all ranks, where VMA is checked.
        """
        cost = (self.ranks - 1) * byte_count(x)
        if same and is_checking(self.axis):
            return lax.all_gather(x, self.axis, to="invarying"), cost
        return lax.all_gather(x, self.axis), cost

    def permute(self, x: jax.Array, permutation: Permutation) -> tuple[jax.Array, float]:
        """Sends x from rank a to rank b for each pair (a, b); others receive zeros."""
        cost, n = float(byte_count(x)), self.ranks
        if len(permutation) == n or set(axis_names(self.axis)) <= set(manual_axes()):
            return lax.ppermute(x, self.axis, permutation), cost
        # Under vmap JAX takes complete permutations only, so the other ranks send too, and
        # what they send is dropped.
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
    """Returns the manual axes without VMA checks: any array may vary over these."""
    return frozenset(name for name in manual_axes() if not is_checking(name))


# The most rows of messages that are sliced one by one on CPUs. Each slice is an operation
# in every branch of a program, so with many ranks most of a program would be slices.
_MOST_ROWS = 32


def unseen_numbers(count: int) -> tuple[jax.Array, ...]:
    """Returns 0, 1, 2, ... as scalars that XLA does not treat as constants; see `heads`.

    Returns an empty tuple if there are more rows than are sliced one by one.
    """
    if count > _MOST_ROWS:
        return ()
    return lax.optimization_barrier(tuple(jnp.int32(i) for i in range(count)))


def heads(x: jax.Array, count: int, words: int, rows: tuple[jax.Array, ...]) -> jax.Array:
    """Returns the first words of the first rows of x, uint32 [count, words].

    XLA:CPU sends each row of an all-to-all as an array of its own, sliced by a kernel of
    its own. Where the row number is an operand, all slices are the same kernel, which is
    compiled once; the same kernel slices the row of a message that goes to all. More than
    `_MOST_ROWS` rows are sliced together, so that the traced program does not grow with the
    ranks; what XLA:CPU compiles from it still does.

    Args:
        x: uint32 [at least count, at least words].
        count: The number of rows.
        words: The number of words.
        rows: The numbers of the rows, from `unseen_numbers`, as operands of the branch in
            which this is called.
    """

    def row_by_row(x):
        cut = lambda row: lax.dynamic_slice(
            x, (row, jnp.int32(0)), (1, words), allow_negative_indices=False
        )
        return jnp.concatenate([cut(row) for row in rows])

    if not rows:
        return x[:count, :words]
    return on_cpus(x, row_by_row, lambda x: x[:count, :words])
