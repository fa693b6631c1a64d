"""What a checkpoint says of a state: its tree, with the type, shape and dtype of each part.

A leaf is an array, or a number or text of Python's. All else is a node, with the name of
its type, its parts by name, and what its type knows and no array says: whether ranks are
averaged, of which leaves thresholds are, how wide a table is without what fills it up.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from sparsejax.axes import axis_names
from sparsejax.errors import ArgumentError
from sparsejax.state import tree
from sparsejax.state.by_owner import ByOwner
from sparsejax.state.pending import Pending
from sparsejax.state.per_rank import PerRank, find
from sparsejax.state.sharded import Sharded
from sparsejax.transforms.exchange import ExchangeState, Reduction


# What depends on the ranks, and `resized` knows how to give to others.
HELD = (ByOwner, PerRank, ExchangeState, Pending, Sharded)

# What Python has that JSON gives back as it was. No subclasses, which it would not.
VALUES = (bool, int, float, str)


class Array(NamedTuple):
    """An array.

    Attributes:
        number: Its number among the arrays that are stored; None where it has no elements.
        shape: Its shape.
        dtype: Its dtype by name; that of typed PRNG keys is `key<...>`.
        impl: The PRNG of typed keys, whose numbers are stored; else None.
    """

    number: int | None
    shape: tuple[int, ...]
    dtype: str
    impl: str | None = None

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Value(NamedTuple):
    """A number or text of Python's."""

    value: bool | int | float | str

    def __str__(self) -> str:
        return f"{self.value!r}"


class Node(NamedTuple):
    """A node.

    Attributes:
        type: The name of its type.
        told: What its type knows and no array holds, as JSON.
        parts: Its parts by name.
        kind: Which of `HELD` it is; None for others, and in what was read from a file.
    """

    type: str
    told: dict[str, Any]
    parts: dict[str, "Part"]
    kind: Any = None

    def __str__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in self.told.items())
        return f"{self.type}({inside})" if inside else self.type


Part = Array | Value | Node


class Ranks(NamedTuple):
    """For how many ranks a state is.

    Attributes:
        number: How many; None where nothing says it.
        mesh: The axes of the mesh on which it is with their sizes; empty if it is on none.
    """

    number: int | None
    mesh: dict[str, int]

    def are_others(self, other: "Ranks") -> bool:
        """Whether two states are for ranks that differ, as far as both say."""
        if self.number is None or other.number is None:
            return False
        sizes, others = (
            [size for size in ranks.mesh.values() if size > 1] for ranks in (self, other)
        )
        is_known = bool(self.mesh and other.mesh)
        return self.number != other.number or (is_known and sizes != others)


def children(node: Any) -> list[tuple[str, Any]] | None:
    """The parts of a node by name, those that are None too; None for a leaf."""
    if jax.tree_util.all_leaves([node]):
        return None
    pairs, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    names = tree.distinct([tree.written(keys) for keys, _ in pairs])
    return list(zip(names, (child for _, child in pairs), strict=True))


def joined(path: str, name: str) -> str:
    """The path of a part of what is at a path."""
    return f"{path}/{name}" if path else name


def described(state: Any) -> tuple[Part, list[Any]]:
    """A state's description, and its arrays in the order of their numbers."""
    arrays: list[Any] = []

    def one(node: Any, path: str) -> Part:
        parts = children(node)
        if parts is None:
            return _leaf(node, path, arrays)
        kind = next((kind for kind in HELD if isinstance(node, kind)), None)
        named = {name: one(child, joined(path, name)) for name, child in parts}
        name = "None" if node is None else type(node).__name__
        return Node(name, _told(node), named, kind)

    return one(state, ""), arrays


def _leaf(x: Any, path: str, arrays: list[Any]) -> Array | Value:
    if type(x) in VALUES:
        return Value(x)
    is_array = isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)
    if isinstance(x, Tracer) or not is_array or np.dtype("O") == x.dtype:
        what = "is being traced: call it outside of jit and shard_map"
        if not isinstance(x, Tracer):
            what = f"is a {type(x).__name__}: leave it out, or keep it as one of these"
        raise ArgumentError(
            "a checkpoint holds arrays, and numbers and texts of Python's; "
            f"{path!r} {what}."
        )
    number = None
    if math.prod(x.shape):  # orbax stores none without elements
        number = len(arrays)
        arrays.append(x)
    impl = None
    if is_key(x) and isinstance(x, jax.Array):
        impl = str(jax.random.key_impl(x))
    # orbax stores the order of bytes that this machine has.
    dtype = x.dtype.newbyteorder("=") if isinstance(x.dtype, np.dtype) else x.dtype
    return Array(number, tuple(x.shape), str(dtype), impl)


def is_key(x: Any) -> bool:
    """Whether an array holds typed PRNG keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _told(node):
    if isinstance(node, Reduction):
        return {"reduce": "mean" if node.mean else "sum"}
    if isinstance(node, PerRank):
        return {} if node.paths is None else {"of": list(node.paths)}
    if isinstance(node, Pending):
        return {"height": node.height, "dim": node.dim}
    if isinstance(node, Sharded):
        axis, dim = axis_names(node.axis_name), getattr(node, "dim", None)
        return {"axis": list(axis)} | ({} if dim is None else {"dim": dim})
    return {}


def ranks_of(state: Any) -> Ranks:
    """For how many ranks a state is, by what ranks hold, and by where its arrays are."""
    nodes = find(state, (PerRank, Sharded))
    rows = [
        leaf.shape[0]
        for node in nodes
        # What is about some leaves may have a row for each rank and shard.
        if isinstance(node, PerRank) and not node.paths
        for leaf in jax.tree.leaves(node.value)
    ]
    shardings = (getattr(x, "sharding", None) for x in jax.tree.leaves(nodes or state))
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    mesh = dict(meshes[0].shape) if meshes else {}
    names = axis_names(nodes[0].axis_name) if nodes else mesh
    number = math.prod(mesh.get(name, 0) for name in names) if mesh else 0
    if rows and rows[0] != number:
        return Ranks(rows[0], {})  # held by other ranks than there are on that mesh
    return Ranks(number or None, mesh)


def leaves(part: Part, path: str = "") -> Iterator[tuple[str, Array | Value]]:
    """The leaves of a description with their paths, in their order."""
    if isinstance(part, Node):
        for name, inside in part.parts.items():
            yield from leaves(inside, joined(path, name))
    else:
        yield path, part


def arrays_of(part: Part) -> dict[int, tuple[str, Array]]:
    """The arrays that are stored of a description with their paths, by their numbers."""
    return {
        x.number: (path, x)
        for path, x in leaves(part)
        if isinstance(x, Array) and x.number is not None
    }
