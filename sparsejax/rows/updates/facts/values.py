"""Derives facts about the arrays of a program: rows kept separate, multiples, and zeros.

The program of an optimizer's update is interpreted with an `ArrayFacts` for each of its
arrays. Nothing is computed, so the facts hold for all finite values and at all steps. An
unknown equation is assumed to mix rows.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from sparsejax.rows.updates.facts import factors
from sparsejax.rows.updates.facts.factors import Times
from sparsejax.tracing import programs
from sparsejax.tracing.interpreter import Domain, interpret


@dataclasses.dataclass(frozen=True)
class ArrayFacts:
    """Facts about one array of a program.

    Attributes:
        of: The numbers of the inputs on which it depends.
        row: The number of the leaf whose rows it has, and their axis; None if it has no
            rows.
        flat: Whether all its elements are equal; False for an array with rows.
        mixed: Why rows on which it depends are mixed; None if they are not.
        times: An input and a factor, if it is this multiple of the input; or None and a
            number, if it is constant. A factor or number that is unknown is NaN.
        plus: An input and a number, if it is their sum, saturated at the largest number of
            its dtype.
    """

    of: frozenset[int] = frozenset()
    row: tuple[int, int] | None = None
    flat: bool = False
    mixed: str | None = None
    times: Times | None = None
    plus: Times | None = None

    @property
    def is_zero(self) -> bool:
        """Whether all its elements are zero."""
        return self.times is not None and self.times[1] == 0


def follow(
    program: Any,
    inputs: Sequence[ArrayFacts],
    constants: Sequence[ArrayFacts] | None = None,
) -> list[ArrayFacts]:
    """Derives the facts about the outputs of a program from those about its inputs.

    Args:
        program: The closed jaxpr.
        inputs: The facts about each input.
        constants: The facts about each constant; if None, those that `constant` finds.
    """
    return interpret(program, _Facts(), inputs, constants)


class _Facts(Domain[ArrayFacts]):
    """The domain in which the value of an array is its facts; loops have no rules."""

    def constant(self, x):
        return constant(x)

    def other(self, eqn, given):
        rule = _RULES.get(eqn.primitive.name, _other)
        return [rule(eqn, given, v) for v in eqn.outvars]

    def call(self, eqn, given):
        return [_named_by_caller(eqn, given, value) for value in super().call(eqn, given)]

    def joined(self, eqn, v, index, sides):
        """Returns the facts about an output of a `cond`, whose branch is not known."""
        if index.row or index.mixed:
            return _unknown(eqn, [index, *sides], v)
        made, times = _by_number(eqn, sides, v), {value.times for value in sides}
        times = times.pop() if len(times) == 1 else None
        return dataclasses.replace(made, of=made.of | index.of, times=times, plus=None)


def constant(x: Any) -> ArrayFacts:
    """Returns the facts about a constant of a program."""
    if np.ndim(x):
        return ArrayFacts()
    if isinstance(x, Tracer):
        return ArrayFacts(flat=True, times=factors.SOME)
    if jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended):
        return ArrayFacts(flat=True)
    x = np.asarray(x)
    known = jnp.issubdtype(x.dtype, jnp.integer) or jnp.issubdtype(x.dtype, jnp.floating)
    known = known and math.isfinite(x)
    return ArrayFacts(flat=True, times=(None, float(x)) if known else None)


def _common(given):
    """Returns the facts that outputs of any equation inherit from all of its inputs."""
    reasons = [value.mixed for value in given if value.mixed]
    of = frozenset().union(*(value.of for value in given))
    return {"of": of, "mixed": reasons[0] if reasons else None}


def _other(eqn, given, v):
    """The rule of an unknown equation, which mixes rows if its inputs have any."""
    if any(value.row for value in given):
        return _unknown(eqn, given, v)
    return ArrayFacts(**_common(given), flat=v.aval.shape == ())


def _unknown(eqn, given, v):
    common = _common(given)
    mixed = common["mixed"] or f"{programs.named(eqn)} takes rows together"
    return ArrayFacts(of=common["of"], mixed=mixed, flat=v.aval.shape == ())


def _named_by_caller(eqn, given, value):
    """Names the calling optax transformation if a shared function mixes rows."""
    before = {other.mixed for other in given}
    if not value.mixed or value.mixed in before or value.mixed.startswith("optax."):
        return value
    here = programs.named(eqn)
    if not here.startswith("optax."):
        return value
    return dataclasses.replace(value, mixed=f"{here} takes rows together")


def _by_number(eqn, given, v):
    """The rule of an elementwise equation."""
    rows = {value.row for value in given if value.row}
    # An array with different elements, as noise, differs if only some rows are computed.
    uneven = any(not value.row and not value.flat for value in given)
    if len(rows) > 1:
        return _unknown(eqn, given, v)
    if rows and uneven:
        value = _unknown(eqn, given, v)
        other = f"{programs.named(eqn)} has numbers of its own for each row"
        mixed = _common(given)["mixed"] or other
        return dataclasses.replace(value, mixed=mixed)
    row = next(iter(rows), None)
    flat = not row and all(value.flat for value in given)
    of_given = [value.times for value in given]
    times = factors.multiple(eqn, of_given)
    plus = factors.count(eqn, of_given, [value.plus for value in given], v)
    common = _common(given)
    if times == factors.ZERO:  # Zero depends on no input, whatever it was multiplied by.
        common["of"] = frozenset()
    return ArrayFacts(**common, row=row, flat=flat, times=times, plus=plus)


def _moved(axis_of: Callable[[Any, int], int | None]):
    """Makes the rule of an equation that moves elements.

    Args:
        axis_of: A function of the equation and an axis of its first input that returns the
            corresponding axis of the output, or None.
    """

    def rule(eqn, given, v):
        first = given[0]
        row = first.row
        if row is not None:
            axis = axis_of(eqn, row[1])
            if axis is None:
                return _unknown(eqn, given, v)
            row = row[0], axis
        flat = first.flat or v.aval.shape == ()
        times = first.times if first.times and first.times[0] is None else None
        return ArrayFacts(**_common(given), row=row, flat=flat, times=times)

    return rule


def _reduced(keeps_zero):
    """Makes the rule of a reduction; `keeps_zero` says whether it maps zeros to zeros."""

    def axis_of(eqn, axis):
        axes = eqn.params["axes"]
        return None if axis in axes else axis - sum(other < axis for other in axes)

    def rule(eqn, given, v):
        value = _moved(axis_of)(eqn, given, v)
        times = factors.ZERO if keeps_zero and given[0].is_zero else None
        return dataclasses.replace(value, times=times)

    return rule


def _reshaped(eqn, axis):
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if eqn.params.get("dimensions") is not None:
        return None
    before, n = math.prod(old[:axis]), old[axis]
    at = [k for k in range(len(new)) if math.prod(new[:k]) == before and new[k] == n]
    # Axes of length 1 cannot be distinguished: which of them has the rows is unknown.
    return at[-1] if at and n != 1 and before else None


def _broadcast(eqn, axis):
    to = eqn.params["broadcast_dimensions"][axis]
    return to if eqn.params["shape"][to] == eqn.invars[0].aval.shape[axis] else None


_RULES = {
    **dict.fromkeys(programs.BY_NUMBER, _by_number),
    "broadcast_in_dim": _moved(_broadcast),
    "transpose": _moved(lambda eqn, at: eqn.params["permutation"].index(at)),
    "squeeze": _moved(
        lambda eqn, at: (
            None
            if at in eqn.params["dimensions"]
            else at - sum(other < at for other in eqn.params["dimensions"])
        )
    ),
    "reshape": _moved(_reshaped),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min"), _reduced(True)),
    **dict.fromkeys(("reduce_prod", "reduce_and", "reduce_or"), _reduced(False)),
}
