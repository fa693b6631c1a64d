"""Numbers of a traced program that int32 does not hold, found without running it.

Walks a jaxpr with an interval for each integer whose range is known when it is traced:
constants, `iota`, ranks, counts of bits, and what is computed of them in Python's integers.
What depends on numbers that a program is given has no interval, and nothing is said of it.
Unsigned integers are meant to wrap around: hashes are made of them.
"""

import math
from typing import Any

import jax
import numpy as np

from sparsejax.tracing import programs


Interval = tuple[int, int] | None


def overflows(program: Any) -> list[str]:
    """What of a closed jaxpr does not fit its signed integers, a line each."""
    walk = _Walk()
    walk.run(program.jaxpr, program.consts, [None] * len(program.jaxpr.invars))
    return walk.found


class _Walk:
    def __init__(self):
        self.found: list[str] = []
        self.ranks: dict[str, int] = {}

    def run(self, jaxpr, consts, given) -> list[Interval]:
        """The intervals of the results, from those of the operands."""
        known: dict[Any, Interval] = dict(zip(jaxpr.invars, given, strict=True))
        known |= {var: _of_array(x) for var, x in zip(jaxpr.constvars, consts, strict=True)}

        def of(atom):
            if isinstance(atom, jax.extend.core.Literal):
                return _of_array(atom.val)
            return known.get(atom)

        unused = set()
        guards = _guards(jaxpr)
        for eqn in jaxpr.eqns:
            operands = [of(atom) for atom in eqn.invars]
            guarded = guards.get(eqn.outvars[0]) if eqn.outvars else None
            if guarded is not None and (own := of(guarded)) and own[0] >= 0:
                # What is added to negative indices, and there are none.
                unused.add(eqn.outvars[0])
                continue
            if eqn.primitive.name == "select_n":
                pairs = zip(eqn.invars[1:], operands[1:], strict=True)
                operands = [operands[0], *(x for var, x in pairs if not _in(var, unused))]
            results = self._apply(eqn, operands)
            for var, interval in zip(eqn.outvars, results, strict=True):
                known[var] = self._fitting(eqn, var, interval)
        return [of(atom) for atom in jaxpr.outvars]

    def _fitting(self, eqn, var, interval):
        dtype = getattr(var.aval, "dtype", None)
        is_int = dtype is not None and np.issubdtype(dtype, np.integer)
        if interval is None or not is_int or not var.aval.size:
            return None
        info = np.iinfo(dtype)
        if int(info.min) <= interval[0] and interval[1] <= int(info.max):
            return interval
        if info.min < 0 and eqn.primitive.name != "convert_element_type":
            self.found.append(f"{eqn.primitive.name} makes {interval} as {dtype}")
        return None

    def _apply(self, eqn, operands) -> list[Interval]:
        name, params = eqn.primitive.name, eqn.params
        results = len(eqn.outvars)
        inner = params.get("jaxpr") or params.get("call_jaxpr")
        if name == "shard_map":
            self.ranks |= params["mesh"].shape
        if name in ("psum", "psum_invariant") and results == 1:
            count = math.prod(self.ranks.get(axis, 1) for axis in params["axes"])
            return [_times(lambda _: count)(operands, eqn)]
        if name == "cond":
            sides = [
                self.run(side.jaxpr, side.consts, operands[1:])
                for side in params["branches"]
            ]
            return [_union(*each) for each in zip(*sides, strict=True)]
        if name == "while":
            body, condition = params["body_jaxpr"], params["cond_jaxpr"]
            first, second = params["cond_nconsts"], params["body_nconsts"]
            carried = [None] * (len(operands) - first - second)
            constants = operands[first : first + second]
            self.run(body.jaxpr, body.consts, constants + carried)
            self.run(condition.jaxpr, condition.consts, operands[:first] + carried)
            return [None] * results
        if name == "scan":
            constants = operands[: programs.scan_split(eqn)[0]]
            rest = [None] * (len(inner.jaxpr.invars) - len(constants))
            self.run(inner.jaxpr, inner.consts, constants + rest)
            return [None] * results
        if params.get("name") == "remainder" and operands[1] and operands[1][0] > 0:
            # Of floors: the rest has the sign of what divides.
            self.run(inner.jaxpr, inner.consts, operands)
            return [(0, operands[1][1] - 1)]
        if inner is not None:
            closed = inner if hasattr(inner, "consts") else None
            body = closed.jaxpr if closed else inner
            if len(body.invars) == len(operands) and name not in ("pallas_call",):
                done = self.run(body, closed.consts if closed else (), operands)
                return done if len(done) == results else [None] * results
            return [None] * results
        if name == "optimization_barrier":
            return operands
        rule = _RULES.get(name)
        if rule is None or results != 1:
            return [None] * results
        return [rule(operands, eqn)]


def _in(atom, some):
    return not isinstance(atom, jax.extend.core.Literal) and atom in some


def _guards(jaxpr):
    """Sums that are chosen where one of their operands is negative alone, and which it is.

    So JAX counts negative indices from the end: select(i < 0, i, i + size).
    """
    made = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.outvars}
    found = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "select_n" or len(eqn.invars) != 3:
            continue
        asked, no, yes = (
            None if isinstance(atom, jax.extend.core.Literal) else made.get(atom)
            for atom in eqn.invars
        )
        if asked is None or yes is None or asked.primitive.name != "lt":
            continue
        if yes.primitive.name == "add" and asked.invars[0] in yes.invars:
            found[eqn.invars[2]] = asked.invars[0]
        del no
    return found


def _of_array(x) -> Interval:
    x = np.asarray(x) if not isinstance(x, jax.Array) else x
    if not np.issubdtype(x.dtype, np.integer) or not x.size:
        return None
    if isinstance(x, jax.Array) and isinstance(x, jax.core.Tracer):
        return None
    return int(np.min(x)), int(np.max(x))


def _union(*intervals) -> Interval:
    if any(interval is None for interval in intervals):
        return None
    return min(i[0] for i in intervals), max(i[1] for i in intervals)


def _hull(function):
    """Of a function that is monotonic in each operand: the least and most of all ends."""

    def rule(operands, _):
        if any(interval is None for interval in operands):
            return None
        a, b = operands
        ends = [function(x, y) for x in a for y in b]
        return min(ends), max(ends)

    return rule


def _times(count):
    def rule(operands, eqn):
        if operands[0] is None:
            return None
        low, high = operands[0]
        times = count(eqn)
        return min(low, low * times), max(high, high * times)

    return rule


def _summed(eqn):
    shape = eqn.invars[0].aval.shape
    return math.prod(shape[axis] for axis in eqn.params["axes"])


def _of_bits(_, eqn):
    return 0, np.dtype(eqn.invars[0].aval.dtype).itemsize * 8


def _quotient(operands, _):
    a, b = operands
    if a is None or b is None or b[0] <= 0:
        return None
    ends = [int(x / y) if abs(x) < 2**52 else x // y for x in a for y in b]
    return min(ends), max(ends)


def _remainder(operands, _):
    a, b = operands
    if b is None or b[0] <= 0:
        return None
    low = 0 if a is not None and a[0] >= 0 else 1 - b[1]
    return low, b[1] - 1


def _shifted_right(operands, _):
    a, b = operands
    if a is None or b is None or a[0] < 0 or b[0] < 0:
        return None
    return a[0] >> b[1], a[1] >> b[0]


def _masked(operands, _):
    bounds = [i[1] for i in operands if i is not None and i[0] >= 0]
    return (0, min(bounds)) if bounds else None


def _clamped(operands, _):
    low, _, high = operands
    return None if low is None or high is None else (low[0], high[1])


def _iota(_, eqn):
    return 0, max(eqn.params["shape"][eqn.params["dimension"]] - 1, 0)


_same = lambda operands, _: operands[0]
_RULES = {
    "iota": _iota,
    "add": _hull(lambda x, y: x + y),
    "sub": _hull(lambda x, y: x - y),
    "mul": _hull(lambda x, y: x * y),
    "neg": lambda o, _: None if o[0] is None else (-o[0][1], -o[0][0]),
    "min": _hull(min),
    "max": _hull(max),
    "clamp": _clamped,
    "div": _quotient,
    "rem": _remainder,
    "and": _masked,
    "shift_right_logical": _shifted_right,
    "shift_right_arithmetic": _shifted_right,
    "population_count": _of_bits,
    "reduce_sum": _times(_summed),
    "cumsum": _times(lambda eqn: eqn.invars[0].aval.shape[eqn.params["axis"]]),
    "reduce_max": _same,
    "reduce_min": _same,
    "select_n": lambda o, _: _union(*o[1:]),
    "concatenate": lambda o, _: _union(*o),
    "pad": lambda o, _: _union(*o),
    "gather": lambda o, _: o[0],
    "dynamic_slice": lambda o, _: o[0],
    **dict.fromkeys(
        (
            *("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "slice", "rev"),
            *("transpose", "convert_element_type", "copy", "copy_p", "sort", "pvary"),
            *("pcast", "stop_gradient", "all_gather", "pmax", "pmin"),
        ),
        _same,
    ),
}
