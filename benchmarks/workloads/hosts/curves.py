"""One host of `benchmarks.workloads.curves`: all sides, some steps each in turn."""

import time

from benchmarks.workloads.hosts.training import joined, report
from benchmarks.workloads.options import CurveSettings as Settings


def rank(settings: Settings) -> None:
    """Trains with every system on this host, and reports its losses and when they were."""
    with joined(settings) as (here, prepared):
        elapsed = {side.name: [] for side in prepared.sides}
        losses = {side.name: [] for side in prepared.sides}
        for start in range(0, settings.steps, settings.turn):
            for side in prepared.sides:
                here.barrier()
                before = elapsed[side.name][-1] if start else 0.0
                begin = time.perf_counter()
                for _ in range(min(settings.turn, settings.steps - start)):
                    side.run()
                    seconds = before + time.perf_counter() - begin
                    elapsed[side.name].append(seconds)
                    losses[side.name].append(side.loss)
            here.say(f"  {start + settings.turn} of {settings.steps} steps")
        for side in prepared.sides:
            row = {"scheme": side.name, "compile": side.compiled}
            row |= {"elapsed": elapsed[side.name], "losses": losses[side.name]}
            report(here, settings, side, row | prepared.about)
