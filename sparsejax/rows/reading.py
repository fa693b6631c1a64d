"""Finds the leaves that a program reads by rows only, and where: a plan for `replay`.

Leaves are followed through the program, into the bodies of `jit`, `scan`, `remat` and
`cond`. An equation that uses a leaf otherwise makes its gradient dense, but only if a
gradient can flow through it to the loss: metrics, and negatives after `stop_gradient`, may
use a table in any way.
"""

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from sparsejax.axes import mesh_of
from sparsejax.rows import reads
from sparsejax.rows.lookup import marker_of
from sparsejax.rows.reads import Site
from sparsejax.tracing import programs
from sparsejax.tracing.interpreter import Domain, interpret
from sparsejax.tracing.programs import CallKind


class TableOperation(enum.Enum):
    """An operation on a table that neither reads rows of it nor runs a program."""

    SAME = "returns it"
    CAST = "changes its type"
    BY_NUMBER = "does something to each number"


@dataclasses.dataclass(frozen=True)
class Inner:
    """The plans of the programs inside an equation.

    Attributes:
        kind: How the equation runs the programs.
        plans: The plan of each program.
        sites: The sites of all programs; inside a scan, with an axis for the turns.
        tables: For each input of the programs, whether it is a table inside. A table
            outside that is none inside is used whole, without a gradient.
    """

    kind: CallKind
    plans: tuple["ReplayPlan", ...]
    sites: tuple[Site, ...]
    tables: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class ReplayPlan:
    """The plan of a program: a step for each equation that has tables among its inputs.

    Attributes:
        steps: The steps, by the number of the equation.
    """

    steps: Mapping[int, Site | Inner | TableOperation]

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites that read rows, in the order of the program."""
        found: list[Site] = []
        for _, step in sorted(self.steps.items(), key=lambda item: item[0]):
            if isinstance(step, Site):
                found.append(step)
            elif isinstance(step, Inner):
                found.extend(step.sites)
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class ReadAnalysis:
    """The result of `read`.

    Attributes:
        plan: The plan for the leaves that are read by rows only.
        spoiled: For each leaf that is read by rows and used densely as well, the place of
            its first dense use.
        marked: The name and the place of the first `lookup`, or `column_lookup`, of each
            leaf that has one.
    """

    plan: ReplayPlan
    spoiled: Mapping[int, str]
    marked: Mapping[int, str]


def read(program: Any, leaves: Mapping[int, Any], wanted: Sequence[bool]) -> ReadAnalysis:
    """Finds the leaves that a program reads by rows only, and makes a plan for them.

    Args:
        program: A closed jaxpr whose first inputs are the leaves of the parameters.
        leaves: The leaves that may be tables, by their numbers.
        wanted: For each output, whether it is differentiated.
    """
    leaves, first = dict(leaves), None
    while True:
        uses = _Uses()
        inputs = [
            _Alias(at, leaves[at].shape[0], leaves[at].dtype, _reduced(leaves[at]))
            if at in leaves
            else None
            for at in range(len(program.jaxpr.invars))
        ]
        plan, outputs = uses.planned(program, inputs, wanted)
        uses.spoil(outputs, "is returned as the loss")
        counts = dict.fromkeys(leaves, 0)
        for site in plan.sites:
            counts[site.leaf] += site.count
        first = first or (uses, {at for at, count in counts.items() if count})
        useless = {
            at
            for at, count in counts.items()
            if at in uses.dense or not _saves(count, leaves[at].shape[0], at in uses.marked)
        }
        if not useless:
            break
        leaves = {at: leaf for at, leaf in leaves.items() if at not in useless}
    uses, looked_up = first
    spoiled = {at: why for at, why in uses.dense.items() if at in looked_up}
    return ReadAnalysis(plan, spoiled, uses.marked)


def _saves(count, height, marked):
    """Returns whether the gradient of a leaf of which `count` rows are read is rows.

    It is if `count` is less than the height. Otherwise, as where layers are stacked and
    read one by one, a dense gradient is smaller and needs no ids. After a `lookup`, which
    `marked` says, it is rows in any case.
    """
    return 0 < count and (marked or count < height)


@dataclasses.dataclass(frozen=True, eq=False)
class _Alias:
    """The value of a variable that holds a leaf, or the result of elementwise operations.

    Attributes:
        leaf: The number of the leaf.
        height: The number of rows of the leaf.
        dtype: The dtype of the leaf.
        reduced: On an explicit mesh, under `jit`, the mesh axes over which the leaf is
            reduced; None elsewhere.
    """

    leaf: int
    height: int
    dtype: Any
    reduced: frozenset[str] | None = None


def _reduced(leaf):
    """Returns the mesh axes over which a leaf is reduced; None without an explicit mesh."""
    mesh = mesh_of(leaf)
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return None
    return frozenset(jax.typeof(leaf).sharding.spec.reduced)


class _Aliases(Domain[_Alias | None]):
    """The domain in which the value of an array is the leaf that it holds, or None.

    Args:
        uses: The record of dense uses and markers of leaves, which is updated.
        needed: The variables of the program through which a gradient can flow to the loss.
        jaxpr: The program.
        outputs: The shardings of its outputs on an explicit mesh, None where unknown.
    """

    def __init__(self, uses: "_Uses", needed: set[Any], jaxpr: Any, outputs: Sequence[Any]):
        self.uses, self.needed, self.jaxpr, self.outputs = uses, needed, jaxpr, outputs
        self.steps: dict[int, Site | Inner | TableOperation] = {}

    def constant(self, x):
        return None

    def equation(self, at, eqn, given):
        if not any(given) or not _is_needed(eqn, self.needed):
            return [None] * len(eqn.outvars)
        self._step = None
        spoils = programs.touches_memory(eqn)
        made = self._spoiled(eqn, given) if spoils else super().equation(at, eqn, given)
        if self._step is not None:
            self.steps[at] = self._step
        return made

    def other(self, eqn, given):
        (at, alias), *others = ((k, alias) for k, alias in enumerate(given) if alias)
        alone = not others
        call = marker_of(eqn)
        if call is not None:
            where = f"{call} (at {programs.line(eqn)})"
            self.uses.marked.setdefault(alias.leaf, where)
        if call is not None or reads.is_same(eqn):
            return self._does(TableOperation.SAME, [alias])
        if reads.is_cast(eqn):
            return self._does(TableOperation.CAST, [dataclasses.replace(alias)])
        # On an explicit mesh another operand is on that mesh; rows that were read may lie
        # on Auto axes instead, and could not be combined with it.
        may_wait = alone and (alias.reduced is None or len(eqn.invars) == 1)
        if may_wait and reads.is_by_number(eqn, at):
            return self._does(TableOperation.BY_NUMBER, [dataclasses.replace(alias)])
        site = reads.site_of(eqn, alias.leaf, alias.dtype) if alone and at == 0 else None
        if site is not None and alias.reduced is not None:
            site = reads.placed(site, eqn, self.jaxpr, alias.reduced, self.outputs)
        if site is not None:
            return self._does(site, [None] * len(eqn.outvars))
        return self._spoiled(eqn, given)

    def call(self, eqn, given):
        return self._inside(CallKind.INLINE, eqn, given, self._wanted(eqn))

    def remat(self, eqn, given):
        came = [given] * len(eqn.outvars)
        return self._inside(CallKind.REMAT, eqn, given, self._wanted(eqn), came)

    def custom(self, eqn, given):
        return self._spoiled(eqn, given)  # its derivative is not that of its program

    def cond(self, eqn, given):
        index, *given = given
        self.uses.spoil([index], programs.place(eqn))
        came = [[] for _ in eqn.outvars]
        return self._inside(CallKind.COND, eqn, given, self._wanted(eqn), came)

    def scan(self, eqn, given):
        body = programs.programs(eqn)[0].jaxpr
        first, last = programs.scan_split(eqn)
        wanted = self._wanted(eqn)
        while True:
            needed = _needed(body, wanted)
            # A carried output is needed if the next turn needs its input.
            carried = [v in needed for v in body.invars[first:last]]
            more = [w or any(carried[k : k + 1]) for k, w in enumerate(wanted)]
            if more == wanted:
                break
            wanted = more
        given = [
            x if v in needed else None for v, x in zip(body.invars, given, strict=True)
        ]
        self.uses.spoil(given[last:], programs.place(eqn))  # each turn reads a slice of it
        given[last:] = [None] * len(given[last:])
        came = [[x] for x in given[first:last]]
        came += [[] for _ in eqn.outvars[len(came) :]]
        return self._inside(CallKind.SCAN, eqn, given, wanted, came)

    def _does(self, step, made: list[_Alias | None]):
        self._step = step
        return made

    def _spoiled(self, eqn, given):
        self.uses.spoil(given, programs.place(eqn))
        return [None] * len(eqn.outvars)

    def _wanted(self, eqn):
        return [v in self.needed for v in eqn.outvars]

    def _inside(self, kind, eqn, given, wanted, came=None):
        """Plans the programs of an equation, and returns the values of its outputs.

        Args:
            kind: How the equation runs the programs.
            eqn: The equation.
            given: The values of the inputs of the programs.
            wanted: For each of their outputs, whether it is differentiated.
            came: For programs that are traced separately, the values that each output may
                hold: those of inputs that are returned unchanged. Any other leaf that an
                output holds is used densely. None for programs that are inlined.
        """
        plans, made, outputs = [], [], None
        if kind in (CallKind.INLINE, CallKind.REMAT):
            lies = programs.sharding_after
            outputs = [lies(self.jaxpr, v, self.outputs) for v in eqn.outvars]
        for program in programs.programs(eqn):
            plan, made = self.uses.planned(program, given, wanted, outputs)
            plans.append(plan)
            if came is not None:
                made = self._kept(kind, eqn, came, made)
        sites = [site for plan in plans for site in plan.sites]
        if kind is CallKind.SCAN:
            sites = [site.over(eqn.params["length"]) for site in sites]
        tables = tuple(alias is not None for alias in given)
        self._step = Inner(kind, tuple(plans), tuple(sites), tables)
        return made

    def _kept(self, kind, eqn, came, made):
        if kind is CallKind.SCAN:
            pairs = zip(came, made, strict=True)
            changed = [x for olds, y in pairs for x in olds if x is not y]
            self.uses.spoil(changed, programs.place(eqn))
        kept = [x if x in olds else None for x, olds in zip(made, came, strict=True)]
        lost = [x for x, y in zip(made, kept, strict=True) if y is None]
        self.uses.spoil(lost, programs.place(eqn))
        return kept


@dataclasses.dataclass
class _Uses:
    """The places of the first dense use and of the first marker of each leaf."""

    dense: dict[int, str] = dataclasses.field(default_factory=dict)
    marked: dict[int, str] = dataclasses.field(default_factory=dict)

    def spoil(self, aliases: Iterable[_Alias | None], place: str) -> None:
        for alias in aliases:
            if alias is not None:
                self.dense.setdefault(alias.leaf, place)

    def planned(self, program, inputs, wanted, outputs=None):
        """Returns the plan of a program, and the values of its outputs."""
        outputs = [None] * len(wanted) if outputs is None else outputs
        needed = _needed(program.jaxpr, wanted)
        domain = _Aliases(self, needed, program.jaxpr, outputs)
        made = interpret(program, domain, inputs)
        # An output that is not differentiated may be a table: that is not a dense use.
        outputs = [x if w else None for x, w in zip(made, wanted, strict=True)]
        return ReplayPlan(domain.steps), outputs


# --- Variables through which a gradient can flow.


def _needed(jaxpr, wanted):
    """Returns the variables through which a gradient can flow to the wanted outputs."""
    pairs = zip(jaxpr.outvars, wanted, strict=True)
    needed = {v for v, is_wanted in pairs if is_wanted and not programs.is_literal(v)}
    for eqn in reversed(jaxpr.eqns):
        if _is_needed(eqn, needed):
            needed.update(
                v for v in eqn.invars if not programs.is_literal(v) and programs.is_real(v)
            )
    return needed


def _is_needed(eqn, needed):
    if programs.touches_memory(eqn):
        return True
    return eqn.primitive.name != "stop_gradient" and any(v in needed for v in eqn.outvars)
