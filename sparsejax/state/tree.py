"""Trees of gradients: their paths and leaves, which may be arrays, entries or rows."""

import contextlib
import contextvars
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from sparsejax import axes
from sparsejax.axes import AxisName, varying_axes
from sparsejax.errors import ArgumentError, LeafError, StateError
from sparsejax.units.row_grads import is_row_grads
from sparsejax.units.sparse_tensor import SparseTensor


def is_sparse(leaf: Any) -> bool:
    """Returns whether a leaf is a `SparseTensor`."""
    return isinstance(leaf, SparseTensor)


def is_masked(leaf: Any) -> bool:
    """Returns whether a leaf is masked, by optax or because nothing is kept for it."""
    return isinstance(leaf, optax.MaskedNode)


def has_masked(tree: Any) -> bool:
    """Returns whether any leaf of a tree is masked."""
    return any(is_masked(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_masked))


def to_dense(leaf: Any) -> jax.Array:
    """Returns a leaf as a dense array."""
    return leaf.to_dense() if is_sparse(leaf) or is_row_grads(leaf) else leaf


def numbers(leaf: Any) -> Any:
    """Returns the floating-point array of a leaf: itself, its values, or its rows."""
    if is_row_grads(leaf):
        return leaf.rows
    return leaf.values if is_sparse(leaf) else leaf


def sharded_as(leaf: Any, other: Any) -> Any:
    """Reshards a leaf like `other`, if both are arrays."""
    listed = any(is_sparse(x) or is_row_grads(x) for x in (leaf, other))
    return leaf if listed else axes.sharded_as(leaf, other)


def with_numbers(leaf: Any, x: jax.Array) -> Any:
    """Returns a leaf of the same kind with x as its `numbers`."""
    if is_row_grads(leaf):
        return dataclasses.replace(leaf, rows=x)
    return dataclasses.replace(leaf, values=x) if is_sparse(leaf) else x


def axes_of(leaf: Any) -> frozenset[str]:
    """Returns the mesh axes over which a leaf varies."""
    return varying_axes(numbers(leaf))


_SHARDS: contextvars.ContextVar[Mapping[str, frozenset[str]] | None] = (
    contextvars.ContextVar("shards", default=None)
)


@contextlib.contextmanager
def of_shards(shards: Mapping[str, frozenset[str]]) -> Iterator[None]:
    """Sets the mesh axes over which leaves are sharded, where types do not show them.

    That is so inside the `shard_map` of an update that was entered under `jit`.

    Args:
        shards: The axes of each leaf, without those of the ranks, by its path.
    """
    token = _SHARDS.set(shards)
    try:
        yield
    finally:
        _SHARDS.reset(token)


def knows_shards() -> bool:
    """Returns whether `of_shards` has set how leaves are sharded."""
    return _SHARDS.get() is not None


def may_hide_shards(axis_name: AxisName | None) -> bool:
    """Returns whether leaves may be sharded over manual axes that nothing shows.

    These are axes other than the ranks', with `check_vma=False` and outside of `of_shards`.

    Args:
        axis_name: The mesh axis of the ranks; the only manual one if None.
    """
    manual = axes.manual_axes()
    ranks = manual if axis_name is None else axes.axis_names(axis_name)
    further = [name for name in manual if name not in ranks]
    return not knows_shards() and not all(map(axes.is_checking, further))


def shards_of(path: str, leaf: Any) -> frozenset[str]:
    """Returns the mesh axes over which a leaf is sharded, by its type and `of_shards`.

    By types with `check_vma=True` these are all axes over which it varies, the ranks' too.
    """
    return axes_of(leaf) | (_SHARDS.get() or {}).get(path, frozenset())


def flatten(
    tree: Any, call: str = "this call", *, rows: bool = False
) -> tuple[list[str], list[Any], Any]:
    """Returns the paths, written a/b/c, the leaves and the structure of a tree.

    A `SparseTensor` is a leaf, and so are `RowGrads`.

    Args:
        tree: The tree.
        call: The call as the user wrote it, for the message.
        rows: Whether leaves may be `RowGrads`; if not, they raise.
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
    """Maps like `jax.tree.map`, with masked and sparse nodes as leaves."""
    is_leaf = lambda leaf: is_masked(leaf) or is_sparse(leaf)
    return jax.tree.map(function, tree, *trees, is_leaf=is_leaf)


def written(keys: tuple) -> str:
    """Returns a key path, written a/b/c."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def named(keys: tuple) -> str:
    """Returns the key path of one leaf as messages and metrics write it."""
    return written(unboxed([keys])[0])


def unboxed(paths: Sequence[tuple]) -> list[tuple]:
    """Returns key paths without any `.value` at their ends, unless some become equal.

    The paths of parameters of a flax.nnx model end in it, and those of gradients do not.
    The path of a column table ends in it, too, and so in two of them in such a model.
    """
    short = [_unboxed(keys) for keys in paths]
    return short if len(set(short)) == len(short) else list(paths)


def _unboxed(keys: tuple) -> tuple:
    boxed = jax.tree_util.GetAttrKey("value")
    while keys[1:] and keys[-1] == boxed:
        keys = keys[:-1]
    return keys


def distinct(paths: Sequence[str]) -> list[str]:
    """Returns the paths, with " #1", " #2", ... appended to repeated ones."""
    names: dict[str, None] = {}
    for path in paths:
        name, number = path, 0
        while name in names:
            number += 1
            name = f"{path} #{number}"
        names[name] = None
    return list(names)


def check_dtype(path: str, leaf: Any) -> None:
    """Raises unless the leaf is an array of a real floating dtype."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not is_floating(dtype):
        kind = type(leaf).__name__ if dtype is None else dtype
        raise LeafError(
            f"leaf {path!r} is {kind}; only real floating gradients of 16, 32 or 64 bits "
            "can be synchronized. Convert it (a complex number is two), or leave it out "
            "with optax.masked if no gradient trains it: what is left out is not summed."
        )


def check_transformation(tx: Any, params: Any) -> None:
    """Raises unless `tx` is an optax transformation and `params` a tree of arrays."""
    is_tx = lambda node: isinstance(node, optax.GradientTransformation)
    if not is_tx(tx):
        fix = ", and params is one: they are swapped" if is_tx(params) else ""
        fix = ": call it" if inspect.isfunction(tx) else fix
        if isinstance(tx, optax.MultiSteps):
            fix = ": sparsejax.accumulate(tx, every=k) around the chain does what it does"
        raise ArgumentError(
            "tx must be an optax transformation, such as optax.chain(sparsejax.zen_sync(), "
            f"optax.adam(1e-3)), got a {type(tx).__name__}{fix}."
        )
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_tx):
        if hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex):
            continue
        it = f"their leaf {named(keys)!r}" if keys else "params"
        fix = "those of a flax model are nnx.state(model, nnx.Param) or model.init(key, x)"
        if is_tx(leaf):
            fix = "an optimizer goes first, (tx, params), and the parameters second"
        raise ArgumentError(
            f"params must be a tree of arrays, and {it} is a {type(leaf).__name__}: {fix}."
        )


def is_floating(dtype: Any) -> bool:
    """Returns whether arrays of this dtype can be synchronized."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize >= 2


def rounding_error(x: jax.Array, sent: jax.Array) -> jax.Array:
    """Returns x - sent, the rounding error of what was sent; 0 where it is not finite.

    An infinity in a residual would stay there in all later steps.
    """
    if sent is x:
        return jnp.zeros_like(x)
    error = x - sent.astype(x.dtype)
    return jnp.where(jnp.isfinite(error), error, 0)


def check_not_donated(tree: Any, call: str, fix: str = "") -> None:
    """Raises if an array was deleted, because it was donated to an earlier step."""
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
    """Returns this process's copies of arrays that are replicated over all processes.

    Arithmetic on them is local. Under `jax.set_mesh`, where JAX refuses it on arrays of one
    device, they are NumPy arrays, which waits for them.
    """

    def one(x):
        spans = isinstance(x, jax.Array) and not isinstance(x, Tracer)
        if not spans or x.is_fully_addressable or not x.is_fully_replicated:
            return x
        own = x.addressable_data(0)
        is_key = jnp.issubdtype(own.dtype, jax.dtypes.extended)
        no_mesh = jax.sharding.get_abstract_mesh().empty
        return own if no_mesh or is_key else np.asarray(own)

    return jax.tree.map(one, tree)


def bare(tree: Any) -> Any:
    """Returns a tree whose `RowGrads` lack what was computed to read their rows."""
    one = lambda leaf: leaf.bare if is_row_grads(leaf) else leaf
    return jax.tree.map(one, tree, is_leaf=is_row_grads)


def nothing(shapes: Any) -> Any:
    """Returns updates that change no parameter: zeros, no entries, or no rows."""

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
    """Splits arguments into pytrees of arrays, and others, which are static.

    Args:
        extra: The keyword arguments of `update`: arrays, functions, flags.
    """

    def is_arrays(value):
        leaves = jax.tree.leaves(value)
        return bool(leaves) and all(hasattr(x, "dtype") for x in leaves)

    arrays = {key: value for key, value in extra.items() if is_arrays(value)}
    return arrays, {key: value for key, value in extra.items() if key not in arrays}


class Transformation(optax.GradientTransformationExtraArgs):
    """A transformation whose repr is the call that made it.

    Attributes:
        text: That call; empty before it is known.
        stands_alone: Whether it must not be wrapped.
    """

    text: str = ""
    stands_alone: bool = False

    def __repr__(self) -> str:
        return self.text or super().__repr__()


def transformation(
    init: Callable[..., Any], update: Callable[..., Any]
) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation of these two functions, as a `Transformation`."""
    return Transformation(promoting()(init), promoting()(update))


@contextlib.contextmanager
def promoting() -> Iterator[None]:
    """Lets JAX promote dtypes and ranks, as it does by default.

    It decorates what user's code calls: `jax.config` may forbid promotions there.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
