"""The interpreter of traced programs, and the base class of its domains."""

import abc
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from sparsejax.tracing import programs
from sparsejax.tracing.programs import CallKind


V = TypeVar("V")


class Domain(abc.ABC, Generic[V]):
    """The values that stand for arrays of a program, and the results of its equations.

    Methods that evaluate an equation take it and the values of its inputs, and return the
    values of its outputs.
    """

    @abc.abstractmethod
    def constant(self, x: Any) -> V:
        """Returns the value of a constant of a program."""

    def literal(self, atom: Any) -> V:
        """Returns the value of a literal of an equation."""
        return self.constant(atom.val)

    @abc.abstractmethod
    def other(self, eqn: Any, given: list[V]) -> Sequence[V]:
        """Evaluates an equation of no known kind."""

    def joined(self, eqn: Any, v: Any, index: V, sides: list[V]) -> V:
        """Returns the value of an output of a conditional, from those of its branches.

        Args:
            eqn: The conditional.
            v: The output variable.
            index: The value of the index that selects the branch.
            sides: The value of this output in each branch.
        """
        raise NotImplementedError

    def call(self, eqn: Any, given: list[V]) -> Sequence[V]:
        """Evaluates a call: interprets its program."""
        return interpret(programs.programs(eqn)[0], self, given)

    def remat(self, eqn: Any, given: list[V]) -> Sequence[V]:
        """Evaluates a call that is rematerialized when it is differentiated."""
        return self.call(eqn, given)

    def custom(self, eqn: Any, given: list[V]) -> Sequence[V]:
        """Evaluates a call that has a derivative of its own."""
        return self.call(eqn, given)

    def cond(self, eqn: Any, given: list[V]) -> Sequence[V]:
        """Evaluates a conditional: interprets all branches, and joins their outputs."""
        index, *given = given
        sides = [interpret(side, self, given) for side in programs.programs(eqn)]
        pairs = zip(eqn.outvars, zip(*sides, strict=True), strict=True)
        return [self.joined(eqn, v, index, list(some)) for v, some in pairs]

    def scan(self, eqn: Any, given: list[V]) -> Sequence[V]:
        """Evaluates a scan."""
        return self.other(eqn, given)

    def equation(self, at: int, eqn: Any, given: list[V]) -> Sequence[V]:
        """Evaluates any equation, by its kind.

        Args:
            at: Its position in the program.
            eqn: The equation.
            given: The values of its inputs.
        """
        del at
        return self.by_kind(programs.kind_of(eqn), eqn, given)

    def by_kind(self, kind: CallKind | None, eqn: Any, given: list[V]) -> Sequence[V]:
        """Evaluates an equation of a kind; None is the kind of unknown ones."""
        match kind:
            case CallKind.INLINE:
                return self.call(eqn, given)
            case CallKind.REMAT:
                return self.remat(eqn, given)
            case CallKind.CUSTOM:
                return self.custom(eqn, given)
            case CallKind.COND:
                return self.cond(eqn, given)
            case CallKind.SCAN:
                return self.scan(eqn, given)
            case None:
                return self.other(eqn, given)

    def looks_at(self, jaxpr: Any) -> Sequence[int]:
        """Returns the positions of the equations that the domain evaluates.

        JAX runs all others, for which `array` gives the inputs.
        """
        return range(len(jaxpr.eqns))

    def array(self, value: V) -> Any:
        """Returns the array of a value, as the input of an equation that JAX runs."""
        raise NotImplementedError


def interpret(
    program: Any,
    domain: Domain[V],
    inputs: Sequence[V],
    constants: Sequence[V] | None = None,
) -> list[V]:
    """Returns the values of the outputs of a program, from those of its inputs.

    Args:
        program: The closed jaxpr.
        domain: The domain of the values.
        inputs: The values of its inputs.
        constants: The values of its constants; if None, those of `domain.constant`.
    """
    jaxpr = program.jaxpr
    if constants is None:
        constants = list(map(domain.constant, program.consts))
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    env.update(zip(jaxpr.invars, inputs, strict=True))
    get = lambda v: domain.literal(v) if programs.is_literal(v) else env[v]
    array, begin = (lambda v: domain.array(env[v])), 0
    for at in [*domain.looks_at(jaxpr), len(jaxpr.eqns)]:
        if begin < at:
            env.update(programs.evaluate(jaxpr, jaxpr.eqns[begin:at], array))
        if at < len(jaxpr.eqns):
            eqn = jaxpr.eqns[at]
            made = domain.equation(at, eqn, list(map(get, eqn.invars)))
            env.update(zip(eqn.outvars, made, strict=True))
        begin = at + 1
    return list(map(get, jaxpr.outvars))
