"""Memories: how parts that were left out are added to later gradients.

`transforms.feedback` keeps their state. `Residual` adds what was left out to the next
gradient. So over any number of steps

    sum of gradients == sum of what was sent + residual

With a decay below 1 it forgets on purpose, as SparseLoCo does: in each step, for the
accumulated value e' of a rank,

    e' = decay * residual before + gradient    and    e' == what was sent + residual

`MomentumCorrection` is DGC's: a rank accumulates velocity instead of gradients, and sends
accumulated velocity; the optimizer after it has no momentum of its own. With velocities u,
gradients g and momentum m:

    u[t] = m u[t-1] + g[t]    and    sum of u == sum of what was sent + residual

where, with masking, u[t-1] is zero for entries sent at t-1: their momentum points to where
they have just been moved. Leaves that are sent whole, by a sparsifier or by an exchange,
have a velocity, too, as they would in an optimizer, and it is not masked.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import arguments, errors


class Memory(abc.ABC):
    """A rule for how what was not sent is added to later gradients.

    It is a frozen dataclass. A subclass defines `accumulate`.

    Example:
        >>> isinstance(sparsejax.Residual(), sparsejax.state.memories.Memory)
        True
    """

    #: Whether a velocity is kept in addition to the residual.
    has_momentum: bool = False

    @abc.abstractmethod
    def accumulate(
        self, gradient: jax.Array, residual: jax.Array, momentum: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Adds a gradient to a residual.

        Args:
            gradient: The gradient of a leaf.
            residual: The residual of the leaf on this rank.
            momentum: The velocity of the leaf; None if the memory has none.

        Returns:
            The accumulated gradient, and the next velocity.
        """

    def after(self, momentum: Any, sent: jax.Array) -> Any:
        """Returns the velocity to keep after entries were sent.

        Args:
            momentum: The velocity of a leaf.
            sent: bool, in the leaf's shape: the elements that were sent.
        """
        del sent
        return momentum


@dataclasses.dataclass(frozen=True)
class Residual(Memory):
    """Adds what a rank has not sent to its next gradient: error feedback.

    With g the gradient, and e the residual, in each step

        accumulated = decay e + g
        e           = accumulated - what was sent

    Attributes:
        decay: The share of the residual that is added, in (0, 1]. With 1 nothing is lost.

    Example:
        >>> top = sparsejax.top_k(0.01, memory=sparsejax.Residual())
        >>> tx = optax.chain(top, sparsejax.zen_sync(), optax.sgd(0.1))

    References:
        Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression
        Schemes, ICML 2019

    See Also:
        `sparsejax.MomentumCorrection`: accumulates velocity instead of gradients.
    """

    decay: float = 1.0

    def __post_init__(self):
        arguments.check_share("decay", self.decay)

    def accumulate(self, gradient, residual, momentum):
        """Returns the gradient plus the decayed residual."""
        if self.decay != 1:
            residual = self.decay * residual
        return residual + gradient, momentum


@dataclasses.dataclass(frozen=True)
class MomentumCorrection(Memory):
    """Accumulates velocity in the residual, as Deep Gradient Compression does.

    With g the gradient, u the velocity, and e the residual, in each step

        u           = momentum u + g               or momentum (u + g) with nesterov
        accumulated = e + u                        or e + u + g        with nesterov
        e           = accumulated - what was sent
        u           = 0 where an entry was sent    with masking

    The optimizer after it has no momentum of its own. Leaves that are sent whole have a
    velocity, too, which is not masked.

    Attributes:
        momentum: The share of the velocity that is kept in a step, in [0, 1).
        nesterov: Whether the momentum is Nesterov's.
        masking: Whether the velocity of an entry is cleared when it is sent.

    Example:
        >>> memory = sparsejax.MomentumCorrection(momentum=0.9, masking=False)
        >>> top = sparsejax.top_k(0.01, memory=memory)
        >>> tx = optax.chain(top, sparsejax.zen_sync(), optax.sgd(0.1))  # no momentum here

    References:
        Lin et al., Deep Gradient Compression: Reducing the Communication Bandwidth for
        Distributed Training, ICLR 2018

    See Also:
        `sparsejax.Residual`: accumulates gradients; the momentum is the optimizer's.
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
        """Returns the residual plus the velocity, and the velocity."""
        assert momentum is not None
        if self.nesterov:
            velocity = self.momentum * (momentum + gradient)
            accumulated = residual + velocity + gradient
        else:
            velocity = self.momentum * momentum + gradient
            accumulated = residual + velocity
        # A velocity that is not finite would stay so in all later steps.
        return accumulated, jnp.where(jnp.isfinite(velocity), velocity, 0)

    def after(self, momentum, sent):
        """Returns the velocity, with masking 0 for the entries that were sent."""
        return jnp.where(sent, 0, momentum) if self.masking else momentum
