"""A lazy optimizer's state and parameters at one step, table by table."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax.axes import as_varying
from sparsejax.errors import ArgumentError, StateError
from sparsejax.rows import tiles
from sparsejax.rows.updates import layout as layouts
from sparsejax.rows.updates.call import RowCall, Rows
from sparsejax.rows.updates.catch_up.fading import FadingSums, probe_of, samples
from sparsejax.rows.updates.catch_up.missed import MissedSteps
from sparsejax.rows.updates.catch_up.protocol import CatchUp
from sparsejax.rows.updates.catch_up.replay import Replay
from sparsejax.rows.updates.optimizer import RowOptimizer, UpdatePlan
from sparsejax.rows.updates.state import LazyState
from sparsejax.units.merging import Merge, merged


class Snapshot:
    """A state with the parameters that it belongs to, table by table.

    Args:
        optimizer: The optimizer.
        grads: The gradients, or a pytree with their structure, shapes and dtypes.
        params: The parameters, or None.
        state: The state.
        sums: The sums by which rows catch up, if another snapshot of this state has
            computed them.
    """

    def __init__(
        self,
        optimizer: RowOptimizer,
        grads: Any,
        params: Any,
        state: LazyState,
        sums: Mapping[int, FadingSums] | None = None,
    ):
        _, leaves, structure = layouts.flatten(grads)
        self.optimizer, self.structure = optimizer, structure
        self.plan = optimizer.plan(grads, params)
        self.leaves: list[Any] = [None] * len(leaves)
        if params is not None:
            self.leaves = structure.flatten_up_to(params)
        layout, moving = self.plan.layout, self.plan.moving
        if params is None and moving:
            raise ArgumentError(
                f"lazy: update needs the parameters, because rows of "
                f"{layout.paths[min(moving)]!r} catch up on steps that they have missed: "
                "tx.update(grads, state, params)."
            )
        self.state, self.step = state, state.step
        self.inner, self.of_state = jax.tree.flatten(state.inner)
        self.last = structure.flatten_up_to(state.last)
        held = [self.inner[j] for j in layout.held] if self.plan.lagging else []
        self.history = state.history.noted(state.step + 1, held)
        self.shapes = tuple(layouts.shapes(leaves if params is None else self.leaves))
        self.call = RowCall(optimizer.tx, layout, (structure, self.of_state))
        self.missed = MissedSteps(
            self.call, self.shapes, tuple(self.inner), self.history, state.step, {}
        )
        if len(state.kept) != len(self.plan.fading):
            raise StateError(
                f"lazy: this state keeps the sums of {len(state.kept)} kinds of rows that "
                f"move, and {len(self.plan.fading)} are needed: it was saved by another "
                "version or for another optimizer. Start from tx.init(params); or settle "
                "it with the version that has saved it, and take "
                "state._replace(kept=tx.init(params).kept) of what that returns. Or rows "
                "have float64 gradients of a float32 table: cast them to its dtype."
            )
        made = self._sums() if sums is None else sums
        self.missed = dataclasses.replace(self.missed, sums=made)

    def _sums(self):
        """Computes the sums by which rows catch up to this step."""
        made = {}
        for number, (at, way) in sorted(self.plan.fading.items()):
            run = lambda *args, at=at: samples(self.missed, [at], *args)[0]
            made[number] = way.sums(self.state.kept[number], self.step, probe_of(run))
        return made

    def kept(self) -> tuple[jax.Array, ...]:
        """Returns the sums that the next state keeps."""
        sums = self.missed.sums
        return tuple(sums[number].kept for number in sorted(sums))

    def way(self, at: int) -> CatchUp:
        """Returns the method by which the rows of a table catch up."""
        return self.plan.way(at)

    def all_of(self, at: int) -> Rows:
        """Returns all rows of a table, not caught up."""
        own = tuple(self.inner[j] for j in self.plan.layout.tables[at].own)
        return Rows(self.leaves[at], own, self.last[at])

    def gathered(self, whole: Rows, ids: jax.Array) -> Rows:
        """Gathers rows of a table; for ids out of range the nearest, which are not late."""
        own = tuple(gathered_rows(x, ids) for x in whole.own)
        param: Any = whole.param
        param = param if param is None else gathered_rows(param, ids)
        return Rows(param, own, self.seen(whole.last, ids))

    def seen(self, last: Any, ids: jax.Array) -> jax.Array:
        """Returns the last steps that rows of a table have seen."""
        if isinstance(last, optax.MaskedNode):
            return jnp.zeros(ids.shape, jnp.int32)
        inside = (ids >= 0) & (ids < last.shape[0])
        return jnp.where(inside, gathered_rows(last, ids), self.step)

    def due(self, at: int, unseen: bool = False) -> jax.Array | None:
        """Returns the ids of the rows that a step lists in addition to those of a gradient.

        Args:
            at: The number of the table.
            unseen: Whether rows that have seen this step are replaced by padding.

        Returns:
            int32 [n], or None if there are none.
        """
        height = self.shapes[at].shape[0]
        due = self.way(at).due(height, self.step)
        if due is None or not unseen:
            return due
        return jnp.where(self.seen(self.last[at], due) > self.step, height, due)

    def merged(self, at: int, ids: jax.Array, due: jax.Array | None) -> Merge:
        """Merges two lists of ids; `Merge.places` has the positions of the first list."""
        more = []
        if due is not None:
            more = as_varying([due], tiles.axes_of(due) | tiles.axes_of(ids))
        every = jnp.concatenate([ids, *more])
        if not every.size:
            return Merge(every, every, jnp.int32(0))
        merge = merged(every, self.shapes[at].shape[0], tiles.room(every.size))
        return merge._replace(places=merge.places[: ids.size])

    def advanced(self, at: int, rows: Rows) -> Rows:
        """Catches up some rows of a table to the last step."""
        return self.way(at).advance(self.missed, {at: rows})[at]

    def caught_up(self, at: int, merge: Merge) -> Rows:
        """Returns listed rows of a table, caught up to the last step, to be read.

        Only the parameter is returned if catching up is cheap: an update catches the rows
        up again, from the state that it gathers anyway. Otherwise their state is returned,
        too, so that no step is taken twice.
        """
        whole, ids, is_cheap = self.all_of(at), merge.ids, self.way(at).is_cheap
        types = tiles.axes_of(whole, ids, self.step, self.missed.sums)

        def late(ids, apart=lambda run: run()):
            rows = self.advanced(at, apart(lambda: self.gathered(whole, ids)))
            return rows._replace(own=(), last=()) if is_cheap else rows

        n = ids.shape[0]
        number = tiles.tiles_of(n * max(1, whole.param[:1].size)) if tiles.is_long(n) else 1
        if number == 1:
            return late(ids)

        def one(tile, made):
            return tile.put(at, made, late(tile.cut(at, ids), tile.apart))

        shapes = jax.eval_shape(late, ids)
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return tiles.each({at: (n, merge.found)}, number, one, empty, types)

    def replayed(self, tables: Iterable[int]) -> dict[int, Rows]:
        """Returns all rows of some tables, caught up by missed steps one by one.

        This compiles faster than a sum, for tables whose rows are rarely late.
        """
        every = {at: self.all_of(at) for at in tables}
        return Replay(True).advance(self.missed, every) if every else {}

    def settled(self, tables: Iterable[int]) -> dict[int, Rows]:
        """Returns all rows of some tables, caught up; it is fast if few are late."""
        ways: dict[CatchUp, dict[int, Rows]] = {}
        for at in tables:
            ways.setdefault(self.way(at), {})[at] = self.all_of(at)
        made: dict[int, Rows] = {}
        for way, rows in ways.items():
            made |= way.settled(self.missed, rows)
        return made


def before(plan: UpdatePlan, state: LazyState) -> LazyState:
    """Returns a state as it was before the last step, except for the rows of tables."""
    inner, structure = jax.tree.flatten(state.inner)
    for j in plan.layout.ticks:
        inner[j] = inner[j] - jnp.ones((), inner[j].dtype)
    if plan.lagging:
        held = state.history.at(state.step)
        for j, value in zip(plan.layout.held, held, strict=True):
            inner[j] = value
    return state._replace(step=state.step - 1, inner=structure.unflatten(inner))


def gathered_rows(x: jax.Array, ids: jax.Array) -> jax.Array:
    """Gathers rows of an array; for an id out of range the nearest row."""
    return jnp.take(x, ids, axis=0, mode="clip")
