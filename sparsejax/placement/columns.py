"""Checks that a chain combines no columns of a table that is sharded among the ranks.

Each rank holds some columns, so a norm that it takes of a table, as LAMB and clipping by
the global norm do, is another one on each rank, and on none that of the whole table. The
program of an update is interpreted: the value of an array is the axes along which it has
columns of this rank, and the equation that reduced such axes, if one did. Nothing is
refused that is not known to be wrong: what an unknown equation returns is taken to have no
columns, and what a collective has made equal on all ranks depends on none.
"""

import math
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import PartitionSpec

from sparsejax import axes
from sparsejax.errors import ArgumentError
from sparsejax.state import sharded, tree
from sparsejax.state.per_rank import PerRank
from sparsejax.tracing import programs
from sparsejax.tracing.interpreter import Domain, interpret
from sparsejax.wire.collectives import Wire


class _Columns(NamedTuple):
    """What an array has of the columns that this rank holds.

    Attributes:
        axes: The axes along which it has them; several, where a reshape may have divided
            them.
        table: The path of their table; "" if there is none.
        why: The equation that combined columns on which the array depends, or None.
    """

    axes: frozenset[int] = frozenset()
    table: str = ""
    why: str | None = None


_NONE = _Columns()


def check_by_column(
    tx: optax.GradientTransformation, grads: Any, state: Any, params: Any
) -> None:
    """Raises if an update depends on a reduction over a table's columns of one rank.

    It is called inside `shard_map`, with types that are checked.

    Args:
        tx: The chain.
        grads: The gradients.
        state: The state.
        params: The parameters.
    """
    nodes = sharded.apart(params).nodes
    split = [node for node in nodes if Wire(node.axis_name).ranks > 1]
    if not split:
        return
    names = frozenset(name for node in split for name in axes.axis_names(node.axis_name))

    def update(grads, state, params):
        return optax.with_extra_args_support(tx).update(grads, state, params)

    given = grads, state, params
    program, made = jax.make_jaxpr(update, return_shape=True)(*given)
    values = interpret(program, _OfColumns(names), _inputs(given))
    pairs, _ = jax.tree_util.tree_flatten_with_path(made)
    for (keys, _), value in zip(pairs, values, strict=True):
        if value.why is None:
            continue
        path = tree.named(keys[1:])
        what = "the optimizer's state at" if keys[0].idx else "the update of"
        raise ArgumentError(
            f"{what} {path!r} depends on what {value.why} computes over columns of the "
            f"table {value.table!r}, of which each rank holds its own (ColumnTable): it "
            "would be another number on each rank, and on none that of the whole table. "
            "Give such tables an optimizer that looks at each number alone, as optax.adam, "
            "optax.adagrad and optax.clip do, and this one to the other leaves, by "
            "optax.partition; or keep the table whole on each rank (an array, and "
            "sparsejax.lookup)."
        )


def _inputs(given):
    """Returns the value of each leaf of gradients, state and parameters."""
    is_leaf = lambda node: isinstance(node, PerRank) or sharded.is_sharded(node)
    found = []
    for keys, node in jax.tree_util.tree_leaves_with_path(given, is_leaf=is_leaf):
        if not sharded.is_sharded(node):
            found += [_NONE] * len(jax.tree.leaves(node))
            continue
        path, own = tree.named(keys[1:]), {*axes.axis_names(node.axis_name)}
        is_spec = lambda x: isinstance(x, PartitionSpec)
        for spec in jax.tree.leaves(node.specs(path), is_leaf=is_spec):
            parts = enumerate(axes.axis_names(part or ()) for part in spec)
            of = frozenset(at for at, part in parts if own & {*part})
            found.append(_Columns(of, path if of else ""))
    return found


class _OfColumns(Domain[_Columns]):
    """The domain in which the value of an array is what it has of columns.

    Args:
        names: The mesh axes among which tables are sharded.
    """

    def __init__(self, names: frozenset[str]):
        self.names = names

    def constant(self, x):
        return _NONE

    def other(self, eqn, given):
        return [self._typed(v, _after(eqn, given, v)) for v in eqn.outvars]

    def call(self, eqn, given):
        made, before = super().call(eqn, given), {value.why for value in given}
        here = programs.named(eqn)
        if not here.startswith("optax."):
            return made
        # A function that several transformations share has the line of its first call.
        return [x if x.why in before else x._replace(why=here) for x in made]

    def joined(self, eqn, v, index, sides):
        of = frozenset().union(*(side.axes for side in sides))
        return self._typed(v, _together([index, *sides])._replace(axes=of))

    def _typed(self, v, value):
        """Returns the value of a variable; what is equal on all ranks has no columns."""
        varies = hasattr(v.aval, "manual_axis_type") and programs.varying(v.aval)
        return value if varies and varies & self.names else _NONE


def _together(given):
    """Returns what an array depends on that is computed from others, without its axes."""
    combined = next((value for value in given if value.why), _NONE)
    table = next((value.table for value in given if value.table), "")
    return _Columns(frozenset(), combined.table or table, combined.why)


def _after(eqn, given, v):
    """Returns the value of an output of an equation that runs no known program."""
    value, name = _together(given), eqn.primitive.name
    if not any(x.axes for x in given):
        return value
    if name in programs.BY_NUMBER:
        return value._replace(axes=frozenset().union(*(x.axes for x in given)))
    rule = _RULES.get(name)
    if rule is None:
        return value
    left = rule(eqn, [x.axes for x in given], v)
    if left or value.why:
        return value._replace(axes=left)
    # All axes along which there were columns are reduced.
    reduced = name in _REDUCTIONS
    return value._replace(why=programs.named(eqn)) if reduced else value


def _without(of, gone):
    """Returns axes after some axes are taken away."""
    return frozenset(at - sum(g < at for g in gone) for at in of if at not in gone)


def _product(eqn, given, v):
    """Returns the axes of columns of a `dot_general`."""
    contracted, batched = eqn.params["dimension_numbers"]
    found, begin = set(), len(batched[0])
    pairs = zip(given, contracted, batched, eqn.invars, strict=True)
    for of, over, batch, operand in pairs:
        found |= {k for k, at in enumerate(batch) if at in of}
        free = [at for at in range(operand.aval.ndim) if at not in (*over, *batch)]
        found |= {begin + k for k, at in enumerate(free) if at in of}
        begin += len(free)
    return frozenset(found)


def _reshaped(eqn, given, v):
    """Returns the axes of columns after a reshape: all that may have a part of them."""
    old, new, found = eqn.invars[0].aval.shape, v.aval.shape, set()
    if eqn.params.get("dimensions") is not None or 0 in old:
        return frozenset()
    i = j = 0
    while i < len(old) and j < len(new):
        # The shortest runs of axes in both shapes that have equally many elements.
        end, to = i + 1, j + 1
        while (before := math.prod(old[i:end])) != (after := math.prod(new[j:to])):
            end, to = (end + 1, to) if before < after else (end, to + 1)
        if given[0] & {*range(i, end)}:
            found |= {*range(j, to)}
        i, j = end, to
    return frozenset(found)


def _broadcast(eqn, given, v):
    places = enumerate(eqn.params["broadcast_dimensions"])
    shape = eqn.invars[0].aval.shape
    same = {to for at, to in places if at in given[0] and v.aval.shape[to] == shape[at]}
    return frozenset(same)


# Those of flags are left out: `lazy` asks of its columns whether a row is to catch up.
_REDUCTIONS = {
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin"),
    "dot_general",
}

_RULES = {
    **dict.fromkeys(
        _REDUCTIONS, lambda eqn, given, v: _without(given[0], eqn.params["axes"])
    ),
    "dot_general": _product,
    "reshape": _reshaped,
    "broadcast_in_dim": _broadcast,
    "transpose": lambda eqn, given, v: frozenset(
        k for k, at in enumerate(eqn.params["permutation"]) if at in given[0]
    ),
    "squeeze": lambda eqn, given, v: _without(given[0], eqn.params["dimensions"]),
    **dict.fromkeys(("slice", "dynamic_slice"), lambda eqn, given, v: given[0]),
}
