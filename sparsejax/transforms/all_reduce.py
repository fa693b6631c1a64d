"""`all_reduce`: what `jax.lax.psum` does, sending only what is not zero."""

from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import axes, schemes, wire
from sparsejax.axes import AxisName
from sparsejax.schemes.base import Scheme
from sparsejax.transforms import buckets as leaf_rules
from sparsejax.transforms.sync import check_reduce, check_scheme
from sparsejax.units.sparse_tensor import SparseTensor, from_units


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
    paths, leaves, structure = leaf_rules.flatten(x)
    leaves = [leaf if leaf_rules.is_sparse(leaf) else _as_array(leaf) for leaf in leaves]
    leaves = wire.per_rank(leaves, axis_name)
    own = schemes.Zen() if scheme is None else scheme
    check_scheme(own)
    result: list[Any] = [None] * len(leaves)
    dense = []
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        if isinstance(leaf, SparseTensor):
            result[i] = _sparse(path, leaf, own, axis_name, reduce)
        else:
            dense.append(i)
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
        total = _total(group.scheme, axis_name, units, None)
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
    units, present = wire.per_rank((units, x.present()), axis_name)
    total = _total(scheme, axis_name, units, present)
    total = _scaled(total, reduce, axis_name)
    tensor, _ = from_units(total, min(n * x.capacity, x.units), x.shape)
    return tensor


def _sum_of_units(scheme, axis_name, units, present):
    state = scheme.init(units, wire.ranks(axis_name))
    return scheme(units, state, axis_name, present=present).total


_total = jax.custom_jvp(_sum_of_units, nondiff_argnums=(0, 1))


@_total.defjvp
def _total_jvp(scheme, axis_name, primals, tangents):
    """The derivative of a sum is the sum; what differentiates it is a plain psum.

    The values themselves travel as bits, through which JAX sees no derivative.
    """
    total = _total(scheme, axis_name, *primals)
    tangent, _ = wire.psum(wire.per_rank(tangents[0], axis_name), axis_name)
    return total, tangent


def _as_array(leaf):
    return leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)


def _scaled(total, reduce, axis_name):
    return total if reduce == "sum" else wire.mean_of(total, axis_name)
