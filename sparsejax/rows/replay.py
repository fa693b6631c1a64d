"""The program again as `reading` has planned it: a zero is added to what a lookup returns.

Tables are constants in it. What is differentiated are the zeros, one a lookup, with an axis
more for each scan around it; they are never added to anything, and exist as tangents alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from sparsejax.axes import as_varying, varying_axes
from sparsejax.rows import reads
from sparsejax.rows.reading import Inner, ReplayPlan, TableOperation
from sparsejax.rows.reads import Ids, Site
from sparsejax.tracing import programs
from sparsejax.tracing.interpreter import Domain, interpret
from sparsejax.units.row_grads import RowGrads


class Lookup(NamedTuple):
    """What a lookup has read.

    Attributes:
        ids: Those that its gradient lists.
        reading: What the reader has made to read the rows; None where the lookup is in a
            program that is traced separately.
    """

    ids: jax.Array
    reading: Any = None


class Reader(Protocol):
    """Reads parameters which differ from the arrays that hold them, as lazy ones do."""

    def rows(self, path: str, ids: Ids) -> tuple[jax.Array, Any]:
        """The rows of a table, and what `listed` needs of what was made for them."""
        ...

    def listed(self, path: str, lookups: list[Lookup], grads: RowGrads) -> RowGrads:
        """The gradient of a table, from all that was looked up of it."""
        ...

    def whole(self, paths: Sequence[str]) -> list[jax.Array]:
        """Some parameters, all of them."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramTable:
    """A table in the program.

    Attributes:
        value: Its constant value.
        path: Its path among the parameters.
        read: What reads it, if that is not its value.
        then: What is to be done to each number.
    """

    value: jax.Array
    path: str
    read: Reader | None = None
    then: tuple[Callable[[jax.Array], jax.Array], ...] = ()

    def whole(self) -> jax.Array:
        """The table as the program has it."""
        if self.read is None:
            return self.done_to(self.value)
        (value,) = self.read.whole([self.path])
        return self.done_to(as_varying(value, varying_axes(self.value)))

    def rows(self, eqn: Any, site: Site, operands: Any, ids: Ids) -> tuple[jax.Array, Any]:
        """The rows that a lookup reads of the table, and what a reader has made for them.

        Args:
            eqn: The lookup.
            site: What it reads.
            operands: What it is given beside the table.
            ids: Of the rows.
        """
        if self.read is None:
            return eqn.primitive.bind(self.value, *operands, **eqn.params), None
        rows, reading = self.read.rows(self.path, ids)
        rows = jnp.moveaxis(rows, range(-len(site.axes), 0), site.axes)
        fill = reads.fill_of(eqn, rows.dtype)
        if fill is not None:
            inside = jnp.expand_dims(ids.read < site.height, site.axes)
            rows = jnp.where(inside, rows, fill)
        return as_varying(rows, site.varying), reading

    def done_to(self, rows: jax.Array) -> jax.Array:
        """Does to rows what was done to the table."""
        for do in self.then:
            rows = do(rows)
        return rows


def zeros(site: Site) -> jax.Array:
    """Zeros to be added to the rows that a lookup reads, whose gradient they have."""
    x = jnp.zeros(site.shape, site.dtype, device=site.sharding)
    return as_varying(x, site.varying)


def _nothing_listed(site):
    """The ids of a lookup that has read nothing."""
    sharding = site.sharding and NamedSharding(site.sharding.mesh, site.ids_spec)
    return jnp.full(site.ids_shape, site.height, jnp.int32, device=sharding)


def run(program: Any, plan: ReplayPlan, inputs: Sequence[Any], deltas: Iterator[jax.Array]):
    """Runs a program as its plan says.

    Args:
        program: The program.
        plan: What `reading.read` has made of it.
        inputs: Arrays, and a `ProgramTable` for each leaf that is read by rows only.
        deltas: What is to be added to what each lookup returns, in their order.

    Returns:
        The outputs; of those that are tables, a `ProgramTable`. And each `Lookup`.
    """
    replay = _ReplayDomain(plan, deltas)
    return interpret(program, replay, inputs), replay.lookups


class _ReplayDomain(Domain[Any]):
    """An array is itself, or a `ProgramTable`.

    A program that is traced separately returns only arrays: the ids that were looked up,
    and nothing of what a reader has made.

    Args:
        plan: What the program is to do with tables.
        deltas: What is to be added to what each lookup returns, in their order.
    """

    def __init__(self, plan: ReplayPlan, deltas: Iterator[jax.Array]):
        self.plan, self.deltas = plan, deltas
        self.lookups: list[Lookup] = []
        self._inner: Any = None  # the plan of the equation that runs programs

    def constant(self, x):
        return x

    def literal(self, atom):
        return programs.literal(atom)

    def looks_at(self, jaxpr):
        return sorted(self.plan.steps)

    def array(self, value):
        return whole(value)

    def equation(self, at, eqn, given):
        step = self.plan.steps[at]
        if isinstance(step, Inner):
            self._inner = step
            skipped = len(given) - len(step.tables)  # the number of a branch
            is_table = [False] * skipped + [*step.tables]
            given = [x if t else whole(x) for x, t in zip(given, is_table, strict=True)]
            return self.by_kind(step.kind, eqn, given)
        if isinstance(step, Site):
            rows, lookup = _look_up(eqn, step, given, next(self.deltas))
            self.lookups.append(lookup)
            return [rows]
        return [_used(eqn, step, given)]

    def other(self, eqn, given):
        raise NotImplementedError(programs.place(eqn))  # no plan says so

    def call(self, eqn, given):
        (program,), (plan,) = programs.programs(eqn), self._inner.plans
        made, lookups = run(program, plan, given, self.deltas)
        self.lookups += lookups
        return made

    def remat(self, eqn, given):
        (program,), (plan,) = programs.programs(eqn), self._inner.plans
        split, returned = _Split(given), []

        def inner(arrays, deltas):
            made, lookups = run(program, plan, split.joined(arrays), iter(deltas))
            # A table that comes out as one is one that went in.
            kept = [x if any(x is y for y in given) else whole(x) for x in made]
            returned[:] = [_Split(kept)]
            return returned[0].arrays, [lookup.ids for lookup in lookups]

        known = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
        arrays, ids = jax.checkpoint(inner, **known)(split.arrays, self._own_deltas())
        self.lookups += map(Lookup, ids)
        return returned[0].joined(arrays)

    def scan(self, eqn, given):
        (program,), (plan,) = programs.programs(eqn), self._inner.plans
        first, last = programs.scan_split(eqn)
        carry = _Split(given[first:last])

        def turn(arrays, slices):
            slices, deltas = slices
            inputs = [*given[:first], *carry.joined(arrays), *slices]
            made, lookups = run(program, plan, inputs, iter(deltas))
            made, stacked = made[: last - first], made[last - first :]
            # A carried table comes out as it went in.
            pairs = zip(carry.values, made, strict=True)
            arrays = [whole(y) for x, y in pairs if not isinstance(x, ProgramTable)]
            return arrays, (list(map(whole, stacked)), [lookup.ids for lookup in lookups])

        known = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        slices = given[last:], self._own_deltas()
        arrays, (stacked, ids) = lax.scan(turn, carry.arrays, slices, **known)
        self.lookups += map(Lookup, ids)
        return [*carry.joined(arrays), *stacked]

    def cond(self, eqn, given):
        (index, *given), plans, sites = given, self._inner.plans, self._inner.sites
        sides = programs.programs(eqn)

        def side(k, deltas):
            before = sum(len(plan.sites) for plan in plans[:k])
            own = slice(before, before + len(plans[k].sites))
            made, lookups = run(sides[k], plans[k], given, iter(deltas[own]))
            # The lookups of the other sides have read nothing.
            every = list(map(_nothing_listed, sites))
            every[own] = [lookup.ids for lookup in lookups]
            every = [as_varying(i, s.varying) for i, s in zip(every, sites, strict=True)]
            return list(map(whole, made)), every

        branches = [functools.partial(side, k) for k in range(len(sides))]
        made, ids = lax.switch(index, branches, self._own_deltas())
        self.lookups += map(Lookup, ids)
        return made

    def _own_deltas(self):
        return list(islice(self.deltas, len(self._inner.sites)))


class _Split:
    """Values of which some are tables, which JAX cannot trace: these are closed over."""

    def __init__(self, values):
        self.values = values
        self.arrays = [x for x in values if not isinstance(x, ProgramTable)]

    def joined(self, arrays):
        rest = iter(arrays)
        return [x if isinstance(x, ProgramTable) else next(rest) for x in self.values]


def whole(x: Any) -> Any:
    """An output of `run` as an array."""
    return x.whole() if isinstance(x, ProgramTable) else x


@jax.custom_jvp
def _plus(rows, delta):
    """Rows plus a delta that is zero."""
    del delta
    return rows


_plus.defjvp(lambda primals, tangents: (primals[0], tangents[0] + tangents[1]))


def _look_up(eqn, site, given, delta):
    """The rows that an equation reads, and what it has looked up."""
    if site.sharding is not None:
        return _look_up_typed(eqn, site, given, delta)
    table, *operands = given
    ids = reads.ids_of(eqn, operands)
    return _finished(eqn, site, table, ids, table.rows(eqn, site, operands, ids), delta)


def _finished(eqn, site, table, ids, found, delta):
    """The rows that an equation returns, from those of the table; and the lookup.

    Args:
        eqn: The equation.
        site: What it reads.
        table: The table.
        ids: Of the rows.
        found: What `ProgramTable.rows` has returned.
        delta: What is added to them.
    """
    read, reading = found
    rows = table.done_to(_plus(read, as_varying(delta, varying_axes(read))))
    fill = reads.fill_of(eqn, rows.dtype)
    if table.then and fill is not None:
        # The table has no such rows, and nothing was done to what stands for them.
        inside = jnp.expand_dims(ids.read < site.height, site.axes)
        rows = jnp.where(inside, rows, fill)
    return rows, Lookup(ids.listed, reading)


def _look_up_typed(eqn, site, given, delta):
    """The same on an explicit mesh, where a lookup may be traced on Auto axes.

    The delta is on the explicit mesh, sharded as what is read, and so is its gradient.
    """
    table, *operands = given
    assert site.sharding is not None
    mesh, bare = site.sharding.mesh, dataclasses.replace(site, sharding=None)
    of_ids = NamedSharding(mesh, site.ids_spec)
    after = eqn.outvars[0].aval.sharding
    with programs.context(eqn):
        ids = reads.ids_of(eqn, operands)
    if table.read is None:
        with programs.context(eqn):
            found = table.rows(eqn, bare, operands, ids)
    else:
        asked = Ids(*(jax.reshard(x, of_ids) for x in ids))
        rows, _ = table.rows(eqn, bare, operands, asked)
        found = jax.reshard(rows, after), None
    with programs.context(eqn):
        delta = jax.reshard(delta, after)
        rows, lookup = _finished(eqn, bare, table, ids, found, delta)
    return rows, lookup._replace(ids=jax.reshard(lookup.ids, of_ids))


def _used(eqn, does, given):
    """The table after an equation."""
    at = next(k for k, x in enumerate(given) if isinstance(x, ProgramTable))
    table = given[at]
    if does is TableOperation.SAME:
        return table
    if does is TableOperation.CAST:
        with programs.context(eqn):
            value = eqn.primitive.bind(table.value, **eqn.params)
        return dataclasses.replace(table, value=value)

    def by_number(x):
        others = [
            x if k == at else as_varying(y, varying_axes(x)) for k, y in enumerate(given)
        ]
        return eqn.primitive.bind(*others, **eqn.params)

    return dataclasses.replace(table, then=(*table.then, by_number))
