"""`all_reduce`: a `jax.lax.psum` that sends only non-zero units."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import arguments, axes, branches, schemes
from sparsejax.axes import AxisName
from sparsejax.schemes import row_lists
from sparsejax.schemes.base import Scheme
from sparsejax.schemes.or_dense import suited
from sparsejax.state import sharded, tree
from sparsejax.transforms.buckets import ByRules, Everything
from sparsejax.transforms.sync import check_deterministic, check_scheme
from sparsejax.units import bits, merging
from sparsejax.units.dense import Dense
from sparsejax.units.row_grads import RowGrads
from sparsejax.units.sparse_tensor import SparseTensor, from_units
from sparsejax.units.units import wide
from sparsejax.wire import ordered
from sparsejax.wire.collectives import Wire


@tree.promoting()
def all_reduce(
    x: Any,
    axis_name: AxisName | None = None,
    *,
    scheme: Scheme | None = None,
    reduce: str = "sum",
    deterministic: bool | None = None,
) -> Any:
    """Sums arrays over the ranks of a mesh axis, like `jax.lax.psum`.

    It runs inside `jax.shard_map`, or under `jax.vmap` with an axis name. A value that does
    not vary over the axis is multiplied by the number of ranks, as by `psum`. The gradient
    of a parameter that is sharded over the axis (FSDP) varies, too, and would be added to
    those of other shards: do not pass it.

    Args:
        x: An array, a `SparseTensor`, or a pytree of them, of real floating dtypes. The
            gradient of a `ColumnTable` is a sum already, and is not sent.
        axis_name: The mesh axis, or axes; the only manual one if None.
        scheme: The scheme for every array. If None, Zen for arrays of at least 65,536
            elements, and one psum for all smaller ones.
        reduce: "sum" or "mean".
        deterministic: Whether owners add in a fixed order; see `sparsejax.sync`.

    Returns:
        The sums as a pytree of the same structure, equal on all ranks bit for bit. The sum
        of a `SparseTensor` is one with capacity for the entries of all ranks and ascending
        distinct indices. Its time and memory grow with the entries, not with the array. If
        `scheme` is None, it is summed by Zen on more than four ranks, and on fewer by one
        all-gather of all entries.

    Example:
        >>> add = jax.shard_map(
        ...     sparsejax.all_reduce, mesh=mesh, in_specs=P("data"), out_specs=P())
        >>> x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, P("data")))
        >>> add(x).tolist()  # each of four ranks has two numbers
        [12.0, 16.0]

    See Also:
        `sparsejax.sync`: the same as a transformation of gradients.
        `sparsejax.zen_sync`: the transformation with Zen.
        `sparsejax.dense_sync`: the transformation with a dense sum.
    """
    arguments.check_reduce(reduce)
    check_deterministic(deterministic)
    wire = Wire.over(axis_name, "sparsejax.all_reduce")
    wire = dataclasses.replace(wire, deterministic=deterministic)
    shards = sharded.apart(x)
    parts = [
        sharded.synchronized(path, node, wire, reduce == "mean")
        for path, node in zip(shards.paths, shards.nodes, strict=True)
    ]
    paths, leaves, structure = tree.flatten(shards.rest, "sparsejax.all_reduce")
    leaves = [leaf if tree.is_sparse(leaf) else _as_array(leaf) for leaf in leaves]
    check_scheme(schemes.Zen() if scheme is None else scheme)
    ordered.check(wire, paths, leaves, "sparsejax.all_reduce")
    reduced = functools.partial(_reduced, paths, scheme, wire, reduce)
    result = axes.all_manual(reduced, wire.axis)(leaves)
    if axes.further_axes():
        result = list(map(tree.sharded_as, result, leaves))
    return shards.together(structure.unflatten(result), parts)


def _reduced(paths, scheme, wire, reduce, leaves):
    """Returns the sums, or means, of leaves that are arrays or `SparseTensor`s."""
    leaves = wire.per_rank(leaves)
    result: list[Any] = [None] * len(leaves)
    dense = [i for i, leaf in enumerate(leaves) if not tree.is_sparse(leaf)]
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, SparseTensor):
            result[i] = _sparse(paths[i], leaf, scheme, wire, reduce)
    assignment = ByRules(schemes.Zen()) if scheme is None else Everything(scheme)
    arrays: list[Any] = [leaves[i] for i in dense]
    for bucket in assignment.buckets([paths[i] for i in dense], arrays):
        units = bucket.pack(arrays)
        used = suited(bucket.scheme, units, bucket.name, wire)
        total = _total(used, wire, units.dense(), None)
        for place, part in bucket.unpack(_scaled(total, reduce, wire), arrays).items():
            result[dense[place]] = part
    return result


# Up to this many ranks one all-gather of all entries is fastest: owners would save few
# bytes, and take three rounds.
_FEW = 4


def _sparse(path, x, scheme, wire, reduce):
    x.check(path or "x")
    tree.check_dtype(path or "x", x)
    # Entries are sent as lists if those of all ranks have fewer units than half the array.
    if x.capacity and 2 * wire.ranks * x.capacity <= x.units:
        indices, values = wire.per_rank((x.kept(), x.values))
        lists = _total_of_lists(scheme, wire, x.shape, indices, values)
        if lists is not None:
            values = _scaled(lists[1], reduce, wire)
            return SparseTensor(lists[0], values, x.shape, distinct=True)
    units = x.to_units(wide(x.dtype)).astype(x.dtype)
    units, flags = wire.per_rank((units, x.present()))
    scheme = suited(scheme or schemes.Zen(), Dense(units, flags), path or "x", wire)
    total = _scaled(_total(scheme, wire, units, flags), reduce, wire)
    tensor, _ = from_units(total, min(wire.ranks * x.capacity, x.units), x.shape)
    return tensor


def _sum_of_lists(scheme, wire, shape, indices, values):
    """Returns the entries of the sum, ascending; None if the scheme sends no lists."""
    units = SparseTensor(indices, values, shape).units
    listed = merging.distinct_rows(RowGrads(indices, values, (units, *values.shape[1:])))
    if wire.ranks == 1:
        total = wire.assume_same(listed)
    else:
        if scheme is None and wire.ranks <= _FEW:
            sums = row_lists.gathered([listed], wire, distinct=True)
        else:
            sums = (scheme or schemes.Zen()).rows([listed], wire)
        if sums is None:
            return None
        total = sums.totals[0]
    return _without_zeros(total, wire.ranks * listed.capacity)


def _without_zeros(total, capacity):
    """Returns ascending ids and rows of a list of distinct ids, without rows of zeros.

    Args:
        total: The list, RowGrads.
        capacity: The capacity of the result, an upper bound of the non-zero rows.
    """
    height = total.shape[0]
    real = (total.ids < height) & bits.nonzero_units(total.rows)
    ids = jnp.where(real, total.ids, height)

    def as_is(ids, rows):
        missing = max(capacity - ids.size, 0)
        ids = jnp.pad(ids, (0, missing), constant_values=height)
        rows = jnp.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1))
        return ids[:capacity], rows[:capacity]

    def moved(ids, rows):
        found, place = merging.union(ids[None], capacity, height)
        place = bits.unique_places(place[0], ids < height, capacity)
        empty = jnp.zeros((capacity, *rows.shape[1:]), rows.dtype)
        return found, empty.at[place].set(rows, mode="drop", unique_indices=True)

    ascending = merging.is_ascending(ids, height)
    return branches.cond(ascending, as_is, moved, ids, total.rows)


_total_of_lists = jax.custom_jvp(_sum_of_lists, nondiff_argnums=(0, 1, 2))


@_total_of_lists.defjvp
def _total_of_lists_jvp(scheme, wire, shape, primals, tangents) -> Any:
    """Differentiates as `_total_jvp` does: the tangent is a psum, at the sum's entries."""
    total = _total_of_lists(scheme, wire, shape, *primals)
    if total is None:
        return None, None
    change = SparseTensor(primals[0], tangents[1], shape).to_units()
    change, _ = wire.psum(wire.per_rank(change))
    change = change.at[total[0]].get(mode="fill", fill_value=0)
    return total, (np.zeros(total[0].shape, jax.dtypes.float0), change)


def _sum_of_units(scheme, wire, units, flags):
    like = jax.ShapeDtypeStruct(units.shape, units.dtype)
    state = scheme.init(like, wire)
    return scheme(Dense(units, flags), state, wire).total


_total = jax.custom_jvp(_sum_of_units, nondiff_argnums=(0, 1))


@_total.defjvp
def _total_jvp(scheme, wire, primals, tangents):
    """Differentiates the sum: its tangent is a psum of the tangents.

    Values are sent as bits, which JAX cannot differentiate.
    """
    total = _total(scheme, wire, *primals)
    tangent, _ = wire.psum(wire.per_rank(tangents[0]))
    return total, tangent


def _as_array(leaf):
    return leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)


def _scaled(total, reduce, wire):
    return wire.mean_of(total, reduce == "mean")
