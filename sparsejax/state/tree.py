"""Trees of gradients: their paths, their leaves, and arrays of zeros like them."""

import contextlib
import contextvars
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from sparsejax import axes
from sparsejax.axes import AxisName, varying_axes
from sparsejax.errors import ArgumentError, LeafError, StateError
from sparsejax.units.row_grads import is_row_grads
from sparsejax.units.sparse_tensor import SparseTensor


def is_sparse(leaf: Any) -> bool:
    """Whether a leaf is given by its entries."""
    return isinstance(leaf, SparseTensor)


def is_masked(leaf: Any) -> bool:
    """Whether a leaf was left out by optax.masked or optax.partition, or keeps nothing."""
    return isinstance(leaf, optax.MaskedNode)


def has_masked(tree: Any) -> bool:
    """Whether any leaf of a tree is masked."""
    return any(is_masked(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_masked))


def to_dense(leaf: Any) -> jax.Array:
    """A leaf as a dense array."""
    return leaf.to_dense() if is_sparse(leaf) or is_row_grads(leaf) else leaf


def numbers(leaf: Any) -> Any:
    """The numbers of a leaf: an array itself, the values of entries, or the rows."""
    if is_row_grads(leaf):
        return leaf.rows
    return leaf.values if is_sparse(leaf) else leaf


def sharded_as(leaf: Any, other: Any) -> Any:
    """A leaf, sharded as the type of another says where both are arrays."""
    listed = any(is_sparse(x) or is_row_grads(x) for x in (leaf, other))
    return leaf if listed else axes.sharded_as(leaf, other)


def with_numbers(leaf: Any, x: jax.Array) -> Any:
    """A leaf of the same kind with other numbers; see `numbers`."""
    if is_row_grads(leaf):
        return dataclasses.replace(leaf, rows=x)
    return dataclasses.replace(leaf, values=x) if is_sparse(leaf) else x


def axes_of(leaf: Any) -> frozenset[str]:
    """The mesh axes over which a leaf varies."""
    return varying_axes(numbers(leaf))


_SHARDS: contextvars.ContextVar[Mapping[str, frozenset[str]] | None] = (
    contextvars.ContextVar("shards", default=None)
)


@contextlib.contextmanager
def of_shards(shards: Mapping[str, frozenset[str]]) -> Iterator[None]:
    """Says over which mesh axes leaves are sharded, where types do not: under `jit`.

    Args:
        shards: The axes, but for those of the ranks, by the path of the leaf.
    """
    token = _SHARDS.set(shards)
    try:
        yield
    finally:
        _SHARDS.reset(token)


def knows_shards() -> bool:
    """Whether it is known how leaves are sharded, or types tell: see `of_shards`."""
    return _SHARDS.get() is not None


def may_hide_shards(axis_name: AxisName | None) -> bool:
    """Whether leaves may be sharded over further manual axes, and nothing tells.

    Args:
        axis_name: The mesh axis of the ranks; the only manual one if None.
    """
    manual = axes.manual_axes()
    ranks = manual if axis_name is None else axes.axis_names(axis_name)
    further = [name for name in manual if name not in ranks]
    return not knows_shards() and not all(map(axes.is_checking, further))


def shards_of(path: str, leaf: Any) -> frozenset[str]:
    """The mesh axes over which devices have other parts of a leaf, as far as is known."""
    return axes_of(leaf) | (_SHARDS.get() or {}).get(path, frozenset())


def flatten(
    tree: Any, call: str = "this call", *, rows: bool = False
) -> tuple[list[str], list[Any], Any]:
    """The paths, written a/b/c, the leaves and the structure of a tree.

    A `SparseTensor` is a leaf, and so are `RowGrads`.

    Args:
        tree: The tree.
        call: Who flattens it, as the user knows it, for the message.
        rows: Whether it takes `RowGrads`; else they are refused.
    """
    is_leaf = lambda leaf: is_sparse(leaf) or is_row_grads(leaf)
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    paths = [written(keys) for keys in unboxed([keys for keys, _ in pairs])]
    leaves = [leaf for _, leaf in pairs]
    for path, leaf in zip(paths, leaves, strict=True):
        if is_row_grads(leaf) and not rows:
            raise LeafError(
                f"leaf {path!r} is RowGrads, the rows that a loss has read, and {call} "
                "takes whole arrays: hand them to sparsejax.zen_sync() or "
                "sparsejax.sync(scheme), which add up rows, or make the leaf dense with "
                "its method to_dense()."
            )
    return paths, leaves, structure


def map_leaves(function: Callable[..., Any], tree: Any, *trees: Any) -> Any:
    """`jax.tree.map` for which masked and sparse leaves are leaves."""
    is_leaf = lambda leaf: is_masked(leaf) or is_sparse(leaf)
    return jax.tree.map(function, tree, *trees, is_leaf=is_leaf)


def written(keys: tuple) -> str:
    """The keys on the way to a leaf, written a/b/c."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def named(keys: tuple) -> str:
    """The keys on the way to one leaf, written as messages and metrics name it."""
    return written(unboxed([keys])[0])


def unboxed(paths: Sequence[tuple]) -> list[tuple]:
    """The keys on the way to each leaf, without any `.value` at their ends.

    The parameters of a flax.nnx model end in it, and their gradients do not. A table by
    columns ends in it, too, and so in two of them in such a model.
    """
    short = [_unboxed(keys) for keys in paths]
    return short if len(set(short)) == len(short) else list(paths)


def _unboxed(keys: tuple) -> tuple:
    boxed = jax.tree_util.GetAttrKey("value")
    while keys[1:] and keys[-1] == boxed:
        keys = keys[:-1]
    return keys


def distinct(paths: Sequence[str]) -> list[str]:
    """The paths, with a number after those that are written like one before."""
    names: dict[str, None] = {}
    for path in paths:
        name, number = path, 0
        while name in names:
            number += 1
            name = f"{path} #{number}"
        names[name] = None
    return list(names)


def check_dtype(path: str, leaf: Any) -> None:
    """Raises unless the leaf is an array of real floating numbers."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not is_floating(dtype):
        kind = type(leaf).__name__ if dtype is None else dtype
        raise LeafError(
            f"leaf {path!r} is {kind}; only real floating gradients of 16, 32 or 64 bits "
            "can be synchronized. Convert it (a complex number is two), or leave it out "
            "with optax.masked if no gradient trains it: what is left out is not summed."
        )


def check_transformation(tx: Any, params: Any) -> None:
    """Raises unless these are an optax transformation and a tree of arrays."""
    is_tx = lambda node: isinstance(node, optax.GradientTransformation)
    wanted = "optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))"
    if not is_tx(tx):
        swapped = ", and params is one: they are swapped" if is_tx(params) else ""
        swapped = ": call it" if inspect.isfunction(tx) else swapped
        raise ArgumentError(
            f"tx must be an optax transformation, such as {wanted}, got a "
            f"{type(tx).__name__}{swapped}."
        )
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_tx):
        if hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex):
            continue
        where = f"their leaf {named(keys)!r}" if keys else "params"
        fix = "those of a flax model are nnx.state(model, nnx.Param) or model.init(key, x)"
        if is_tx(leaf):
            fix = "an optimizer goes first, (tx, params), and the parameters second"
        raise ArgumentError(
            f"params must be a tree of arrays, and {where} is a {type(leaf).__name__}: "
            f"{fix}."
        )


def is_floating(dtype: Any) -> bool:
    """Whether numbers of this dtype can be synchronized."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize >= 2


def rounding_error(x: jax.Array, sent: jax.Array) -> jax.Array:
    """The part of x that rounding took from what was sent, zero where x is not finite.

    An infinity in a residual would stay there for ever.
    """
    if sent is x:
        return jnp.zeros_like(x)
    error = x - sent.astype(x.dtype)
    return jnp.where(jnp.isfinite(error), error, 0)


def check_there(tree: Any, call: str, fix: str = "") -> None:
    """Raises where an array was deleted, since a step reused its memory."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array):
            continue
        if leaf.is_deleted():
            raise StateError(
                f"{call} was given a state that is used up: its leaf {named(path)!r} was "
                "deleted when an earlier step reused its memory. Go on with the state that "
                f"the step returned{fix}."
            )


def here(tree: Any) -> Any:
    """Arrays that are equal on all processes, as this process has them.

    Arithmetic on them is this process's alone then, and waits for no other.
    """

    def one(x):
        spans = isinstance(x, jax.Array) and not isinstance(x, Tracer)
        if spans and not x.is_fully_addressable and x.is_fully_replicated:
            return x.addressable_data(0)
        return x

    return jax.tree.map(one, tree)


def bare(tree: Any) -> Any:
    """A tree whose gradients by rows are without what was made to read them."""
    one = lambda leaf: leaf.bare if is_row_grads(leaf) else leaf
    return jax.tree.map(one, tree, is_leaf=is_row_grads)


def nothing(shapes: Any) -> Any:
    """A tree of updates that change no parameter: zeros, or no entries, or no rows."""

    def zeros(leaf):
        if is_row_grads(leaf):
            ids = jnp.full_like(leaf.ids, leaf.shape[0])
            rows = jnp.zeros_like(leaf.rows)
            return dataclasses.replace(leaf.bare, ids=ids, rows=rows)
        if is_sparse(leaf):
            indices = jnp.full(leaf.indices.shape, leaf.units, leaf.indices.dtype)
            values, coded = jax.tree.map(zeros, (leaf.values, leaf.coded))
            return dataclasses.replace(leaf, indices=indices, values=values, coded=coded)
        return jnp.zeros_like(leaf)

    is_leaf = lambda leaf: is_sparse(leaf) or is_row_grads(leaf)
    return jax.tree.map(zeros, shapes, is_leaf=is_leaf)


def arrays_and_others(extra: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments that are trees of arrays, and those that are known when traced.

    Args:
        extra: What `update` is given by name: arrays, functions, flags.
    """

    def is_arrays(value):
        leaves = jax.tree.leaves(value)
        return bool(leaves) and all(hasattr(x, "dtype") for x in leaves)

    arrays = {key: value for key, value in extra.items() if is_arrays(value)}
    return arrays, {key: value for key, value in extra.items() if key not in arrays}


class Transformation(optax.GradientTransformationExtraArgs):
    """A transformation that prints as the call that made it.

    Attributes:
        text: That call; empty before it is known.
        stands_alone: Whether no wrapper may stand around it.
    """

    text: str = ""
    stands_alone: bool = False

    def __repr__(self) -> str:
        return self.text or super().__repr__()


def transformation(
    init: Callable[..., Any], update: Callable[..., Any]
) -> optax.GradientTransformationExtraArgs:
    """The transformation of two functions whose states are of types of this library."""
    return Transformation(init, update)
