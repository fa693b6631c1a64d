"""All that needs a GPU, in one command: are the kernels right, and which is fastest.

    python -m benchmarks.gpu --out DIR [--minutes 8] [--parts winners figure14]

It needs pytest and hypothesis, and is faster with pytest-xdist.

    copies      whether sums have the same bits always: on copies over a second axis of a
                mesh, with four GPUs or more, and in twenty runs, with one
    probe       whether each backend runs at all; if not, nothing else does either
    suite       the tests of the kernels on the GPU, every backend that runs there
    contended   1,000 runs of `partition` and `partition_dense` in memories that are too
                small, each checked on the device
    largest     arrays with as many elements as int32 can number
    sums        whether scatter-add with repeated indices gives the same bytes twice
    winners     every operation by every backend, its results compared with the reference's;
                214M and 16M elements at 2.8%, these and 1M at 1%; against reading the
                array, copying it, jnp.nonzero, top-k and DGC; and the ratios to be reached
    steps       a rank's whole step but for the network, against what `make device` says
                of it, and its kernels by the profiler
    figure14    `benchmarks.kernels memory` at 214M parameters, as in Zen, by XLA and Triton

Each part is a process of its own, in this order, so that neither a fault on the device nor
a part that takes too long loses what the others measured. DIR gets gpu.jsonl, winners.json
(to be checked in as pallas_kernels/winners.json), and figure 14 as CSV and PNG; all are
written as soon as there is anything in them. Without a GPU it says so and ends with status
1; with --any it runs on whatever there is, at small sizes, to show that it works.
"""

import dataclasses
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import time

from benchmarks.gpu import checks, copies, steps, winners
from benchmarks.gpu.context import Context
from benchmarks.harness import settings
from benchmarks.harness.record import say
from benchmarks.harness.settings import option
from benchmarks.kernels import figure14 as algorithm1


def figure14(context) -> bool:
    """Algorithm 1's cost by memory and number of hashes."""
    size = max(context.sizes[0], 1 << 20)
    names = [name for name in context.backends if name != "pallas"]  # For want of minutes.
    algorithm1.memory(context.record, size, context.out, names, 0.02)
    return True


# In this order; and for how many seconds at most, of those that are left.
PARTS = {
    "copies": (copies.copies, 120),
    "probe": (checks.probe, 60),
    "suite": (checks.suite, 150),
    "contended": (checks.contended, 90),
    "largest": (checks.largest, 40),
    "sums": (checks.sums, 30),
    "winners": (winners.winners, 240),
    "steps": (steps.steps, 240),
    "figure14": (figure14, 180),
}


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Checks and times the kernels on a GPU."""

    PROGRAM = "benchmarks.gpu"
    out: str = option(help="the folder for all files")
    minutes: float = option(8.0, "for all parts")
    any: bool = option(False, "run without a GPU too")
    parts: tuple[str, ...] = option(tuple(PARTS), choices=tuple(PARTS))
    one: str | None = option(None, hidden=True)


def one_part(name: str, out: pathlib.Path) -> int:
    """Runs a part in this process."""
    context = Context(out, name)
    try:
        well = PARTS[name][0](context)
    except Exception as error:
        say(f"{name} failed: {type(error).__name__}: {str(error)[:500]}")
        context.record.add(part=name, failed=str(error)[:2000])
        well = False
    return 0 if well else 1


def _environment() -> dict[str, str]:
    """Memory as it is needed, and an assembler, which jax-triton starts by its name."""
    path = os.environ.get("PATH", "")
    if spec := importlib.util.find_spec("triton"):
        for folder in spec.submodule_search_locations or ():
            path += os.pathsep + str(pathlib.Path(folder, "backends", "nvidia", "bin"))
    return os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PATH": path}


def main(argv: list[str] | None = None) -> int:
    settings = Settings.parse(argv)
    out = pathlib.Path(settings.out)
    if settings.one:
        return one_part(settings.one, out)
    # This process leaves the device to the others.
    code = "import jax; print(jax.default_backend())"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if seen.stdout.strip() != "gpu" and not settings.any:
        say(f"JAX sees no GPU here, only {seen.stdout.strip()}; --any runs all the same.")
        return 1
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * settings.minutes
    environment = _environment()
    missed, lines = [], []
    for name in settings.parts:
        say(f"\n== {name}")
        command = [sys.executable, "-m", "benchmarks.gpu", "--out", out]
        most = max(5.0, min(PARTS[name][1], end - time.monotonic()))
        part = subprocess.Popen(
            [*command, "--one", name], env=environment, start_new_session=True
        )
        try:
            missed += [name] if part.wait(most) else []
        except subprocess.TimeoutExpired:
            # With all that it started: nothing may run beside the next part.
            os.killpg(part.pid, signal.SIGKILL)
            part.wait()
            say(f"{name} was stopped after {most:.0f} s")
            missed.append(name)
        written = out / f"{name}.jsonl"
        if written.exists():
            rows = written.read_text().splitlines()
            lines += rows[1:] if lines else rows
            written.unlink()
        (out / "gpu.jsonl").write_text("\n".join(lines) + "\n")
        if name in missed and name == "probe" and not settings.any:
            say("Without all backends a run would be wasted; --any runs all the same.")
            break
    say(f"\n{'NOT WELL: ' + ', '.join(missed) if missed else 'all well'}; in {out}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
