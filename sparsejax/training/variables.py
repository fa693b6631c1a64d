"""Variables: arrays that a loss changes without a gradient, such as batch statistics.

On the wire: a psum for each floating leaf that is averaged; nothing for leaves that are
kept by rank, nor for integers, which must be equal on all ranks.
"""

from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import axes
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError, LeafError, StateError
from sparsejax.state import tree
from sparsejax.state.per_rank import PerRank
from sparsejax.training import placing
from sparsejax.training.on_rank.shares import Share
from sparsejax.wire.collectives import Wire


KINDS = ("mean", "by_rank")


def check(kinds: Any) -> None:
    """Raises unless all leaves are one of `KINDS`."""
    for kind in jax.tree.leaves(kinds, is_leaf=lambda node: node is None):
        if kind not in KINDS:
            raise ArgumentError(
                "variables must be 'mean' or 'by_rank', or a tree of these like the "
                f"variables, or a prefix of one; got {kind!r}. (Their values are given to "
                "trainer.init(params, variables=...).)"
            )


def check_values(values: Any) -> None:
    """Raises unless the values are a tree of arrays of numbers, or None."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(values):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None and isinstance(leaf, bool | int | float | complex):
            continue
        if dtype is None or placing.is_unfit(dtype):
            kind = type(leaf).__name__
            kind += "" if dtype is None else f" of {dtype.name}"
            where = f"their leaf {tree.named(keys)!r}" if keys else "this one"
            raise ArgumentError(
                f"variables must be a tree of arrays of numbers, and {where} is {kind}: "
                "keep it out of them, or make it an array of numbers; those of a flax "
                "model are its collections, such as batch_stats."
            )


def check_by_rank(values: Any, kinds: Any) -> None:
    """Raises if a variable is reduced over the ranks, for steps that send nothing."""
    if values is not None and any(kind != "by_rank" for kind in jax.tree.leaves(kinds)):
        raise ArgumentError(
            "data_parallel: with overlap=True a step sends nothing, and the mean of "
            "variables over ranks is one: give it variables='by_rank', or leave overlap "
            "out."
        )


def check_trained(params: Any) -> None:
    """Raises if a parameter has a type of which there is no gradient."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        is_number = isinstance(leaf, bool | int)
        dtype = type(leaf).__name__ if is_number else getattr(leaf, "dtype", None)
        if is_number or (dtype is not None and not jnp.issubdtype(dtype, jnp.inexact)):
            raise LeafError(
                f"trainer.init: the parameter {tree.named(keys)!r} is {dtype}, of which "
                "there is no gradient. Arrays that no gradient trains go to "
                "trainer.init(params, variables=...): loss_fn is given them as variables, "
                "and returns them, changed or as they are. (optax.masked alone leaves them "
                "out of the optimizer, and JAX would still differentiate them.)"
            )


def wrapped(values: Any, kinds: Any, axis_name: AxisName) -> Any:
    """Returns the values, with those that are kept by rank in a `PerRank`."""
    if values is None:
        return None

    def wrap(kind, value):
        # No paths of parameters: so they are sharded over the ranks only, and
        # `sparsejax.resized` averages those that are floating.
        return PerRank(value, axis_name, paths=()) if kind == "by_rank" else value

    try:
        return jax.tree.map(wrap, kinds, values)
    except ValueError as error:
        raise ArgumentError(
            "variables, as given to sparsejax.data_parallel, must be a tree like those "
            f"given to trainer.init, or a prefix of one: {error}"
        ) from None


def copied(x: jax.Array) -> jax.Array:
    """Returns a copy that is not weakly typed, so that later steps keep its dtype."""
    return jnp.array(x, dtype=x.dtype, copy=True)


def first(values: Any, wire: Wire) -> Any:
    """Copies wrapped values; adds a leading rank axis to those that are kept by rank."""

    def one(node):
        if not isinstance(node, PerRank):
            return copied(node)
        return node.with_value(jax.tree.map(lambda x: wire.per_rank(x[None]), node.value))

    return jax.tree.map(one, values, is_leaf=_is_per_rank)


def check_ranks(variables: Any, ranks: int) -> None:
    """Raises if variables were kept by another number of ranks."""
    nodes = jax.tree_util.tree_leaves_with_path(variables, is_leaf=_is_per_rank)
    for path, node in nodes:
        held = node.value if isinstance(node, PerRank) else ()
        for below, leaf in jax.tree_util.tree_leaves_with_path(held):
            if leaf.shape[0] != ranks:
                raise StateError(
                    f"the variable {tree.named((*path, *below))!r} is kept by "
                    f"{leaf.shape[0]} ranks, and there are {ranks}: sparsejax.resized("
                    "state, like=trainer.init(params, ...)) gives each of them the average."
                )


def given(variables: Any, wire: Wire) -> Any:
    """Returns the variables in the form that is passed to the loss function.

    Floating ones are cast to varying over the ranks, like values computed from them.
    """

    def one(node):
        if isinstance(node, PerRank):
            return jax.tree.map(lambda x: x[0], node.value)
        return wire.per_rank(node) if _is_floating(node) else node

    return jax.tree.map(one, variables, is_leaf=_is_per_rank)


def merged(variables: Any, new: Any, share: Share) -> Any:
    """Returns the next variables, reduced over the ranks.

    Args:
        variables: The variables in the state, on this rank.
        new: The variables that the loss function returned.
        share: The share of this rank in means.
    """
    old = given(variables, share.wire)
    _check_alike(old, new)
    new = jax.tree.structure(old).unflatten(jax.tree.leaves(new))

    paths, leaves, _ = tree.flatten(new)
    for path, leaf in zip(paths, leaves, strict=True):
        share.require_same_elsewhere(f"the variable {path!r} that loss_fn returns", leaf)

    def kept(old, new):
        return share.wire.per_rank(share.own(new, old)[None])

    def one(path, node, old, new):
        if isinstance(node, PerRank):
            return node.with_value(jax.tree.map(kept, old, new))
        return _averaged(tree.named(path), node, new, share)

    return jax.tree_util.tree_map_with_path(one, variables, old, new, is_leaf=_is_per_rank)


def _averaged(path, old, new, share):
    if _is_floating(new):
        return share.of_all(new, old)
    if axes.varying_axes(new):
        raise ArgumentError(
            f"the variable {path!r} is {new.dtype}, which has no mean, and it differs by "
            "rank. Keep it by rank, sparsejax.data_parallel(..., variables='by_rank') or a "
            "tree that says it of this one; or compute it from what all ranks share."
        )
    return new


def kinds_of(arrays: Any) -> dict[str, str]:
    """Returns the dtype and shape of each array of a tree, as text, by path."""
    paths, leaves, _ = tree.flatten(arrays)
    kinds = (f"{jnp.result_type(x)}{list(jnp.shape(x))}" for x in leaves)
    return dict(zip(paths, kinds, strict=True))


def _check_alike(old, new):
    """Raises unless the loss function returned variables of the same paths and types."""
    was, now = kinds_of(old), kinds_of(new)
    for path in sorted(was.keys() | now.keys()):
        if was.get(path) != now.get(path):
            raise ArgumentError(
                f"the variable {path!r} was {was.get(path, 'not there')} when loss_fn was "
                f"given it, and is {now.get(path, 'not there')} among those it returned. "
                "Return all variables that are given, of the same shapes and dtypes: "
                "changed, or as they are."
            )


def _is_per_rank(node):
    return isinstance(node, PerRank)


def _is_floating(x):
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def keywords(state: Any, wire: Wire) -> dict[str, Any]:
    """Returns the keyword arguments of the loss function, those that the state has.

    Args:
        state: The `TrainState`.
        wire: The wire.
    """
    found = {}
    if state.variables is not None:
        found["variables"] = given(state.variables, wire)
    if state.key is not None:
        found["key"] = state.key_of(wire)
    return found
