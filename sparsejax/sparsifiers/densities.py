"""Densities that change from step to step.

A schedule is a function of the step that returns the density. Capacities are fixed at trace
time, so a schedule also has its largest density.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import arguments, errors


@dataclasses.dataclass(frozen=True)
class Warmup:
    """A density that falls exponentially from `start` to `density` in `steps` steps.

        start (density / start)^min(step / steps, 1)

    Capacities are those of the largest density, so a large start costs memory and time in
    all steps. `sparsejax.warm_up` sends densely instead.

    Attributes:
        density: The density after the warm-up.
        steps: The number of steps of the warm-up.
        start: The density of the first step.

    Example:
        >>> density = sparsejax.sparsifiers.Warmup(0.01, steps=100)
        >>> tx = optax.chain(sparsejax.dgc(density), sparsejax.zen_sync(), optax.sgd(0.1))

    References:
        Lin et al., Deep Gradient Compression: Reducing the Communication Bandwidth for
        Distributed Training, ICLR 2018

    See Also:
        `sparsejax.warm_up`: sends everything densely in the first steps.
        `sparsejax.sparsifiers.Schedule`: a density that follows any schedule.
    """

    density: float
    steps: int
    start: float = 0.25

    def __post_init__(self):
        arguments.check_density("density", self.density)
        arguments.check_density("start", self.start)
        arguments.check_whole("steps", self.steps, 1)

    @property
    def largest(self) -> float:
        """The largest density of all steps."""
        return max(self.density, self.start)

    def __call__(self, step: jax.Array) -> jax.Array:
        """Returns the density of a step."""
        done = jnp.minimum(step / self.steps, 1.0)
        return self.start * (self.density / self.start) ** done


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A density that follows a schedule, such as those of optax.

    Attributes:
        density_at: A function from the step, an int32 array, to the density, which is
            clipped to `largest`.
        largest: The largest density. Capacities are made for it.

    Example:
        >>> falling = optax.linear_schedule(0.1, 0.01, 1000)
        >>> density = sparsejax.sparsifiers.Schedule(falling, largest=0.1)
        >>> tx = optax.chain(sparsejax.dgc(density), sparsejax.zen_sync(), optax.sgd(0.1))

    See Also:
        `sparsejax.warm_up`: sends everything densely in the first steps.
        `sparsejax.sparsifiers.Warmup`: the exponential schedule of DGC.
    """

    density_at: Callable[[jax.Array], Any]
    largest: float

    def __post_init__(self):
        if not callable(self.density_at):
            raise errors.ArgumentError(
                "density_at must be a function from the step to the density, such as "
                f"optax.cosine_decay_schedule(0.1, 1000), got {self.density_at!r}."
            )
        arguments.check_density("largest", self.largest)

    def __call__(self, step: jax.Array) -> jax.Array:
        """Returns the density of a step."""
        return jnp.minimum(self.density_at(step), self.largest)
