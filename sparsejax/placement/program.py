"""The numbers in a traced program, as text that processes compare.

An optax optimizer is a pair of closures, from which a learning rate cannot be read. But the
traced program of its update contains all numbers with which the optimizer was made. If two
processes differ in one, XLA compiles different programs for them, and replicas diverge.
"""

import collections
import enum
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

from sparsejax.jobs import agreement
from sparsejax.state import tree
from sparsejax.tracing import programs


# Options of jitted functions inside a program, which decide how they are compiled.
_OF_JIT = ("compiler_options_kvs", "donated_invars", "inline", "keep_unused", "name")
_SIMPLE = bool | int | float | str
_SHOWN = 1 << 12  # elements of a constant, up to which messages show its values


def numbers_of(program: core.ClosedJaxpr) -> dict[str, str]:
    """Returns the numbers and options of operations, with counts, by operation and type.

    Options have names of their own, so that messages about numbers list numbers alone. The
    order of operations is left out, because it may follow the order of a set, which differs
    by process.
    """
    found: dict[str, collections.Counter[str]] = {}
    for name, text in _operations(program):
        found.setdefault(name, collections.Counter())[text] += 1
    return {name: _counted(each) for name, each in found.items()}


def computing(jaxpr: core.Jaxpr) -> Iterator[Any]:
    """Yields the equations, except for those of `checkify`'s checks.

    JAX numbers checks in the order in which a process has traced them.
    """
    checks = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "check"]
    of_checks = {id(var) for eqn in checks for var in eqn.invars}
    for equation in jaxpr.eqns:
        # All outputs of what is left out are operands of a check.
        if not {id(var) for var in equation.outvars} <= of_checks:
            yield equation


def _operations(program: core.ClosedJaxpr) -> Iterator[tuple[str, str]]:
    """Yields the name of each operation, also of nested programs, and its numbers.

    Then the name of its options, if it has any, and these. The constants of a program
    follow its operations.
    """
    for equation in computing(program.jaxpr):
        types = ", ".join(dict.fromkeys(type_of(var.aval) for var in equation.outvars))
        given = [number(x.val) for x in equation.invars if isinstance(x, core.Literal)]
        name = f"{equation.primitive.name} to {types or 'nothing'}"
        yield name, ", ".join(given)
        params = sorted(equation.params.items())
        if options := [f"{k}={v}" for k, v in params if _is_simple(v) and k not in _OF_JIT]:
            yield f"the options of {name}", ", ".join(options)
        for inner in programs.held(equation):
            yield from _operations(inner)
    yield from (("constants", constant(x)) for x in program.consts)


def type_of(aval: Any) -> str:
    """Returns the dtype and the shape of a value, as text."""
    shape = getattr(aval, "shape", None)
    return "other" if shape is None else f"{aval.dtype}{[*shape]}"


def number(value: Any) -> str:
    """Returns the number of a literal, as text."""
    return str(np.asarray(value))  # in as few digits as its dtype needs


def _is_simple(value: Any) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return all(isinstance(one, _SIMPLE) for one in values)


def options_of(equation: Any) -> list[tuple[str, str]]:
    """Returns the parameters of an operation that are written alike in all processes."""
    params = sorted(equation.params.items())
    return [(k, repr(v)) for k, v in params if _is_fixed(v) and k not in _OF_JIT]


def _is_fixed(value: Any) -> bool:
    """Returns whether a parameter of an operation is written alike in all processes."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return value is None or isinstance(value, _SIMPLE | enum.Enum | np.dtype)


def constant(x: Any) -> str:
    """Returns a constant of a program as text: its values, or a hash of many.

    Of an array whose shards are on other processes it is the type alone.
    """
    shape, dtype = np.shape(x), getattr(x, "dtype", type(x).__name__)
    text = f"{dtype}{[*shape]}"
    x = tree.here(jax.random.key_data(x) if "key<" in str(dtype) else x)
    if not getattr(x, "is_fully_addressable", True):
        return text
    if math.prod(shape) > _SHOWN:
        return f"{text} of hash {agreement.hashed(np.asarray(x))}"
    return f"{text} {np.asarray(x).tolist()}"


def _counted(texts: collections.Counter[str]) -> str:
    parts = [
        (f"{text or 'no constant'}" + (f" ({count} times)" if count > 1 else ""))
        for text, count in sorted(texts.items())
    ]
    return "; ".join(parts)
