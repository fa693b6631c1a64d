"""`all_reduce`: what `jax.lax.psum` does, sending only what is not zero."""

from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import schemes
from sparsejax.axes import AxisName
from sparsejax.schemes.base import Scheme
from sparsejax.transforms.buckets import ByRules, Everything
from sparsejax.transforms.state import tree
from sparsejax.transforms.sync import check_scheme
from sparsejax.transforms.wrappers import check_reduce
from sparsejax.units.dtypes import wide
from sparsejax.units.sparse_tensor import SparseTensor, from_units
from sparsejax.units.units import Dense
from sparsejax.wire import Wire


def all_reduce(
    x: Any,
    axis_name: AxisName | None = None,
    *,
    scheme: Scheme | None = None,
    reduce: str = "sum",
) -> Any:
    """Adds up arrays over the ranks of a mesh axis, like `jax.lax.psum`.

    Runs inside `jax.shard_map`, or under `jax.vmap` with an axis name. A value that does
    not vary over the axis is added up as often as there are ranks, as `psum` does.

    Args:
        x: An array, a `SparseTensor`, or a tree of them, of real floating numbers.
        axis_name: The mesh axis, or axes; the only manual one if None.
        scheme: How; if None, Zen for arrays of at least 65,536 elements and one psum for
            all smaller ones. A scheme that is given is used for every array.
        reduce: "sum" or "mean".

    Returns:
        The same tree, equal on all ranks bit for bit. A SparseTensor comes back as one with
        room for the entries of all ranks, its indices ascending and distinct.
    """
    check_reduce(reduce)
    wire = Wire.over(axis_name, "sparsejax.all_reduce")
    paths, leaves, structure = tree.flatten(x, "sparsejax.all_reduce")
    leaves = [leaf if tree.is_sparse(leaf) else _as_array(leaf) for leaf in leaves]
    leaves = wire.per_rank(leaves)
    check_scheme(schemes.Zen() if scheme is None else scheme)
    result: list[Any] = [None] * len(leaves)
    dense = [i for i, leaf in enumerate(leaves) if not tree.is_sparse(leaf)]
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, SparseTensor):
            tensor_scheme = schemes.Zen() if scheme is None else scheme
            result[i] = _sparse(paths[i], leaf, tensor_scheme, wire, reduce)
    assignment = ByRules(schemes.Zen()) if scheme is None else Everything(scheme)
    arrays: list[Any] = [leaves[i] for i in dense]
    for bucket in assignment.buckets([paths[i] for i in dense], arrays):
        total = _total(bucket.scheme, wire, bucket.pack(arrays).dense(), None)
        for place, part in bucket.unpack(_scaled(total, reduce, wire), arrays).items():
            result[dense[place]] = part
    return structure.unflatten(result)


def _sparse(path, x, scheme, wire, reduce):
    x.check(path or "x")
    tree.check_dtype(path or "x", x)
    units = x.to_units(wide(x.dtype)).astype(x.dtype)
    units, flags = wire.per_rank((units, x.present()))
    total = _scaled(_total(scheme, wire, units, flags), reduce, wire)
    tensor, _ = from_units(total, min(wire.ranks * x.capacity, x.units), x.shape)
    return tensor


def _sum_of_units(scheme, wire, units, flags):
    like = jax.ShapeDtypeStruct(units.shape, units.dtype)
    state = scheme.init(like, wire)
    return scheme(Dense(units, flags), state, wire).total


_total = jax.custom_jvp(_sum_of_units, nondiff_argnums=(0, 1))


@_total.defjvp
def _total_jvp(scheme, wire, primals, tangents):
    """The derivative of a sum is the sum; what differentiates it is a plain psum.

    The values themselves travel as bits, through which JAX sees no derivative.
    """
    total = _total(scheme, wire, *primals)
    tangent, _ = wire.psum(wire.per_rank(tangents[0]))
    return total, tangent


def _as_array(leaf):
    return leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)


def _scaled(total, reduce, wire):
    return total if reduce == "sum" else wire.mean_of(total)
