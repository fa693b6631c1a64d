"""Ceilings for the launches, waits and temporaries of a small step on a GPU.

They keep launches and waits from coming back. A ceiling is what was counted when it was
written, plus at most a tenth, one launch, or a kilobyte. Lower it when a step takes less.
"""

import dataclasses
from collections.abc import Container
from typing import NamedTuple

from jax.sharding import Mesh

from benchmarks.device import compiled, graphs
from benchmarks.device.loads import LOADS, RANKS, Load
from benchmarks.harness.record import Recorder, say
from pallas_kernels.triton.launch import by_ptx


SMALL = LOADS["65,536 x 64"]
# The same table, with a gradient that lists rows.
LISTED = dataclasses.replace(SMALL, name="65,536 x 64, listed", listed=2048)


class Takes(NamedTuple):
    """The counts of a step, or their ceilings.

    Attributes:
        launches: The number of kernels, copies and collectives.
        waits: The number of times that the host waits for the device.
        temporary: Bytes of temporary buffers, without the gradient and the sum.
    """

    launches: float
    waits: float
    temporary: float


# The ceilings of a step on sixteen ranks, by load, scheme, and backend of the kernels.
CEILINGS = {
    (SMALL, "zen", "auto"): Takes(launches=75, waits=4, temporary=7.5e6),
    (SMALL, "zen", "triton"): Takes(launches=66, waits=4, temporary=2.4e6),
    (SMALL, "agsparse", "auto"): Takes(launches=70, waits=2, temporary=9.7e6),
    (SMALL, "all-reduce", "auto"): Takes(launches=6, waits=0, temporary=1e3),
    (LISTED, "zen", "auto"): Takes(launches=88, waits=3, temporary=9.8e6),
    (LISTED, "agsparse", "auto"): Takes(launches=79, waits=1, temporary=19e6),
}


def exceeded(load: Load, scheme: str, kernels: str, took: Takes) -> list[str]:
    """Returns a message for each ceiling that a step exceeds."""
    most_of = zip(Takes._fields, took, CEILINGS[load, scheme, kernels], strict=True)
    return [
        f"a step of {_named(scheme, kernels)} on {load.name} takes {name} {took_:,.0f}, "
        f"ceiling {most:,.0f}: see what was added, by `make device`."
        for name, took_, most in most_of
        if took_ > most
    ]


def _named(scheme, kernels):
    return scheme if kernels == "auto" else f"{scheme} by {kernels}"


def left_outside(scheme: str, found: graphs.Graphs) -> list[str]:
    """Returns a message if a step is not one CUDA graph, though XLA may capture all."""
    if found.whole:
        return []
    outside = ", ".join(f"{n} {kind}" for kind, n in found.outside.items()) or "nothing"
    return [
        f"a step of {scheme} is {found.graphs} CUDA graphs, not one: {outside} is launched "
        f"outside, and {found.asks} conditionals and loops ask the host. See what holds "
        "them by `python -m benchmarks.device --graphs`."
    ]


def check(record: Recorder, mesh: Mesh, backends: Container[str]) -> list[str]:
    """Counts a small step of each scheme, prints it, and returns what exceeds a ceiling.

    Args:
        record: The recorder to which rows are added.
        mesh: The devices.
        backends: The backends whose steps are counted; "auto" counts as "reference".
    """
    say(f"\n{f'a step on {RANKS} devices':42} launches  waits  temp (MB)")
    wrong = []
    for load, scheme, kernels in CEILINGS:
        if ("reference" if kernels == "auto" else kernels) not in backends:
            continue
        named = _named(scheme, kernels)
        try:
            one = compiled.counted(scheme, load, mesh, graphs.ALL, kernels)
        except Exception as error:
            wrong.append(
                f"a step of {named} on {load.name} cannot be counted: {str(error)[:300]}"
            )
            continue
        took = Takes(one.counts.launches, one.counts.waits, one.temporary)
        megabytes = took.temporary / 1e6
        name = f"{named}, {load.name}"
        say(f"{name:42} {took.launches:8.0f} {took.waits:6.0f} {megabytes:10.1f}")
        record.add(part="step", name=named, load=load.name, **took._asdict())
        wrong += exceeded(load, scheme, kernels, took)
        # Custom calls of jax-triton are never captured.
        if kernels != "triton" or by_ptx():
            wrong += left_outside(scheme, one.graphs)
    return wrong
