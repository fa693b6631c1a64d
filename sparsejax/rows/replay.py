"""Runs a program by the plan of `reading`, with a delta added to the rows of each lookup.

Tables are constants in it. It is differentiated with respect to the deltas, which are zero:
one array per lookup, with a leading axis for each scan around it. They are never added to
rows, and only their tangents are computed.
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
    """The record of one lookup.

    Attributes:
        ids: int32, the ids of its gradient.
        reading: The value that the reader returned with the rows; None without a reader, or
            where the lookup is in a program that is traced separately.
    """

    ids: jax.Array
    reading: Any = None


class Reader(Protocol):
    """Reads parameters whose values differ from the arrays that hold them, as lazy ones."""

    def rows(self, path: str, ids: Ids) -> tuple[jax.Array, Any]:
        """Returns rows of a table, and a value for `listed`: `Lookup.reading`."""
        ...

    def listed(self, path: str, lookups: list[Lookup], grads: RowGrads) -> RowGrads:
        """Returns the gradient of a table, given all lookups of it."""
        ...

    def whole(self, paths: Sequence[str]) -> list[jax.Array]:
        """Returns the whole parameters at some paths."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramTable:
    """A table in the program.

    Attributes:
        value: The array, a constant of the program.
        path: The path of the parameter.
        read: The reader of its rows; if None, they are read from `value`.
        then: Elementwise operations to apply to its rows, in order.
    """

    value: jax.Array
    path: str
    read: Reader | None = None
    then: tuple[Callable[[jax.Array], jax.Array], ...] = ()

    def whole(self) -> jax.Array:
        """Returns the whole table, with the elementwise operations applied."""
        if self.read is None:
            return self.done_to(self.value)
        (value,) = self.read.whole([self.path])
        return self.done_to(as_varying(value, varying_axes(self.value)))

    def rows(self, eqn: Any, site: Site, operands: Any, ids: Ids) -> tuple[jax.Array, Any]:
        """Returns the rows that a lookup reads, and the reader's value for `listed`.

        Args:
            eqn: The equation of the lookup.
            site: Its site.
            operands: Its operands except the table.
            ids: The ids of the rows.
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
        """Applies the elementwise operations to rows."""
        for do in self.then:
            rows = do(rows)
        return rows


def zeros(site: Site) -> jax.Array:
    """Returns the delta of a site: zeros, whose gradient is that of the rows it reads."""
    x = jnp.zeros(site.shape, site.dtype, device=site.sharding)
    return as_varying(x, site.varying)


def _padding_ids(site):
    """Returns the ids of a lookup in a branch that is not taken: all are padding."""
    sharding = site.sharding and NamedSharding(site.sharding.mesh, site.ids_spec)
    return jnp.full(site.ids_shape, site.height, jnp.int32, device=sharding)


def run(program: Any, plan: ReplayPlan, inputs: Sequence[Any], deltas: Iterator[jax.Array]):
    """Runs a program by its plan.

    Args:
        program: The program.
        plan: The plan that `reading.read` has made for it.
        inputs: Arrays, and a `ProgramTable` for each leaf that is read by rows only.
        deltas: The deltas of the lookups, in the order of the program.

    Returns:
        The outputs, with a `ProgramTable` for each that is a table, and a list of all
        `Lookup`s in the order of the deltas.
    """
    replay = _ReplayDomain(plan, deltas)
    return interpret(program, replay, inputs), replay.lookups


class _ReplayDomain(Domain[Any]):
    """The domain in which the value of an array is itself, or a `ProgramTable`.

    A program that is traced separately returns only arrays: the ids of its lookups, but
    not the values of a reader.

    Args:
        plan: The plan of the program.
        deltas: The deltas of the lookups, in the order of the program.
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
        raise NotImplementedError(programs.place(eqn))  # every equation has a planned step

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
            # Only a table that is an input may be an output without becoming an array.
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
            # A carried table is the same in every turn, so it is not in the traced carry.
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
            # For the lookups of the other sides, which do not run, all ids are padding.
            every = list(map(_padding_ids, sites))
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
    """Splits values into arrays, which JAX traces, and tables, which are closed over."""

    def __init__(self, values):
        self.values = values
        self.arrays = [x for x in values if not isinstance(x, ProgramTable)]

    def joined(self, arrays):
        rest = iter(arrays)
        return [x if isinstance(x, ProgramTable) else next(rest) for x in self.values]


def whole(x: Any) -> Any:
    """Returns an output of `run` as an array."""
    return x.whole() if isinstance(x, ProgramTable) else x


@jax.custom_jvp
def _plus(rows, delta):
    """Adds a delta that is zero to rows: returns them, and adds the tangents."""
    del delta
    return rows


_plus.defjvp(lambda primals, tangents: (primals[0], tangents[0] + tangents[1]))


def _look_up(eqn, site, given, delta):
    """Evaluates an equation that reads rows; returns its output and its `Lookup`."""
    if site.sharding is not None:
        return _look_up_typed(eqn, site, given, delta)
    table, *operands = given
    ids = reads.ids_of(eqn, operands)
    return _finished(eqn, site, table, ids, table.rows(eqn, site, operands, ids), delta)


def _finished(eqn, site, table, ids, found, delta):
    """Makes the output of an equation from rows of the table; returns it and the `Lookup`.

    Args:
        eqn: The equation.
        site: Its site.
        table: The table.
        ids: The ids of the rows.
        found: The result of `ProgramTable.rows`.
        delta: The delta to add to the rows.
    """
    read, reading = found
    own = _plus(read, as_varying(delta, varying_axes(read)))
    is_filled = reads.fill_of(eqn, own.dtype) is not None
    if not table.then or not (is_filled or ids.listed is not ids.read):
        return table.done_to(own), Lookup(ids.listed, reading)
    # Rows out of range are the fill value, to which no operation is applied; or those at
    # the ends, whose gradient JAX drops, also that of the operations' numbers.
    inside = jnp.expand_dims(ids.listed < site.height, site.axes)
    rows = table.done_to(jnp.where(inside, own, 1) if is_filled else own)
    fill = reads.fill_of(eqn, rows.dtype)
    rows = jnp.where(inside, rows, lax.stop_gradient(rows) if fill is None else fill)
    return rows, Lookup(ids.listed, reading)


def _look_up_typed(eqn, site, given, delta):
    """Does as `_look_up` on an explicit mesh, where a lookup may be traced on Auto axes.

    The delta and its gradient are on the explicit mesh, sharded as the rows that are read.
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
    """Evaluates an equation that returns a table after a cast or elementwise operation."""
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
