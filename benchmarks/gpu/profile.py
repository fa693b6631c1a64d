"""Which kernels run on the GPU, how often and for how long, by JAX's profiler."""

import pathlib
import tempfile
from collections.abc import Callable

import jax


CALLS = 3  # that are profiled


def kernels(run: Callable) -> list[tuple[str, float, float]]:
    """Of each kernel its name, launches and seconds in a call, the longest first."""
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                jax.block_until_ready(run())
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    found: dict[str, list[float]] = {}
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                found.setdefault(event.name, []).append(event.duration_ns * 1e-9)
    if not found:
        raise RuntimeError(
            "the profile has no kernels: its planes or lines have other names"
        )
    rows = [(name, len(x) / CALLS, sum(x) / CALLS) for name, x in found.items()]
    return sorted(rows, key=lambda row: -row[2])
