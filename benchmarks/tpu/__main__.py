"""Compiles steps for described TPUs, without one, and reads their programs.

    make tpu

libtpu compiles for a slice that is only described. Of each step the time to compile it, its
temporaries, its code and its largest scatter are printed: a TPU writes what a scatter is
given one update after another. It ends with an error where a step of rows across slices has
a scatter of more updates than there are rows, a copy of a table, or more code than counted.
"""

import dataclasses
import os
import sys
import warnings
from typing import ClassVar


# libtpu looks for no chips, and asks no server what it runs on.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

from benchmarks.harness import settings, table
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.settings import option
from benchmarks.harness.table import Column
from benchmarks.tpu import steps
from benchmarks.tpu.compiled import compiled, exceeded
from sparsejax.errors import PlatformWarning


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Compiles steps for described TPUs, and reads their programs.

    Attributes:
        chips: For which.
        only: A part of the names of the steps that are compiled.
    """

    PROGRAM: ClassVar[str] = "benchmarks.tpu"
    chips: tuple[str, ...] = option(tuple(steps.CHIPS), "TPUs", choices=tuple(steps.CHIPS))
    only: str = option("", "a part of the names of steps")


COLUMNS = [
    Column("step", "step"),
    Column("chips", "chips"),
    Column("compile s", "compile", ".1f"),
    Column("temp MB", "temporary", ",.1f", 1e-6),
    Column("code MB", "code", ",.1f", 1e-6),
    Column("largest scatter", "updates", ",d"),
    Column("largest copy", "copied", ",d"),
]


def main() -> int:
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("ignore", PlatformWarning)  # That is what is looked at.
    given = Settings.parse()
    record = Recorder("tpu", given.command(), ("step", "chips"))
    wrong = []
    for step in steps.STEPS:
        if step.chips not in given.chips or given.only not in step.name:
            continue
        try:
            where = steps.mesh(step.chips)
        except Exception as error:
            say(f"libtpu is needed to compile for TPUs; `make tpu` installs it: {error}")
            return 1
        found = compiled(step.lowered(where))
        say(f"{step.named()}: compiled in {found.compile:.1f} s, {found.operations}")
        record.add(step=step.name, chips=step.chips, **found._asdict())
        wrong += exceeded(step, found)
    table.show(record.rows, COLUMNS, "of one chip")
    for line in wrong:
        say(f"WRONG: {line}")
    if not wrong:
        say(f"written: {record.write()}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
