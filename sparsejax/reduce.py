"""`all_reduce`: what `jax.lax.psum` does, sending only what is not zero."""

from typing import Any

import jax.numpy as jnp

from sparsejax import axes, leaves as leaf_rules, schemes, wire
from sparsejax._compat import AxisName
from sparsejax.schemes.base import Scheme
from sparsejax.sparse_tensor import SparseTensor, from_units
from sparsejax.transforms import check_reduce


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
    axis_name = axes.resolve(axis_name, "sparsejax.all_reduce")
    is_sparse = lambda node: isinstance(node, SparseTensor)
    paths, leaves, structure = leaf_rules.flatten(x, is_leaf=is_sparse)
    leaves = wire.per_rank(leaves, axis_name)
    own = scheme or schemes.Zen()
    result: list[Any] = [None] * len(leaves)
    dense = []
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        if isinstance(leaf, SparseTensor):
            result[i] = _sparse(path, leaf, own, axis_name, reduce)
        else:
            dense.append(i)
            leaves[i] = jnp.asarray(leaf) if hasattr(leaf, "dtype") else leaf
    groups = leaf_rules.group(
        [paths[i] for i in dense],
        [leaves[i] for i in dense],
        own,
        always=scheme is not None,
    )
    arrays: list[Any] = [leaves[i] for i in dense]
    totals: list[Any] = [None] * len(arrays)
    for group in groups:
        units = group.gather(arrays)
        state = group.scheme.init(units, wire.ranks(axis_name))
        total = group.scheme(units, state, axis_name).total
        group.scatter(_scaled(total, reduce, axis_name), totals, arrays)
    for i, total in zip(dense, totals, strict=True):
        result[i] = total
    return structure.unflatten(result)


def _sparse(path, x, scheme, axis_name, reduce):
    x.check(path or "x")
    leaf_rules.check_dtype(path or "x", x)
    n = wire.ranks(axis_name)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    units = x.to_units(wide).astype(x.dtype)
    state = scheme.init(units, n)
    total = scheme(units, state, axis_name, present=x.present()).total
    total = _scaled(total, reduce, axis_name)
    tensor, _ = from_units(total, min(n * x.capacity, x.units), x.shape)
    return tensor


def _scaled(total, reduce, axis_name):
    if reduce == "sum":
        return total
    wide = jnp.promote_types(total.dtype, jnp.float32)
    return (total.astype(wide) / wire.ranks(axis_name)).astype(total.dtype)
