"""What is done with each leaf of a gradient: which scheme, which unit, which together.

Leaves that are treated alike are laid end to end and exchanged as one, so that a model of
forty leaves costs the collectives, and the compile time, of one or two. Together go leaves
of one scheme, dtype and unit width. A dense leaf among sparse ones costs a bit a number.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax import axes as mesh_axes, schemes, wire
from sparsejax.axes import AxisName, as_varying, varying_axes
from sparsejax.errors import LeafError, RuleError
from sparsejax.schemes.base import MOST_UNITS, Scheme
from sparsejax.units import bits, entries
from sparsejax.units.sparse_tensor import SparseTensor


SPARSE_FROM = 1 << 16  # elements; a smaller leaf joins the one dense psum
_EMBEDDING = re.compile("embedding", re.IGNORECASE)

Rules = Mapping[str, Scheme | str]


@dataclasses.dataclass(frozen=True)
class Group:
    """Leaves that are exchanged as one array of units.

    Attributes:
        name: For metrics: the path of the only leaf, or of the first and how many more.
        scheme: How they are added up.
        leaves: Their places in the flattened tree.
        paths: Their paths.
        units: How many units each of them has.
        shape: The shape of one unit.
    """

    name: str
    scheme: Scheme
    leaves: tuple[int, ...]
    paths: tuple[str, ...]
    units: tuple[int, ...]
    shape: tuple[int, ...]

    def split(self, leaves: Sequence[Any]) -> list["Group"]:
        """Leaves given by their entries, and the others, as groups of their own.

        Together they would be one dense array, and no longer sparse.
        """
        members = list(zip(self.leaves, self.paths, self.units, strict=True))
        kinds = [
            [m for m in members if is_sparse(leaves[m[0]]) is kind]
            for kind in (True, False)
        ]
        return [
            dataclasses.replace(self, leaves=own[0], paths=own[1], units=own[2])
            for own in (tuple(zip(*kind, strict=True)) for kind in kinds if kind)
        ]

    def gather(self, leaves: Sequence[Any], as_elements: bool = False) -> entries.Units:
        """The group's leaves as one array [units, *shape], by its entries if it can be.

        With `as_elements`, entries that are elements stay so, whatever a unit is.
        """
        own = [leaves[i] for i in self.leaves]
        unit = lambda leaf: leaf.values.shape[1:]
        units = [self.shape, *([()] if as_elements else [])]
        if all(is_sparse(leaf) for leaf in own) and any(
            all(unit(leaf) == shape for leaf in own) for shape in units
        ):
            return entries.of_tensors(own)
        arrays = [
            to_dense(leaves[i]).reshape(count, *self.shape)
            for i, count in zip(self.leaves, self.units, strict=True)
        ]
        return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)

    def scatter(self, x: jax.Array, leaves: list[Any], like: Sequence[Any]) -> None:
        """Puts the parts of [units, *shape] at their places in `leaves`."""
        x = x.reshape(sum(self.units), *self.shape)
        start = 0
        for i, count in zip(self.leaves, self.units, strict=True):
            leaves[i] = x[start : start + count].reshape(like[i].shape)
            start += count


def wide(dtype: Any) -> jnp.dtype:
    """The dtype in which numbers of this one are added up and held."""
    return jnp.promote_types(dtype, jnp.float32)


def zeros_by_rank(leaf: Any, axis_name: AxisName) -> jax.Array:
    """What is held of a leaf at first: [1, ...] on each rank of an axis."""
    zeros = jnp.zeros((1, *leaf.shape), wide(leaf.dtype))
    return wire.per_rank(as_varying(zeros, varying_axes(leaf)), axis_name)


def is_sparse(leaf: Any) -> bool:
    """Whether a leaf is given by its entries."""
    return isinstance(leaf, SparseTensor)


def to_dense(leaf: Any) -> jax.Array:
    """A leaf as a dense array."""
    return leaf.to_dense() if is_sparse(leaf) else leaf


def flatten(tree: Any) -> tuple[list[str], list[Any], Any]:
    """The paths, written a/b/c, the leaves and the structure of a tree.

    A `SparseTensor` is a leaf.
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_sparse)
    paths = [written(keys) for keys in unboxed([keys for keys, _ in pairs])]
    return paths, [leaf for _, leaf in pairs], structure


def written(keys: tuple) -> str:
    """The keys on the way to a leaf, written a/b/c."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def unboxed(paths: Sequence[tuple]) -> list[tuple]:
    """The keys on the way to each leaf, without a `.value` at their ends.

    The parameters of a flax.nnx model end in it, and their gradients do not.
    """
    boxed = jax.tree_util.GetAttrKey("value")
    short = [keys[:-1] if keys[1:] and keys[-1] == boxed else keys for keys in paths]
    return short if len(set(short)) == len(short) else list(paths)


def distinct(paths: Sequence[str]) -> list[str]:
    """The paths, with a number behind those that are written like one before."""
    found: dict[str, None] = {}
    for path in paths:
        own, number = path, 0
        while own in found:
            number += 1
            own = f"{path} #{number}"
        found[own] = None
    return list(found)


def check_dtype(path: str, leaf: Any) -> None:
    """Raises unless the leaf is an array of real floating numbers."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not is_floating(dtype):
        kind = type(leaf).__name__ if dtype is None else dtype
        raise LeafError(
            f"leaf {path!r} is {kind}; only real floating gradients of 16, 32 or 64 bits "
            "can be synchronized. Leave it out with optax.masked, or convert it (a complex "
            "number is two)."
        )


def is_floating(dtype: Any) -> bool:
    """Whether numbers of this dtype can be synchronized."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize >= 2


def group(
    paths: Sequence[str],
    leaves: Sequence[Any],
    scheme: Scheme,
    rules: Rules | None = None,
    *,
    always: bool = False,
    chosen: Mapping[str, tuple[Scheme, str]] | None = None,
    elements: Collection[str] = (),
) -> list[Group]:
    """Decides for every leaf, and puts like to like.

    Args:
        paths: The leaves' paths.
        leaves: The leaves: arrays or anything with a shape and a dtype.
        scheme: For sparse leaves that no rule gives another.
        rules: From regular expressions, searched in the path, to a scheme, "dense",
            "sparse" (the scheme, whatever the size), or the unit "row" or "element". Of
            all rules that match a leaf the first to say something about its scheme, and
            the first to say something about its unit, hold.
        always: Whether small leaves, too, use the scheme.
        chosen: The scheme and the unit of each leaf by path, where a plan has them.
        elements: Paths of leaves whose unit is the element unless a rule says else.

    Returns:
        The groups, in the order of their first leaves.
    """
    rules = dict(rules or {})
    used: set[str] = set()
    members: dict[Any, list[int]] = {}
    fill: dict[Any, tuple[int, int]] = {}
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        check_dtype(path, leaf)
        if chosen is None:
            usual = "element" if path in elements else None
            own, unit = _decide(path, leaf, scheme, rules, used, always, usual)
        else:
            own, unit = chosen[path]
        shape = leaf.shape[1:] if unit == "row" else ()
        # A large leaf that goes densely anyway is not worth a copy.
        alone = isinstance(own, schemes.AllReduce) and leaf.size >= SPARSE_FROM
        axes = entries.axes_of(leaf)
        key = (own, shape, jnp.dtype(leaf.dtype), axes, i if alone else None)
        width = math.prod(shape)
        own_units = leaf.size // width if width else 0
        # Units are numbered by int32: what does not fit starts another group.
        part, filled = fill.get(key, (0, 0))
        if filled and filled + own_units > MOST_UNITS:
            part, filled = part + 1, 0
        fill[key] = part, filled + own_units
        members.setdefault((*key, part), []).append(i)
    unused = [pattern for pattern in rules if pattern not in used]
    if unused:
        raise RuleError(
            f"the rule {unused[0]!r} matches no leaf. The leaves are: "
            + ", ".join(repr(path) for path in paths)
            + ". Rules are regular expressions, searched in these paths."
        )
    groups: list[Group] = []
    for key, indices in members.items():
        own = _group(key[0], key[1], indices, paths, leaves)
        # Two paths may be written alike; names are keys of the state.
        same = sum(other.name.split(" #")[0] == own.name for other in groups)
        groups.append(dataclasses.replace(own, name=f"{own.name} #{same}") if same else own)
    return groups


def _group(scheme, shape, indices, paths, leaves):
    name = paths[indices[0]] or "value"
    if len(indices) > 1:
        name = f"{name} and {len(indices) - 1} more"
    width = math.prod(shape)
    units = tuple(leaves[i].size // width if width else 0 for i in indices)
    return Group(
        name, scheme, tuple(indices), tuple(paths[i] for i in indices), units, shape
    )


def uses(path: str, leaf: Any, scheme: Scheme, rules: Rules | None) -> bool:
    """Whether rules, or its size, give a leaf the scheme."""
    return _decide(path, leaf, scheme, dict(rules or {}), set(), False, None)[0] == scheme


def _decide(path, leaf, scheme, rules, used, always, usual):
    """The scheme and the unit of one leaf."""
    own, unit = None, None
    for pattern, value in rules.items():
        if not re.search(pattern, path):
            continue
        used.add(pattern)
        if value in ("row", "element"):
            unit = unit or value
        elif value == "dense":
            own = own or schemes.AllReduce(getattr(scheme, "wire_dtype", None))
        elif value == "sparse":
            own = own or scheme
        else:
            own = own or value
    if unit == "row" and leaf.ndim < 2:
        raise RuleError(
            f"a rule gives leaf {path!r} the unit 'row', but it has shape "
            f"{list(leaf.shape)}: rows need two axes. Use 'element'."
        )
    large = leaf.size >= SPARSE_FROM or always
    own = own or (
        scheme if large else schemes.AllReduce(getattr(scheme, "wire_dtype", None))
    )
    if unit == "row" and own.selects:
        raise RuleError(
            f"a rule gives leaf {path!r} the unit 'row', and {type(own).__name__} chooses "
            "numbers one by one. Leave the rule out, or give the leaf a scheme that sends "
            "rows, such as sparsejax.schemes.Zen()."
        )
    unit = unit or usual
    if unit is None:
        rows = leaf.ndim == 2 and _EMBEDDING.search(path)
        dense = isinstance(own, schemes.AllReduce)
        unit = "row" if rows and not dense and not own.selects else "element"
    return own, unit


def check_rules(rules: Rules | None) -> None:
    """Raises where a rule is not a regular expression, or says something unknown."""
    if rules is None:
        return
    if not isinstance(rules, Mapping):
        raise RuleError(
            f"rules must map regular expressions to treatments, got {type(rules).__name__}."
        )
    for pattern, value in rules.items():
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise RuleError(
                f"the rule {pattern!r} is not a regular expression: {error}."
            ) from None
        if not isinstance(value, Scheme) and value not in (
            "dense",
            "sparse",
            "row",
            "element",
        ):
            raise RuleError(
                f"the rule {pattern!r} says {value!r}; it must be a scheme, 'dense', "
                "'sparse', 'row' or 'element'."
            )


def is_masked(tree: Any) -> bool:
    """Whether optax.masked or optax.partition left leaves out of the tree."""
    masked = lambda node: isinstance(node, optax.MaskedNode)
    return any(masked(node) for node in jax.tree.leaves(tree, is_leaf=masked))


def touched(
    groups: Sequence[Group],
    leaves: Sequence[Any],
    ids: Mapping[str, Any] | None,
    masked: bool,
) -> dict[str, jax.Array]:
    """Which units of each group the caller says were touched.

    Where leaves are masked, ids may be meant for another transformation.
    """
    if not ids:
        return {}
    by_path = {path: group for group in groups for path in group.paths}
    for path in ids:
        group = by_path.get(path)
        dense = group is not None and isinstance(group.scheme, schemes.AllReduce)
        if (group is None and not masked) or (group and not group.shape and not dense):
            rows = [p for p, group in by_path.items() if group.shape]
            raise RuleError(
                f"ids were given for {path!r}, which is not a leaf synchronized by rows. "
                f"Such leaves are: {rows}. A rule {{path: 'row'}}, or its unit in a plan, "
                "makes a leaf one."
            )
    present = {}
    for group in groups:
        if not group.shape or not any(path in ids for path in group.paths):
            continue
        flags = []
        for path, i, count in zip(group.paths, group.leaves, group.units, strict=True):
            # What waited in a memory may be of other rows than those of this batch.
            if path in ids and not is_sparse(leaves[i]):
                rows = jnp.asarray(ids[path]).reshape(-1)
                rows = jnp.where(rows < 0, rows + count, rows)
                mark = jnp.zeros(count, bool).at[rows].set(True, mode="drop")
                flags.append(mesh_axes.as_varying(mark, entries.axes_of(leaves[i])))
            else:
                dense = to_dense(leaves[i]).reshape(count, *group.shape)
                flags.append(bits.nonzero_units(dense))
        present[group.name] = jnp.concatenate(flags)
    return present
