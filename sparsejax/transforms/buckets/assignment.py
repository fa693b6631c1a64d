"""Assignment: the scheme and the unit of each leaf, and the buckets that leaves form.

Leaves with equal schemes and units are concatenated in a bucket and exchanged as one array,
so that a model of forty leaves costs the collectives, and the compile time, of one or two.
A bucket has leaves of one scheme, dtype and unit shape; if the scheme is lossy, they are
sharded over the same mesh axes. A dense leaf among sparse ones costs one bit an element.
"""

import abc
import contextlib
import contextvars
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from sparsejax.errors import RuleError
from sparsejax.schemes.all_reduce import AllReduce
from sparsejax.schemes.base import MOST_UNITS, LossyScheme, Scheme
from sparsejax.state import tree
from sparsejax.transforms.buckets.bucket import Bucket


SPARSE_FROM = 1 << 16  # elements; a smaller leaf joins the one dense psum
_EMBEDDING = re.compile("embedding", re.IGNORECASE)
_UNITS = ("row", "element")

Rules = Mapping[str, Scheme | str]

_PART: contextvars.ContextVar[bool] = contextvars.ContextVar("part", default=False)


@contextlib.contextmanager
def of_part() -> Iterator[None]:
    """Allows rules and plans that refer to leaves which the tree does not have.

    It is for callers that pass a tree in parts, and have checked the whole tree.
    """
    token = _PART.set(True)
    try:
        yield
    finally:
        _PART.reset(token)


def is_part() -> bool:
    """Returns whether the leaves may be those of a part of a tree: see `of_part`."""
    return _PART.get()


class Assignment(abc.ABC):
    """A rule for which leaf is summed by which scheme, and in which unit.

    A subclass defines `decide`, `schemes` and `map`.

    Example:
        >>> plan = sparsejax.Plan(ranks=8, leaves=())
        >>> isinstance(plan, sparsejax.transforms.buckets.assignment.Assignment)
        True
    """

    @abc.abstractmethod
    def decide(
        self, paths: Sequence[str], leaves: Sequence[Any]
    ) -> list[tuple[Scheme, str]]:
        """Returns the scheme and the unit, "row", "element" or "leaf", of each leaf."""

    def of_rows(self, paths: Sequence[str], leaves: Sequence[Any]) -> list[Scheme]:
        """Returns the scheme that each leaf has if its gradient is a list of rows."""
        return [scheme for scheme, _ in self.decide(paths, leaves)]

    @abc.abstractmethod
    def schemes(self) -> list[Scheme]:
        """Returns all schemes that `decide` may return."""

    @abc.abstractmethod
    def map(self, change: Callable[[Scheme], Scheme]) -> "Assignment":
        """Returns the assignment with every scheme replaced by the result of `change`."""

    def check_ranks(self, ranks: int) -> None:
        """Raises if it was made for another number of ranks."""
        del ranks

    def check_levels(self, two_level: bool, axis_name: Any) -> None:
        """Raises if it was made for two levels, and the mesh has one."""
        del two_level, axis_name

    def buckets(
        self, paths: Sequence[str], leaves: Sequence[Any], hidden: bool = False
    ) -> list[Bucket]:
        """Returns the buckets of leaves, in the order of their first leaves.

        Args:
            paths: The leaves' paths.
            leaves: The leaves.
            hidden: Whether types may not show shardings: see `tree.may_hide_shards`.
        """
        members: dict[Any, list[int]] = {}
        filled: dict[Any, tuple[int, int]] = {}
        for path, leaf in zip(paths, leaves, strict=True):
            tree.check_dtype(path, leaf)
        for i, (scheme, unit) in enumerate(self.decide(paths, leaves)):
            leaf = leaves[i]
            shape = {"row": leaf.shape[1:], "leaf": leaf.shape}.get(unit, ())
            # A large leaf that is summed densely is not copied into a shared array.
            alone = scheme.is_dense and leaf.size >= SPARSE_FROM
            # A lossy scheme selects from all leaves of a bucket. Devices that hold copies
            # of a leaf must select the same, so the leaves have the same shardings.
            is_lossy = isinstance(scheme, LossyScheme)
            axes = tree.shards_of(paths[i], leaf) if is_lossy else tree.axes_of(leaf)
            alone |= is_lossy and hidden
            key = (scheme, shape, jnp.dtype(leaf.dtype), axes, i if alone else None)
            width = math.prod(shape)
            count = leaf.size // width if width else 0
            # Indices of units are int32: units beyond their range start another bucket.
            part, taken = filled.get(key, (0, 0))
            if taken and taken + count > MOST_UNITS:
                part, taken = part + 1, 0
            filled[key] = part, taken + count
            members.setdefault((*key, part), []).append(i)
        buckets: list[Bucket] = []
        for key, indices in members.items():
            bucket = _bucket(key[0], key[1], indices, paths, leaves)
            # Two paths may be printed the same, but names are keys of the state.
            same = sum(other.name.split(" #")[0] == bucket.name for other in buckets)
            name = f"{bucket.name} #{same}" if same else bucket.name
            buckets.append(dataclasses.replace(bucket, name=name))
        return buckets


@dataclasses.dataclass(frozen=True)
class ByRules(Assignment):
    """Sums large leaves by one scheme and small ones densely, unless a rule differs.

    A small leaf whose gradient is rows is summed by the scheme, too, if that saves bytes.

    Attributes:
        scheme: The scheme of leaves of at least 65,536 elements without a rule for it.
        rules: A mapping from regular expressions, searched in the path, to a scheme,
            "dense", "sparse" (the scheme, whatever the size), or the unit "row" or
            "element". Of the rules that match a leaf, the first that gives a scheme and the
            first that gives a unit hold.
    """

    scheme: Scheme
    rules: Rules | None = None

    def decide(self, paths, leaves):
        pairs = list(zip(paths, leaves, strict=True))
        decisions = [self._decide(path, leaf) for path, leaf in pairs]
        if self.rules and not is_part():
            self._check_used(paths, leaves, [scheme for scheme, _ in decisions])
        return decisions

    def _check_used(self, paths, leaves, schemes):
        """Raises if a rule has no effect.

        Args:
            paths: The paths of all leaves.
            leaves: The leaves.
            schemes: The schemes by which they are summed.
        """
        first = [self._first(path) for path in paths]
        for pattern, value in (self.rules or {}).items():
            matched = [k for k, path in enumerate(paths) if re.search(pattern, path)]
            if not matched:
                raise RuleError(
                    f"the rule {pattern!r} matches no leaf. The leaves are: "
                    + ", ".join(repr(path) for path in paths)
                    + ". Rules are regular expressions, searched in these paths."
                )
            # A baseline, such as dense_sync, may be given the rules of the scheme that it
            # is compared with. Units have no effect on it, and this is no mistake.
            if value in _UNITS and self.scheme.is_dense:
                continue
            largest = max(matched, key=lambda k: leaves[k].size)
            are_dense = all(schemes[k].is_dense for k in matched)
            if value in _UNITS and are_dense:
                self._refuse_unit(pattern, value, leaves[largest].size, first[largest][0])
            first_of_kind = [by[value in _UNITS] for by in first]
            self._check_first(pattern, value, matched, first_of_kind)

    def _refuse_unit(self, pattern, value, size, by):
        """Raises the error for a unit that only leaves with a dense sum are given.

        Args:
            pattern: The pattern of the rule.
            value: The unit.
            size: The number of elements of the largest of these leaves.
            by: The rule that gives its scheme, as (pattern, value), or None.
        """
        name = type(self.scheme).__name__
        why, fix = "no rule says 'sparse' of it", f"Say 'sparse' to send them by {name}"
        if by is not None:
            why = f"the rule {by[0]!r} says {_said(by[1])} of it"
            fix = f"Say 'sparse' in front of that rule to send them by {name}"
        elif size < SPARSE_FROM:
            why = f"leaves below {SPARSE_FROM:,} join one dense sum"
        raise RuleError(
            f"the rule {pattern!r} says {value!r}, and it has no effect: a dense sum has "
            "no units, and every leaf that it matches is summed densely; the largest has "
            f"{size:,} numbers, and {why}. {fix}, or leave the rule out: gradients that "
            "come as rows, as with sparsejax.lazy, need none."
        )

    def _check_first(self, pattern, value, matched, first):
        """Raises if earlier rules that differ hold for all leaves that a rule matches.

        Args:
            pattern: The pattern of the rule.
            value: Its value: a scheme, "dense", "sparse", or a unit.
            matched: The positions of the leaves that it matches.
            first: For each leaf the rule that holds for its scheme, or for its unit, as
                (pattern, value), or None.
        """
        earlier = dict(first[k] for k in matched)
        # A last rule that matches any path is a default for the remaining leaves, if any.
        is_default = pattern == [*(self.rules or {})][-1] and re.search(pattern, "")
        if pattern in earlier or is_default:
            return
        meant = self._means(value)
        others = {by: said for by, said in earlier.items() if self._means(said) != meant}
        if others:
            said = " and ".join(f"{by!r} says {_said(x)}" for by, x in others.items())
            # "Put it first" is a fix only if the others then still hold for some leaf.
            matched = set(matched)
            rest = {by[0] for k, by in enumerate(first) if by and k not in matched}
            fix = "Put it first, or leave it out" if rest >= {*others} else "Leave it out"
            raise RuleError(
                f"the rule {pattern!r} says {_said(value)}, and it has no effect: {said}, "
                "and of every leaf the first rule that says such a thing holds. "
                f"{fix}."
            )

    def of_rows(self, paths, leaves):
        pairs = zip(paths, leaves, strict=True)
        return [self._said(path)[0] or self.scheme for path, _ in pairs]

    def schemes(self):
        values = (self.rules or {}).values()
        return [self.scheme, *(value for value in values if isinstance(value, Scheme))]

    def map(self, change):
        rules = {
            pattern: change(value) if isinstance(value, Scheme) else value
            for pattern, value in (self.rules or {}).items()
        }
        return dataclasses.replace(self, scheme=change(self.scheme), rules=rules)

    def uses(self, path: str, leaf: Any) -> bool:
        """Returns whether a leaf is summed by `scheme`."""
        return self._decide(path, leaf)[0] == self.scheme

    def _first(self, path: str) -> tuple[Any, Any]:
        """Returns the rules for the scheme and the unit of a leaf; None without one.

        Each is (pattern, value).
        """
        first: dict[bool, tuple[str, Any]] = {}
        for pattern, value in (self.rules or {}).items():
            if re.search(pattern, path):
                first.setdefault(value in _UNITS, (pattern, value))
        return first.get(False), first.get(True)

    def _means(self, value):
        """Returns the scheme, or the unit, that the value of a rule stands for."""
        return {"dense": self._dense(), "sparse": self.scheme}.get(value, value)

    def _said(self, path: str) -> tuple[Any, Any]:
        """Returns the scheme and the unit that rules give a leaf; None without a rule."""
        scheme, unit = self._first(path)
        return scheme and self._means(scheme[1]), unit and unit[1]

    def _decide(self, path: str, leaf: Any) -> tuple[Scheme, str]:
        """Returns the scheme and the unit of one leaf."""
        scheme, unit = self._said(path)
        if unit == "row" and leaf.ndim < 2:
            raise RuleError(
                f"a rule gives leaf {path!r} the unit 'row', but it has shape "
                f"{list(leaf.shape)}: rows need two axes. Use 'element'."
            )
        if scheme is not None and not _suits(scheme, leaf):
            raise RuleError(
                f"a rule gives leaf {path!r}, of shape {list(leaf.shape)}, the scheme "
                f"{scheme!r}, which would send more of it than a dense sum. Leave the rule "
                "out: such leaves are summed densely."
            )
        worth = self._is_meant(path, leaf) and _suits(self.scheme, leaf)
        scheme = scheme or (self.scheme if worth else self._dense())
        if scheme.unit is not None:
            if unit is not None and unit != scheme.unit:
                raise RuleError(
                    f"a rule gives leaf {path!r} the unit {unit!r}, and "
                    f"{type(scheme).__name__} has the unit {scheme.unit!r}. Leave the rule "
                    "out, or give the leaf a scheme that sends rows or elements, such as "
                    "sparsejax.schemes.Zen()."
                )
            return scheme, scheme.unit
        if unit is None:
            is_table = leaf.ndim == 2 and _EMBEDDING.search(path)
            dense = scheme.is_dense
            unit = "row" if is_table and not dense else "element"
        return scheme, unit

    def _is_meant(self, path, leaf):
        """Returns whether a leaf without a rule is summed by the scheme."""
        del path
        return leaf.size >= SPARSE_FROM

    def _dense(self):
        return AllReduce(self.scheme.wire_dtype)


@dataclasses.dataclass(frozen=True)
class Everything(ByRules):
    """Sums every leaf by one scheme, however small, unless a rule differs."""

    def _is_meant(self, path, leaf):
        del path, leaf
        return True


@dataclasses.dataclass(frozen=True)
class ByTables(ByRules):
    """Sums large tables with "embedding" in their path by one scheme.

    All other leaves are summed densely, however large, unless a rule differs.
    """

    def _is_meant(self, path, leaf):
        is_table = leaf.ndim == 2 and _EMBEDDING.search(path)
        return bool(is_table) and super()._is_meant(path, leaf)


def _suits(scheme, leaf):
    """Returns whether a scheme suits a leaf: low-rank factors may be larger than it."""
    return not isinstance(scheme, LossyScheme) or scheme.suits(leaf.shape)


def _bucket(scheme, shape, indices, paths, leaves):
    name = paths[indices[0]] or "value"
    if len(indices) > 1:
        name = f"{name} and {len(indices) - 1} more"
    width = math.prod(shape)
    units = tuple(leaves[i].size // width if width else 0 for i in indices)
    return Bucket(
        name, scheme, tuple(indices), tuple(paths[i] for i in indices), units, shape
    )


def _said(value):
    """Returns the value of a rule, for a message."""
    return repr(value) if isinstance(value, str) else f"{type(value).__name__}(...)"


def check_rules(rules: Rules | None) -> None:
    """Raises if a rule has an invalid regular expression or an unknown value."""
    if rules is None:
        return
    if not isinstance(rules, Mapping):
        raise RuleError(
            f"rules must map regular expressions to treatments, got {type(rules).__name__}."
        )
    words = ("dense", "sparse", "row", "element")
    for pattern, value in rules.items():
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise RuleError(
                f"the rule {pattern!r} is not a regular expression: {error}."
            ) from None
        if not isinstance(value, Scheme) and value not in words:
            raise RuleError(
                f"the rule {pattern!r} says {value!r}; it must be a scheme, 'dense', "
                "'sparse', 'row' or 'element'."
            )


def check_ids(buckets: Sequence[Bucket], ids: Mapping[str, Any], masked: bool) -> None:
    """Raises if ids are given for a leaf that is not summed by rows.

    If leaves are masked, ids of absent leaves may be for another transformation.
    """
    by_path = {path: bucket for bucket in buckets for path in bucket.paths}
    for path in ids:
        bucket = by_path.get(path)
        if bucket is None:
            is_wrong = not masked
        else:
            is_wrong = not bucket.is_by_rows and not bucket.scheme.is_dense
        if is_wrong:
            rows = [p for p, bucket in by_path.items() if bucket.is_by_rows]
            raise RuleError(
                f"ids were given for {path!r}, which is not a leaf synchronized by rows. "
                f"Such leaves are: {rows}. A rule {{path: 'row'}}, or its unit in a plan, "
                "makes a leaf one."
            )
