"""Parameters that are sharded among the ranks: each rank trains its shard.

The gradient of a shard is complete on its rank: the loss has summed those of all ranks. So
nothing is left to send, and a synchronization only divides it by the number of ranks, if it
averages. The optimizer's state for it is sharded like it. Such a parameter is a node of the
tree with its own type, `Sharded`, and so are its gradient and its state in optimizers.
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
    """A node of a tree of parameters, gradients or states that is sharded among the ranks.

    Attributes:
        value: The array, or its gradient or state.
        axis_name: The mesh axis, or axes, of the ranks.
    """

    value: Any
    axis_name: AxisName

    @abc.abstractmethod
    def specs(self, path: str = "") -> Any:
        """Returns the node with a PartitionSpec for each of its arrays.

        Raises if an array is not a shard of a whole array as the ranks divide it.

        Args:
            path: The path of the node, for the message.
        """

    @abc.abstractmethod
    def with_weight(self, weight: jax.Array) -> Any:
        """Returns the node for a loss whose gradient has this weight on this rank."""

    @property
    @abc.abstractmethod
    def is_sent(self) -> bool:
        """Whether the ranks have exchanged this gradient, so that each has its shard."""

    @abc.abstractmethod
    def check_ranks(self, path: str, ranks: int) -> None:
        """Raises if the whole array cannot be sharded among `ranks` ranks."""

    @abc.abstractmethod
    def for_ranks(self, ranks: int) -> Any:
        """Returns the shapes and dtypes of the node's whole arrays for `ranks` ranks."""

    @abc.abstractmethod
    def fitted(self, x: Any, shape: Sequence[int]) -> Any:
        """Pads or cuts a whole NumPy array of the node to its shape for other ranks."""


def is_sharded(node: Any) -> bool:
    """Returns whether a node of a tree is sharded among the ranks."""
    return isinstance(node, Sharded)


class Apart(NamedTuple):
    """A tree split into its sharded nodes and the rest.

    Attributes:
        rest: The tree with an `optax.MaskedNode` in place of each sharded node.
        paths: The paths of the sharded nodes.
        nodes: The sharded nodes.
        places: Their positions among the leaves of `structure`.
        structure: The structure of the whole tree, in which sharded nodes are leaves.
    """

    rest: Any
    paths: list[str]
    nodes: list[Any]
    places: list[int]
    structure: Any

    def together(self, rest: Any, nodes: Sequence[Any]) -> Any:
        """Merges a tree like `rest` and nodes like `nodes` into one like the whole tree."""
        if not self.places:
            return rest
        leaves = self.structure.flatten_up_to(rest)
        for at, node in zip(self.places, nodes, strict=True):
            leaves[at] = node
        return self.structure.unflatten(leaves)


def apart(given: Any) -> Apart:
    """Splits a tree into the nodes that are sharded among the ranks and the rest."""
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
    """Returns the paths, as of `tree.flatten`, of the leaves inside sharded nodes."""
    paths, _, _ = tree.flatten(given, rows=True)
    flags = jax.tree.map(_flags, given, is_leaf=_stops)
    return [path for path, flag in zip(paths, jax.tree.leaves(flags), strict=True) if flag]


def flags(given: Any) -> Any:
    """Returns a tree of booleans: whether each leaf is inside a sharded node."""
    return jax.tree.map(_flags, given, is_leaf=_stops)


def _stops(node):
    return is_sharded(node) or tree.is_sparse(node) or is_row_grads(node)


def _flags(node):
    if not is_sharded(node):
        return False
    return jax.tree.map(lambda _: True, node, is_leaf=is_row_grads)


def synchronized(path: str, node: Any, wire: Wire, mean: bool) -> Any:
    """Returns the gradient of a shard, divided by the ranks for a mean; sends nothing.

    Args:
        path: The node's path.
        node: The gradient of this rank's shard: a sum over the ranks already.
        wire: The ranks of the synchronization.
        mean: Whether the synchronization averages.
    """
    require_sent({path: node}, "a synchronization")
    check_axis(path, node, wire.axis)

    def one(leaf):
        if is_row_grads(leaf):
            leaf.check(path)
            rows = wire.mean_of(leaf.rows, mean)
            # All ranks have gathered the same ids.
            return RowGrads.marked(wire.assume_same(leaf.ids), rows, leaf.shape)
        return wire.mean_of(leaf, mean)

    return jax.tree.map(one, node, is_leaf=is_row_grads)


def check_axis(path: str, node: Any, axis: AxisName) -> None:
    """Raises unless a gradient is that of a shard over the synchronized axis."""
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
    """Returns for each sharded gradient whether the ranks have exchanged it."""
    return [node.is_sent for node in apart(given).nodes]


def require_sent(given: Any, what: str) -> None:
    """Raises if a gradient is given to `what` which only `embrace_sync` can exchange.

    Args:
        given: The gradients.
        what: The transformation that was given them, for the message.
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
    """Raises if a tree has a node that is sharded among the ranks."""
    found = apart(given)
    if found.places:
        raise ArgumentError(
            f"{what}: {found.paths[0]!r} is a table that is sharded over the ranks, {why}"
        )
