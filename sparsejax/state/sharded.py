"""Parameters that are sharded among the ranks: each has a part, and all its gradient.

The gradient of such a part is complete where it is: the loss has added up those of all
ranks. Nothing is left to be synchronized, and a synchronization only divides it by the
number of ranks, where it averages. An optimizer's state of it is sharded like it. Such a
parameter is a node of the tree, of a type of its own, and so are its gradient and what
optimizers keep of it: the type tells.
"""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax

from sparsejax import axes
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError, StateError
from sparsejax.state import tree
from sparsejax.units.row_grads import RowGrads, is_row_grads
from sparsejax.wire.collectives import Wire


class Sharded(abc.ABC):
    """A node of a tree of parameters, gradients or states, of which ranks hold parts.

    Attributes:
        value: The array, or the gradient or state of it.
        axis_name: The mesh axis of the ranks, or axes.
    """

    value: Any
    axis_name: AxisName

    @abc.abstractmethod
    def specs(self, path: str = "") -> Any:
        """The node with a PartitionSpec for each of its arrays.

        Raises where an array is no part of a whole one, as ranks share it out.

        Args:
            path: Where the node is, for the message.
        """

    @abc.abstractmethod
    def with_weight(self, weight: jax.Array) -> Any:
        """The node as a loss is given it whose gradient counts by a factor on this rank."""

    @property
    @abc.abstractmethod
    def is_sent(self) -> bool:
        """Whether, if it is a gradient, each rank has been sent its part."""

    @abc.abstractmethod
    def check_ranks(self, path: str, ranks: int) -> None:
        """Raises where the whole array cannot be sharded among `ranks` ranks."""

    @abc.abstractmethod
    def for_ranks(self, ranks: int) -> Any:
        """The shapes and dtypes of the node's whole arrays for `ranks` ranks."""

    @abc.abstractmethod
    def fitted(self, x: Any, shape: Sequence[int]) -> Any:
        """A whole NumPy array of such a node as one of the shape for other ranks."""


def is_sharded(node: Any) -> bool:
    """Whether a node of a tree is sharded among the ranks."""
    return isinstance(node, Sharded)


class Apart(NamedTuple):
    """A tree without its nodes that are sharded, and these.

    Attributes:
        rest: The tree, an `optax.MaskedNode` in place of each.
        paths: Their paths.
        nodes: The nodes.
        places: Their numbers among the leaves of the structure.
        structure: Of the whole tree.
    """

    rest: Any
    paths: list[str]
    nodes: list[Any]
    places: list[int]
    structure: Any

    def together(self, rest: Any, nodes: Sequence[Any]) -> Any:
        """The whole tree again, of what was made of both parts."""
        if not self.places:
            return rest
        leaves = self.structure.flatten_up_to(rest)
        for at, node in zip(self.places, nodes, strict=True):
            leaves[at] = node
        return self.structure.unflatten(leaves)


def apart(given: Any) -> Apart:
    """Takes the nodes that are sharded among the ranks out of a tree."""
    is_leaf = lambda x: is_sharded(x) or tree.is_sparse(x) or is_row_grads(x)
    pairs, structure = jax.tree_util.tree_flatten_with_path(given, is_leaf=is_leaf)
    found = [at for at, (_, leaf) in enumerate(pairs) if is_sharded(leaf)]
    if not found:
        return Apart(given, [], [], [], structure)
    paths = [tree.written(keys) for keys in tree.unboxed([keys for keys, _ in pairs])]
    leaves = [optax.MaskedNode() if is_sharded(leaf) else leaf for _, leaf in pairs]
    nodes = [pairs[at][1] for at in found]
    rest = structure.unflatten(leaves)
    return Apart(rest, [paths[at] for at in found], nodes, found, structure)


def paths_of(given: Any) -> list[str]:
    """The paths of the leaves in nodes that are sharded, as `tree.flatten` has them."""
    paths, _, _ = tree.flatten(given, rows=True)
    flags = jax.tree.map(_flags, given, is_leaf=_stops)
    return [path for path, flag in zip(paths, jax.tree.leaves(flags), strict=True) if flag]


def flags(given: Any) -> Any:
    """A tree of booleans: whether each leaf is inside a node that is sharded."""
    return jax.tree.map(_flags, given, is_leaf=_stops)


def _stops(node):
    return is_sharded(node) or tree.is_sparse(node) or is_row_grads(node)


def _flags(node):
    if not is_sharded(node):
        return False
    return jax.tree.map(lambda _: True, node, is_leaf=is_row_grads)


def synchronized(path: str, node: Any, wire: Wire, mean: bool) -> Any:
    """The gradient of a part as a synchronization returns it: nothing is sent.

    Args:
        path: The node's path.
        node: The gradient on this rank: the sum over the ranks.
        wire: The ranks of the synchronization.
        mean: Whether it averages.
    """
    require_sent({path: node}, "a synchronization")
    check_axis(path, node, wire.axis)

    def one(leaf):
        if is_row_grads(leaf):
            leaf.check(path)
            rows = wire.mean_of(leaf.rows) if mean else leaf.rows
            # All ranks have gathered the same ids.
            return RowGrads.marked(wire.assume_same(leaf.ids), rows, leaf.shape)
        return wire.mean_of(leaf) if mean else leaf

    return jax.tree.map(one, node, is_leaf=is_row_grads)


def check_axis(path: str, node: Any, axis: AxisName) -> None:
    """Raises unless a gradient is that of a part, over the axis that is synchronized."""
    own, wanted = set(axes.axis_names(node.axis_name)), set(axes.axis_names(axis))
    if own != wanted:
        raise ArgumentError(
            f"the table {path!r} is sharded over {node.axis_name!r}, and gradients are "
            f"synchronized over {axis!r}: its gradient is the sum over the first alone. "
            f"Make the table with axis_name={axis!r}."
        )
    if not axes.is_checking(axis):
        return
    for leaf in jax.tree.leaves(node.value, is_leaf=is_row_grads):
        if wanted - tree.axes_of(leaf):
            raise StateError(
                f"the gradient of the table {path!r} is the same on all ranks, and each "
                "should have that of its own columns: pass the parameters to "
                "jax.shard_map with sparsejax.state_specs(params) in in_specs and "
                "out_specs."
            )


def are_sent(given: Any) -> list[bool]:
    """Of each gradient that is sharded whether each rank has been sent its part."""
    return [node.is_sent for node in apart(given).nodes]


def require_sent(given: Any, what: str) -> None:
    """Raises where parts of a gradient are still to be sent, and something else is next.

    Args:
        given: The gradients.
        what: What is next.
    """
    found = apart(given)
    for path, node in zip(found.paths, found.nodes, strict=True):
        if not node.is_sent:
            raise ArgumentError(
                f"the gradient of the table {path!r} was taken to be sent by "
                f"sparsejax.embrace_sync(vertical=True), and was given to {what}: let "
                "nothing come between, or around, since what embrace_sync holds back is "
                "for the very next step. Or take embrace_sync(vertical=False), and the "
                "gradient with sparsejax.value_and_grad, which sends it."
            )


def refuse(given: Any, what: str, why: str) -> None:
    """Raises where a tree has a node that is sharded among the ranks."""
    found = apart(given)
    if found.places:
        raise ArgumentError(
            f"{what}: {found.paths[0]!r} is a table that is sharded over the ranks, {why}"
        )
