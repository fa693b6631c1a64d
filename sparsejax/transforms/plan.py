"""A plan: for each leaf its scheme, unit, index codes and capacities, as a JSON file.

`sparsejax.make_plan` writes one from what was seen in the first steps, and
`sparsejax.sync(plan)` follows it. A plan is made to be read and edited: a leaf's scheme is
its class and its arguments, by name. It holds for one tree of parameters and one number of
ranks, which is checked before anything is sent. A later step that does not fit a capacity
takes further rounds or goes densely: the sum is exact all the same.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from sparsejax import errors, schemes
from sparsejax.errors import PlanError, SparsejaxError
from sparsejax.schemes.base import Scheme
from sparsejax.units import ownership
from sparsejax.units.ownership import sorted_thresholds


_FORMAT = 1
_UNITS = ("element", "row")
_SCHEMES = {
    name: value
    for name, value in vars(schemes).items()
    if isinstance(value, type)
    and issubclass(value, Scheme)
    and value is not Scheme
    and value.lossless
}
_OWNERSHIPS = {
    kind.__name__: kind
    for kind in (
        ownership.StripedHash,
        ownership.MurmurHash,
        ownership.Contiguous,
        sorted_thresholds.SortedThresholds,
    )
}


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """What is done with one leaf.

    Attributes:
        path: Its path in the tree, written a/b/c.
        shape: Its shape.
        dtype: Its dtype, by name.
        unit: What an index points at: "element" or "row".
        scheme: How it is added up.
        note: Why, for the reader of the file.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    unit: str
    scheme: Scheme
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is done with every leaf of a model.

    Attributes:
        ranks: For how many ranks it was made: hosts, where there are two levels.
        leaves: One entry a leaf, in the order of the tree.
    """

    ranks: int
    leaves: tuple[LeafPlan, ...]

    def check_leaves(self, paths: Sequence[str], leaves: Sequence[Any]) -> None:
        """Raises unless the plan was made for a tree of these leaves."""
        own = {leaf.path: leaf for leaf in self.leaves}
        missing = [path for path in paths if path not in own]
        extra = [path for path in own if path not in set(paths)]
        if missing or extra:
            raise PlanError(
                "the plan was made for another tree: "
                + (f"it has no entry for {_some(missing)}" if missing else "")
                + (", and " if missing and extra else "")
                + (f"the tree has no leaf for its {_some(extra)}" if extra else "")
                + ". Make a new plan, or rename the entries in its file."
            )
        for path, leaf in zip(paths, leaves, strict=True):
            shape, dtype = tuple(leaf.shape), str(jnp.dtype(leaf.dtype))
            if (shape, dtype) != (own[path].shape, own[path].dtype):
                raise PlanError(
                    f"the plan was made for another tree: in the plan {path!r} is "
                    f"{own[path].dtype}{list(own[path].shape)}, in the tree "
                    f"{dtype}{list(shape)}. Make a new plan."
                )

    def check_ranks(self, ranks: int) -> None:
        """Raises unless the plan was made for so many ranks."""
        if ranks != self.ranks:
            raise PlanError(
                f"the plan was made for {self.ranks} ranks, and there are {ranks}. Make a "
                "new plan, or, if it should hold here too, edit `ranks` in its file."
            )

    def chosen(self) -> dict[str, tuple[Scheme, str]]:
        """The scheme and the unit of each leaf, by path."""
        return {leaf.path: (leaf.scheme, leaf.unit) for leaf in self.leaves}

    def to_json(self) -> str:
        """The plan as text."""
        leaves = [
            {
                "path": leaf.path,
                "shape": list(leaf.shape),
                "dtype": leaf.dtype,
                "unit": leaf.unit,
                "scheme": _to_dict(leaf.scheme),
                **({"note": leaf.note} if leaf.note else {}),
            }
            for leaf in self.leaves
        ]
        head = {"format": _FORMAT, "ranks": self.ranks, "leaves": leaves}
        return json.dumps(head, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that `to_json` wrote, edited or not."""
        try:
            head = json.loads(text)
        except (json.JSONDecodeError, TypeError) as error:
            raise PlanError(f"the plan is not JSON: {error}.") from None
        _check_keys("the plan", head, {"format", "ranks", "leaves"})
        if head["format"] != _FORMAT or isinstance(head["format"], (bool, float)):
            raise PlanError(
                f"the plan has format {head['format']!r}; this version reads {_FORMAT}."
            )
        ranks = head["ranks"]
        if not errors.is_int(ranks, 1):
            raise PlanError(f"the plan's ranks must be a positive int, got {ranks!r}.")
        if not isinstance(head["leaves"], list):
            raise PlanError("the plan's leaves must be a list.")
        leaves = tuple(_leaf(entry) for entry in head["leaves"])
        paths = [leaf.path for leaf in leaves]
        twice = [path for path in paths if paths.count(path) > 1]
        if twice:
            raise PlanError(f"the plan has two entries for {twice[0]!r}.")
        return cls(ranks, leaves)

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the plan to a file."""
        pathlib.Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "Plan":
        """Reads a plan from a file."""
        try:
            return cls.from_json(pathlib.Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise PlanError(f"the plan in {path} is not text: {error}.") from None


def _leaf(entry):
    _check_keys("a leaf of the plan", entry, set(), {"path"})
    where = f"leaf {entry.get('path')!r} of the plan"
    required = {"path", "shape", "dtype", "unit", "scheme"}
    _check_keys(where, entry, required, {"note"})
    if entry["unit"] not in _UNITS:
        known = " or ".join(repr(unit) for unit in _UNITS)
        raise PlanError(f"{where}: unit must be {known}, got {entry['unit']!r}.")
    shape = entry["shape"]
    if not isinstance(shape, list) or not all(errors.is_int(n, 0) for n in shape):
        raise PlanError(
            f"{where}: shape must be a list of ints of at least 0, got {shape!r}."
        )
    for key in ("path", "dtype", "note"):
        if not isinstance(entry.get(key, ""), str):
            raise PlanError(f"{where}: {key} must be a string, got {entry[key]!r}.")
    try:
        floating = jnp.issubdtype(jnp.dtype(entry["dtype"]), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise PlanError(
            f"{where}: dtype must name a floating dtype, got {entry['dtype']!r}."
        )
    if entry["unit"] == "row" and len(shape) < 2:
        raise PlanError(f"{where}: rows need two axes, and its shape is {shape}.")
    scheme = _from_dict(where, entry["scheme"], _SCHEMES, "scheme")
    return LeafPlan(
        entry["path"],
        tuple(shape),
        entry["dtype"],
        entry["unit"],
        scheme,
        entry.get("note", ""),
    )


def _to_dict(value) -> dict[str, Any]:
    """A scheme or an ownership as its name and the arguments that differ from defaults."""
    found: dict[str, Any] = {"name": type(value).__name__}
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        if given == field.default:
            continue
        if dataclasses.is_dataclass(given):
            given = _to_dict(given)
        elif field.name == "wire_dtype":
            given = str(jnp.dtype(given))
        found[field.name] = given
    return found


def _from_dict(where: str, given: Any, known: Mapping[str, type], what: str) -> Any:
    given = {"name": given} if isinstance(given, str) else given
    name = given.get("name") if isinstance(given, dict) else given
    if not isinstance(given, dict) or not isinstance(name, str) or name not in known:
        raise PlanError(
            f"{where}: unknown {what} {name!r}; there are {', '.join(sorted(known))}."
        )
    kind = known[name]
    fields = {field.name for field in dataclasses.fields(kind)}
    arguments = {key: value for key, value in given.items() if key != "name"}
    unknown = sorted(set(arguments) - fields)
    if unknown:
        raise PlanError(
            f"{where}: {name} has no argument {unknown[0]!r}; it has "
            f"{', '.join(sorted(fields))}."
        )
    if "ownership" in arguments:
        arguments["ownership"] = _from_dict(
            where, arguments["ownership"], _OWNERSHIPS, "ownership"
        )
    if "across" in arguments:
        arguments["across"] = _from_dict(where, arguments["across"], known, what)
    try:
        if arguments.get("wire_dtype") is not None:
            arguments["wire_dtype"] = jnp.dtype(arguments["wire_dtype"])
        return kind(**arguments)
    except (SparsejaxError, TypeError) as error:
        raise PlanError(f"{where}: {name}: {error}") from None


def _check_keys(what: str, given: Any, required: set[str], others: Iterable[str] = ()):
    if not isinstance(given, dict):
        raise PlanError(f"{what} must be a JSON object, got {type(given).__name__}.")
    missing = sorted(required - set(given))
    if missing:
        raise PlanError(f"{what} has no {missing[0]!r}.")
    unknown = sorted(set(given) - required - set(others)) if required else []
    if unknown:
        raise PlanError(f"{what} has an unknown key {unknown[0]!r}.")


def _some(paths: Sequence[str]) -> str:
    shown = ", ".join(repr(path) for path in paths[:3])
    return shown + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
