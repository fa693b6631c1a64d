"""Finds the arrays of an optimizer's state that have rows, and the table of each.

An optax transformation is two functions. The arrays of its state that have a row for each
row of a parameter are found by giving `init` parameters of other heights; the effect of
`update` on a row, and on one whose gradient is zero, is derived from its jaxpr.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

from sparsejax.axes import mesh_of
from sparsejax.errors import ArgumentError
from sparsejax.rows.updates.facts.tables import TableFacts, UpdateWalk
from sparsejax.state import tree
from sparsejax.units.row_grads import is_row_grads


# The fields of optax's states that add up gradients: of MultiSteps, and of apply_every.
_ADDING = ("acc_grads", "grad_acc")
_ACCUMULATE = "sparsejax.accumulate(tx, every=k) around the chain does so for rows"


@dataclasses.dataclass(frozen=True)
class OptimizerLayout:
    """The layout of an optimizer's state for parameters of given shapes.

    Attributes:
        paths: The paths of the parameters.
        tables: The parameters with at least two axes, by their numbers.
        owner: For each leaf of the state, the number of the parameter whose rows it has;
            None if it has no rows.
        counts: The leaves of the state that count steps, and on which catching up depends.
        held: The leaves that only the user changes, and on which catching up depends.
        ticks: All leaves that count steps, which a gradient of the last step needs as they
            were then.
        names: The names of the leaves of the state.
        closes_over: Whether the optimizer closes over arrays on Explicit mesh axes, which
            cannot be used inside a `shard_map`.
    """

    paths: tuple[str, ...]
    tables: dict[int, TableFacts]
    owner: tuple[int | None, ...]
    counts: tuple[int, ...]
    held: tuple[int, ...]
    ticks: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    closes_over: bool = False


def flatten(grads: Any) -> tuple[list[str], list[Any], Any]:
    """Returns the paths, leaves and structure of a tree in which `RowGrads` are leaves.

    A reader and its optimizer find a table by its path, so no other leaf may have it.
    """
    paths, leaves, structure = tree.flatten(grads, rows=True)
    pairs, times = zip(paths, leaves, strict=True), Counter(paths)
    if twice := [path for path, x in pairs if times[path] > 1 and np.ndim(x) > 1]:
        raise ArgumentError(
            f"lazy: two parameters have the path {twice[0]!r}, as 'b' in 'a' and 'a/b' do: "
            "rename one, or its dict."
        )
    return paths, leaves, structure


def shapes(leaves: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of arrays, of `RowGrads`, and of Python numbers."""
    return [jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)) for x in leaves]


def may_be_table(leaf: Any) -> bool:
    """Returns whether a parameter can have a gradient by rows."""
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    return floating and len(leaf.shape) >= 2 and 0 not in leaf.shape


def study(tx: optax.GradientTransformation, grads: Any, params: Any) -> OptimizerLayout:
    """Finds the arrays of an optimizer's state that have rows, and how update treats them.

    Args:
        tx: The optimizer.
        grads: The gradients, of which only shapes and dtypes are used.
        params: The parameters, of which only shapes and dtypes are used.
    """
    paths, leaves, structure = flatten(grads)
    given = shapes(map(as_array, leaves))
    kept = shapes(jax.tree.leaves(params))
    whole = lambda flat: jax.tree.unflatten(structure, flat)
    state = jax.eval_shape(tx.init, whole(kept))
    names = _names(state)
    owner = _owners(tx, kept, whole, jax.tree.leaves(state))
    try:
        program = jax.make_jaxpr(tx.update)(whole(given), state, whole(kept))
    except TypeError as error:
        raise ArgumentError(
            "lazy: the optimizer's update cannot be called with gradients, state and "
            f"parameters alone, as steps are that rows have missed: {error}. Chain what "
            "needs more before lazy(...), or after it where exact=False."
        ) from error
    walk = UpdateWalk(program, owner, kept)
    tables = {}
    for at, leaf in enumerate(kept):
        if may_be_table(leaf):
            own = tuple(j for j, k in enumerate(owner) if k == at)
            table = walk.judged(TableFacts(at, paths[at], own), names)
            ends = tuple(f"{name}/{paths[at]}" for name in _ADDING)
            if adding := [names[j] for j in own if names[j].endswith(ends)]:
                reason = f"{adding[0]} adds up gradients of several steps: {_ACCUMULATE}"
                table = TableFacts(at, paths[at], own, refused=reason)
            every = frozenset() if table.refused else walk.scalars(table)
            scalars = every if table.moves else frozenset()
            traced = table.moves and not table.refused and walk.is_traced(table)
            tables[at] = dataclasses.replace(
                table, scalars=scalars, every=every, traced=traced
            )
    matter = [table.scalars for table in tables.values() if not table.refused]
    matter = sorted(frozenset().union(*matter))
    counts = tuple(j for j in matter if walk.is_count(j))
    held = tuple(j for j in matter if walk.is_held(j))
    for at, table in tables.items():
        others = table.scalars - {*counts, *held}
        if others and not table.refused:
            name = names[min(others)]
            reason = (
                f"{name} of its state is neither a number of steps nor a number that only "
                "you change, so what it was at a step that a row has missed is not known"
            )
            tables[at] = dataclasses.replace(table, replay_refused=reason)
    ticks = tuple(j for j, k in enumerate(owner) if k is None and walk.is_count(j))
    numbers = counts, held, ticks
    closes_over = any(map(_is_explicit, program.consts))
    return OptimizerLayout(tuple(paths), tables, owner, *numbers, tuple(names), closes_over)


def as_array(leaf: Any) -> Any:
    """Returns the shape and dtype of the dense gradient; other leaves unchanged."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_row_grads(leaf) else leaf


def _is_explicit(x):
    """Returns whether a constant of a program is on a mesh with Explicit axes."""
    mesh = mesh_of(x)
    return mesh is not None and AxisType.Explicit in mesh.axis_types


def _names(state):
    pairs = jax.tree_util.tree_leaves_with_path(state)
    return [tree.written(keys) for keys, _ in pairs]


def _owners(tx, kept, whole, state):
    """Finds for each leaf of the state the parameter whose rows it has, or None.

    `init` is evaluated for parameters each of which has a different number of rows added: a
    leaf of the state to which as many rows are added has its rows. So shapes that are equal
    by chance are distinguished.
    """
    higher = [
        jax.ShapeDtypeStruct((x.shape[0] + 1 + at, *x.shape[1:]), x.dtype) if x.shape else x
        for at, x in enumerate(kept)
    ]
    owners = []
    other = jax.tree.leaves(jax.eval_shape(tx.init, whole(higher)))
    for old, new in zip(state, other, strict=True):
        by = new.shape[0] - old.shape[0] if old.shape and new.shape else 0
        fits = 0 < by <= len(kept) and old.shape[1:] == new.shape[1:]
        fits = fits and kept[by - 1].shape[:1] == old.shape[:1]
        owners.append(by - 1 if fits else None)
    return tuple(owners)
