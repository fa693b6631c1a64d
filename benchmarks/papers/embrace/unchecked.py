"""A train step with `check_vma=False`, in a `shard_map` of one's own.

`sparsejax.data_parallel` checks; models that cannot be checked are trained as here, by the
two schedules as well. What it trains must be the same.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import sparsejax
from sparsejax import embrace, rows
from sparsejax.placement.initial import on_ranks


class State(NamedTuple):
    """What a step changes."""

    params: Any
    opt_state: Any


class Unchecked:
    """Trains as `sparsejax.data_parallel` does, without checking."""

    def __init__(
        self,
        loss_fn: Callable[..., jax.Array],
        tx: optax.GradientTransformation,
        mesh: Mesh,
        axis_name: str = "data",
    ):
        self._loss, self._tx, self._mesh, self._axis = loss_fn, tx, mesh, axis_name
        self._lazy: rows.Lazy | None = None
        self._ahead = self._carries = False
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def scheduled(self, lazy: rows.Lazy | None, ahead: bool, carries: bool) -> "Unchecked":
        """The same, by what `tx` does.

        Args:
            lazy: The optimizer of tables in `tx`, where it takes rows.
            ahead: Whether `tx` is to know the rows of the next batch.
            carries: Whether it is `sparsejax.embrace.horizontal`.
        """
        self._lazy, self._ahead, self._carries = lazy, ahead, carries
        return self

    def init(self, params: Any) -> State:
        """The first state."""
        there = lambda x, spec: jax.device_put(x, NamedSharding(self._mesh, spec))
        params = jax.tree.map(there, params, sparsejax.state_specs(params))
        opt_state = sparsejax.init(
            self._tx, params, self._mesh, self._axis, check_vma=False
        )
        return State(params, opt_state)

    def step(self, state: State, *batches: Any) -> tuple[State, jax.Array]:
        """One step: the state, and the mean loss of all ranks.

        Args:
            state: The state.
            *batches: The batch, and the next one where it is to be known; None behind the
                last.
        """
        batches = tuple(batch for batch in batches if batch is not None)
        return self._on_ranks(self._of_rank, state, batches, (P(),))

    def flush(self, state: State) -> State:
        """The state in which nothing waits."""
        return self._on_ranks(self._flushed, state, (), ())[0]

    def _on_ranks(self, function, state, batches, out):
        key = function.__name__, len(batches), jax.tree.structure(state)
        if key not in self._compiled:
            specs = sparsejax.state_specs(state)
            mapped = on_ranks(
                function,
                mesh=self._mesh,
                in_specs=(specs, *[P(self._axis)] * len(batches)),
                out_specs=(specs, *out),
                check_vma=False,
            )
            self._compiled[key] = jax.jit(mapped)
        return self._compiled[key](state, *batches)

    def _of_rank(self, state, batch, following=None):
        params, opt_state = state
        if self._carries:
            order = embrace.find_order(lambda params: self._loss(params, batch), params)
            params, opt_state = self._tx.begin(params, opt_state, order)
        params = sparsejax.local(params, self._axis)
        value_and_grad, extra = jax.value_and_grad(self._loss), {}
        if self._lazy is not None:
            kept = opt_state.rest if self._carries else opt_state
            read = extra["read"] = self._lazy.reader(params, kept)
            by_rows = embrace.value_and_grad if self._ahead else sparsejax.value_and_grad
            value_and_grad = by_rows(self._loss, read=read)
        loss, grads = value_and_grad(params, batch)
        if self._ahead:
            ids = None
            if following is not None:
                ids = embrace.rows_read(self._loss)(params, following)
            extra["next_ids"] = ids
        updates, opt_state = self._tx.update(grads, opt_state, params, **extra)
        params = sparsejax.apply_updates(params, updates)
        return State(params, opt_state), jax.lax.pmean(loss, self._axis)

    def _flushed(self, state):
        def of_rows(params, opt_state):
            if self._lazy is None:
                return params, opt_state
            flush = embrace.flush if self._ahead else rows.settle
            return flush(params, opt_state, self._lazy)

        if self._carries:
            return (State(*self._tx.flush(*state, of_rows)),)
        return (State(*of_rows(*state)),)
