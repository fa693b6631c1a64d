"""Conditionals inside `jax.shard_map`, whose branches may differ in varying axes.

`lax.cond` and `lax.switch` require results of equal types from all branches. A type says
over which mesh axes a value varies (`pallas_kernels.types`), and branches differ in that if
one of them has a collective: `cond` and `switch` here make each result vary over the union
of its axes in all branches, and give it the first sharding by Explicit axes that it has in
any. Four helpers are here, too: `together` is an optimization barrier, `at_number` indexes
without a test of the range, `alone` prevents a fusion by a branch that is always taken, and
`hidden` makes kernels equal by such a branch.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jax_core

from pallas_kernels.platforms import by_platform, policy
from pallas_kernels.types import as_varying, varying_axes, without_types


# The number of arrays of a kind from which on their numbers are `hidden`: the branch takes
# about as long to compile as a few kernels.
_ALIKE = 8


def cond(
    predicate: jax.Array, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any
) -> Any:
    """Calls `lax.cond`; the branches may differ in the axes over which results vary.

    The predicate must be equal on all ranks if either branch has a collective.
    """
    # Each branch is traced once. Conditionals are nested: if a branch were traced for its
    # types and again by `lax.cond`, the number of traces would double at each level.
    of_yes = jax.make_jaxpr(yes, return_shape=True)(*operands)
    of_no = jax.make_jaxpr(no, return_shape=True)(*operands)
    (yes, no), unpack = _of_one_type([of_yes, of_no])
    return unpack(lax.cond(predicate, yes, no, *operands))


def switch(number: jax.Array, sides: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Calls `lax.switch`; the branches may differ in the axes over which results vary.

    The number must be equal on all ranks if any branch has a collective.
    """
    traced = [jax.make_jaxpr(side, return_shape=True)(*operands) for side in sides]
    sides, unpack = _of_one_type(traced)
    return unpack(lax.switch(number, sides, *operands))


def _of_one_type(traced):
    """Wraps traced branches so that their results have equal types.

    Args:
        traced: For each branch its jaxpr and the shapes of its results.

    Returns:
        The branches, each result of which varies over the union of its axes in all of
        them, and a function from what such a branch returns to the pytree of results.
    """
    shapes = [shape for _, shape in traced]
    union = lambda *results: frozenset[str]().union(*map(varying_axes, results))
    types = jax.tree.map(union, *shapes)
    of_each = zip(*(program.out_avals for program, _ in traced), strict=True)
    shardings = list(map(_first_sharding, of_each))
    structure = jax.tree.structure(shapes[0])
    groups = _groups(jax.tree.leaves(shapes[0]), jax.tree.leaves(types))

    def typed(program):
        def run(*operands):
            leaves = jax_core.jaxpr_as_fun(program)(*jax.tree.leaves(operands))
            leaves = map(as_varying, leaves, jax.tree.leaves(types))
            pairs = zip(leaves, shardings, strict=True)
            leaves = [x if to is None else jax.reshard(x, to) for x, to in pairs]
            return _stacked(leaves, groups)

        return run

    unpack = lambda done: jax.tree.unflatten(structure, _unstacked(done, groups))
    return [typed(program) for program, _ in traced], unpack


def _first_sharding(types):
    """Returns the first sharding of a result by Explicit axes, in any branch, or None."""
    shardings = [x.sharding for x in types]
    return next((x for x in shardings if any(part for part in x.spec)), None)


def _groups(shapes: list[Any], types: list[Any]) -> list[list[int]]:
    """Groups the results that branches return as one array: scalars of one type.

    On GPUs each scalar that a branch returns takes a kernel; stacked, they take one.

    Args:
        shapes: The shapes and dtypes of the results.
        types: For each result the axes over which it varies.

    Returns:
        For each group the positions of its results.
    """
    groups: dict[Any, list[int]] = {}
    for i, (shape, type_) in enumerate(zip(shapes, types, strict=True)):
        groups.setdefault(i if shape.shape else (shape.dtype, type_), []).append(i)
    return list(groups.values())


def _stacked(leaves, groups):
    """Returns one array for each group; a group of several scalars is stacked."""
    arrays = [[leaves[i] for i in group] for group in groups]
    return [jnp.stack(group) if len(group) > 1 else group[0] for group in arrays]


def _unstacked(arrays, groups):
    """Returns the results in order, the inverse of `_stacked`."""
    leaves = {}
    for array, group in zip(arrays, groups, strict=True):
        alone = len(group) == 1
        leaves |= {i: array if alone else array[k] for k, i in enumerate(group)}
    return [leaves[i] for i in sorted(leaves)]


def together(*arrays: jax.Array) -> list[jax.Array]:
    """Returns the arrays behind an optimization barrier: none is used before all are ready.

    The barrier makes each vary over the axes of all; that is undone.
    """
    found = lax.optimization_barrier(arrays)
    extra = [varying_axes(y) - varying_axes(x) for x, y in zip(arrays, found, strict=True)]
    return list(map(without_types, found, extra))


def at_number(x: jax.Array, number: Any) -> jax.Array:
    """Returns x[number] for a number in range; no test of its sign is compiled."""
    return lax.dynamic_index_in_dim(x, number, keepdims=False, allow_negative_indices=False)


def alone(
    count: jax.Array, function: Callable[[], Any], choose: Callable[..., Any] = lax.cond
) -> Any:
    """Calls a function whose kernels are its own, where XLA:CPU would fuse it.

    XLA:CPU fuses a gather with the computation of its indices and with the uses of its
    result into one loop. No part of that loop is vectorized, and an entry takes 50 ns,
    where it takes 5 ns in three loops. An index that is used twice is computed twice, from
    arrays that are kept for it, and an array that is read in several such loops is copied
    before it is written. A branch that is always taken prevents the fusion: XLA cannot
    infer that a count is never negative.

    Args:
        count: A traced number that is never negative.
        function: A function without arguments that returns arrays.
        choose: The `cond` to use; that of this module if arrays may vary over mesh axes.
    """
    like = jax.eval_shape(function)
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    return choose(count >= 0, function, zeros)


def alone_on_cpus(
    count: jax.Array, function: Callable[[], Any], choose: Callable[..., Any] = lax.cond
) -> Any:
    """Applies `alone` on CPUs; on other platforms it just calls the function."""
    return by_platform(cpu=lambda: alone(count, function, choose), default=function)


def hidden(
    numbers: np.ndarray, kinds: Sequence[Any], data: Callable[[], jax.Array]
) -> list[Any]:
    """Returns numbers of arrays; on CPUs not as constants where many arrays are alike.

    XLA:CPU compiles equal kernels once, and kernels that differ in a constant one by one.
    With hundreds of leaves of a few shapes, constants such as the place of a leaf in its
    bucket took most of the time to compile a step. Here they are results of a branch that
    is always taken, which XLA does not treat as constants.

    Args:
        numbers: A number of each array.
        kinds: The kind of each array: the kernels of one kind differ in `numbers` alone.
        data: A function that returns an integer of the data of a step, of any value.

    Returns:
        The numbers: as scalars of a branch where a kind has many arrays, else NumPy's.
    """
    found, times = list(numbers), Counter(kinds)
    many = [i for i, kind in enumerate(kinds) if times[kind] >= _ALIKE]
    if many and not policy().at_once:
        shown = tuple(jnp.asarray(found[i]) for i in many)
        others = tuple(map(jnp.zeros_like, shown))
        given = data()
        always = without_types((given | 1) != 0, varying_axes(given))
        numbers_of = lax.cond(always, lambda: shown, lambda: others)
        for i, number in zip(many, numbers_of, strict=True):
            found[i] = number
    return found
