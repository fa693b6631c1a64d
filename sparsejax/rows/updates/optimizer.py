"""The optimizer inside a lazy one: the tables it updates by rows, and how they catch up."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax.errors import ArgumentError, StateError
from sparsejax.rows.updates import layout as layouts
from sparsejax.rows.updates.call import RowCall
from sparsejax.rows.updates.catch_up.fading import SAMPLES, Fading, samples
from sparsejax.rows.updates.catch_up.history import History
from sparsejax.rows.updates.catch_up.missed import MissedSteps
from sparsejax.rows.updates.catch_up.protocol import CatchUp, Never
from sparsejax.rows.updates.catch_up.replay import Replay
from sparsejax.rows.updates.facts.tables import TableFacts
from sparsejax.rows.updates.layout import OptimizerLayout
from sparsejax.rows.updates.state import LazyState
from sparsejax.state.tree import is_masked
from sparsejax.tracing import outputs
from sparsejax.units.row_grads import is_row_grads


NEVER = Never()


class UpdatePlan(NamedTuple):
    """The plan of a lazy optimizer for parameters of given shapes.

    Attributes:
        layout: The arrays of the state that have rows, and the effect of a step on them.
        catch_up: The method by which the rows of each table catch up, by its number.
    """

    layout: OptimizerLayout
    catch_up: Mapping[int, CatchUp]

    def way(self, at: int) -> CatchUp:
        """Returns the method by which the rows of a parameter catch up."""
        return self.catch_up.get(at, NEVER)

    @property
    def lagging(self) -> set[int]:
        """The tables for whose rows the state records the last step that they have seen."""
        return {at for at, way in self.catch_up.items() if way.lags}

    @property
    def moving(self) -> set[int]:
        """The tables whose parameters may change in steps that do not list a row."""
        return {at for at, way in self.catch_up.items() if way.moves}

    @property
    def fading(self) -> dict[int, tuple[int, Fading]]:
        """One table for each set of `FadingSums`, and its method, by `Fading.number`."""
        found = {}
        for at, way in sorted(self.catch_up.items()):
            if isinstance(way, Fading):
                found.setdefault(way.number, (at, way))
        return found


@dataclasses.dataclass(eq=False)
class RowOptimizer:
    """The optimizer inside a lazy one, with its plans. It is compared by identity.

    Attributes:
        tx: The optimizer.
        exact: Whether rows catch up.
        starts: The tree structures of parameters for which `init` was called, with the
            paths of their leaves.
    """

    tx: optax.GradientTransformationExtraArgs
    exact: bool
    starts: dict[Any, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    _known: dict[Any, UpdatePlan] = dataclasses.field(default_factory=dict)

    def plan(self, grads: Any, params: Any) -> UpdatePlan:
        """Returns the plan; parameters that are None have the shapes of the gradients."""
        leaves, structure = jax.tree.flatten(grads, is_leaf=is_row_grads)
        if params is None:
            params = jax.tree.unflatten(structure, map(layouts.as_array, leaves))
        both = [*leaves, *jax.tree.leaves(params)]
        key = structure, tuple((np.shape(x), jnp.result_type(x)) for x in both)
        if key not in self._known:
            self._known[key] = self._planned(layouts.study(self.tx, grads, params), params)
        return self._known[key]

    def started(self, params: Any) -> UpdatePlan:
        """Returns the plan for the parameters of `init`, and records their structure."""
        plan = self.plan(params, params)
        self.starts[jax.tree.structure(params)] = plan.layout.paths
        return plan

    def params_of(self, params: Any, state: LazyState) -> Any:
        """Returns the parameters that a state belongs to.

        They are all of them, or those that `optax.partition` or `masked` around `lazy`
        passes, with `optax.MaskedNode` in place of each other leaf, or of a whole subtree,
        like the labels.
        """
        names, leaves, _ = layouts.flatten(params)
        own, found = dict(zip(names, leaves, strict=True)), [params]
        for structure, paths in self.starts.items():
            if own.keys() >= {*paths}:
                found.append(structure.unflatten([own[path] for path in paths]))
        for left in found:
            if self._is_of(state, left):
                return left
        raise StateError(
            "lazy: the state is not one of these parameters. Give it the parameters of "
            "which init has made the state, and where optax.partition or optax.masked is "
            "around lazy, all of them, after init of this very transformation. Of an "
            "nnx.Optimizer that is nnx.as_pure(optimizer.opt_state)."
        )

    def _is_of(self, state, params):
        """Returns whether a state has the structure of one of these parameters."""
        inner = jax.tree.structure(jax.eval_shape(self.tx.init, params))
        if inner != jax.tree.structure(state.inner):
            return False
        # An optimizer without a state of its own shows by `last` what it was given.
        try:
            last = layouts.flatten(params)[2].flatten_up_to(state.last)
        except ValueError:
            return False
        own = {at for at, x in enumerate(last) if not is_masked(x)}
        return own == self.plan(params, params).lagging

    def _planned(self, layout, params):
        """Makes the plan for a layout."""
        caught = {at: table for at, table in layout.tables.items() if self._lags(table)}
        for table in caught.values():
            if table.traced:  # as optax.inject_hyperparams around `lazy` makes it
                self.check(table)
        fading = self._fading(layout, params, caught)
        replayed = {at: Replay(table.moves) for at, table in caught.items()}
        never = dict.fromkeys(layout.tables, NEVER)
        return UpdatePlan(layout, never | replayed | fading)

    def _lags(self, table):
        return self.exact and table.lags and not self.why_not(table)

    def _fading(self, layout, params, caught):
        """Finds the tables whose rows move as `Fading` describes.

        The optimizer is run on numbers to check that. If hyperparameters that are set by
        hand affect its steps, there are none, and steps are taken one by one. It is traced
        once, for all tables, and run once for each distinct program of a table: a model has
        hundreds of leaves, and few kinds of them.
        """
        dtypes = [jnp.result_type(x) for x in jax.tree.leaves(params)]
        guesses = {at: self._guess(table) for at, table in caught.items()}
        of = {at: x for at, x in guesses.items() if x and dtypes[at] == jnp.float32}
        if layout.held or not of:
            return {}
        found, numbers, count = dict[int, Fading](), dict[Any, int | None](), 0
        programs = self._samples(layout, params, of)
        for (at, guess), alone in zip(of.items(), programs, strict=True):
            kind = guess, caught[at].scalars, alone.written()
            if kind not in numbers:
                is_right = guess.is_right(alone)
                numbers[kind] = count if is_right else None
                count += is_right
            if (number := numbers[kind]) is not None:
                found[at] = dataclasses.replace(guess, number=number)
        return found

    def _samples(self, layout, params, tables):
        """Returns for each table the program of `samples`: a step with a gradient of 0."""
        steps = self.zero_steps(layout, params)
        sample = functools.partial(samples, steps, list(tables))
        return outputs.alone(jax.make_jaxpr(sample)(*_SAMPLE))

    def _guess(self, table):
        """Returns a `Fading` that may describe a table; None if its factors are unknown."""
        if table.fades is None or len(table.own) > 2:
            return None
        (idle,), factors = table.idle, list(table.decays)
        factors[idle] = table.fades
        squares = 1 - idle if table.squares else None
        fading = Fading(idle, squares, tuple(factors), table.shrinks)
        return fading if fading.is_short else None

    def zero_steps(self, layout: OptimizerLayout, params: Any) -> MissedSteps:
        """Returns steps with a gradient of zero, from step 0 and a state of zeros on.

        Its arrays are NumPy's, since it may run while something else is traced.
        """
        leaves, structure = jax.tree.flatten(params)
        like = jax.tree.unflatten(structure, layouts.shapes(leaves))
        state, of_state = jax.tree.flatten(jax.eval_shape(self.tx.init, like))
        state = [
            x if k is not None else np.zeros(x.shape, x.dtype)
            for x, k in zip(state, layout.owner, strict=True)
        ]
        call = RowCall(self.tx, layout, (structure, of_state))
        shapes, count = tuple(layouts.shapes(leaves)), np.int32(0)
        return MissedSteps(call, shapes, tuple(state), History((), ()), count, {})

    def why_not(self, table: TableFacts) -> str | None:
        """Returns why a table cannot be updated by rows; None if it can."""
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
                "Use what looks at each row alone, as optax.clip; clip by "
                "sparsejax.transforms.clip_by_rank before the synchronization; or give it "
                "only leaves with dense gradients (optax.masked, optax.partition)."
            )
        raise ArgumentError(
            f"lazy: {table.path!r} cannot be updated by rows: {reason}. {fix}"
        )

    def check_late(self, plan: UpdatePlan, at: int) -> None:
        """Raises if rows of a table cannot be updated one step late."""
        layout = plan.layout
        table = layout.tables[at]
        known = {*layout.ticks, *(layout.held if plan.lagging else ())}
        unknown = sorted(table.every - known)
        if unknown:
            raise ArgumentError(
                f"lazy: rows of {table.path!r} come a step late, and what "
                f"{layout.names[unknown[0]]} of the optimizer's state was at their own "
                "step is not known: it is no number of steps. Use a schedule in place of "
                "what is set by hand, or sparsejax.embrace_sync(vertical=False)."
            )


# The types of the arguments of `fading.samples` after `missed` and `tables`.
_SAMPLE = (
    jax.ShapeDtypeStruct((), jnp.int32),
    *[jax.ShapeDtypeStruct((SAMPLES,), jnp.float32)] * 3,
)
