"""Memories: how what was left out comes back; `transforms.feedback` keeps it.

`Residual` adds what was left out to the next gradient. So over any number of steps

    sum of gradients == sum of what was sent + residual

With a decay below 1 it forgets on purpose, as SparseLoCo does: in each step, for the
accumulated value e' of a rank,

    e' = decay * residual before + gradient    and    e' == what was sent + residual

`MomentumCorrection` is DGC's: a rank accumulates velocity instead of gradients, and sends
accumulated velocity; the optimizer after it has no momentum of its own. Its law is that of
the velocities u, for gradients g and momentum m:

    u[t] = m u[t-1] + g[t]    and    sum of u == sum of what was sent + residual

where, with masking, u[t-1] is zero for entries sent at t-1: their momentum points to where
they have just been moved. Leaves that are sent whole, by a sparsifier or by an exchange,
have velocity too, as they would in an optimizer, and it is not masked.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import arguments, errors


class Memory(abc.ABC):
    """A rule for the residual: how it is added to later gradients. Frozen and hashable."""

    #: Whether a velocity is kept beside the residual.
    has_momentum: bool = False

    @abc.abstractmethod
    def accumulate(
        self, gradient: jax.Array, residual: jax.Array, momentum: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """The accumulated gradient of a leaf, and its next velocity."""

    def after(self, momentum: Any, sent: jax.Array) -> Any:
        """The velocity once the entries where `sent` is true were sent."""
        del sent
        return momentum


@dataclasses.dataclass(frozen=True)
class Residual(Memory):
    """Adds what was not sent to the next gradient.

    Attributes:
        decay: The share of it that is added, in (0, 1]; 1 loses nothing.

    Example:
        >>> top = sparsejax.top_k(0.01, memory=sparsejax.Residual())
        >>> tx = optax.chain(top, sparsejax.zen_sync(), optax.sgd(0.1))
    """

    decay: float = 1.0

    def __post_init__(self):
        arguments.check_share("decay", self.decay)

    def accumulate(self, gradient, residual, momentum):
        """The gradient and the decayed residual."""
        if self.decay != 1:
            residual = self.decay * residual
        return residual + gradient, momentum


@dataclasses.dataclass(frozen=True)
class MomentumCorrection(Memory):
    """DGC's memory: accumulates velocity, and sends that.

    Attributes:
        momentum: The share of the velocity that is left after a step, in [0, 1).
        nesterov: Whether the gradient is added once more, ahead of the velocity.
        masking: Whether an entry that was sent starts again without velocity.

    Example:
        >>> memory = sparsejax.MomentumCorrection(momentum=0.9, masking=False)
        >>> top = sparsejax.top_k(0.01, memory=memory)
        >>> tx = optax.chain(top, sparsejax.zen_sync(), optax.sgd(0.1))  # no momentum here
    """

    has_momentum = True
    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True

    def __post_init__(self):
        value = self.momentum
        if not arguments.is_number(value) or not 0 <= value < 1:
            raise errors.ArgumentError(f"momentum must lie in [0, 1), got {value!r}.")

    def accumulate(self, gradient, residual, momentum):
        """The residual and the velocity, and the velocity."""
        assert momentum is not None
        if self.nesterov:
            velocity = self.momentum * (momentum + gradient)
            accumulated = residual + velocity + gradient
        else:
            velocity = self.momentum * momentum + gradient
            accumulated = residual + velocity
        # Velocity that is not finite would stay so for ever.
        return accumulated, jnp.where(jnp.isfinite(velocity), velocity, 0)

    def after(self, momentum, sent):
        """The velocity, 0 where masking takes it."""
        return jnp.where(sent, 0, momentum) if self.masking else momentum
