"""A hash of what a traced program computes, which processes compare.

It differs where the same numbers are applied to other leaves, or in another order: masks,
labels, the order of a chain. It is the same where independent operations were traced in
another order, which may be that of a set and then differs by process. JAX numbers what a
nested program closes over by its first use. So its inputs are named by what computes them,
and not by their position.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from sparsejax.jobs import agreement
from sparsejax.placement import program as numbers
from sparsejax.tracing import programs
from sparsejax.tracing.programs import CallKind


def flow_of(program: core.ClosedJaxpr) -> str:
    """Returns a hash of all operations, each with those that compute its inputs."""
    made, outputs = _walked(program, _positions("input", program.jaxpr.invars))
    return _hashed(sorted(made), outputs)


def _walked(program: core.ClosedJaxpr, given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns hashes of the operations of a program, and of its outputs.

    Args:
        program: The program.
        given: Texts of its inputs.
    """
    jaxpr, constants = program.jaxpr, list(map(numbers.constant, program.consts))
    known = {id(var): text for var, text in zip(jaxpr.constvars, constants, strict=False)}
    known |= {id(var): text for var, text in zip(jaxpr.invars, given, strict=True)}

    def text_of(x):
        if isinstance(x, core.Literal):
            return f"{numbers.type_of(x.aval)} {numbers.number(x.val)}"
        return known.get(id(x), "other")

    made = []
    for equation in numbers.computing(jaxpr):
        some, outputs = _equation(equation, list(map(text_of, equation.invars)))
        made += some
        known |= {id(v): text for v, text in zip(equation.outvars, outputs, strict=True)}
    return made, list(map(text_of, jaxpr.outvars))


def _equation(equation: Any, given: list[str]) -> tuple[list[str], list[str]]:
    """Returns hashes of the operations of an equation, and of its outputs."""
    name, held = equation.primitive.name, programs.held(equation)
    kind, options = programs.kind_of(equation), numbers.options_of(equation)
    if kind is CallKind.COND:
        index, *operands = given
        sides = [_walked(side, operands) for side in held]
        every = zip(*(outputs for _, outputs in sides), strict=True)
        outputs = [_hashed(name, index, each) for each in every]
        return [_hashed(name, index, [sorted(made) for made, _ in sides])], outputs
    if kind is CallKind.SCAN:
        first, _ = programs.scan_split(equation)
        inputs = given[:first] + _positions("turn", given[first:])
        made, outputs = _walked(held[0], inputs)
        options = [pair for pair in options if pair[0] not in ("num_consts", "linear")]
        one = _hashed(name, options, given[first:], sorted(made), outputs)
    elif len(held) == 1 and len(held[0].jaxpr.invars) == len(given):
        return _walked(held[0], given)  # It runs the program once.
    elif held:
        unnamed = [_walked(one, ["input"] * len(one.jaxpr.invars)) for one in held]
        inside = [(sorted(made), outputs) for made, outputs in unnamed]
        one = _hashed(name, options, sorted(given), inside)
    else:
        one = _hashed(name, options, given)
    return [one], _positions(one, equation.outvars)


def _positions(name: str, of: Sequence[Any]) -> list[str]:
    return [f"{name} {i}" for i in range(len(of))]


def _hashed(*parts: Any) -> str:
    return agreement.hashed(repr(parts))
