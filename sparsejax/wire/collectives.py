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

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.axes import (
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


def byte_count(x: jax.Array) -> int:
    """The bytes of an array."""
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
    return lax.psum(x, axis_name), all_reduce_bytes(byte_count(x), ranks(axis_name))


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
    cost = all_reduce_bytes(byte_count(x), ranks(axis_name))
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
    cost = (n - 1) / n * byte_count(x)

    def here(x):
        received, _ = all_to_all(x, axis_name)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return jnp.sum(received.astype(wide), axis=0)

    if x.dtype.itemsize <= 2:
        return here(x), cost
    scattered = lambda x: lax.psum_scatter(x, axis_name, scatter_dimension=0)
    return on_cpus(x, here, scattered), cost


def all_to_all(x: jax.Array, axis_name: AxisName) -> tuple[jax.Array, float]:
    """Row i of x [n, ...] goes to rank i; row i of the result came from rank i."""
    n = ranks(axis_name)
    got = lax.all_to_all(x, axis_name, split_axis=0, concat_axis=0, tiled=True)
    return got, (n - 1) / n * byte_count(x)


def all_gather(
    x: jax.Array, axis_name: AxisName, same: bool = True
) -> tuple[jax.Array, float]:
    """Row i of the result [n, ...] is rank i's x; the same on every rank.

    Args:
        x: This rank's row.
        axis_name: The axis.
        same: Whether the result is typed as the same on every rank.
    """
    cost = (ranks(axis_name) - 1) * byte_count(x)
    if same and is_checking(axis_name):
        return lax.all_gather(x, axis_name, to="invarying"), cost
    return lax.all_gather(x, axis_name), cost


def permute(
    x: jax.Array, axis_name: AxisName, permutation: Permutation
) -> tuple[jax.Array, float]:
    """Sends x from rank a to rank b for every pair (a, b); zeros where nothing came."""
    cost, n = float(byte_count(x)), ranks(axis_name)
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


def on_cpus(x: jax.Array, cpu: Callable, default: Callable) -> jax.Array:
    """One way for messages on CPUs, another elsewhere.

    gloo sends to a rank only when that rank has said that it is ready, and has one
    connection for both ways. In XLA's all-to-all and permute a rank that comes late finds
    the others ready and sends its data; that it is ready itself goes out behind them. So
    one way waits for the other.
    """
    return lax.platform_dependent(x, cpu=cpu, default=default)


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
