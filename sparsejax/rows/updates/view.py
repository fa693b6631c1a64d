"""A lazy optimizer's state and parameters, table by table, and how to read them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.errors import ArgumentError
from sparsejax.rows.updates import anatomy as anatomies
from sparsejax.rows.updates.catch_up import CatchUp, Rows
from sparsejax.rows.updates.inside import Inside
from sparsejax.rows.updates.state import LazyState, find


class View:
    """A state with the parameters that it belongs to, table by table.

    Args:
        inside: The optimizer.
        grads: The gradients, or what has their structure, shapes and dtypes.
        params: The parameters, or None.
        state: The state.
    """

    def __init__(self, inside: Inside, grads: Any, params: Any, state: LazyState):
        _, leaves, structure = anatomies.flatten(grads)
        if params is None:
            shapes = map(anatomies.as_array, leaves)
            self.anatomy = inside.anatomy(grads, jax.tree.unflatten(structure, shapes))
            self.leaves: list[Any] = [None] * len(leaves)
        else:
            self.anatomy = inside.anatomy(grads, params)
            self.leaves = structure.flatten_up_to(params)
        self.inner, self.of_state = jax.tree.flatten(state.inner)
        self.last = structure.flatten_up_to(state.last)
        self.step = state.step
        self.lagging = inside.lagging(self.anatomy)
        self.moving = {at for at in self.lagging if self.anatomy.tables[at].moves}
        if params is None and self.moving:
            path = self.anatomy.paths[min(self.moving)]
            raise ArgumentError(
                f"lazy: update needs the parameters, because rows of {path!r} catch up on "
                "steps that they have missed: tx.update(grads, state, params)."
            )
        next_step = state.step + 1
        held = [self.inner[j] for j in self.anatomy.held] if self.lagging else []
        self.history = state.history.noted(next_step, held)
        self._catch_up = CatchUp(
            inside.tx,
            self.anatomy,
            (structure, self.of_state),
            tuple(anatomies.shapes(leaves if params is None else self.leaves)),
            tuple(self.inner),
            self.history,
            state.step,
        )

    def catch_up(self, rows: dict[int, Rows], one_by_one: bool = False) -> dict[int, Rows]:
        """Rows of some tables as after the last step, as `CatchUp` has them."""
        return self._catch_up(rows, one_by_one) if rows else {}

    def gathered(self, at: int, ids: jax.Array) -> Rows:
        """Rows of a table; none that is out of range is late."""
        own = tuple(gathered_rows(self.inner[j], ids) for j in self.anatomy.tables[at].own)
        leaf = self.leaves[at]
        param: Any = leaf if leaf is None else gathered_rows(leaf, ids)
        last = jnp.zeros(ids.shape, jnp.int32)
        if at in self.lagging:
            inside = (ids >= 0) & (ids < self.last[at].shape[0])
            last = gathered_rows(self.last[at], ids)
            last = jnp.where(inside, last, self.step)
        return Rows(param, own, last)

    def inner_with(self, rows: dict[int, Rows]) -> list[Any]:
        """The leaves of the state, those that have rows of some tables replaced."""
        inner = list(self.inner)
        for at, part in rows.items():
            for j, own in zip(self.anatomy.tables[at].own, part.own, strict=True):
                inner[j] = own
        return inner

    def all_of(self, at: int) -> Rows:
        """All rows of a table."""
        own = tuple(self.inner[j] for j in self.anatomy.tables[at].own)
        return Rows(self.leaves[at], own, self.last[at])


class Reader:
    """Rows as the dense optimizer has them, from tables some of whose rows are late.

    Args:
        inside: The optimizer.
        params: The parameters.
        state: Its state, or that of a chain that it is in.
    """

    def __init__(self, inside: Inside, params: Any, state: Any):
        self._paths, self._leaves, _ = anatomies.flatten(params)
        self._view = View(inside, params, params, find(state))

    def rows(self, path: str, ids: jax.Array) -> jax.Array:
        """Rows of a table.

        Args:
            path: Of the table among the parameters.
            ids: int32 [n]; for ids out of range it returns the nearest row.
        """
        at = self._paths.index(path)
        if at not in self._view.moving:
            return gathered_rows(self._leaves[at], ids)
        rows = self._view.gathered(at, ids)
        return self._view.catch_up({at: rows})[at].param

    def whole(self, paths: Sequence[str]) -> list[jax.Array]:
        """Some parameters, all of them."""
        wanted = [self._paths.index(path) for path in paths]
        tables = [at for at in wanted if at in self._view.moving]
        every = {at: self._view.all_of(at) for at in tables}
        settled = self._view.catch_up(every, one_by_one=True)
        leaves = self._leaves
        return [settled[at].param if at in settled else leaves[at] for at in wanted]


def gathered_rows(x: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of an array; the nearest one for an id that is out of range."""
    return jnp.take(x, ids, axis=0, mode="clip")
