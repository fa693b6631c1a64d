"""The steps that rows have missed: what a gradient of zero would have done to them."""

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
        call: The optimizer.
        params: The shapes of the parameters.
        state: The leaves of its state, of which the numbers matter.
        history: Of those that only the user changes.
        count: How many steps there were: rows are to be as after that one.
        sums: What `Fading.sums` makes of them, by `Fading.number`.
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
        """Takes one: the updates of rows, and their state.

        Args:
            step: Which one.
            rows: As before it.
        """
        layout = self.call.layout
        # What is not among the rows matters to none of them: nothing of it is computed.
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
    """The state of rows each of which is multiplied a number of times.

    The relative error is that of the power's logarithm, which is rounded once.
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
    """Something by row, with as many axes as an array of rows."""
    flags = jnp.asarray(flags)
    return flags.reshape(flags.shape + (1,) * (x.ndim - flags.ndim))
