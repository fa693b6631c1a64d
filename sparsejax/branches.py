"""Branches, where a program goes on in one of several ways, inside `jax.shard_map`.

`lax.cond` and `lax.switch` want results of equal types on all sides. A type says over which
mesh axes a value varies (`pallas_kernels.types`), and sides differ in that where one of
them sends: `cond` and `switch` make all results vary over the axes of any side's. What
stands around a branch is here, too: `together` holds arrays until all are computed, and
`at_number` takes one of several.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jax_core

from pallas_kernels.types import as_varying, varying_axes, without_types


def cond(
    predicate: jax.Array, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any
) -> Any:
    """`lax.cond` whose sides may differ in the mesh axes over which their results vary.

    The predicate must be equal on all ranks if either side sends anything.
    """
    # Each side is traced once: choices lie within choices, and would be traced twice at
    # each level if a side were asked for its types first and traced again for `lax.cond`.
    of_yes = jax.make_jaxpr(yes, return_shape=True)(*operands)
    of_no = jax.make_jaxpr(no, return_shape=True)(*operands)
    (yes, no), taken = _of_one_type([of_yes, of_no])
    return taken(lax.cond(predicate, yes, no, *operands))


def switch(number: jax.Array, sides: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """`lax.switch` whose sides may differ in the mesh axes over which their results vary.

    The number must be equal on all ranks if any side sends anything.
    """
    traced = [jax.make_jaxpr(side, return_shape=True)(*operands) for side in sides]
    sides, taken = _of_one_type(traced)
    return taken(lax.switch(number, sides, *operands))


def _of_one_type(traced):
    """The sides of a choice, with results that vary over all axes that any side's do.

    Args:
        traced: Of each side the program, and the shapes of its results.

    Returns:
        The sides, and from what one of them returns to its results.
    """
    shapes = [shape for _, shape in traced]
    union = lambda *results: frozenset[str]().union(*map(varying_axes, results))
    types = jax.tree.map(union, *shapes)

    structure = jax.tree.structure(shapes[0])
    together = _together(jax.tree.leaves(shapes[0]), jax.tree.leaves(types))

    def typed(program):
        def run(*operands):
            leaves = jax_core.jaxpr_as_fun(program)(*jax.tree.leaves(operands))
            leaves = map(as_varying, leaves, jax.tree.leaves(types))
            return _stacked(list(leaves), together)

        return run

    taken = lambda done: jax.tree.unflatten(structure, _unstacked(done, together))
    return [typed(program) for program, _ in traced], taken


def _together(shapes: list[Any], types: list[Any]) -> list[list[int]]:
    """Which results of a choice are returned as one array: numbers of one type.

    On GPUs each number that a branch returns is a kernel of its own, and all of them, as
    one array, are one.
    """
    groups: dict[Any, list[int]] = {}
    for i, (shape, type_) in enumerate(zip(shapes, types, strict=True)):
        groups.setdefault(i if shape.shape else (shape.dtype, type_), []).append(i)
    return list(groups.values())


def _stacked(leaves, together):
    """The results by groups, several numbers as one array."""
    groups = [[leaves[i] for i in group] for group in together]
    return [jnp.stack(group) if len(group) > 1 else group[0] for group in groups]


def _unstacked(groups, together):
    """Inverse of `_stacked`."""
    leaves = {}
    for numbers, group in zip(groups, together, strict=True):
        alone = len(group) == 1
        leaves |= {i: numbers if alone else numbers[k] for k, i in enumerate(group)}
    return [leaves[i] for i in sorted(leaves)]


def together(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays, none before all are there; each varies over the axes that it did."""
    found = lax.optimization_barrier(arrays)
    extra = [varying_axes(y) - varying_axes(x) for x, y in zip(arrays, found, strict=True)]
    return list(map(without_types, found, extra))


def at_number(x: jax.Array, number: Any) -> jax.Array:
    """x[number], of a number that is known to be in range: no test is compiled."""
    return lax.dynamic_index_in_dim(x, number, keepdims=False, allow_negative_indices=False)
