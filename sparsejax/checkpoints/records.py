"""The JSON beside the arrays of a checkpoint.

    {"format": 2, "sparsejax": "0.1.0", "jax": "0.10.2", "ranks": 4, "mesh": {"data": 4},
     "about": {}, "tree": {"type": "TrainState", "parts": {
        "step": {"array": 0, "shape": [], "dtype": "int32"}, ...}}, "crc32": 1234567}

A node has its "type", its "parts", and "told", its static data, if it has any. A Python
number or string is {"value": ...}. "array" is the number of an array, in the order of the
tree; an array without elements has none. "crc32" is the checksum of all other entries.

When the format changes, `FORMAT` increases by one, and no other format is read.
"""

import importlib.metadata
import json
import math
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from sparsejax import errors
from sparsejax.arguments import cut
from sparsejax.checkpoints.description import (
    VALUES,
    Array,
    Node,
    Part,
    Ranks,
    Value,
    leaves,
)
from sparsejax.errors import CheckpointError


FORMAT = 2

# Bytes of a file that is read. One of a hundred thousand leaves has about ten million.
LARGEST = 64 * 2**20

_KEY = "crc32"

About = Mapping[str, bool | int | float | str | None]


class Record(NamedTuple):
    """The contents of the JSON file.

    Attributes:
        versions: The versions of sparsejax and JAX that wrote it.
        ranks: The ranks for which the state was made.
        about: The `about` of `sparsejax.save`.
        tree: The description of the state.
    """

    versions: dict[str, str]
    ranks: Ranks
    about: dict[str, Any]
    tree: Part


def versions() -> dict[str, str]:
    """Returns the versions of this library and of JAX."""
    try:
        own = importlib.metadata.version("sparsejax")
    except importlib.metadata.PackageNotFoundError:
        own = "0.0.0"  # a source tree that was not installed
    return {"sparsejax": own, "jax": jax.__version__}


def written(record: Record) -> dict[str, Any]:
    """Returns a record as JSON, with its checksum."""
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
    """Returns a JSON object with the checksum of its entries as one more entry."""
    return {**given, _KEY: checksum(given)}


def checksum(given: dict[str, Any]) -> int:
    """Returns the CRC-32 of a JSON object, without the entry of the checksum itself."""
    # Not of the bytes of the file, because spaces and the order of keys have no meaning.
    said = {key: value for key, value in given.items() if key != _KEY}
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return zlib.crc32(text.encode())


def read(text: bytes, file: str) -> Record:
    """Decodes the JSON file, and raises unless `written` would write it.

    Args:
        text: The bytes of the file, of which at most `LARGEST` + 1 are given.
        file: The name of the file, for messages.
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
        raise _damaged(file, f"it is not JSON, {why}") from None
    if not isinstance(given, dict) or "format" not in given:
        raise CheckpointError(f"{file} has no 'format': sparsejax.save did not write it.")
    number = given["format"]
    if number != FORMAT:
        raise CheckpointError(
            f"{file} has format {cut(repr(number))}, written by sparsejax "
            f"{cut(repr(given.get('sparsejax')))}; "
            f"this is sparsejax {versions()['sparsejax']!r}, which reads format {FORMAT}. "
            "Install the version that wrote it: pip install sparsejax==..."
        )
    try:
        is_sealed = given.get(_KEY) == checksum(given)
        record = _decoded(given) if is_sealed else None
    except RecursionError:
        raise _damaged(file, "it is nested too deeply") from None
    if not is_sealed:
        raise _damaged(file, "its checksum is not that of what it says")
    # A right checksum is no proof that this library wrote it: encode it again and compare.
    if record is None or checksum(written(record)) != given[_KEY]:
        raise _damaged(file, "sparsejax.save does not write what it says")
    return record


def _damaged(file, why):
    return CheckpointError(f"{file} is damaged: {why}. Take the checkpoint before.")


def _decoded(given: dict[str, Any]) -> Record | None:
    """Returns the record, or None if what is given is none."""
    try:
        return _record(given)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None


def _record(given: dict[str, Any]) -> Record:
    """Decodes a record. Values of a wrong type are cast, which `read` then notices."""
    number = None if given["ranks"] is None else int(given["ranks"])
    ranks = Ranks(number, {name: int(size) for name, size in given["mesh"].items()})
    tree = _part(given["tree"])
    arrays = [x for _, x in leaves(tree) if isinstance(x, Array)]
    numbers = [x.number for x in arrays if x.number is not None or math.prod(x.shape)]
    if numbers != [*range(len(numbers))]:
        raise ValueError("arrays that are stored are numbered in the order of the tree")
    versions = {name: str(given[name]) for name in ("sparsejax", "jax")}
    return Record(versions, ranks, dict(given["about"]), tree)


def _part(given: dict[str, Any]) -> Part:
    if "value" in given:
        return Value(given["value"])
    if "shape" in given:
        number, impl = given.get("array"), given.get("impl")
        number = number if number is None else int(number)
        return Array(number, tuple(map(int, given["shape"])), str(given["dtype"]), impl)
    parts = {name: _part(inside) for name, inside in given["parts"].items()}
    return Node(str(given["type"]), dict(given.get("told", {})), parts)


def check_about(about: About | None) -> dict[str, Any]:
    """Returns the caller's `about` as a dict; raises unless JSON can store it."""
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
        if isinstance(value, float) and math.isnan(value):
            raise errors.ArgumentError(
                f"about has {name!r}: nan, which equals no number, not even itself, and so "
                "no restore with the same about would be taken: leave it out, or give None."
            )
    return dict(about)
