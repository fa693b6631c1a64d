"""What was computed, beside what was applied and what is held back.

Gradients are computed again, of all steps and ranks, in NumPy and float64. Which law is
held to depends on the system:

* `Sums`: what was applied and the mean of what ranks hold back is the sum of the means of
  gradients. Within a round of local steps ranks hold what they have moved by themselves.
  Where few bits stand for what is sent, sizes are at least the mean size of their array.
* `Velocities`: of a sparsifier with momentum correction it is the sum of velocities, and
  the mean of the velocities that ranks keep is what momentum has left. Both are linear in
  the gradients and look at means over ranks alone, so they hold whatever was selected, and
  however many ranks there were at each step. They are those without masking: that sets
  the velocity of what a rank sends to zero, and what it takes away is in no state.
* `Steps`: where an optimizer with memory trains rows, parameters are those of its steps
  over all rows, those that a gradient does not list, too.
"""

import abc
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import optax

import sparsejax
from benchmarks.faults.systems import (
    BETAS,
    EPSILON,
    RATE,
    SHAPES,
    Arrays,
    Numbers,
    Rows,
    Training,
)
from sparsejax.rounds import LocalStepsState
from sparsejax.state.per_rank import find
from sparsejax.transforms.feedback import FeedbackState


class Run(Protocol):
    """Settings of a job that trains."""

    @property
    def seed(self) -> int:
        """Of gradients."""
        ...

    def ranks_at(self, step: int) -> int:
        """How many ranks took a step."""
        ...


class Books(abc.ABC):
    """Holds the states of a job to a law."""

    def __init__(self, run: Run, training: Training):
        """Books of nothing yet.

        Args:
            run: The settings of the job.
            training: What is trained.
        """
        self._run, self._training = run, training

    @abc.abstractmethod
    def lost(self, state: sparsejax.TrainState) -> float:
        """The largest difference of two sides of the law, over the sum of their sizes."""

    def _shares(self, step) -> Iterator[Numbers]:
        """Of all ranks in a step."""
        ranks = self._run.ranks_at(step)
        for rank in range(ranks):
            yield self._training.system.share(self._run.seed, step, rank, ranks)


class Sums(Books):
    """Of gradients that are arrays."""

    def lost(self, state):
        given, scale = _zeros(), _zeros()
        for step in range(int(state.step)):
            mean, sizes = self._mean(step)
            for name in SHAPES:
                given[name] += mean[name]
                scale[name] += sizes[name]
        return self._unlike_applied(given, scale, state)

    def _mean(self, step):
        """The mean gradient of a step, and that of sizes."""
        mean, sizes, ranks = _zeros(), _zeros(), self._run.ranks_at(step)
        for share in self._shares(step):
            for name in SHAPES:
                mean[name] += share[name].astype(np.float64) / ranks
                sizes[name] += np.abs(share[name]) / ranks
        return mean, sizes

    def _unlike_applied(self, given, scale, state):
        """How far parameters and residuals are from what was given."""
        applied = self._training.settled(state)
        held, system = self._held(state), self._training.system
        if isinstance(system, Arrays) and system.is_rounded:
            scale = {name: np.maximum(x, x.mean()) for name, x in scale.items()}
        there = {name: held.get(name, 0.0) - applied[name] for name in SHAPES}
        return _unlike(given, there, scale)

    def _held(self, state):
        """The mean of what ranks hold back, and of what they have moved by themselves."""
        found = self._training.mean(self._residuals(state))
        for rounds in find(state.opt_state, LocalStepsState):
            for name, x in self._training.mean(rounds.offset.value).items():
                found[name] = found.get(name, 0.0) - x
        return found

    def _residuals(self, state):
        try:
            residuals = sparsejax.residuals(state.opt_state)
        except sparsejax.errors.StateError:
            return {}  # all is sent
        is_there = lambda x: not isinstance(x, optax.MaskedNode)
        return {name: x for name, x in residuals.items() if is_there(x)}


class Velocities(Sums):
    """Of gradients that are arrays, and velocities that are accumulated in their place."""

    def lost(self, state):
        velocity, size, given, scale = (_zeros() for _ in range(4))
        system = self._training.system
        assert isinstance(system, Arrays)
        for step in range(int(state.step)):
            mean, sizes = self._mean(step)
            for name in SHAPES:
                velocity[name] = system.momentum * velocity[name] + mean[name]
                size[name] = system.momentum * size[name] + sizes[name]
                given[name] += velocity[name]
                scale[name] += size[name]
        (memory,) = (x for x in find(state.opt_state, FeedbackState) if x.momentum)
        kept = self._training.mean(memory.momentum.value)
        return max(self._unlike_applied(given, scale, state), _unlike(velocity, kept, size))


class Steps(Books):
    """Of Adam's steps over all rows, from the means of gradients."""

    def lost(self, state):
        system, (first, second) = self._training.system, BETAS
        assert isinstance(system, Rows)
        params, scale, m, v = (_zeros() for _ in range(4))
        for step in range(int(state.step)):
            shares = [system.gradient(share, params) for share in self._shares(step)]
            for name in SHAPES:
                mean = sum(share[name] for share in shares) / len(shares)
                m[name] = first * m[name] + (1 - first) * mean
                v[name] = second * v[name] + (1 - second) * mean**2
                size = np.sqrt(v[name] / (1 - second ** (step + 1))) + EPSILON
                move = RATE * m[name] / (1 - first ** (step + 1)) / size
                params[name] = params[name] - move
                scale[name] += np.abs(move)
        return _unlike(params, self._training.settled(state), scale)


def books(run: Run, training: Training) -> Books:
    """The books of a system.

    Args:
        run: The settings of the job.
        training: What is trained.
    """
    system = training.system
    if isinstance(system, Rows):
        return Steps(run, training)
    return (Velocities if system.momentum else Sums)(run, training)


def _zeros():
    return {name: np.zeros(shape) for name, shape in SHAPES.items()}


def _unlike(wanted, found, scale):
    """The largest difference, over sizes."""
    return max(
        float((np.abs(wanted[name] - found[name]) / np.maximum(scale[name], 1e-3)).max())
        for name in SHAPES
    )
