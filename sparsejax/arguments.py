"""Checks of arguments: each error names the argument, its value, and the fix."""

import math
import numbers
import os
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.errors import ArgumentError, RuleError


def cut(text: str, most: int = 80) -> str:
    """Returns the text, truncated to `most` characters for a message."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def check_static(name: str, value: Any) -> None:
    """Raises if the value is a JAX array, as an injected hyperparameter is."""
    if isinstance(value, jax.Array):
        raise ArgumentError(
            f"{name} must be a Python value, because it decides what is compiled, got a "
            "JAX array. optax.inject_hyperparams injects all numbers that are not in its "
            f"static_args=({name!r},): name all arguments there but those of the optimizer."
        )


def is_int(value: Any, least: float = -math.inf) -> bool:
    """Returns whether a value is a Python int of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> bool:
    """Returns whether a value is a Python or NumPy real number that converts to float."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:  # an int of some hundred digits
        return False
    return True


def check_whole(name: str, value: Any, least: float = -math.inf, other: str = "") -> None:
    """Raises unless an argument is a Python int of at least `least`.

    Args:
        name: Name of the argument.
        value: Its value.
        least: The smallest int that it may be.
        other: Other values that are allowed, for the message, such as " or None".
    """
    check_static(name, value)
    if not is_int(value, least):
        kind = {-math.inf: "an int", 1: "a positive int"}
        wanted = kind.get(least, f"an int of at least {least}")
        raise ArgumentError(f"{name} must be {wanted}{other}, got {value!r}.")


def check_path(name: str, path: Any) -> str:
    """Returns a path as a str, or raises if no file can have that name.

    Args:
        name: Name of the argument.
        path: A str or a `pathlib` path.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise ArgumentError(
            f"{name} must be a text or a pathlib.Path, got {cut(repr(path))}."
        )
    is_utf8 = text.encode(errors="replace").decode() == text
    if not text or "\0" in text or not is_utf8:
        raise ArgumentError(
            f"{name} must be the name of a file or folder, some text without NUL that is "
            f"UTF-8, got {cut(repr(text))}."
        )
    return text


def check_regular(pattern: Any) -> None:
    """Raises unless a pattern is a valid regular expression."""
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise RuleError(f"{pattern!r} is not a regular expression: {error}.") from None


def check_positive(name: str, value: Any, least: float = 0, most: float = math.inf) -> None:
    """Raises unless an argument is a number above `least` and not above `most`."""
    check_static(name, value)
    if not is_number(value) or not least < value <= most:
        upper = "" if most == math.inf else f" and at most {most:g}"
        raise ArgumentError(f"{name} must be above {least:g}{upper}, got {value!r}.")


def check_at_least(name: str, value: Any, least: float = 0) -> None:
    """Raises unless an argument is a finite number of at least `least`."""
    check_static(name, value)
    if not is_number(value) or not least <= value < math.inf:
        raise ArgumentError(f"{name} must be at least {least:g}, got {value!r}.")


def check_between(name: str, value: Any, least: float, most: float, why: str = "") -> None:
    """Raises unless an argument is a number in [least, most].

    Args:
        name: Name of the argument.
        value: Its value.
        least: The least number that it may be.
        most: The largest number that it may be.
        why: A sentence for the message that says what the number does.
    """
    check_static(name, value)
    if not is_number(value) or not least <= value <= most:
        why = f" {why}" if why else ""
        raise ArgumentError(
            f"{name} must lie in [{least:g}, {most:g}], got {value!r}.{why}"
        )


def check_share(name: str, value: Any) -> None:
    """Raises unless an argument is a number in (0, 1]."""
    check_static(name, value)
    if not is_number(value):
        raise ArgumentError(f"{name} must be a number in (0, 1], got {value!r}.")
    if not 0 < value <= 1:
        hint = " (0.01 is one per cent)" if value > 1 else ""
        raise ArgumentError(f"{name} must lie in (0, 1], got {value!r}{hint}.")


def check_density(name: str, value: Any) -> None:
    """Raises unless an argument is a number in (0, 1], or a schedule of such numbers."""
    check_static(name, value)
    if not callable(value):
        check_share(name, value)
        return
    if not isinstance(getattr(value, "largest", None), (int, float)):
        raise ArgumentError(
            f"{name} is a schedule, and room is made for its largest value: use "
            "sparsejax.sparsifiers.Schedule(schedule, largest=0.1), or "
            "sparsejax.sparsifiers.Warmup(density, steps)."
        )
    check_share(f"{name}.largest", getattr(value, "largest"))  # noqa: B009


def check_one_of(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raises unless an argument is one of the values that it may have."""
    choices = tuple(choices)
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ArgumentError(f"{name} must be one of {listed}, got {value!r}.")


def check_dtype(name: str, value: Any) -> None:
    """Raises unless values can be sent in this dtype; None means the dtype of the array."""
    if value is None:
        return
    # NumPy accepts strings other than names of dtypes, and fails at others in many ways.
    kind = vars(jnp).get(value) if isinstance(value, str) else value
    try:
        dtype = None if isinstance(kind, list | dict | None) else jnp.dtype(kind)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        meant = _DTYPES.get(value) if isinstance(value, str) else None
        raise ArgumentError(
            f"{name} must be a floating dtype of at least 16 bits, such as jnp.bfloat16, "
            f"got {value!r}." + (f" Did you mean {meant!r}?" if meant else "")
        )


# Names of dtypes in other libraries, with those of jax.numpy.
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32"}


def check_reduce(reduce: str) -> None:
    """Raises unless `reduce` is "sum" or "mean"."""
    if reduce not in ("sum", "mean"):
        hint = " Did you mean 'mean'?" if reduce in ("avg", "average") else ""
        raise ArgumentError(f"reduce must be 'sum' or 'mean', got {reduce!r}.{hint}")
