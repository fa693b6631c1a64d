"""Which leaves a program reads by rows only, and where: a plan, which `replay` follows.

Follows leaves through the program, into what is jitted, scanned, rematerialized and chosen.
An equation that uses a leaf otherwise makes its gradient dense, if a gradient can flow
through it to the loss at all: what metrics and negatives see of a table costs nothing.
"""

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from sparsejax.axes import mesh_of
from sparsejax.rows import reads
from sparsejax.rows.lookup import is_marker
from sparsejax.rows.reads import Site
from sparsejax.tracing import programs
from sparsejax.tracing.interpreter import Domain, interpret
from sparsejax.tracing.programs import CallKind


class TableOperation(enum.Enum):
    """What an equation does with a table, but for reading it and running a program."""

    SAME = "returns it"
    CAST = "changes its type"
    BY_NUMBER = "does something to each number"


@dataclasses.dataclass(frozen=True)
class Inner:
    """The programs inside an equation, read.

    Attributes:
        kind: What the equation does with them.
        plans: Theirs.
        sites: What they read, over all turns.
        tables: Which of the programs' inputs are tables there; others that are tables
            outside are used whole, without a gradient.
    """

    kind: CallKind
    plans: tuple["ReplayPlan", ...]
    sites: tuple[Site, ...]
    tables: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class ReplayPlan:
    """What to do with those equations of a program that have a table among their inputs.

    Attributes:
        steps: By the number of the equation.
    """

    steps: Mapping[int, Site | Inner | TableOperation]

    @property
    def sites(self) -> tuple[Site, ...]:
        """The places that read rows, in the order of the program."""
        found: list[Site] = []
        for _, step in sorted(self.steps.items(), key=lambda item: item[0]):
            if isinstance(step, Site):
                found.append(step)
            elif isinstance(step, Inner):
                found.extend(step.sites)
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class ReadAnalysis:
    """What was found.

    Attributes:
        plan: Reads the leaves that are read by rows only.
        spoiled: The place of the first dense use of each leaf that is read by rows as well.
        marked: The place of the first `lookup` of each leaf that has one.
    """

    plan: ReplayPlan
    spoiled: Mapping[int, str]
    marked: Mapping[int, str]


def read(program: Any, leaves: Mapping[int, Any], wanted: Sequence[bool]) -> ReadAnalysis:
    """Reads a program.

    Args:
        program: A program whose first inputs are the leaves of the parameters.
        leaves: Those that may be tables, by their numbers.
        wanted: Which of the outputs are differentiated.
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
    """Whether rows are returned for a leaf of which `count` rows are read.

    Fewer than it has: with as many or more, as where layers are stacked and read one by
    one, a dense gradient is smaller and needs no ids. A `lookup` asks for rows in any case.
    """
    return 0 < count and (marked or count < height)


@dataclasses.dataclass(frozen=True, eq=False)
class _Alias:
    """A variable that holds a leaf, or a leaf with something done to each number.

    Attributes:
        leaf: The number of the leaf.
        height: How many rows it has.
        dtype: Its dtype.
        reduced: On an explicit mesh, under `jit`, the axes over which it is reduced; None
            elsewhere.
    """

    leaf: int
    height: int
    dtype: Any
    reduced: frozenset[str] | None = None


def _reduced(leaf):
    """The axes over which a leaf is reduced; None where it is on no explicit mesh."""
    mesh = mesh_of(leaf)
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return None
    return frozenset(jax.typeof(leaf).sharding.spec.reduced)


class _Aliases(Domain[_Alias | None]):
    """An array is the leaf that it holds, if it holds one.

    Args:
        uses: Where leaves are used densely, and where they are marked, which is noted.
        needed: The variables of the program through which a gradient can flow to the loss.
        jaxpr: The program.
        outputs: The shardings of its outputs on an explicit mesh, where they are known.
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
        if is_marker(eqn):
            self.uses.marked.setdefault(alias.leaf, programs.line(eqn))
        if is_marker(eqn) or reads.is_same(eqn):
            return self._does(TableOperation.SAME, [alias])
        if reads.is_cast(eqn):
            return self._does(TableOperation.CAST, [dataclasses.replace(alias)])
        # On an explicit mesh what else it is given is on that, and what is read may not be.
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
            # The next turn needs what is carried.
            carried = [v in needed for v in body.invars[first:last]]
            more = [w or any(carried[k : k + 1]) for k, w in enumerate(wanted)]
            if more == wanted:
                break
            wanted = more
        given = [
            x if v in needed else None for v, x in zip(body.invars, given, strict=True)
        ]
        self.uses.spoil(given[last:], programs.place(eqn))  # each turn uses a part of it
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
        """What the outputs hold of an equation that runs programs.

        Args:
            kind: What it does with them.
            eqn: The equation.
            given: What the inputs of the programs hold.
            wanted: Which of their outputs are differentiated.
            came: Of a program traced separately what each of its outputs may contain:
                that went in, and comes out as it was.
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
    """The place of the first dense use, and of the first marker, of each leaf."""

    dense: dict[int, str] = dataclasses.field(default_factory=dict)
    marked: dict[int, str] = dataclasses.field(default_factory=dict)

    def spoil(self, aliases: Iterable[_Alias | None], place: str) -> None:
        for alias in aliases:
            if alias is not None:
                self.dense.setdefault(alias.leaf, place)

    def planned(self, program, inputs, wanted, outputs=None):
        """The plan of a program, and what its outputs hold."""
        outputs = [None] * len(wanted) if outputs is None else outputs
        needed = _needed(program.jaxpr, wanted)
        domain = _Aliases(self, needed, program.jaxpr, outputs)
        made = interpret(program, domain, inputs)
        # What is not differentiated may be returned whole.
        outputs = [x if w else None for x, w in zip(made, wanted, strict=True)]
        return ReplayPlan(domain.steps), outputs


# --- Through which variables a gradient can flow.


def _needed(jaxpr, wanted):
    """The variables through which a gradient can flow to the wanted outputs."""
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
