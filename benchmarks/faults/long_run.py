"""A long run on several processes: memory that stays, no program compiled again, no drift.

    python -m benchmarks.faults.long_run
    python -m benchmarks.faults.long_run --schemes zen --steps 2000

Trains as `benchmarks.faults` does, with no fault, for very many steps: replicas are
compared at every 100th, a checkpoint takes the place of the one before at every 500th, and
there each process says how much memory it has and how much it has compiled. After the first
of these, memory may grow by 2% and nothing may be compiled; at the end parameters are the
same bytes on all processes, and nothing is lost: `benchmarks.faults.books`. Writes
benchmarks/results/long-run-*.jsonl.
"""

import dataclasses
import os
import pathlib
import sys
import tempfile

import jax

import sparsejax
from benchmarks.faults import rank as faults, verdicts
from benchmarks.faults.books import books
from benchmarks.faults.settings import SCHEMES
from benchmarks.faults.systems import Training
from benchmarks.harness import settings
from benchmarks.harness.record import Recorder
from benchmarks.harness.settings import option
from benchmarks.harness.table import Column
from benchmarks.testbed import host, network, ranks


GROWTH = 0.02  # of memory, after the first sample
ROUNDING = 1e-5  # of the sum of sizes of what was computed
COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Takes very many steps, and looks at memory, programs and replicas."""

    PROGRAM = "benchmarks.faults.long_run"
    schemes: tuple[str, ...] = option(("zen", "dgc", "ok_topk"), choices=SCHEMES)
    steps: int = option(20_000, "of a run")
    hosts: int = option(4, "that train")
    rate: str = option("1gbit", "of each link, each way")
    every: int = option(500, "steps a sample and a checkpoint")
    check_every: int = option(100, "steps a comparison of replicas")
    seed: int = option(0, "of gradients")
    timeout: float = option(3600.0, "seconds for each scheme")
    scheme: str = option("", hidden=True)
    folder: str = option("", hidden=True)

    def __post_init__(self):
        if self.steps < 2 * self.every:
            raise ValueError(
                f"{self.steps} steps have no two samples {self.every} steps apart; "
                "take more steps, or a smaller --every."
            )

    def ranks_at(self, step: int) -> int:
        """How many ranks took a step."""
        return self.hosts


def main(argv: list[str] | None = None) -> int:
    settings = Settings.parse(argv)
    record = Recorder("long-run", settings.command(), ("scheme", "hosts", "steps"))
    rows = (
        (scheme, run(dataclasses.replace(settings, scheme=scheme)))
        for scheme in settings.schemes
    )
    return verdicts.judge(record, rows, COLUMNS, "Long runs")


def run(settings: Settings) -> dict:
    """A row: one scheme, and what is wrong."""
    row = {"scheme": settings.scheme, "hosts": settings.hosts, "steps": settings.steps}
    with (
        network.hosts(settings.hosts, settings.rate) as net,
        tempfile.TemporaryDirectory() as folder,
    ):
        settings = dataclasses.replace(settings, folder=folder)
        row["shaped"] = net is not None
        reported = ranks.run(
            "benchmarks.faults.long_run", settings, settings.hosts, net, settings.timeout
        )
    if reported is None:
        return row | {"wrong": "a process failed"}
    return row | judged(reported)


def judged(reported: list[tuple[dict, ...]]) -> dict:
    """What became of a run, from the samples of all processes and their last rows."""
    *samples, last = reported
    memory = [[of_rank["memory"] for of_rank in sample] for sample in samples]
    programs = [[of_rank["compiled"] for of_rank in sample] for sample in samples]
    of_ranks = list(zip(*memory, strict=True))
    row = {
        "step": last[0]["seconds"],
        "memory": memory,
        "grown": max(max(rank) / rank[0] - 1 for rank in of_ranks),
        "grown_at_the_end": max(rank[-1] / rank[0] - 1 for rank in of_ranks),
        "compiled": max(map(sum, programs[1:])),
        "lost": max(of_rank["lost"] for of_rank in last),
    }
    wrong = []
    if row["grown"] > GROWTH:
        wrong.append(f"memory grew by {row['grown']:.1%}")
    if row["compiled"]:
        wrong.append(f"{row['compiled']} programs compiled between two samples")
    if row["lost"] > ROUNDING:
        wrong.append(f"lost: {row['lost']:.1e}")
    if len({of_rank["digest"] for of_rank in last}) > 1:
        wrong.append("replicas differ")
    return row | {"wrong": "; ".join(wrong)}


COLUMNS = [
    Column("scheme", "scheme"),
    Column("processes", "hosts", "d"),
    Column("steps", "steps", "d"),
    Column("ms a step", "step", ".1f", 1e3),
    Column("memory at most, %", "grown", ".2f", 100),
    Column("at the end, %", "grown_at_the_end", ".2f", 100),
    Column("compiled", "compiled", "d"),
    Column("lost", "lost", ".0e"),
    Column("", "wrong"),
]


class Compiled:
    """How many programs this process compiled since it was asked last."""

    def __init__(self):
        self._count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, seconds: float, **about) -> None:
        self._count += event == COMPILED

    def since(self) -> int:
        """The count, which begins again."""
        count, self._count = self._count, 0
        return count


def memory() -> int:
    """Bytes of this process that are in memory."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def rank(settings: Settings) -> None:
    """Trains on this host, and reports a row at each sample and one at the end."""
    compiled = Compiled()
    with host.join() as here:
        mesh, every = faults.mesh_of_hosts(), settings.check_every
        training = Training(settings.scheme, mesh, settings.seed, check_every=every)
        state = training.first()
        whole = host.Section()
        whole.begin()
        for step in range(1, settings.steps + 1):
            state = training.step(state, training.batches(step - 1))
            if step % settings.every == 0:
                folder = pathlib.Path(settings.folder) / "checkpoint"
                sparsejax.save(folder, state, replace=True)
                here.report(step=step, memory=memory(), compiled=compiled.since())
            if step % (10 * settings.every) == 0:
                here.say(f"  {settings.scheme}: step {step} of {settings.steps}")
        jax.block_until_ready(state)
        whole.end()
        here.report(
            seconds=whole.seconds / settings.steps,
            lost=books(settings, training).lost(state),
            digest=faults.digest(state.params),
        )


if __name__ == "__main__":
    sys.exit(main())
