"""What a rank remembers of what it did not send: error feedback, once for all sparsifiers.

`Residual` adds what waited to the next gradient, so what goes and what is kept make up
what came, over any number of steps:

    sum of gradients == sum of what went + what waits

`MomentumCorrection` is DGC's: a rank gathers velocity instead of gradients, and what it
sends is what has gathered. The optimizer behind it has no momentum of its own. Its law is
that of the velocities u, for gradients g and momentum m:

    u[t] = m u[t-1] + g[t]    and    sum of u == sum of what went + what waits

where u[t-1] is zero for what went at t-1, if masking: momentum that points to where an
element has just gone would carry it on. Leaves that are sent whole have velocity too, as
they would in an optimizer.
"""

import abc
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparsejax import errors
from sparsejax.errors import ArgumentError


class Held(NamedTuple):
    """What a rank holds of one leaf, flat, in float32 or wider.

    Attributes:
        residual: What waits.
        momentum: The velocity, or None.
    """

    residual: jax.Array
    momentum: jax.Array | None = None


class Memory(abc.ABC):
    """A way to remember. Frozen and hashable."""

    #: Whether there is velocity.
    has_momentum: bool = False

    @abc.abstractmethod
    def due(self, gradient: jax.Array, held: Held) -> tuple[jax.Array, Held]:
        """What would go if there were no limit, and what is held then."""

    def gone(self, held: Held, places: jax.Array) -> Held:
        """What is held once the elements at these places went."""
        del places
        return held


@dataclasses.dataclass(frozen=True)
class Residual(Memory):
    """What was not sent is added to the next gradient."""

    def due(self, gradient, held):
        return held.residual + gradient, held


@dataclasses.dataclass(frozen=True)
class MomentumCorrection(Memory):
    """DGC's memory: velocity gathers, and is what is sent.

    Attributes:
        momentum: How much of the velocity is left after a step, in [0, 1).
        nesterov: Whether the gradient is added once more, ahead of the velocity.
        masking: Whether an element that went starts again without velocity.
    """

    has_momentum = True
    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True

    def __post_init__(self):
        value = self.momentum
        if not errors.is_number(value) or not 0 <= value < 1:
            raise ArgumentError(f"momentum must lie in [0, 1), got {value!r}.")

    def due(self, gradient, held):
        assert held.momentum is not None
        if self.nesterov:
            velocity = self.momentum * (held.momentum + gradient)
            due = held.residual + velocity + gradient
        else:
            velocity = self.momentum * held.momentum + gradient
            due = held.residual + velocity
        # Velocity that is not finite would stay so for ever.
        velocity = jnp.where(jnp.isfinite(velocity), velocity, 0)
        return due, held._replace(momentum=velocity)

    def gone(self, held, places):
        if not self.masking or held.momentum is None:
            return held
        masked = held.momentum.at[places].set(0, mode="drop", unique_indices=True)
        return held._replace(momentum=masked)
