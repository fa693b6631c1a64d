"""Derives the order in which a loss uses its parameters from its traced program.

A parameter is used where it is first combined with data: values that depend on the batch,
or on parameters that were used. Casts, transpositions and combinations with other
parameters are no use: a cast of all parameters at the beginning of a loss does not
determine the order. The programs inside equations are followed as by `sparsejax.tracing`,
and those of scans; any other equation with a program uses all its inputs at once.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from sparsejax.embrace.horizontal import blocks
from sparsejax.state import sharded, tree
from sparsejax.tracing import programs
from sparsejax.tracing.interpreter import Domain, interpret


@dataclasses.dataclass(frozen=True)
class _ArrayUse:
    """The facts about an array.

    Attributes:
        data: Whether it depends on data.
        of: The numbers of the parameters on which it depends and that are not used yet.
    """

    data: bool = False
    of: frozenset[int] = frozenset()

    def joined(self, other: "_ArrayUse") -> "_ArrayUse":
        data = self.data or other.data
        return _ArrayUse(data, frozenset() if data else self.of | other.of)


def find_order(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    order: blocks.Order | Callable[..., blocks.Order] | None = None,
    at_once: Sequence[str] = (),
    **kwargs: Any,
) -> tuple[str | tuple[str, ...], ...]:
    """Finds the order in which a loss first uses the blocks of a model.

    The result is an `order` for `horizontal`, which you can read and change. Call it where
    the loss can be traced: inside `shard_map`, if the loss communicates. `data_parallel`
    calls it for a `horizontal` without an order.

    Args:
        loss_fn: The loss, which is called with `(params, *args, **kwargs)`.
        params: The parameters, or their shapes and dtypes.
        *args: Further arguments, such as a batch.
        order: The blocks, as for `horizontal`, in any order. If None, those that
            `horizontal` finds from paths.
        at_once: See `horizontal`.
        **kwargs: Further keyword arguments.

    Returns:
        The blocks in order, each a path prefix or a tuple of them.

    Example:
        >>> sparsejax.embrace.find_order(loss_fn, params, batch)
        ('embed', 'layers/0', 'layers/1', 'head')
    """
    paths, _, _ = tree.flatten(sharded.apart(params).rest, "find_order")
    now = blocks.among(at_once, paths, "at_once")
    cut = blocks.cut([p for p, out in zip(paths, now, strict=True) if not out], order)
    used = uses(loss_fn, params, *args, **kwargs)
    place = {path: at for at, path in enumerate(used)}
    cut = sorted(cut, key=lambda block: min(place[path] for path in block.paths))
    names = [tuple(block.name.split(", ")) for block in cut]
    return tuple(name[0] if len(name) == 1 else name for name in names)


def uses(loss_fn: Callable[..., Any], params: Any, *args: Any, **kwargs: Any) -> list[str]:
    """Returns the paths of the parameters in the order in which a loss first uses them.

    Parameters that it does not use come last. Parameters that one equation uses are in the
    order of the tree.
    """
    shards = sharded.apart(params)
    paths, leaves, structure = tree.flatten(shards.rest, "find_order")
    leaves = [
        leaf if isinstance(leaf, Tracer) else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for leaf in leaves
    ]

    def loss(leaves, args, kwargs):
        whole = shards.together(structure.unflatten(leaves), shards.nodes)
        return loss_fn(whole, *args, **kwargs)

    traced = jax.make_jaxpr(loss)(leaves, args, kwargs)
    first: dict[int, int] = {}
    rest = len(traced.jaxpr.invars) - len(leaves)
    given = [_ArrayUse(of=frozenset([i])) for i in range(len(leaves))]
    interpret(traced, _FirstUse(first), [*given, *[_ArrayUse(data=True)] * rest])
    order = sorted(range(len(paths)), key=lambda i: (first.get(i, len(first)), i))
    return [paths[i] for i in order]


class _FirstUse(Domain[_ArrayUse]):
    """The domain in which the value of an array is an `_ArrayUse`.

    Args:
        first: The position of each parameter in the order of uses, to be filled in; if
            None, uses are not recorded.
    """

    def __init__(self, first: dict[int, int] | None):
        self.first = first

    def constant(self, x):
        # A traced array over which a loss closes belongs to the same computation: data.
        return _ArrayUse(data=isinstance(x, Tracer))

    def other(self, eqn, given):
        value = _joined(given)
        if value.data:
            self._note(given)
        return [value] * len(eqn.outvars)

    def joined(self, eqn, v, index, sides):
        return _joined([index, *sides] if index.data else sides)

    def scan(self, eqn, given):
        """Iterates until the carry is stable: it is data in all turns if it is in one."""
        (body,) = programs.programs(eqn)
        start, end = programs.scan_split(eqn)
        silent = _FirstUse(None)
        while True:
            made = interpret(body, silent, given)
            after = [
                x.joined(y)
                for x, y in zip(given[start:end], made[: end - start], strict=True)
            ]
            again = [*given[:start], *after, *given[end:]]
            if again == given:
                return interpret(body, self, given)
            # A parameter in the carry that is combined with data in a later turn is used.
            self._note(
                [old for old, new in zip(given[start:end], after, strict=True) if new.data]
            )
            given = again

    def _note(self, given):
        if self.first is None:
            return
        for leaf in sorted(frozenset().union(*(value.of for value in given))):
            self.first.setdefault(leaf, len(self.first))


def _joined(values):
    joined = _ArrayUse()
    for value in values:
        joined = joined.joined(value)
    return joined
