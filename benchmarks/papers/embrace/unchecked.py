"""A train step with `check_vma=False`, in a `shard_map` of one's own.

`sparsejax.data_parallel` checks; models that cannot be checked are trained as here. What it
trains must be the same.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import sparsejax
from sparsejax import rows


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
        self._step: Callable[..., Any] | None = None

    def for_rows(self, lazy: rows.Lazy) -> "Unchecked":
        """The same, whose `tx` ends with this optimizer, which takes rows."""
        self._lazy = lazy
        return self

    def init(self, params: Any) -> State:
        """The first state."""
        there = lambda x, spec: jax.device_put(x, NamedSharding(self._mesh, spec))
        params = jax.tree.map(there, params, sparsejax.state_specs(params))
        opt_state = sparsejax.init(
            self._tx, params, self._mesh, self._axis, check_vma=False
        )
        return State(params, opt_state)

    def step(self, state: State, batch: Any) -> tuple[State, jax.Array]:
        """One step: the state, and the mean loss of all ranks."""
        if self._step is None:
            specs = sparsejax.state_specs(state)
            mapped = jax.shard_map(
                self._on_rank,
                mesh=self._mesh,
                in_specs=(specs, P(self._axis)),
                out_specs=(specs, P()),
                check_vma=False,
            )
            self._step = jax.jit(mapped)
        return self._step(state, batch)

    def _on_rank(self, state, batch):
        value_and_grad = jax.value_and_grad(self._loss)
        if self._lazy is not None:
            read = self._lazy.reader(state.params, state.opt_state)
            value_and_grad = sparsejax.value_and_grad(self._loss, read=read)
        loss, grads = value_and_grad(state.params, batch)
        updates, opt_state = self._tx.update(grads, state.opt_state, state.params)
        params = sparsejax.apply_updates(state.params, updates)
        return State(params, opt_state), jax.lax.pmean(loss, self._axis)
