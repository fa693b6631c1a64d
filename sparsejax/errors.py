"""What the library raises. Each message names the leaf or argument, the value, the fix."""

import math
from typing import Any

import jax


class SparsejaxError(Exception):
    """The base of all errors that sparsejax raises on purpose."""


class ArgumentError(SparsejaxError, ValueError):
    """An argument has a value that cannot be used."""


class AxisError(SparsejaxError, ValueError):
    """There is no such mesh axis here, or more than one to choose from."""


class AlreadySummedError(SparsejaxError, ValueError):
    """A gradient was summed over the axis before it was to be synchronized."""


class LeafError(SparsejaxError, TypeError):
    """A leaf has a type that cannot be synchronized."""


class RuleError(SparsejaxError, ValueError):
    """A rule matches no leaf, or says something unknown."""


class PlanError(SparsejaxError, ValueError):
    """A plan cannot be read, or was made for another model or another number of ranks."""


class StateError(SparsejaxError, ValueError):
    """A state is not the one that the transformation needs here."""


def check_static(name: str, value: Any) -> None:
    """Raises for a JAX array, which an injected hyperparameter is."""
    if isinstance(value, jax.Array):
        raise ArgumentError(
            f"{name} must be a Python value, because it decides what is compiled, got a "
            "JAX array. optax.inject_hyperparams injects all numbers that are not in its "
            f"static_args=({name!r},): name all arguments there but those of the optimizer."
        )


def is_int(value: Any, least: float = -math.inf) -> bool:
    """Is it a Python int, and at least so much?"""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> bool:
    """Is it a Python number?"""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_whole(name: str, value: Any, least: float = -math.inf, other: str = "") -> None:
    """Raises unless it is a Python int of at least so much.

    Args:
        name: Of the argument.
        value: Its value.
        least: What it must be at least.
        other: What else it may be, for the message: " or None".
    """
    check_static(name, value)
    if not is_int(value, least):
        kind = {-math.inf: "an int", 1: "a positive int"}
        wanted = kind.get(least, f"an int of at least {least}")
        raise ArgumentError(f"{name} must be {wanted}{other}, got {value!r}.")


def check_positive(name: str, value: Any, least: float = 0, most: float = math.inf) -> None:
    """Raises unless it is a number above one bound and not above the other."""
    check_static(name, value)
    if not is_number(value) or not least < value <= most:
        upper = "" if most == math.inf else f" and at most {most:g}"
        raise ArgumentError(f"{name} must be above {least:g}{upper}, got {value!r}.")


def check_density(name: str, value: Any) -> None:
    """Raises unless it is a share, or a schedule of one."""
    check_static(name, value)
    if callable(value):
        if not isinstance(getattr(value, "largest", None), (int, float)):
            raise ArgumentError(
                f"{name} is a schedule, and room is made for its largest value: use "
                "sparsejax.sparsifiers.Warmup(density, steps), or give the function an "
                "attribute `largest`."
            )
        check_density(f"{name}.largest", getattr(value, "largest"))  # noqa: B009
        return
    if not is_number(value):
        raise ArgumentError(f"{name} must be a number in (0, 1], got {value!r}.")
    if not 0 < value <= 1:
        hint = " (0.01 is one per cent)" if value > 1 else ""
        raise ArgumentError(f"{name} must lie in (0, 1], got {value!r}{hint}.")
