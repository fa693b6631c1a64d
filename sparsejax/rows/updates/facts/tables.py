"""What an optimizer's update does to each of its tables, read off its program.

The program is followed with what is known of its inputs, and again with zeros in place of
the gradients and of parts of the state: that shows what a step without a gradient does.
"""

import dataclasses
from typing import Any

from jax.core import Tracer

from sparsejax.rows.updates.facts import values
from sparsejax.rows.updates.facts.factors import ZERO
from sparsejax.rows.updates.facts.values import ArrayFacts
from sparsejax.state import tree


@dataclasses.dataclass(frozen=True)
class TableFacts:
    """A parameter of at least two axes, and what belongs to it.

    Attributes:
        leaf: Its number among the parameters.
        path: Its path.
        own: The numbers of the leaves of the state that have its rows.
        refused: Why it cannot be updated by rows; None if it can.
        replay_refused: Why steps that a row missed cannot be caught up on; None if they
            can.
        still: Which of `own` have to be zero in a row for a step with a gradient of zero
            not to change its parameter; None if that is not known.
        wanted: The leaves of the state without rows that such a step of a still row
            depends on, as its other state changes by them.
        idle: Which of `own` have to be zero in a row for such a step to do just what
            `decays` and `shrinks` say; None if that is not known.
        decays: By what fixed number a step of an idle row multiplies each of `own`.
        shrinks: What it adds to the parameter, as a multiple of the parameter: 0, or with
            weights that decay a fixed number below.
        fades: By what a step with a gradient of zero multiplies the one of `own` that is
            in `idle`, where that is a fixed number.
        squares: Whether how far that moves them depends on another of `own`.
        scalars: The leaves of the state without rows that a step with a gradient of zero
            depends on, if that changes the parameter.
        every: Those that any step depends on.
        traced: Whether such a step depends on values that the optimizer was made of, and
            that are traced.
    """

    leaf: int
    path: str
    own: tuple[int, ...]
    refused: str | None = None
    replay_refused: str | None = None
    still: tuple[int, ...] | None = None
    wanted: frozenset[int] = frozenset()
    idle: tuple[int, ...] | None = None
    decays: tuple[float, ...] | None = None
    shrinks: float = 0.0
    fades: float | None = None
    squares: bool = False
    scalars: frozenset[int] = frozenset()
    every: frozenset[int] = frozenset()
    traced: bool = False

    @property
    def moves(self) -> bool:
        """Whether steps with a gradient of zero may have to be taken one by one."""
        return self.idle != ()

    @property
    def lags(self) -> bool:
        """Whether steps that a row has missed are to be caught up on at all."""
        return self.moves or self.decays is None or any(f != 1 for f in self.decays)


class UpdateWalk:
    """Follows the program of an update, and notes what it does to each table.

    Args:
        program: The program: of the gradients, the state and the parameters.
        owner: The parameter whose rows each leaf of the state has.
        kept: The shapes of the parameters.
    """

    def __init__(self, program, owner, kept):
        self.program, self.owner, self.n, self.kept = program, owner, len(kept), kept
        leaves = [*range(self.n), *owner, *range(self.n)]
        self.given = []
        for j, (k, v) in enumerate(zip(leaves, program.jaxpr.invars, strict=True)):
            row = (k, 0) if k is not None and v.aval.shape else None
            flat, it = v.aval.shape == (), frozenset({j})
            self.given.append(ArrayFacts(it, row, flat, None, (j, 1.0)))
        # Constants that are traced have numbers, too, after those of the inputs.
        self.constants = list(map(values.constant, program.consts))
        for k, x in enumerate(program.consts, len(self.given)):
            if isinstance(x, Tracer):
                at = k - len(self.given)
                numbered = dataclasses.replace(self.constants[at], of=frozenset({k}))
                self.constants[at] = numbered
        self.made = self._follow(self.given)
        self.own = [
            tuple(j for j, k in enumerate(owner) if k == at) for at in range(self.n)
        ]
        most = max(map(len, self.own), default=0)
        # With a gradient of zero, and zeros in none of a table's state, in one leaf of it,
        # and in all of them: what a row has to have for as little as possible to change.
        self.zeros: dict[tuple[int, ...], Any] = {(): self._with_zeros(lambda own: ())}
        for at in range(most):
            self.zeros[at,] = self._with_zeros(lambda own, at=at: own[at : at + 1])
        self.all_zeros = self._with_zeros(lambda own: own)

    def judged(self, table, names):
        """A table with all that is known of it."""
        reason = self._refused(table, names)
        if reason:
            return dataclasses.replace(table, refused=reason)
        for zeros, made in self._cases(table):
            shrinks = self._shrinks(table, made)
            stay = all(made[self.n + table.own[at]].is_zero for at in zeros)
            if shrinks is None or not stay or (shrinks and not zeros):
                continue
            if table.still is None and shrinks == 0:
                wanted = self._wanted(table, made)
                table = dataclasses.replace(table, still=zeros, wanted=wanted)
            decays = self._decays(table, made, zeros)
            if decays is not None:
                table = dataclasses.replace(
                    table, idle=zeros, decays=decays, shrinks=shrinks
                )
                others = {self.n + j for at, j in enumerate(table.own) if at not in zeros}
                return dataclasses.replace(
                    table,
                    fades=self._fades(table, zeros),
                    squares=bool(others & self.zeros[()][table.leaf].of),
                )
        return table

    def _cases(self, table):
        """Which of a table's state may be zero, and the facts about the outputs then."""
        n = len(table.own)
        yield from (
            (zeros, made)
            for zeros, made in self.zeros.items()
            if max(zeros, default=-1) < n
        )
        if n > 1:
            yield tuple(range(n)), self.all_zeros

    def _wanted(self, table, made):
        """The leaves of the state without rows that the rest of a table's state needs."""
        own = (made[self.n + j] for j in table.own)
        of = frozenset().union(*(value.of for value in own if not value.is_zero))
        of = (j for j in of - self._own(table) if j < len(self.given))
        return frozenset(j - self.n for j in of)

    def _fades(self, table, zeros):
        """By what fixed number a step multiplies the state that has to be zero."""
        if len(zeros) != 1:
            return None
        j = self.n + table.own[zeros[0]]
        input, factor = self.zeros[()][j].times or (None, None)
        return factor if input == j else None

    def _all_of(self, table):
        """The inputs and constants, by number, that a step of the table depends on."""
        return frozenset().union(*(self.made[j].of for j in self._outputs(table)))

    def scalars(self, table):
        """The leaves of the state without rows that a step of the table depends on."""
        of = self._all_of(table) - self._own(table)
        return frozenset(j - self.n for j in of if j < len(self.given))

    def is_traced(self, table):
        """Whether a step of the table depends on constants that are traced."""
        return any(j >= len(self.given) for j in self._all_of(table))

    def _follow(self, given):
        return values.follow(self.program, given, self.constants)

    def is_count(self, j):
        """Whether a leaf of the state grows by one a step."""
        return self.made[self.n + j].plus == (self.n + j, 1.0)

    def is_held(self, j):
        """Whether no step changes a leaf of the state."""
        return self.made[self.n + j].times == (self.n + j, 1.0)

    def _with_zeros(self, chosen):
        """The facts about the outputs where gradients are zero, and some of the state.

        Args:
            chosen: From the leaves of the state of a table to those that are zero.
        """
        state = (self.n + j for own in self.own for j in chosen(own))
        zeros = {*range(self.n), *state}
        zero = lambda value: dataclasses.replace(value, times=ZERO)
        return self._follow(
            [zero(v) if j in zeros else v for j, v in enumerate(self.given)]
        )

    def _outputs(self, table):
        return [table.leaf, *(self.n + j for j in table.own)]

    def _own(self, table):
        """The inputs that have rows of the table."""
        grads, params = table.leaf, self.n + len(self.owner) + table.leaf
        return frozenset({grads, params, *(self.n + j for j in table.own)})

    def _refused(self, table, names):
        own, others = self._own(table), set(range(len(self.given)))
        scalars = {j for j, value in enumerate(self.given) if value.flat}
        others -= own | {j for j in scalars if self.n <= j < self.n + len(self.owner)}
        for j in self._outputs(table):
            value = self.made[j]
            if value.mixed:
                return value.mixed
            if value.of & others:
                return "its update depends on other parameters too"
            if value.row != (table.leaf, 0) and not value.flat:
                return "what is done to its rows cannot be followed"
        for j, value in enumerate(self.made):
            if j not in self._outputs(table) and value.of & own:
                where = names[j - self.n] if j >= self.n else "another update"
                return f"{where} depends on all its rows"
        return None

    def _shrinks(self, table, made):
        """By what multiple of itself a parameter moves; None if by something else."""
        input, factor = made[table.leaf].times or (None, 1.0)
        if factor == 0:
            return 0.0
        param = self.n + len(self.owner) + table.leaf
        return factor if input == param and -1 < factor < 0 else None

    def _decays(self, table, made, zeros):
        """By what each leaf of the state is multiplied; None if not by a fixed number."""
        factors = []
        for at, j in enumerate(table.own):
            input, factor = made[self.n + j].times or (None, 0.0)
            if at in zeros:
                factor = 1.0
            elif input != self.n + j or not 0 <= factor <= 1:
                return None
            dtype = self.program.jaxpr.outvars[self.n + j].aval.dtype
            # Numbers of 16 bits are rounded at each step, which is no multiple.
            if factor != 1 and not (tree.is_floating(dtype) and dtype.itemsize >= 4):
                return None
            factors.append(factor)
        return tuple(factors)
