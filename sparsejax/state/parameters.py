"""The specs of parameters, by path, and of the arrays that states keep for them.

An array of the shape of a parameter is sharded like it; in this library's states, after a
leading axis of the ranks. An array that is derived from a parameter and has none of its
axes, such as a threshold, has one piece for each rank and shard, concatenated.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sparsejax import axes as mesh_axes
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError, StateError, missing_axis
from sparsejax.state import sharded, tree


def check_axes(mesh: Mesh | AbstractMesh, names: Iterable[str], what: str) -> None:
    """Raises unless the mesh has the axes."""
    missing = [name for name in names if name not in mesh.axis_names]
    if missing:
        raise missing_axis(what, missing[0], mesh.axis_names)


def ranks_of(mesh: Mesh | AbstractMesh, axis_name: AxisName) -> int:
    """Returns the size of a mesh axis, or the product of several."""
    return math.prod(mesh.shape[name] for name in mesh_axes.axis_names(axis_name))


class Parameter(NamedTuple):
    """A parameter's path, shape and spec.

    Attributes:
        path: Its path in the tree.
        shape: Its shape.
        spec: Its PartitionSpec.
        is_sharded: Whether it is a column table, sharded over the ranks.
    """

    path: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    is_sharded: bool = False

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes that shard it."""
        parts = (() if part is None else mesh_axes.axis_names(part) for part in self.spec)
        return frozenset(name for part in parts for name in part)

    def shared(self, axis_name: AxisName) -> list[str]:
        """Returns the axes of the ranks that shard it; [] for a column table."""
        both = self.axes & frozenset(mesh_axes.axis_names(axis_name))
        return [] if self.is_sharded else sorted(both)


class ParameterSpecs(NamedTuple):
    """The parameters of a tree, and their specs.

    Attributes:
        tree: The tree of PartitionSpecs.
        by_keys: Each parameter by its key path.
        is_whole: Whether states are made for whole parameters, whose arrays happen to be
            sharded, and not for shards.
    """

    tree: Any
    by_keys: dict[tuple, Parameter]
    is_whole: bool = False

    @classmethod
    def of(cls, params: Any, param_specs: Any) -> "ParameterSpecs":
        """Makes it of parameters and a tree of specs, or a prefix of one."""
        is_spec = lambda node: isinstance(node, PartitionSpec)
        for leaf in jax.tree.leaves(param_specs, is_leaf=is_spec):
            if not is_spec(leaf):
                raise ArgumentError(
                    "param_specs must hold PartitionSpecs, P() for what is replicated, got "
                    f"{leaf!r}. (Of a NamedSharding that is its .spec.)"
                )
        try:
            full = jax.tree.broadcast(param_specs, params, is_leaf=is_spec)
        except ValueError as error:
            raise ArgumentError(
                "param_specs must be a tree like the parameters, or a prefix of it, with a "
                f"PartitionSpec for each, P() for what is replicated: {error}"
            ) from None
        own = lambda node, spec: node.specs() if sharded.is_sharded(node) else spec
        full = jax.tree.map(own, params, full, is_leaf=sharded.is_sharded)
        pairs, _ = jax.tree_util.tree_flatten_with_path(params)
        flags = jax.tree.leaves(sharded.flags(params))
        specs = jax.tree.leaves(full, is_leaf=is_spec)
        paths = tree.unboxed([keys for keys, _ in pairs])
        by_keys = {}
        for keys, (_, leaf), spec, flag in zip(paths, pairs, specs, flags, strict=True):
            found = Parameter(tree.written(keys), np.shape(leaf), spec, flag)
            if len(spec) > len(found.shape):
                raise ArgumentError(
                    f"param_specs gives {found.path!r} {spec}, and it has the shape "
                    f"{list(found.shape)}: a spec may not be longer than that."
                )
            by_keys[keys] = found
        return cls(full, by_keys)

    @classmethod
    def of_arrays(cls, params: Any, mesh: Mesh | AbstractMesh) -> "ParameterSpecs":
        """Makes it of the shardings of arrays; `P()` for those that are not on the mesh."""

        def spec(node):
            return PartitionSpec() if sharded.is_sharded(node) else _spec_on(node, mesh)

        specs = jax.tree.map(spec, params, is_leaf=sharded.is_sharded)
        return cls.of(params, specs)._replace(is_whole=True)

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes that shard any parameter."""
        return frozenset[str]().union(*(own.axes for own in self.by_keys.values()))

    def check(self, mesh: Mesh | AbstractMesh, axis_name: AxisName) -> None:
        """Raises unless the mesh has the axes of the specs, none of which is the ranks'."""
        for own in self.by_keys.values():
            check_axes(mesh, sorted(own.axes), f"param_specs of {own.path!r}")
            _check_replicated(own, axis_name)

    def check_arrays(self, axis_name: AxisName, call: str) -> None:
        """Raises if an array is sharded over the axis of the ranks; see `of_arrays`."""
        for own in self.by_keys.values():
            both = own.shared(axis_name)
            if both:
                raise ArgumentError(
                    f"{call}: the parameter {own.path!r} is sharded {own.spec}, and over "
                    f"{both[0]!r} {_NEEDS_WHOLE} Shard it over another axis, or replicate "
                    f"it: {_REPLICATED}."
                )

    def check_replicated(self, call: str) -> None:
        """Raises if an array is sharded, which each device would have whole in training."""
        for own in self.by_keys.values():
            if own.axes and not own.is_sharded:
                raise ArgumentError(
                    f"{call}: the parameter {own.path!r} is sharded {own.spec}, and "
                    "without param_specs each device trains the whole of it. Give the "
                    "specs, for a loss function that works on shards, data_parallel(..., "
                    f"param_specs=...), or replicate it: {_REPLICATED}."
                )

    def at(self, keys: tuple) -> "Parameter | None":
        """Returns the parameter with this key path, or None."""
        return self.by_keys.get(keys) or self.by_keys.get(tree.unboxed([keys])[0])

    def of_leaf(self, path: tuple, leaf: Any) -> PartitionSpec:
        """Returns the spec of a leaf of an optimizer's state, by its path and shape.

        It is that of the parameter at the end of the path that has the same shape; `P()`
        without one.
        """
        shape = np.shape(leaf)
        ends = (self.at(path[start:]) for start in range(len(path) + 1))
        like = [own for own in ends if own is not None]
        for own in like:
            if own.shape == shape:
                return own.spec
        # Counters and flags have one element, and are replicated.
        for own in like if np.prod(shape) > 1 and not self.is_whole else ():
            if own.axes and own.path:
                raise StateError(
                    f"the state has at {tree.named(path)!r} an array of shape "
                    f"{list(shape)}, and the parameter {own.path!r} of shape "
                    f"{list(own.shape)} is sharded {own.spec}: how the array is sharded "
                    "does not follow. Give state_specs the parameters of the state (both "
                    "global, or both shards). A transformation that keeps arrays of other "
                    "shapes than the parameters', as optax.adafactor does, belongs to "
                    "replicated ones: optax.partition."
                )
        return PartitionSpec()


def _of_whole_per_rank(node, known):
    """Returns the specs of a `PerRank` that was made for whole parameters."""

    def like(keys, leaf):
        own = known.at(keys) if node.paths is None else None
        if own is None or own.shape != np.shape(leaf)[1:]:
            return PartitionSpec(node.axis_name)
        return PartitionSpec(node.axis_name, *own.spec)

    return node.specs(jax.tree_util.tree_map_with_path(like, node.value))


def _of_own(node, known):
    """Returns the specs of a `RankState`, the state of each rank's own optimizer."""

    def like(keys, leaf):
        own = jax.ShapeDtypeStruct(np.shape(leaf)[1:], np.float32)  # of one rank
        return PartitionSpec(node.axis_name, *known.of_leaf(keys, own))

    return node.specs(jax.tree_util.tree_map_with_path(like, node.value))


def of_per_rank(node, known):
    """Returns the specs of a `PerRank`; `known` are the parameters' specs, or None."""
    axis_name = node.axis_name
    if known is None:
        return node.specs(jax.tree.map(lambda _: PartitionSpec(axis_name), node.value))
    if node.is_own:
        return _of_own(node, known)
    if known.is_whole:
        return _of_whole_per_rank(node, known)

    def checked(own, what):
        if own is None:
            paths = ", ".join(repr(p.path) for p in known.by_keys.values())
            raise StateError(
                f"the state holds something of {what!r}, which is not among the parameters "
                f"given: {paths}. Give the parameters with which it was made."
            )
        _check_replicated(own, axis_name)
        return own

    if node.paths is None:

        def like(keys, leaf):
            own = checked(known.at(keys), tree.named(keys))
            if np.shape(leaf)[1:] != own.shape:
                raise StateError(
                    f"the state was made for a parameter {own.path!r} of shape "
                    f"{list(np.shape(leaf)[1:])}, and the one given has the shape "
                    f"{list(own.shape)}. Give the parameters with which it was made (both "
                    "global, or both shards)."
                )
            return PartitionSpec(axis_name, *own.spec)

        value = jax.tree_util.tree_map_with_path(like, node.value)
        return node.specs(value)
    axes = frozenset()
    for path in node.paths:
        found = [own for own in known.by_keys.values() if own.path == path] or [None]
        axes |= checked(found[0], path).axes
        if any(own.axes != found[0].axes for own in found):
            raise StateError(
                f"several parameters have a path written {path!r}, and they are not "
                "sharded alike: which one a state is about cannot be told. Rename one."
            )
    further = sorted(axes - frozenset(node.same))
    if node.is_divided:
        divided = PartitionSpec(axis_name, tuple(further) or None)
        return node.specs(jax.tree.map(lambda _: divided, node.value))
    names = (*mesh_axes.axis_names(axis_name), *further) if further else axis_name
    return node.specs(jax.tree.map(lambda _: PartitionSpec(names), node.value))


_REPLICATED = "jax.device_put(x, jax.sharding.NamedSharding(mesh, P()))"
_NEEDS_WHOLE = (
    "gradients are synchronized: each of its ranks needs the whole of what it trains."
)


def _check_replicated(own, axis_name):
    both = own.shared(axis_name)
    if both:
        raise ArgumentError(
            f"param_specs shards {own.path!r} over {both[0]!r}, and over that axis "
            f"{_NEEDS_WHOLE} Shard it over another axis, or not."
        )


def _spec_on(x, mesh):
    """Returns the spec of an array on the mesh, without axes of size one."""
    sharding = (
        jax.typeof(x).sharding if isinstance(x, Tracer) else getattr(x, "sharding", None)
    )
    if not isinstance(sharding, NamedSharding) or sharding.mesh.shape != mesh.shape:
        return PartitionSpec()

    def part(names):
        names = () if names is None else mesh_axes.axis_names(names)
        return tuple(name for name in names if mesh.shape[name] > 1) or None

    return PartitionSpec(*map(part, sharding.spec))
