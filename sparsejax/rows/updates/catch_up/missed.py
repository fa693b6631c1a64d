"""The steps that rows have missed: steps of the optimizer with a gradient of zero."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.rows.updates.call import RowCall, Rows
from sparsejax.rows.updates.catch_up.history import History


@dataclasses.dataclass(frozen=True)
class MissedSteps:
    """Steps of the optimizer with a gradient of zero, up to the last one.

    Attributes:
        call: The call of the optimizer.
        params: The shapes and dtypes of the parameters.
        state: The leaves of its state, of which those without rows are used.
        history: The history of the numbers that only the user changes.
        count: int32 [], the number of steps so far: rows catch up to the last of them.
        sums: The `FadingSums` of these steps, by `Fading.number`.
    """

    call: RowCall
    params: tuple[jax.ShapeDtypeStruct, ...]
    state: tuple[Any, ...]
    history: History
    count: Any
    sums: Mapping[int, Any]

    def take(
        self, step: jax.Array, rows: Mapping[int, Rows]
    ) -> tuple[dict[int, jax.Array], dict[int, tuple[jax.Array, ...]]]:
        """Takes one step; returns the updates of rows, and their state after it.

        Args:
            step: The number of the step.
            rows: The rows before the step, by table.
        """
        layout = self.call.layout
        # Rows depend on no other parameters: zeros replace these, and are not computed.
        params = [jnp.zeros(x.shape, x.dtype) for x in self.params]
        grads = list(params)
        state = [
            jnp.zeros(x.shape, x.dtype) if k is not None else x
            for x, k in zip(self.state, layout.owner, strict=True)
        ]
        for j in layout.counts:
            state[j] = state[j] - (self.count - step + 1).astype(state[j].dtype)
        for j, value in zip(layout.held, self.history.at(step), strict=True):
            state[j] = value
        for at, part in rows.items():
            grads[at] = jnp.zeros_like(part.param)
        made, state = self.call(grads, params, state, rows)
        own = {at: tuple(state[j] for j in layout.tables[at].own) for at in rows}
        return {at: made[at] for at in rows}, own


def decayed(
    own: tuple[jax.Array, ...], factors: tuple[float, ...], steps: jax.Array
) -> tuple[jax.Array, ...]:
    """Multiplies the state of each row by powers of constant factors.

    The relative error is that of the logarithm of the power, which is rounded once.

    Args:
        own: The leaves of the state, each [n, ...].
        factors: The factor of each leaf.
        steps: int32 [n], the exponent for each row.
    """

    def one(x, factor):
        if factor == 1:
            return x
        if factor == 0:
            power = (steps == 0).astype(x.dtype)
        else:
            power = jnp.exp(steps.astype(x.dtype) * math.log(factor))
        return x * over(power, x)

    return tuple(map(one, own, factors))


def over(flags: Any, x: jax.Array) -> jax.Array:
    """Reshapes an array [n] to broadcast against the rows of x, [n, ...]."""
    flags = jnp.asarray(flags)
    return flags.reshape(flags.shape + (1,) * (x.ndim - flags.ndim))
