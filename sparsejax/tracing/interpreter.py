"""One walk over a traced program, and what a question has to say of its equations."""

import abc
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from sparsejax.tracing import programs
from sparsejax.tracing.programs import CallKind


V = TypeVar("V")


class Domain(abc.ABC, Generic[V]):
    """What stands for an array of a program, and what equations make of it."""

    @abc.abstractmethod
    def constant(self, x: Any) -> V:
        """The value of a constant."""

    def literal(self, atom: Any) -> V:
        """The value of a number in the program's text."""
        return self.constant(atom.val)

    @abc.abstractmethod
    def other(self, eqn: Any, given: list[V]) -> Sequence[V]:
        """The values of the outputs of an equation that runs no program that is known."""

    def joined(self, eqn: Any, v: Any, index: V, sides: list[V]) -> V:
        """The value of what one of several branches returns.

        Args:
            eqn: The conditional.
            v: The variable that it writes.
            index: What chooses the branch.
            sides: What each of the branches returns.
        """
        raise NotImplementedError

    def call(self, eqn: Any, given: list[V]) -> Sequence[V]:
        """The values of the outputs of a call."""
        return interpret(programs.programs(eqn)[0], self, given)

    def remat(self, eqn: Any, given: list[V]) -> Sequence[V]:
        """Those of a call that is run again when it is differentiated."""
        return self.call(eqn, given)

    def custom(self, eqn: Any, given: list[V]) -> Sequence[V]:
        """Those of a call that has a derivative of its own."""
        return self.call(eqn, given)

    def cond(self, eqn: Any, given: list[V]) -> Sequence[V]:
        """Those of a conditional."""
        index, *given = given
        sides = [interpret(side, self, given) for side in programs.programs(eqn)]
        pairs = zip(eqn.outvars, zip(*sides, strict=True), strict=True)
        return [self.joined(eqn, v, index, list(some)) for v, some in pairs]

    def scan(self, eqn: Any, given: list[V]) -> Sequence[V]:
        """Those of a scan."""
        return self.other(eqn, given)

    def equation(self, at: int, eqn: Any, given: list[V]) -> Sequence[V]:
        """Those of an equation, by its kind.

        Args:
            at: Its number in the program.
            eqn: The equation.
            given: The values of its inputs.
        """
        del at
        return self.by_kind(programs.kind_of(eqn), eqn, given)

    def by_kind(self, kind: CallKind | None, eqn: Any, given: list[V]) -> Sequence[V]:
        """Those of an equation of a kind; None is that of all else."""
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
        """The numbers of the equations that `equation` is for; JAX runs all others."""
        return range(len(jaxpr.eqns))

    def array(self, value: V) -> Any:
        """The array of a value that an equation is given which JAX runs."""
        raise NotImplementedError


def interpret(
    program: Any,
    domain: Domain[V],
    inputs: Sequence[V],
    constants: Sequence[V] | None = None,
) -> list[V]:
    """The values of the outputs of a program, from those of its inputs.

    Args:
        program: The closed program.
        domain: What a value is, and what equations make of it.
        inputs: The values of its inputs.
        constants: Those of its constants; what the domain says of them, if None.
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
