"""Dataclasses as JSON: plans, explanations and measured costs, to be read and edited.

A dataclass is an object whose keys are its fields. A field that has its default value is
left out. A scheme or an ownership also has the name of its class, under "name"; if that
would be its only key, a string with the name may replace the object:

    {"name": "BalancedParallelism", "push_capacity": 512, "ownership": "MurmurHash"}

`decode` checks keys and lists; the classes check the values of their fields.
"""

import contextlib
import dataclasses
import difflib
import inspect
import json
import math
import os
import pathlib
import types
import typing
from collections.abc import Iterator, Set
from typing import Any

import jax.numpy as jnp
import numpy as np

from sparsejax import arguments, schemes
from sparsejax.arguments import cut
from sparsejax.errors import ArgumentError, SparsejaxError
from sparsejax.schemes.base import LossyScheme, Scheme
from sparsejax.units import ownership
from sparsejax.units.ownership import Ownership


def _exported(module: types.ModuleType, family: type) -> dict[str, type]:
    """Returns the classes of a family that a module exports and a file may name."""
    return {
        name: kind
        for name, kind in vars(module).items()
        if isinstance(kind, type)
        and issubclass(kind, family)
        and not inspect.isabstract(kind)
        and not issubclass(kind, LossyScheme)
    }


# The families whose classes are written with their names: a noun for messages, the classes.
_FAMILIES: dict[type, tuple[str, dict[str, type]]] = {
    Scheme: ("scheme", _exported(schemes, Scheme)),
    Ownership: ("ownership", _exported(ownership, Ownership)),
}


# Names of schemes in rules, by which a file may name them, too.
_ALIASES = {"dense": "AllReduce"}


# Upper bound of the bytes of a file. A plan of 100,000 leaves has about thirty million.
LARGEST = 64 * 2**20

_LONGEST = 400  # characters of a path in a message


def dumps(value: Any, **head: Any) -> str:
    """Returns a dataclass as JSON text, with the keys of `head` before its own."""
    return json.dumps({**head, **encode(value)}, indent=1)


def encode(value: Any) -> Any:
    """Returns a value as a tree of types that JSON can encode; an infinity becomes null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = any(isinstance(value, family) for family in _FAMILIES)
        encoded = {"name": type(value).__name__} if named else {}
        for field in dataclasses.fields(value):
            given = getattr(value, field.name)
            if given == field.default:
                continue
            if field.name == "wire_dtype":
                given = str(jnp.dtype(given))
            encoded[field.name] = encode(given)
        return encoded
    if isinstance(value, dict):
        return {key: encode(given) for key, given in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(given) for given in value]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and math.isinf(value) else value


def loads(text: str | bytes, where: str) -> Any:
    """Parses JSON text, which error messages call `where`."""
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _object(pairs, where))
    except ArgumentError:
        raise
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"{where} is not JSON: {error}.") from None
    except RecursionError:
        raise ArgumentError(f"{where} has lists or objects nested too deeply.") from None


def _object(pairs, where):
    """Returns a JSON object as a dict; raises if it has a key twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        values = " and ".join(cut(repr(value)) for name, value in pairs if name == twice)
        raise ArgumentError(
            f"{where} has the key {cut(repr(twice))} more than once in one object, with "
            f"{values}: keep one of them."
        )
    return found


def read(path: str | os.PathLike[str], where: str) -> bytes:
    """Reads a file, which messages call `where`; raises if it exceeds `LARGEST` bytes."""
    name = arguments.check_path("path", path)
    with _in_words(f"{where} in {path} cannot be read"):
        with pathlib.Path(name).open("rb") as opened:
            text = opened.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ArgumentError(
            f"{where} in {path} has more than {LARGEST:,} bytes, which is no file that "
            "sparsejax has written."
        )
    return text


def write(path: str | os.PathLike[str], text: str, where: str) -> None:
    """Writes text to a file; error messages call its contents `where`."""
    name = arguments.check_path("path", path)
    with _in_words(f"{where} cannot be written to {path}"):
        pathlib.Path(name).write_text(text)


@contextlib.contextmanager
def _in_words(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ArgumentError(f"{cut(what, _LONGEST)}: {error.strerror}.") from error


def decode(kind: Any, given: Any, where: str) -> Any:
    """Decodes a value that `encode` wrote, edited or not.

    Args:
        kind: The type of the value, as annotated at the field of a dataclass.
        given: The parsed JSON.
        where: The name of the value in messages, such as "leaf 'w' of the plan".
    """
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        members = typing.get_args(kind) if isinstance(given, dict) else ()
        kind = next((k for k in members if dataclasses.is_dataclass(k)), Any)
    if kind in _FAMILIES:
        family, classes = _FAMILIES[kind]
        fields = {"name": given} if isinstance(given, str) else given
        name = fields.get("name") if isinstance(fields, dict) else fields
        name = _ALIASES.get(name, name) if isinstance(name, str) else name
        if not isinstance(name, str) or name not in classes:
            shown = cut(repr(name))
            close = difflib.get_close_matches(shown.strip("\"'"), classes, 1, 0.5)
            raise ArgumentError(
                f"{where}: unknown {family} {shown}; there are "
                f"{', '.join(sorted(classes))}."
                + "".join(f" Did you mean {kind!r}?" for kind in close)
            )
        given = {key: value for key, value in fields.items() if key != "name"}
        return _built(classes[name], given, f"{where}: {name}")
    if dataclasses.is_dataclass(kind):
        return _built(kind, given, where)
    if typing.get_origin(kind) is tuple:
        if not isinstance(given, list):
            raise ArgumentError(f"{where} must be a list, got {cut(repr(given))}.")
        member = typing.get_args(kind)[0]
        return tuple(decode(member, item, where) for item in given)
    if kind is str and not isinstance(given, str):
        raise ArgumentError(f"{where} must be a string, got {cut(repr(given))}.")
    return given


def _built(kind: Any, given: Any, where: str) -> Any:
    """Makes a dataclass from the JSON values of its fields."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    required = {k for k, default in defaults.items() if default is dataclasses.MISSING}
    check_keys(where, given, required, set(defaults) - required)
    hints = typing.get_type_hints(kind)
    values = {}
    for name, value in given.items():
        # Messages about a scheme or an ownership name its class instead of the field.
        inside = where if hints[name] in _FAMILIES else f"{where}: {name}"
        values[name] = decode(hints[name], value, inside)
    try:
        if values.get("wire_dtype") is not None:
            arguments.check_dtype("wire_dtype", values["wire_dtype"])
            values["wire_dtype"] = jnp.dtype(values["wire_dtype"])
        return kind(**values)
    except (SparsejaxError, TypeError) as error:
        raise ArgumentError(f"{where}: {error}") from None


def check_keys(
    where: str, given: Any, required: Set[str], optional: Set[str] = frozenset()
) -> None:
    """Raises unless a value is an object with all required keys, and no unknown ones."""
    if not isinstance(given, dict):
        raise ArgumentError(f"{where} must be a JSON object, got {type(given).__name__}.")
    missing = sorted(required - set(given))
    if missing:
        raise ArgumentError(f"{where} has no {missing[0]!r}.")
    unknown = sorted(set(given) - required - optional)
    if unknown:
        raise ArgumentError(
            f"{where} has an unknown key {cut(repr(unknown[0]))}; its keys are "
            f"{', '.join(sorted(required | optional))}."
        )
