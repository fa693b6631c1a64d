"""Dead code elimination: for all outputs of a program, or for each one separately."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.interpreters import partial_eval

from sparsejax.tracing import programs


def needed(program: core.ClosedJaxpr) -> tuple[core.ClosedJaxpr, list[bool]]:
    """Returns a program without dead code, and for each input whether it still takes it."""
    wanted = [True] * len(program.jaxpr.outvars)
    jaxpr, used = partial_eval.dce_jaxpr(program.jaxpr, wanted)
    return _closed(jaxpr, program), used


def alone(program: core.ClosedJaxpr) -> list["Output"]:
    """Returns for each output of a program the program that computes it alone."""
    jaxpr, found = program.jaxpr, []
    makers = {v: at for at, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    for output in jaxpr.outvars:
        # First only its ancestors are collected: dead code elimination over all equations,
        # once for each output, would take quadratic time.
        eqns, left = {}, [output]
        while left:
            at = makers.get(v) if not programs.is_literal(v := left.pop()) else None
            if at is not None and at not in eqns:
                eqns[at] = jaxpr.eqns[at]
                left += eqns[at].invars
        some = jaxpr.replace(eqns=[eqns[at] for at in sorted(eqns)], outvars=[output])
        some, _ = partial_eval.dce_jaxpr(some, [True], instantiate=True)
        found.append(Output(_closed(some, program)))
    return found


@dataclasses.dataclass(frozen=True)
class Output:
    """One output of a program, with the equations on which it depends.

    Attributes:
        program: The program of these equations; it takes all inputs of the whole one.
    """

    program: core.ClosedJaxpr

    def __call__(self, *args: Any) -> jax.Array:
        """Computes the output from all inputs of the whole program."""
        (made,) = core.jaxpr_as_fun(self.program)(*args)
        return made

    @property
    def reads_inputs(self) -> bool:
        """Whether it depends on the values of the program's inputs."""
        jaxpr = self.program.jaxpr
        used = [v for eqn in jaxpr.eqns for v in eqn.invars] + list(jaxpr.outvars)
        given = {*jaxpr.invars}
        return any(v in given for v in used if not programs.is_literal(v))

    def written(self) -> Any:
        """Returns the program and its constants in a form that can be compared."""
        consts = [*self.program.consts, *_constants(self.program.jaxpr)]
        # A program is printed without the values of its constants.
        return str(self.program.jaxpr), tuple(map(_value, consts))


def _closed(jaxpr, program):
    """Closes a part of a program over the constants that it still uses."""
    consts = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    return core.ClosedJaxpr(jaxpr, [consts[v] for v in jaxpr.constvars])


def _value(x):
    """Returns a constant in a form that can be compared."""
    if isinstance(x, Tracer) or jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended):
        return id(x)
    return np.shape(x), np.asarray(x).tobytes()


def _constants(jaxpr):
    """Returns the constants of all programs inside a program."""
    inside = [inner for eqn in jaxpr.eqns for inner in programs.held(eqn)]
    return [x for one in inside for x in (*one.consts, *_constants(one.jaxpr))]
