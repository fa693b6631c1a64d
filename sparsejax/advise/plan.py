"""A plan: for each leaf its scheme, unit, index codes and capacities, as a JSON file.

`sparsejax.make_plan` makes one from profiles of the first steps, and
`sparsejax.sync(plan)` follows it. A plan can be read and edited: a leaf's scheme is written
as the name of its class, with its arguments by name. It is for one tree of parameters and
one number of ranks, which are checked before anything is sent. If a later step exceeds a
capacity, it takes further rounds or a dense sum, so the sum is exact nevertheless.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import arguments, axes
from sparsejax.advise import codec
from sparsejax.advise.table import table
from sparsejax.arguments import cut
from sparsejax.checkpoints.records import versions
from sparsejax.errors import ArgumentError, PlanError, message
from sparsejax.schemes import TwoLevel
from sparsejax.schemes.base import Scheme
from sparsejax.state import tree
from sparsejax.transforms.buckets import Assignment, is_part


_FORMAT = 1

# Upper bounds, above those of any job and array.
MOST_RANKS, _MOST_ELEMENTS, _MOST_AXES = 2**24, 2**62, 64

# Characters of a message, since a wrong value in a file may be as long as the file.
_LONGEST = 600


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """The scheme and the unit of one leaf, an entry of a `Plan`.

    Attributes:
        path: The leaf's path in the tree, written a/b/c.
        shape: The leaf's shape.
        dtype: The name of the leaf's dtype.
        unit: What an index refers to: "element" or "row".
        scheme: The scheme that sums it.
        note: The reason for the choice, for readers of the file.

    Example:
        >>> leaf = sparsejax.advise.LeafPlan(
        ...     path="users", shape=(1000, 64), dtype="float32", unit="row",
        ...     scheme=sparsejax.schemes.BalancedParallelism())
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    unit: str
    scheme: Scheme
    note: str = ""

    def __post_init__(self):
        arguments.check_one_of("unit", self.unit, ("element", "row"))
        arguments.check_dtype("dtype", self.dtype)
        if not all(arguments.is_int(n, 0) for n in self.shape):
            raise ArgumentError(f"shape must hold ints of at least 0, got {self.shape}.")
        numbers = self.shape if len(self.shape) <= _MOST_AXES else (math.inf,)
        # Check each first, because the product of very large ints is slow.
        if max(numbers, default=0) > _MOST_ELEMENTS or math.prod(numbers) > _MOST_ELEMENTS:
            raise ArgumentError(
                f"shape has more elements than an array can have, or axes: {self.shape}."
            )
        if self.unit == "row" and len(self.shape) < 2:
            raise ArgumentError(f"rows need two axes, and the shape is {self.shape}.")

    def row(self) -> tuple[str, ...]:
        """Returns the cells of a table: path, shape, unit, scheme, capacity, note."""
        ways = [(f"{way}_code", f"{way}_capacity") for way in ("push", "pull")]
        given = [[getattr(self.scheme, name, None) for name in names] for names in ways]
        room = [
            "" if code is None else f"{capacity:,} {code}" if capacity else str(code)
            for code, capacity in given
        ]
        shape = "x".join(map(str, self.shape))
        kind = f"{self.dtype}[{shape}]"
        return self.path, kind, self.unit, type(self.scheme).__name__, *room, self.note


@dataclasses.dataclass(frozen=True)
class Plan(Assignment):
    """The schemes and the units of all leaves of a model.

    Attributes:
        ranks: The number of ranks that it was made for; of hosts, where there are two
            levels.
        leaves: One entry for each leaf, in the order of the tree.

    Example:
        >>> zen = sparsejax.schemes.Zen()
        >>> leaf = sparsejax.advise.LeafPlan("users", (1000, 64), "float32", "row", zen)
        >>> sparsejax.Plan(ranks=8, leaves=(leaf,)).save("plan.json")
        >>> tx = sparsejax.sync(sparsejax.Plan.load("plan.json"))
    """

    ranks: int
    leaves: tuple[LeafPlan, ...]

    def __post_init__(self):
        arguments.check_whole("ranks", self.ranks, 1)
        if self.ranks > MOST_RANKS:
            raise ArgumentError(
                f"ranks must be a number of ranks, at most {MOST_RANKS}, got {self.ranks}."
            )

    def check_leaves(self, paths: Sequence[str], leaves: Sequence[Any]) -> None:
        """Raises if the plan was made for another tree.

        Args:
            paths: The paths of the leaves.
            leaves: The leaves, or their shapes and dtypes.
        """
        by_path = {leaf.path: leaf for leaf in self.leaves}
        missing = [path for path in paths if path not in by_path]
        extra = [path for path in by_path if path not in set(paths) and not is_part()]
        if missing or extra:
            raise PlanError(
                "the plan was made for another tree: "
                + (f"it has no entry for {_some(missing)}" if missing else "")
                + (", and " if missing and extra else "")
                + (f"the tree has no leaf for its {_some(extra)}" if extra else "")
                + ". Make a new plan, or rename the entries in its file."
            )
        for path, leaf in zip(paths, leaves, strict=True):
            whole, dtype = by_path[path].shape, str(jnp.dtype(leaf.dtype))
            fits = tuple(leaf.shape) == whole or _is_shard(path, leaf, whole)
            if not fits or dtype != by_path[path].dtype:
                raise PlanError(
                    f"the plan was made for another tree: in the plan {path!r} is "
                    f"{by_path[path].dtype}{list(whole)}, in the tree "
                    f"{dtype}{list(leaf.shape)}. Make a new plan, of the whole parameters."
                )

    def check_ranks(self, ranks: int) -> None:
        """Raises unless the plan was made for `ranks` ranks."""
        if ranks != self.ranks:
            raise PlanError(
                f"the plan was made for {self.ranks} ranks, and there are {ranks}. Make a "
                "new plan, or, if it should hold here too, edit `ranks` in its file."
            )

    def check_levels(self, two_level: bool, axis_name: Any) -> None:
        """Raises if a leaf has a scheme of two levels, and there is one axis."""
        levels = [leaf for leaf in self.leaves if isinstance(leaf.scheme, TwoLevel)]
        if levels and not two_level:
            raise ArgumentError(
                f"the plan has TwoLevel for leaf {levels[0].path!r}, which works over two "
                f"axes, and axis_name is {axis_name!r}: pass axis_name=(outer, inner)."
            )

    def decide(self, paths, leaves):
        """Returns the scheme and the unit of each leaf; raises for another tree."""
        self.check_leaves(paths, leaves)
        by_path = {leaf.path: (leaf.scheme, leaf.unit) for leaf in self.leaves}
        return [by_path[path] for path in paths]

    def schemes(self) -> list[Scheme]:
        """Returns the scheme of each leaf."""
        return [leaf.scheme for leaf in self.leaves]

    def map(self, change: Callable[[Scheme], Scheme]) -> "Plan":
        """Returns a plan with each scheme replaced by the result of `change`."""
        leaves = [
            dataclasses.replace(leaf, scheme=change(leaf.scheme)) for leaf in self.leaves
        ]
        return dataclasses.replace(self, leaves=tuple(leaves))

    def __str__(self) -> str:
        """Returns the plan as a table with a line for each leaf."""
        heading = ("leaf", "shape", "unit", "scheme", "push", "pull", "note")
        rows = [heading, *(leaf.row() for leaf in self.leaves)]
        return "\n".join([f"plan for {self.ranks} ranks", "", *table(rows, {0, 2, 3, 6})])

    def to_json(self) -> str:
        """Returns the plan as text."""
        return codec.dumps(self, format=_FORMAT) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads the plan from text that `to_json` has made, edited or not."""
        try:
            head = codec.loads(text, "the plan")
            _check_format(head)
            codec.check_keys("the plan", head, {"format", "ranks", "leaves"})
            if not isinstance(head["leaves"], list):
                raise ArgumentError("the plan's leaves must be a list.")
            leaves = tuple(_leaf(entry) for entry in head["leaves"])
            seen = set()
            for leaf in leaves:
                if leaf.path in seen:
                    raise ArgumentError(f"the plan has two entries for {leaf.path!r}.")
                seen.add(leaf.path)
            return cls(head["ranks"], leaves)
        except ArgumentError as error:
            raise PlanError(cut(message(error), _LONGEST)) from None
        except RecursionError:
            raise PlanError("the plan has schemes nested too deeply.") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file."""
        try:
            codec.write(path, self.to_json(), "the plan")
        except ArgumentError as error:
            raise PlanError(str(error)) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Reads a plan from a file."""
        try:
            text = codec.read(path, "the plan").decode()
        except ArgumentError as error:
            raise PlanError(str(error)) from None
        except UnicodeDecodeError as error:
            raise PlanError(f"the plan in {path} is not text: {error}.") from None
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None


def _is_shard(path, leaf, whole):
    """Returns whether a leaf can be a shard of an array of the shape `whole`.

    That is by the sizes of the axes over which it is sharded, as far as its type shows, or
    over which it may be, where types are not checked.
    """
    manual = axes.manual_axes()
    names = {*tree.shards_of(path, leaf)}
    if len(manual) > 1 and not all(map(axes.is_checking, manual)):
        names |= {*manual}
    sizes = jax.sharding.get_abstract_mesh().shape
    shards = math.prod(sizes.get(name, 1) for name in names)
    if len(leaf.shape) != len(whole) or not math.prod(leaf.shape):
        return False
    divides = all(of % part == 0 for of, part in zip(whole, leaf.shape, strict=True))
    return divides and shards % (math.prod(whole) // math.prod(leaf.shape)) == 0


def _check_format(head: Any) -> None:
    """Raises if a JSON object says another format, before its other keys are looked at."""
    given = head.get("format", _FORMAT) if isinstance(head, dict) else _FORMAT
    if not arguments.is_int(given) or given != _FORMAT:
        raise ArgumentError(
            f"the plan has format {cut(repr(given))}, and sparsejax "
            f"{versions()['sparsejax']} reads format {_FORMAT}: another version has "
            "written it. Make a new plan with sparsejax.make_plan, or install the version "
            "that wrote it."
        )


def _leaf(entry: Any) -> LeafPlan:
    path = entry.get("path") if isinstance(entry, dict) else None
    where = "a leaf of the plan"
    if path is not None:
        where = f"leaf {cut(repr(path))} of the plan"
    return codec.decode(LeafPlan, entry, where)


def _some(paths: Sequence[str]) -> str:
    shown = ", ".join(repr(path) for path in paths[:3])
    return shown + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
