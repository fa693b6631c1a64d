"""The JSON beside the arrays of a checkpoint.

    {"format": 2, "sparsejax": "0.1.0", "jax": "0.10.2", "ranks": 4, "mesh": {"data": 4},
     "about": {}, "tree": {"type": "TrainState", "parts": {
        "step": {"array": 0, "shape": [], "dtype": "int32"}, ...}}, "crc32": 1234567}

A node has its "type", its "parts", and "told" where its type knows something more; a number
or text of Python's is {"value": ...}. An array without elements has no number. The numbers
count up in the order of the tree. "crc32" is the checksum of all else.

When what is written changes, `FORMAT` goes up by one, and no other format is read.
"""

import importlib.metadata
import json
import math
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from sparsejax import arguments, errors
from sparsejax.arguments import cut
from sparsejax.checkpoints.description import (
    VALUES,
    Array,
    Node,
    Part,
    Ranks,
    Value,
    joined,
    leaves,
)
from sparsejax.errors import CheckpointError


FORMAT = 2

# Bytes. A hundred thousand leaves have some ten million.
LARGEST = 64 * 2**20

# Of numbers, and of axes. A product of many long numbers takes long.
_MOST, _MOST_AXES = 2**62, 64

_KEY = "crc32"

_LONGEST = 300  # characters of a path in a message

About = Mapping[str, bool | int | float | str | None]


class Record(NamedTuple):
    """What stands beside the arrays.

    Attributes:
        versions: Those of sparsejax and JAX that wrote it.
        ranks: For how many ranks the state was made.
        about: What the caller says that it is of.
        tree: The state.
    """

    versions: dict[str, str]
    ranks: Ranks
    about: dict[str, Any]
    tree: Part


def versions() -> dict[str, str]:
    """Those of this library and of JAX."""
    try:
        own = importlib.metadata.version("sparsejax")
    except importlib.metadata.PackageNotFoundError:
        own = "0.0.0"  # run from a source tree that was not installed
    return {"sparsejax": own, "jax": jax.__version__}


def written(record: Record) -> dict[str, Any]:
    """A record as JSON."""
    given = {
        "format": FORMAT,
        **record.versions,
        "ranks": record.ranks.number,
        "mesh": record.ranks.mesh,
        "about": record.about,
        "tree": _written(record.tree),
    }
    return sealed(given)


def _written(part):
    if isinstance(part, Value):
        return {"value": part.value}
    if isinstance(part, Array):
        number = {} if part.number is None else {"array": part.number}
        impl = {} if part.impl is None else {"impl": part.impl}
        return {**number, "shape": list(part.shape), "dtype": part.dtype, **impl}
    told = {"told": part.told} if part.told else {}
    parts = {name: _written(inside) for name, inside in part.parts.items()}
    return {"type": part.type, **told, "parts": parts}


def sealed(given: dict[str, Any]) -> dict[str, Any]:
    """A description with the checksum of all else that it says."""
    return {**given, _KEY: checksum(given)}


def checksum(given: dict[str, Any]) -> int:
    """The CRC-32 of what a description says, but for its own."""
    # Not of the bytes of the file: who writes JSON chooses spaces and the order of keys.
    said = {key: value for key, value in given.items() if key != _KEY}
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return zlib.crc32(text.encode())


def read(text: bytes, file: str) -> Record:
    """The record that a text holds.

    Args:
        text: What the file holds, at most one byte more than `LARGEST`.
        file: Its name, for the message.
    """
    if len(text) > LARGEST:
        raise CheckpointError(
            f"{file} has more than {LARGEST:,} bytes, which no description of a state has: "
            "it was not written by sparsejax.save."
        )
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = str(error) or "nested too deeply"
        raise CheckpointError(
            f"{file} is cut off or damaged, it is not JSON: {why}. Take the checkpoint "
            "before."
        ) from None
    check = _Check(file)
    given = check.mapping(given, "the description")
    if "format" not in given:
        raise CheckpointError(f"{file} has no 'format': sparsejax.save did not write it.")
    number = check.whole(given["format"], "format", 1)
    if number != FORMAT:
        raise CheckpointError(
            f"{file} has format {number}, written by sparsejax "
            f"{cut(repr(given.get('sparsejax')))}; "
            f"this is sparsejax {versions()['sparsejax']!r}, which reads format {FORMAT}. "
            "Install the version that wrote it: pip install sparsejax==..."
        )
    try:
        is_sealed = given.get(_KEY) == checksum(given)
    except RecursionError:
        raise CheckpointError(
            f"{file} is damaged: it is nested too deeply. Take the checkpoint before."
        ) from None
    if not is_sealed:
        raise CheckpointError(
            f"{file} is damaged: its checksum is not that of what it says. Take the "
            "checkpoint before."
        )
    try:
        return check.record(given)
    except RecursionError:
        raise CheckpointError(
            f"{file} is damaged: 'tree' is nested too deeply. Take the checkpoint before."
        ) from None


def check_about(about: About | None) -> dict[str, Any]:
    """What the caller says that a state is of; raises unless JSON gives it back."""
    about = {} if about is None else about
    if not isinstance(about, Mapping):
        raise errors.ArgumentError(
            "about must be a dict of texts and numbers that say what the state is of, got "
            f"a {type(about).__name__}."
        )
    for name, value in about.items():
        if not isinstance(name, str) or not (value is None or type(value) in VALUES):
            raise errors.ArgumentError(
                f"about must have texts as keys, and texts or numbers as values, got "
                f"{name!r}: {value!r}."
            )
    return dict(about)


class _Check:
    """Checks values that were read; messages name the file and the field.

    Args:
        file: The file.
    """

    def __init__(self, file: str):
        self._file = file

    def record(self, given: dict[str, Any]) -> Record:
        wanted = ["format", "sparsejax", "jax", "ranks", "mesh", "about", "tree", _KEY]
        self._keys(given, "the description", wanted)
        versions = {name: self._text(given[name], name) for name in wanted[1:3]}
        number = given["ranks"]
        number = None if number is None else self.whole(number, "ranks", 1)
        mesh = self.mapping(given["mesh"], "mesh")
        mesh = {name: self.whole(size, f"mesh/{name}", 1) for name, size in mesh.items()}
        sizes = list(mesh.values())
        fits = number is not None and len(sizes) <= _MOST_AXES
        if mesh and not (fits and math.prod(sizes) % (number or 1) == 0):
            raise self._wrong("mesh", f"sizes of a mesh of {number} ranks", mesh)
        about = self.mapping(given["about"], "about")
        for name, value in about.items():
            self._value(value, f"about/{name}", or_none=True)
        tree = self._part(given["tree"], "tree")
        numbers = [x.number for _, x in leaves(tree) if isinstance(x, Array)]
        numbers = [number for number in numbers if number is not None]
        if len(set(numbers)) != len(numbers):
            raise self._wrong("tree", "another number for each array", numbers)
        return Record(versions, Ranks(number, mesh), about, tree)

    def _part(self, given: Any, path: str) -> Part:
        given = self.mapping(given, path)
        if "value" in given:
            self._keys(given, path, ["value"])
            return Value(self._value(given["value"], f"{path}: value"))
        if "shape" in given:
            self._keys(given, path, ["shape", "dtype"], ["array", "impl"])
            return self._array(given, path)
        self._keys(given, path, ["type", "parts"], ["told"])
        name = self._text(given["type"], f"{path}: type")
        told = self.mapping(given.get("told", {}), f"{path}: told")
        parts = self.mapping(given["parts"], f"{path}: parts")
        inside = {key: self._part(part, joined(path, key)) for key, part in parts.items()}
        return Node(name, told, inside)

    def _array(self, given, path):
        shape = given["shape"]
        is_shape = isinstance(shape, list) and len(shape) <= _MOST_AXES
        if not is_shape or not all(arguments.is_int(n, 0) and n <= _MOST for n in shape):
            raise self._wrong(f"{path}: shape", "a list of ints of at least 0", shape)
        dtype = self._text(given["dtype"], f"{path}: dtype")
        number, impl = given.get("array"), given.get("impl")
        if "impl" in given:
            self._text(impl, f"{path}: impl")
        if (number is None) != (math.prod(shape) == 0):
            wanted = "a number where, and only where, an array has elements"
            raise self._wrong(f"{path}: array", wanted, number)
        if number is not None:
            self.whole(number, f"{path}: array", 0)
        return Array(number, tuple(shape), dtype, impl)

    def mapping(self, given: Any, field: str) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise self._wrong(field, "a JSON object", given)
        return given

    def whole(self, given: Any, field: str, least: int) -> int:
        if not arguments.is_int(given, least) or given > _MOST:
            raise self._wrong(field, f"an int of at least {least}", given)
        return given

    def _text(self, given, field):
        if not isinstance(given, str):
            raise self._wrong(field, "a text", given)
        return given

    def _value(self, given: Any, field: str, or_none: bool = False) -> Any:
        if type(given) not in VALUES and not (or_none and given is None):
            raise self._wrong(field, "a number or a text", given)
        return given

    def _keys(self, given, field, required, optional=()):
        missing = [key for key in required if key not in given]
        extra = [key for key in given if key not in (*required, *optional)]
        if missing or extra:
            found = f"no {missing[0]!r}" if missing else f"an unknown key {extra[0]!r}"
            raise CheckpointError(
                f"{self._file} is damaged: {cut(field, _LONGEST)} has "
                f"{cut(found)}. Take the checkpoint before."
            )

    def _wrong(self, field, wanted, given):
        got = cut(repr(given))
        return CheckpointError(
            f"{self._file} is damaged: {cut(field, _LONGEST)} must be {wanted}, got "
            f"{got}. Take the checkpoint before."
        )
