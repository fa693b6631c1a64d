"""Times the trainings of a host, and reports a row for each. JAX is not needed here."""

from collections.abc import Sequence
from typing import Protocol

from benchmarks.harness import sides
from benchmarks.network.end_to_end.options import Settings
from benchmarks.testbed import host


class Training(sides.Side, Protocol):
    """A training run.

    Attributes:
        loss: That of the last step.
    """

    loss: float

    def digest(self) -> str:
        """A hash of this rank's parameters."""


def timed(here: host.Here, settings: Settings, trainings: Sequence[Training]) -> None:
    """Runs them in turn, and compares the parameters of all ranks behind that."""
    rows = sides.timed(here, trainings, settings.rounds, settings.steps)
    for training, row in zip(trainings, rows, strict=True):
        same = len(set(here.gather(training.digest()))) == 1
        rate = settings.rate if here.shaped else "unshaped"
        about = {"task": settings.task, "rate": rate, "loss": training.loss}
        here.report(**about, replicas_equal=same, **row)
