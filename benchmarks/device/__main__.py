"""Counts what a step does on a GPU, with no GPU and no driver.

    make device

Each scheme is compiled for sixteen described H200s, and its program is walked for a load:
launches, waits of the host, collectives, bytes of memory. The iterations of loops whose
length is data are computed from the program's own message sizes (`turns`). They are
compared with a run of the same load, or of a smaller one, on CPU devices: if they differ,
nothing is written and the program exits with an error.

`--kernels triton` counts the step in which Triton kernels of this library pack and unpack
messages; "auto" uses plain XLA until a GPU was measured on. Such a kernel moves only
the entries of a message, because its programs exit at once if they have none.

`--graphs` counts instead what XLA captures in CUDA graphs, for several settings of the flag
that lists the types of thunks it may capture (`graphs`). It exits with an error unless a
step is one graph if all may be captured.
"""

import dataclasses
import os
import sys
import warnings
from typing import Any, ClassVar


os.environ.setdefault("JAX_PLATFORMS", "cpu")  # The plugin must not look for a driver.

from jax.sharding import Mesh

from benchmarks.data import index_sets
from benchmarks.device import ceilings, compiled, costs, graphs, held
from benchmarks.device.hlo import ProgramError
from benchmarks.device.loads import LOADS, RANKS, Load
from benchmarks.harness import settings, table
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.settings import option
from benchmarks.harness.table import Column
from benchmarks.kernels import h200
from pallas_kernels import backends


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Counts launches, waits and bytes of a step that is compiled for H200s.

    Attributes:
        loads: The names of the loads.
        schemes: The names of the schemes that sum them.
        costs: A JSON file that replaces the stated costs.
        trust: Whether computed iterations are not compared with a run.
        plot: Whether to draw the predicted times.
        kernels: The backend of the kernels.
        graphs: Whether to count what is captured in CUDA graphs, and nothing else.
    """

    PROGRAM: ClassVar[str] = "benchmarks.device"
    loads: tuple[str, ...] = option(tuple(LOADS), "arrays", choices=tuple(LOADS))
    schemes: tuple[str, ...] = option(
        tuple(compiled.SCHEMES),
        "schemes",
        choices=(*compiled.SCHEMES, *compiled.VARIANTS),
    )
    costs: str | None = option(None, "a JSON file of measured costs", recorded="FILE")
    trust: bool = option(False, "do not hold turns against a run on CPU devices")
    plot: bool = option(False, "draw the times from all rows of the result file")
    kernels: str = option("auto", "our kernels", choices=("auto", *backends.BACKENDS))
    graphs: bool = option(False, "count what is captured in CUDA graphs instead")


COLUMNS = [
    Column("array", "load"),
    Column("scheme", "scheme"),
    Column("kernels", "kernels"),
    Column("launches", "launches", ",.0f"),
    Column("waits", "waits", ",.0f"),
    Column("collectives", "collectives", ".0f"),
    Column("sent MB", "sent", ",.2f", 1e-6),
    Column("read MB", "read", ",.0f", 1e-6),
    Column("written MB", "written", ",.0f", 1e-6),
    Column("temp MB", "temporary", ",.0f", 1e-6),
    Column("arrays", lambda row: row["temporary"] / row["array"], ".2f"),
    Column("compile s", "compile", ".1f"),
]
TIMES = [
    Column("array", "load"),
    Column("scheme", "scheme"),
    Column("launching ms", lambda row: row["seconds"]["launching"], ".2f", 1e3),
    Column("waiting ms", lambda row: row["seconds"]["waiting"], ".2f", 1e3),
    Column("moving ms", lambda row: row["seconds"]["moving"], ".2f", 1e3),
    Column("beyond ms", lambda row: costs.beyond(row["seconds"]), ".2f", 1e3),
    Column("device ms", "device", ".2f", 1e3),
    Column("limit ms", "least_device", ".2f", 1e3),
    *(
        Column(f"wire {rate}G ms", lambda row, i=i: row["wire"][i], ".2f", 1e3)
        for i, rate in enumerate(costs.RATES)
    ),
    Column("limit 25G ms", lambda row: row["least_wire"][0], ".2f", 1e3),
    *(
        Column(
            f"device/wire {rate}G", lambda row, i=i: row["device"] / row["wire"][i], ".2f"
        )
        for i, rate in enumerate(costs.RATES)
    ),
]


GRAPHS = [
    Column("array", "load"),
    Column("scheme", "scheme"),
    Column("captured types", "commands"),
    Column("captured", "captured", ",.0f"),
    Column("outside", lambda row: sum(row["outside"].values()), ",.0f"),
    Column("graphs", "graphs", ",.0f"),
    Column("asks", "asks", ",.0f"),
]


def row_of(
    scheme: str, load: Load, one: compiled.Counted, cost: costs.Costs, kernels: str = "auto"
) -> dict:
    """Returns a row of the results: the counts of a step of a scheme for a load."""
    seconds = cost.seconds(one.counts)
    own, of_sum = load.densities
    return {
        "load": load.name,
        "scheme": scheme,
        "kernels": None if kernels == "auto" else kernels,
        "ranks": RANKS,
        "densities": [float(own), float(of_sum)],
        "array": load.bytes,
        "launches": round(one.counts.launches, 3),
        "waits": round(one.counts.waits, 3),
        "collectives": round(sum(one.counts.collectives.values()), 3),
        "kinds": {k: round(n, 3) for k, n in one.counts.collectives.items()},
        "sent": round(one.counts.sent, 1),
        "read": round(one.counts.read),
        "written": round(one.counts.written),
        "temporary": one.temporary,
        "compile": one.seconds,
        "seconds": seconds,
        "device": sum(seconds.values()),
        "wire": [costs.on_wire(one.counts.sent, rate) for rate in costs.RATES],
        "least_sent": float(load.least_sent),
        "least_wire": [costs.on_wire(load.least_sent, rate) for rate in costs.RATES],
        "least_device": cost.moving(load.least_moved),
        "costs": dataclasses.asdict(cost),
    }


def hold(
    scheme: str,
    load: Load,
    one: compiled.Counted,
    gpus: Mesh,
    cpus: Mesh,
    kernels: str = "auto",
) -> dict[str, Any]:
    """Compares the counts of a load, or of its smaller one, with a run on CPU devices.

    Returns the number of units and the results of the run; raises if they differ.
    """
    small = load.smaller()
    if small != load:
        one = compiled.counted(scheme, small, gpus, kernels=kernels)
    return {"units": small.units} | held.hold(scheme, small, cpus, one)


def count_graphs(given: Settings, gpus: Mesh) -> int:
    """Counts what is captured of each step, for each setting of `graphs.COMMANDS`.

    Returns the exit status.
    """
    record = Recorder("graphs", given.command(), ("load", "scheme", "commands"))
    wrong = []
    for name in given.loads:
        for scheme in given.schemes:
            for which, commands in graphs.COMMANDS.items():
                found = compiled.counted(scheme, LOADS[name], gpus, commands).graphs
                left = sum(found.outside.values()) + found.asks
                say(
                    f"{name}, {scheme}, {which}: {found.graphs} graphs, {left} left outside"
                )
                flags = graphs.options(commands)
                row = {"load": name, "scheme": scheme, "ranks": RANKS, "commands": which}
                record.add(**row, flags=flags, **dataclasses.asdict(found))
                if commands == graphs.ALL:
                    wrong += ceilings.left_outside(scheme, found)
    table.show(record.rows, GRAPHS, f"launches of all branches, {RANKS} H200s")
    for line in wrong:
        say(f"WRONG: {line}")
    if not wrong:
        say(f"written: {record.write()}")
    return 1 if wrong else 0


def main() -> int:
    warnings.simplefilter("ignore", DeprecationWarning)
    given = Settings.parse()
    cost = costs.Costs.read(given.costs)
    cpus = index_sets.mesh(RANKS)
    try:
        gpus = h200.mesh(RANKS)
    except Exception as error:
        say(
            "JAX's CUDA plugin is needed to compile for a GPU; `make device` installs it: "
            f"{error}"
        )
        return 1
    if given.graphs:
        return count_graphs(given, gpus)
    record = Recorder("device", given.command(), ("load", "scheme", "kernels"))
    for name in given.loads:
        load = LOADS[name]
        for scheme in given.schemes:
            try:
                one = compiled.counted(scheme, load, gpus, kernels=given.kernels)
                row = row_of(scheme, load, one, cost, given.kernels)
                say(
                    f"{name}, {scheme}: {row['launches']:,.0f} launches, "
                    f"{row['waits']:,.0f} waits, compiled in {row['compile']:.1f} s"
                )
                if not given.trust:
                    row["held"] = hold(scheme, load, one, gpus, cpus, given.kernels)
                    say(f"  held on {row['held']['units']:,} units: {row['held']['turns']}")
            except ProgramError as error:
                say(f"WRONG: {error}")
                return 1
            record.add(**row)
    table.show(record.rows, COLUMNS, f"counted for {RANKS} H200s, a step")
    title = f"{cost.launch * 1e6:g} us a launch, {cost.wait * 1e6:g} us a wait, "
    title += f"{cost.memory * cost.reached / 1e12:.3g} TB/s: {cost.source}"
    table.show(record.rows, TIMES, title)
    say(f"written: {record.write()}")
    if given.plot:
        from benchmarks.device import plot

        plot.draw(record.all_rows())
    return 0


if __name__ == "__main__":
    sys.exit(main())
