"""Derives the effect of an optimizer's update on each of its tables, from its program.

The program is interpreted with facts about its inputs, and again with zeros in place of the
gradients and of parts of the state, which shows the effect of a step without a gradient.
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
    """Facts about a table, and about the effect of the optimizer on its rows.

    A zero step is one with a gradient of zero. Leaves of the state without rows are given
    by their numbers, and leaves with rows of the table by their positions in `own`.

    Attributes:
        leaf: The number of the parameter.
        path: The path of the parameter.
        own: The numbers of the leaves of the state that have rows of the table.
        refused: Why it cannot be updated by rows; None if it can.
        replay_refused: Why its rows cannot catch up on missed steps; None if they can.
        still: The leaves that must be zero in a row for zero steps not to change its
            parameter; None if unknown.
        wanted: The leaves without rows on which zero steps of such a row depend, because
            they change its other state.
        idle: The leaves that must be zero in a row for zero steps to be described by
            `decays` and `shrinks`; None if unknown.
        decays: The constant factor by which zero steps of an idle row multiply each leaf of
            `own`.
        shrinks: The change of the parameter of an idle row in a zero step, as a multiple of
            the parameter: 0, or with weight decay a negative constant.
        fades: The constant factor by which zero steps multiply the only leaf in `idle`;
            None if there is none.
        squares: Whether the update of zero steps depends on another leaf of `own`.
        scalars: The leaves without rows on which steps depend, if `moves`; else none.
        every: The leaves without rows on which any step depends.
        traced: Whether `moves`, and steps depend on traced values over which the optimizer
            closes.
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
        """Whether zero steps may change the parameter, or the state in an unknown way."""
        return self.idle != ()

    @property
    def lags(self) -> bool:
        """Whether zero steps may change a row or its state, so that rows must catch up."""
        return self.moves or self.decays is None or any(f != 1 for f in self.decays)


class UpdateWalk:
    """Interprets the program of an update, and derives facts about tables.

    Args:
        program: The closed jaxpr, a function of the gradients, the state and the
            parameters.
        owner: For each leaf of the state, the parameter whose rows it has, or None.
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
        # Traced constants are numbered after the inputs, so that `of` can include them.
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
        # The facts with a gradient of zero, and zeros in no leaf of a table's state, in one
        # leaf, or in all: `judged` takes the first of them in which a row is idle.
        self.zeros: dict[tuple[int, ...], Any] = {(): self._with_zeros(lambda own: ())}
        for at in range(most):
            self.zeros[at,] = self._with_zeros(lambda own, at=at: own[at : at + 1])
        self.all_zeros = self._with_zeros(lambda own: own)

    def judged(self, table, names):
        """Returns a table with all facts that zero steps show."""
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
        """Yields choices of leaves of a table's state to be zero, and the output facts."""
        n = len(table.own)
        yield from (
            (zeros, made)
            for zeros, made in self.zeros.items()
            if max(zeros, default=-1) < n
        )
        if n > 1:
            yield tuple(range(n)), self.all_zeros

    def _wanted(self, table, made):
        """Returns the leaves without rows on which a table's non-zero state depends."""
        own = (made[self.n + j] for j in table.own)
        of = frozenset().union(*(value.of for value in own if not value.is_zero))
        of = (j for j in of - self._own(table) if j < len(self.given))
        return frozenset(j - self.n for j in of)

    def _fades(self, table, zeros):
        """Returns the factor of the only leaf in `zeros` in zero steps, or None."""
        if len(zeros) != 1:
            return None
        j = self.n + table.own[zeros[0]]
        input, factor = self.zeros[()][j].times or (None, None)
        return factor if input == j else None

    def _all_of(self, table):
        """Returns the inputs and constants, by number, on which a table's step depends."""
        return frozenset().union(*(self.made[j].of for j in self._outputs(table)))

    def scalars(self, table):
        """Returns the leaves of the state without rows on which a table's step depends."""
        of = self._all_of(table) - self._own(table)
        return frozenset(j - self.n for j in of if j < len(self.given))

    def is_traced(self, table):
        """Returns whether a step of the table depends on traced constants."""
        return any(j >= len(self.given) for j in self._all_of(table))

    def _follow(self, given):
        return values.follow(self.program, given, self.constants)

    def is_count(self, j):
        """Returns whether each step adds one to a leaf of the state."""
        return self.made[self.n + j].plus == (self.n + j, 1.0)

    def is_held(self, j):
        """Returns whether no step changes a leaf of the state."""
        return self.made[self.n + j].times == (self.n + j, 1.0)

    def _with_zeros(self, chosen):
        """Returns the facts about the outputs if gradients and parts of the state are zero.

        Args:
            chosen: A function from the leaves of a table's state to those that are zero.
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
        """Returns the inputs that have rows of the table."""
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
        """Returns the update of a parameter as a multiple of it, in (-1, 0], or None."""
        input, factor = made[table.leaf].times or (None, 1.0)
        if factor == 0:
            return 0.0
        param = self.n + len(self.owner) + table.leaf
        return factor if input == param and -1 < factor < 0 else None

    def _decays(self, table, made, zeros):
        """Returns the constant factor of each leaf of the state; None if one has none."""
        factors = []
        for at, j in enumerate(table.own):
            input, factor = made[self.n + j].times or (None, 0.0)
            if at in zeros:
                factor = 1.0
            elif input != self.n + j or not 0 <= factor <= 1:
                return None
            dtype = self.program.jaxpr.outvars[self.n + j].aval.dtype
            # 16-bit values are rounded at each step, so powers of a factor do not apply.
            if factor != 1 and not (tree.is_floating(dtype) and dtype.itemsize >= 4):
                return None
            factors.append(factor)
        return tuple(factors)
