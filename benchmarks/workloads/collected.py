"""What an example trains, as the example builds it.

`collect` calls an example's `main` with a session that does not train, and keeps what it is
given: so a measurement is of the example's model, batches and transformations, whatever
they are by then, and no copy of them has to follow.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import optax
from jax.sharding import Mesh

import sparsejax
from examples.common.session import Session


class Training(NamedTuple):
    """What an example gives its session for one run.

    Attributes:
        trainer: From `sparsejax.data_parallel`.
        loss: What the trainer differentiates.
        params: To begin with.
        batches: From a step to the batches of all devices from that step on.
        optimizer: Behind the synchronization; None where the example does not say.
        scores: From parameters to figures of them; None without any.
    """

    trainer: sparsejax.training.DataParallel
    loss: Callable[..., Any]
    params: Any
    batches: Callable[[int], Iterator[Any]]
    optimizer: optax.GradientTransformation | None
    scores: Callable[[Any], dict[str, float]] | None


class Collecting(Session):
    """A session that keeps what it is to train.

    Attributes:
        mesh: The devices.
        trainings: By synchronization.
    """

    losses: list

    def __init__(self, options, mesh: Mesh, origin: Mapping[str, Any]):
        super().__init__(options, mesh, origin)
        self.mesh = mesh
        self.trainings: dict[str, Training] = {}

    def train(self, name, trainer, params, batches, optimizer=None, scores=None):
        training = Training(trainer, self.losses[-1], params, batches, optimizer, scores)
        self.trainings[name] = training
        return training

    def finish(self) -> "Collecting":
        return self

    def really_train(self, name: str, training: Training):
        """Trains as the example's session does, and returns the run."""
        trainer, _, params, batches, optimizer, scores = training
        return super().train(name, trainer, params, batches, optimizer, scores)

    def really_finish(self) -> Session:
        """Shows the figures of what was trained."""
        return super().finish()


def collect(
    example: str,
    argv: Sequence[str],
    size: tuple | None = None,
    **constants: Any,
) -> Collecting:
    """The trainings of an example.

    Args:
        example: Its module in `examples`.
        argv: Its command line.
        size: In place of what it has for `--size small`.
        constants: Of its module, in place of those that it has.
    """
    module = importlib.import_module(f"examples.{example}")
    losses: list[Callable] = []
    make = sparsejax.data_parallel

    @functools.wraps(make)
    def recorded(loss_fn, *given, **options):
        losses.append(loss_fn)
        return make(loss_fn, *given, **options)

    kind = type("Collecting", (Collecting,), {"losses": losses})
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(module, "Session", kind))
        stack.enter_context(mock.patch.object(sparsejax, "data_parallel", recorded))
        for name, value in constants.items():
            stack.enter_context(mock.patch.object(module, name, value))
        if size is not None:
            stack.enter_context(mock.patch.dict(module.SIZES, small=tuple(size)))
        return module.main(list(argv))
