"""The optimizer inside a lazy one, and which tables it can update by rows."""

import dataclasses
import functools
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.extend import core
from jax.interpreters import partial_eval

from sparsejax.errors import ArgumentError, StateError
from sparsejax.rows.updates import anatomy as anatomies
from sparsejax.rows.updates.anatomy import Anatomy
from sparsejax.rows.updates.catch_up import CatchUp, History
from sparsejax.rows.updates.facts.tables import TableFacts
from sparsejax.rows.updates.fading import SAMPLES, Fading
from sparsejax.rows.updates.state import LazyState
from sparsejax.tracing import programs
from sparsejax.units.row_grads import is_row_grads


@dataclasses.dataclass(eq=False)
class Inside:
    """The optimizer inside a lazy one, and what is known of it; each is equal to itself.

    Attributes:
        tx: The optimizer.
        exact: Whether rows catch up.
        readers: What has caught rows up to read them, as long as it lives.
        starts: Of the parameters of which first states were made: what they are like, and
            the paths of their leaves.
    """

    tx: optax.GradientTransformationExtraArgs
    exact: bool
    readers: weakref.WeakSet[Any] = dataclasses.field(default_factory=weakref.WeakSet)
    starts: dict[Any, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    _known: dict[Any, Anatomy] = dataclasses.field(default_factory=dict)

    def anatomy(self, grads: Any, params: Any) -> Anatomy:
        """The anatomy of the optimizer for such gradients and parameters."""
        leaves, structure = jax.tree.flatten(grads, is_leaf=is_row_grads)
        both = [*leaves, *jax.tree.leaves(params)]
        key = structure, tuple((np.shape(x), jnp.result_type(x)) for x in both)
        if key not in self._known:
            anatomy = anatomies.study(self.tx, grads, params)
            if self.exact:
                anatomy = self._with_fading(anatomy, params)
            self._known[key] = anatomy
        return self._known[key]

    def started(self, params: Any) -> Anatomy:
        """The anatomy for the parameters of which a first state is made."""
        anatomy = self.anatomy(params, params)
        self.starts[jax.tree.structure(params)] = anatomy.paths
        return anatomy

    def those_of(self, params: Any, inner: Any) -> Any:
        """The parameters that a state of the optimizer is of.

        All of them, or those that `optax.partition` or `masked` around `lazy` hands on;
        `optax.MaskedNode` in place of others, of each or of a whole subtree, as their
        labels are.
        """
        names, leaves, _ = anatomies.flatten(params)
        own, found = dict(zip(names, leaves, strict=True)), [params]
        for structure, paths in self.starts.items():
            if own.keys() >= {*paths}:
                found.append(structure.unflatten([own[path] for path in paths]))
        wanted = jax.tree.structure(inner)
        for left in found:
            if jax.tree.structure(jax.eval_shape(self.tx.init, left)) == wanted:
                return left
        raise StateError(
            "lazy: the state is not one of these parameters. Give it the parameters of "
            "which init has made the state, and where optax.partition or optax.masked is "
            "around lazy, all of them, after init of this very transformation."
        )

    def _with_fading(self, anatomy, params):
        """The same with the tables whose momentum fades as `Fading` says.

        The optimizer is run on numbers. What it is fed with by hand matters to steps, which
        are taken one by one then; so they are where its own numbers are traced, as
        `optax.inject_hyperparams` around `lazy` has them. There a state has sums all the
        same, which nothing reads: it is like one of the optimizer whose numbers are known.
        The optimizer is traced once, for all tables, and run once for each program of a
        table: a model has hundreds of leaves, and few kinds of them.
        """
        dtypes = [jnp.result_type(x) for x in jax.tree.leaves(params)]
        of = {
            at: self._guess(table)
            for at, table in anatomy.tables.items()
            if table.may_fade is not None
            and dtypes[at] == jnp.float32
            and not self.why_not(table)
        }
        of = {at: guess for at, guess in of.items() if guess or anatomy.tables[at].traced}
        if anatomy.held or not of:
            return anatomy
        tables, movings = dict(anatomy.tables), dict[Any, tuple[int | None, Any]]()
        for (at, fading), alone in zip(
            of.items(), self._samples(anatomy, params, of), strict=True
        ):
            kind = fading, tables[at].scalars, alone.written()
            if kind not in movings:
                is_right = fading is None or fading.is_right(alone)
                known = sum(number is not None for number, _ in movings.values())
                movings[kind] = (known, fading) if is_right else (None, None)
            moving, fading = movings[kind]
            tables[at] = dataclasses.replace(tables[at], moving=moving, fading=fading)
        return dataclasses.replace(anatomy, tables=tables)

    def _samples(self, anatomy, params, tables):
        """How steps with a gradient of zero move each of some tables: a program each."""
        runs = self._runs(anatomy, params)
        program = jax.make_jaxpr(functools.partial(runs.samples, list(tables)))(*_SAMPLE)
        return _alone(program)

    def _guess(self, table):
        """How the rows of a table may move; None where numbers for that are not known."""
        if table.traced or table.fades is None or table.idle != (table.may_fade,):
            return None
        idle, factors = table.may_fade, list(table.decays)
        factors[idle] = table.fades
        squares = 1 - idle if table.squares else None
        fading = Fading(idle, squares, tuple(factors), table.shrinks)
        return fading if fading.is_short else None

    def _runs(self, anatomy, params):
        """What takes steps with a gradient of zero, from the first one on.

        All in it is NumPy's, since it may run while something else is traced.
        """
        leaves, structure = jax.tree.flatten(params)
        like = jax.tree.unflatten(structure, anatomies.shapes(leaves))
        state, of_state = jax.tree.flatten(jax.eval_shape(self.tx.init, like))
        state = [
            x if k is not None else np.zeros(x.shape, x.dtype)
            for x, k in zip(state, anatomy.owner, strict=True)
        ]
        return CatchUp(
            self.tx,
            anatomy,
            (structure, of_state),
            tuple(anatomies.shapes(leaves)),
            tuple(state),
            History((), ()),
            np.int32(0),
            {},
        )

    def movings(self, anatomy: Anatomy) -> dict[int, TableFacts]:
        """A table of each `TableFacts.moving` that rows catch up by, in their order."""
        tables = [anatomy.tables[at] for at in sorted(self.lagging(anatomy), reverse=True)]
        found = {t.moving: t for t in tables if t.moving is not None}
        return dict(sorted(found.items()))

    def lagging(self, anatomy: Anatomy) -> set[int]:
        """The tables whose rows catch up, by their numbers."""
        tables = anatomy.tables.items()
        return {at for at, t in tables if self.exact and t.lags and not self.why_not(t)}

    def why_not(self, table: TableFacts) -> str | None:
        """Why a table cannot be updated by rows; None if it can."""
        return table.refused or (table.replay_refused if self.exact else None)

    def check(self, table: TableFacts) -> None:
        """Raises if a table cannot be updated by rows."""
        reason = self.why_not(table)
        fix = "Use lazy(tx, exact=False), or leave that part out."
        if self.exact and table.traced:
            reason = reason or (
                "the optimizer was made of values that are traced, and what they were at a "
                "step that a row has missed is not known"
            )
            fix = (
                "Put optax.inject_hyperparams inside, lazy(optax.inject_hyperparams("
                "optax.adam)(0.1)), which remembers its values; or use exact=False."
            )
        if not reason:
            return
        if table.refused:
            fix = (
                "Leave that out of lazy(...), give it only leaves with dense gradients "
                "(optax.partition), or use what looks at each row alone, as optax.clip."
            )
        raise ArgumentError(
            f"lazy: {table.path!r} cannot be updated by rows: {reason}. {fix}"
        )

    def check_late(self, anatomy: Anatomy, at: int) -> None:
        """Raises if rows of a table cannot be updated as of the step before."""
        table = anatomy.tables[at]
        known = {*anatomy.ticks, *(anatomy.held if self.lagging(anatomy) else ())}
        unknown = sorted(table.every - known)
        if unknown:
            raise ArgumentError(
                f"lazy: rows of {table.path!r} come a step late, and what "
                f"{anatomy.names[unknown[0]]} of the optimizer's state was at their own "
                "step is not known: it is no number of steps. Use a schedule in place of "
                "what is set by hand, or sparsejax.embrace_sync(vertical=False)."
            )

    def before(self, anatomy: Anatomy, state: LazyState) -> LazyState:
        """A state as it was before the last step, but for the rows of tables."""
        inner, structure = jax.tree.flatten(state.inner)
        for j in anatomy.ticks:
            inner[j] = inner[j] - jnp.ones((), inner[j].dtype)
        if self.lagging(anatomy):
            for j, value in zip(anatomy.held, state.history.at(state.step), strict=True):
                inner[j] = value
        return state._replace(step=state.step - 1, inner=structure.unflatten(inner))


# The arguments of `CatchUp.samples` but for the tables.
_SAMPLE = (
    jax.ShapeDtypeStruct((), jnp.int32),
    *[jax.ShapeDtypeStruct((SAMPLES,), jnp.float32)] * 3,
)


def _alone(program):
    """Each output of a program by itself: with the equations that it depends on."""
    jaxpr = program.jaxpr
    consts = dict(zip(jaxpr.constvars, program.consts, strict=True))
    makers = {v: at for at, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    found = []
    for output in jaxpr.outvars:
        # First just those in front of it: to look through all, once an output, would take
        # as long as all outputs together, squared.
        eqns, left = {}, [output]
        while left:
            at = makers.get(v) if not programs.is_literal(v := left.pop()) else None
            if at is not None and at not in eqns:
                eqns[at] = jaxpr.eqns[at]
                left += eqns[at].invars
        some = jaxpr.replace(eqns=[eqns[at] for at in sorted(eqns)], outvars=[output])
        some, _ = partial_eval.dce_jaxpr(some, [True], instantiate=True)
        kept = [consts[v] for v in some.constvars]
        found.append(_Alone(core.ClosedJaxpr(some, kept)))
    return found


@dataclasses.dataclass(frozen=True)
class _Alone:
    """One output of a program, without the equations that it does not depend on.

    Attributes:
        program: It takes all inputs of the whole program.
    """

    program: core.ClosedJaxpr

    def __call__(self, *args: Any) -> jax.Array:
        """The output."""
        (made,) = core.jaxpr_as_fun(self.program)(*args)
        return made

    def written(self) -> Any:
        """The program and its constants, in a form that can be compared."""
        consts = [*self.program.consts, *_constants(self.program.jaxpr)]
        # A program is printed without the values of its constants.
        return str(self.program.jaxpr), tuple(map(_value, consts))


def _value(x):
    """A constant, in a form that can be compared."""
    if isinstance(x, Tracer) or jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended):
        return id(x)
    return np.shape(x), np.asarray(x).tobytes()


def _constants(jaxpr):
    """The constants of all programs inside a program."""
    inside = [inner for eqn in jaxpr.eqns for inner in programs.held(eqn)]
    return [x for one in inside for x in (*one.consts, *_constants(one.jaxpr))]
