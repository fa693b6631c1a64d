"""The description of a state in a checkpoint: its tree, with types, shapes and dtypes.

A leaf is an array, or a Python number or string. Everything else is a node, with the name
of its type, its parts by name, and its static data: whether ranks are averaged, the leaves
to which thresholds belong, the width of a table without padding.
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
from sparsejax.state.pending import Pending, Period
from sparsejax.state.per_rank import PerRank, find
from sparsejax.state.sharded import Sharded
from sparsejax.transforms.exchange import ExchangeState, Reduction


# Types of nodes that depend on the ranks, which `resized` converts to another number.
HELD = (ByOwner, PerRank, ExchangeState, Pending, Sharded)

# Types that JSON gives back unchanged. Not their subclasses, whose type would be lost.
VALUES = (bool, int, float, str)


class Array(NamedTuple):
    """The description of an array.

    Attributes:
        number: Its number among the stored arrays; None if it has no elements.
        shape: Its shape.
        dtype: The name of its dtype; `key<...>` for typed PRNG keys.
        impl: The PRNG implementation of typed keys, whose key data is stored; else None.
    """

    number: int | None
    shape: tuple[int, ...]
    dtype: str
    impl: str | None = None

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Value(NamedTuple):
    """A Python number or string."""

    value: bool | int | float | str

    def __str__(self) -> str:
        return f"{self.value!r}"


class Node(NamedTuple):
    """The description of a node.

    Attributes:
        type: The name of its type.
        told: Its static data, as JSON.
        parts: Its parts by name.
        kind: The type of `HELD` that it has; None for others, and if read from a file.
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
    """The number of ranks for which a state was made.

    Attributes:
        number: The number of ranks; None if it is unknown.
        mesh: The sizes of the axes of its mesh, by name; empty if it is on no mesh.
    """

    number: int | None
    mesh: dict[str, int]

    def differ_from(self, other: "Ranks") -> bool:
        """Whether two states are known to be for different numbers of ranks, or meshes."""
        if self.number is None or other.number is None:
            return False
        sizes, others = (
            [size for size in ranks.mesh.values() if size > 1] for ranks in (self, other)
        )
        is_known = bool(self.mesh and other.mesh)
        return self.number != other.number or (is_known and sizes != others)


def children(node: Any) -> list[tuple[str, Any]] | None:
    """Returns the parts of a node with their names, None included; None for a leaf."""
    if jax.tree_util.all_leaves([node]):
        return None
    pairs, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    names = tree.distinct([tree.written(keys) for keys, _ in pairs])
    return list(zip(names, (child for _, child in pairs), strict=True))


def joined(path: str, name: str) -> str:
    """Returns the path of the part `name` of the node at `path`."""
    return f"{path}/{name}" if path else name


def described(state: Any) -> tuple[Part, list[Any]]:
    """Returns a state's description, and its arrays in the order of their numbers."""
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
    if math.prod(x.shape):  # orbax does not store an array without elements
        number = len(arrays)
        arrays.append(x)
    impl = None
    if is_key(x) and isinstance(x, jax.Array):
        impl = str(jax.random.key_impl(x))
    # orbax stores arrays in the byte order of this machine.
    dtype = x.dtype.newbyteorder("=") if isinstance(x.dtype, np.dtype) else x.dtype
    return Array(number, tuple(x.shape), str(dtype), impl)


def is_key(x: Any) -> bool:
    """Whether an array holds typed PRNG keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _told(node):
    if isinstance(node, Reduction):
        return {"reduce": "mean" if node.mean else "sum"}
    if isinstance(node, Period):
        return {"every": node.every, "delay": node.delay}
    if isinstance(node, ByOwner):
        return {"of": list(node.paths), "shapes": [list(shape) for shape in node.shapes]}
    if isinstance(node, PerRank):
        return {} if node.paths is None else {"of": list(node.paths)}
    if isinstance(node, Pending):
        return {"height": node.height, "dim": node.dim}
    if isinstance(node, Sharded):
        axis, dim = axis_names(node.axis_name), getattr(node, "dim", None)
        return {"axis": list(axis)} | ({} if dim is None else {"dim": dim})
    return {}


def ranks_of(state: Any) -> Ranks:
    """Returns the ranks of a state, from its state by rank and its arrays' shardings."""
    nodes = find(state, (PerRank, Sharded))
    rows = [
        leaf.shape[0]
        for node in nodes
        # Arrays derived from some leaves may have a row for each rank and shard.
        if isinstance(node, PerRank) and not node.paths
        for leaf in jax.tree.leaves(node.value)
    ]
    shardings = (getattr(x, "sharding", None) for x in jax.tree.leaves(nodes or state))
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    mesh = dict(meshes[0].shape) if meshes else {}
    names = axis_names(nodes[0].axis_name) if nodes else mesh
    number = math.prod(mesh.get(name, 0) for name in names) if mesh else 0
    if rows and rows[0] != number:
        return Ranks(rows[0], {})  # made for another number of ranks than that mesh has
    return Ranks(number or None, mesh)


def leaves(part: Part, path: str = "") -> Iterator[tuple[str, Array | Value]]:
    """Yields the leaves of a description, with their paths, in the order of the tree."""
    if isinstance(part, Node):
        for name, inside in part.parts.items():
            yield from leaves(inside, joined(path, name))
    else:
        yield path, part


def arrays_of(part: Part) -> dict[int, tuple[str, Array]]:
    """Returns the stored arrays of a description, with their paths, by their numbers."""
    return {
        x.number: (path, x)
        for path, x in leaves(part)
        if isinstance(x, Array) and x.number is not None
    }
