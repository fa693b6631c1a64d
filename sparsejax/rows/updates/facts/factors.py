"""Derives whether the output of an equation is a multiple of an input, or a count."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp


# A multiple of an input: the number of the input, and the factor. A constant: None, and the
# number. A factor or a number that exists but is not known is NaN.
Times = tuple[int | None, float]
ZERO: Times = (None, 0.0)
SOME: Times = (None, math.nan)


def _is_known(times):
    return times is not None and times[0] is None


def _product(eqn, times):
    a, b = times
    if ZERO in times:
        return ZERO
    if a is None or b is None:
        return None
    if _is_known(b):
        a, b = b, a
    return (b[0], b[1] * a[1]) if _is_known(a) else None


def _sum_of(sign):
    def rule(eqn, times):
        a, b = times
        if b == ZERO:
            return a
        if a is None or b is None:
            return None
        b = b[0], sign * b[1]
        if a == ZERO:
            return b
        return (a[0], a[1] + b[1]) if a[0] == b[0] else None

    return rule


def _quotient(eqn, times):
    a, b = times
    if a == ZERO:
        return ZERO
    if a is None or b is None or not _is_known(b) or b[1] == 0:
        return None
    return a[0], a[1] / b[1]


def _power(eqn, times):
    power = eqn.params["y"]
    return ZERO if times[0] == ZERO and power > 0 else times[0] if power == 1 else None


def _chosen(eqn, times):
    cases = set(times[1:])
    return cases.pop() if len(cases) == 1 else None


def _numbers(function):
    """Makes the rule of an equation whose output is constant if all its inputs are."""

    def rule(eqn, times):
        if not all(map(_is_known, times)):
            return None
        numbers = [n for _, n in times]
        return SOME if any(map(math.isnan, numbers)) else (None, function(*numbers))

    return rule


def _cast(eqn, times):
    """Keeps zeros, and unchanged inputs; other multiples are rounded at each step."""
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    is_float = jnp.issubdtype(new, jnp.floating) and jnp.issubdtype(old, jnp.floating)
    kept = times[0] is not None and (times[0][1] in (0, 1) or old == new)
    # A cast to a wider dtype and back changes nothing; one to a narrower dtype rounds.
    wider = is_float and _holds(jnp.finfo(new), jnp.finfo(old))
    return times[0] if kept and (times[0] == ZERO or wider) else None


def _holds(wide, narrow):
    """Returns whether a floating dtype has all numbers of another."""
    exponents = wide.minexp <= narrow.minexp and wide.maxexp >= narrow.maxexp
    return exponents and wide.nmant >= narrow.nmant


def multiple(eqn: Any, times: Sequence[Times | None]) -> Times | None:
    """Derives `Times` of an equation's output from those of its inputs; None if unknown."""
    rule = _RULES.get(eqn.primitive.name)
    return rule(eqn, times) if rule else None


def count(eqn: Any, times: Sequence[Times | None], plus: Sequence[Times | None], v: Any):
    """Derives `ArrayFacts.plus` of an equation's output: an input, and a number added.

    Args:
        eqn: The equation.
        times: `ArrayFacts.times` of its inputs.
        plus: `ArrayFacts.plus` of its inputs.
        v: The output variable.
    """
    name = eqn.primitive.name
    if name == "add" and times[0] and times[1]:
        (a, factor), (b, number) = sorted((times[0], times[1]), key=_is_known)
        return (a, number) if a is not None and b is None and factor == 1 else None
    if name == "select_n" and jnp.issubdtype(v.aval.dtype, jnp.integer):
        most = None, float(jnp.iinfo(v.aval.dtype).max)
        others = {p for p, t in zip(plus[1:], times[1:], strict=True) if t != most}
        return others.pop() if len(others) == 1 else None
    return None


_RULES = {
    "add": _sum_of(1),
    "add_any": _sum_of(1),
    "sub": _sum_of(-1),
    "mul": _product,
    "div": _quotient,
    "neg": lambda eqn, times: times[0] and (times[0][0], -times[0][1] + 0.0),
    "integer_pow": _power,
    "select_n": _chosen,
    "convert_element_type": _cast,
    **dict.fromkeys(("copy", "copy_p", "pvary", "stop_gradient"), lambda eqn, t: t[0]),
    **dict.fromkeys(
        (
            *("abs", "asinh", "atan", "cbrt", "ceil", "erf", "expm1", "floor", "imag"),
            *("log1p", "real", "round", "sign", "sin", "sinh", "sqrt", "square", "tan"),
            *("tanh", "reduce_precision"),
        ),
        lambda eqn, times: ZERO if times[0] == ZERO else None,
    ),
    "clamp": _numbers(lambda low, x, high: min(max(x, low), high)),
    "max": _numbers(max),
    "min": _numbers(min),
}


# The names of the primitives that have a rule here.
NAMES = frozenset(_RULES)
