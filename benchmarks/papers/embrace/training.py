"""Training by every system beside plain synchronous training: losses, and BLEU.

    python -m benchmarks.papers.embrace training
    python -m benchmarks.papers.embrace training --optimizers adagrad sgd --unchecked

Plain training is one device that has all batches, dense gradients and optax, and nothing
of this library. The systems train on simulated devices, from the same numbers on the same
batches, with the same optimizer: lazy ones are exact. So losses must be those of plain
training to rounding. That grows with the steps: Adam makes a whole step of a gradient that
is zero but for rounding, as the translator has some, and so even a dense all-reduce in
place of one device's sum moves its losses by some thousandths, and its BLEU by some tenths.
`--double` trains in float64, whose rounding is smaller by nine digits. Prints

    loss      the mean of the last ten steps
    apart     the largest difference of a step's loss from plain training's, over that loss
    held out  the loss of text, and the BLEU of sentences, that were not trained on
    BLEU      of sentences that were
    tables    MB that a rank holds of tables, and of what the optimizer keeps for them

EmbRace reports a perplexity of 41.5 and a BLEU of 24.0 after as many steps as all-gather
(figure 11); here the two must be the same run.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

from benchmarks.harness import settings, table
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.settings import option
from benchmarks.harness.table import Column
from benchmarks.papers.embrace import translator
from benchmarks.papers.embrace.bleu import bleu
from benchmarks.papers.embrace.systems import (
    AXIS,
    OPTIMIZERS,
    SYSTEMS,
    Training,
    held,
    loss_of,
)
from benchmarks.papers.embrace.tasks import Batch, Task, language, rooms, translation


NAME, PLAIN = "embrace-training", "plain"
# Small enough for minutes on two cores; tables still hold most of the numbers.
SMALL = {
    "language": lambda: language(words=4_000, width=64, hidden=32, windows=8),
    "translation": lambda: translation(words=3_000, width=64, hidden=64, sentences=32),
}
# How far losses may be apart after hundreds of steps whose sums have other orders.
APART = 1e-2
SCORED = 256  # sentences


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Trains by every system, and compares with plain training."""

    PROGRAM = "benchmarks.papers.embrace training"
    tasks: tuple[str, ...] = option(tuple(SMALL), choices=tuple(SMALL))
    systems: tuple[str, ...] = option(tuple(SYSTEMS), choices=tuple(SYSTEMS))
    optimizers: tuple[str, ...] = option(("adam",), choices=tuple(OPTIMIZERS))
    steps: int = option(300, "of each run")
    ranks: int = option(4, "simulated devices")
    double: bool = option(False, "in float64, where rounding stays small")
    unchecked: bool = option(False, "in a shard_map of one's own with check_vma=False")


def plain(
    task: Task,
    optimizer: optax.GradientTransformation,
    batches: list[Batch],
    ranks: int,
) -> tuple[list[float], Any]:
    """The losses and the last parameters of training on one device."""

    @jax.jit
    def step(params, state, batch):
        parts = jax.tree.map(lambda x: x.reshape(ranks, -1, *x.shape[1:]), batch)
        mean = lambda params: jnp.mean(jax.vmap(loss_of(task), (None, 0))(params, parts))
        loss, grads = jax.value_and_grad(mean)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = jax.device_put(task.init())
    state, losses = optimizer.init(params), []
    for batch in batches:
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return losses, jax.device_get(params)


def scores(task: Task, params: Any) -> dict[str, float]:
    """The loss of data that was not trained on, or the BLEU of both kinds."""
    if task.name == "language":
        unseen = itertools.islice(task.batches(1, seed=1), 16)
        loss = jax.jit(loss_of(task))
        return {"held_out": float(np.mean([loss(params, batch) for batch in unseen]))}
    words = params["tables"]["source"].shape[0]
    found = {}
    for key, held_out in (("bleu", False), ("held_out", True)):
        source, _, german = translator.sentences(words, held_out)
        source, german = source[::7][:SCORED], german[::7][:SCORED]
        found[key] = bleu(translator.translated(params, source), german)
    return found


def main(argv: list[str] | None = None) -> int:
    settings = Settings.parse(argv)
    jax.config.update("jax_num_cpu_devices", settings.ranks)
    devices = np.array(jax.devices()[: settings.ranks])
    mesh = Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))
    jax.config.update("jax_enable_x64", settings.double)
    keys = ("task", "optimizer", "system", "steps", "ranks", "checked", "double")
    record = Recorder(NAME, settings.command(), keys)
    for name, kind in itertools.product(settings.tasks, settings.optimizers):
        task = SMALL[name]()
        if settings.double:
            task = task._replace(init=_in_double(task.init))
        rows = compared(task, kind, settings, mesh)
        about = f"{settings.steps} steps on {settings.ranks} ranks"
        about += ", unchecked" * settings.unchecked + ", float64" * settings.double
        share = f"{task.share_of_tables():.0%} of it in tables"
        table.show(rows, COLUMNS, f"{name}, {kind}, {about}, {share}")
        record.rows += rows
        record.write()
    say(f"\nwritten: {record.write()}")
    return 1 if any(_complaint(row) for row in record.rows) else 0


def _in_double(init):
    return lambda: jax.tree.map(lambda x: x.astype(np.float64), init())


def compared(task: Task, kind: str, settings: Settings, mesh: Mesh) -> list[dict]:
    """A row for plain training and for every system."""
    optimizer = OPTIMIZERS[kind](task.rate)
    batches = [*itertools.islice(task.batches(settings.ranks), settings.steps)]
    about = {"task": task.name, "optimizer": kind, "steps": settings.steps}
    about |= {"ranks": settings.ranks, "checked": not settings.unchecked}
    about["double"] = settings.double
    want, params = plain(task, optimizer, batches, settings.ranks)
    rows = [about | {"system": PLAIN} | _summary(want, want) | scores(task, params)]
    for name in settings.systems:
        system = SYSTEMS[name]
        training = Training(
            system,
            task,
            mesh,
            optimizer,
            exact=True,
            rooms=rooms(task, batches[:20], settings.ranks),
            check=not settings.unchecked,
        )
        losses = [training.step(*given) for given in system.feed(iter(batches))]
        tables, kept = held(training.state)
        row = about | {"system": name, "table_bytes": tables, "optimizer_bytes": kept}
        rows.append(row | _summary(losses, want) | scores(task, training.params()))
        say(f"  {task.name}, {kind}, {name}: loss {rows[-1]['loss']:.4f}")
    return rows


def _summary(losses, want):
    """The last losses, how far they are from plain training's, and their curve."""
    losses, want = np.array(losses), np.array(want)
    every = max(1, len(losses) // 30)
    means = losses[: len(losses) // every * every].reshape(-1, every).mean(1)
    return {
        "loss": float(losses[-10:].mean()),
        "apart": float(np.max(np.abs(losses - want) / want)),
        "losses": [round(float(mean), 5) for mean in means],
    }


def _complaint(row):
    return "LOSSES DIFFER" if not row["apart"] <= APART else ""


COLUMNS = [
    Column("system", "system"),
    Column("loss", "loss", ".4f"),
    Column("apart", "apart", ".1e"),
    Column("held out", "held_out", ".3f"),
    Column("BLEU", "bleu", ".2f"),
    Column("tables, MB", "table_bytes", ".3f", 1e-6),
    Column("optimizer's, MB", "optimizer_bytes", ".3f", 1e-6),
    Column("", _complaint),
]
