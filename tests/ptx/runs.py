"""Checks of kernels in the machine: which there are, and what one finds."""

import dataclasses
import os
import pathlib
import time
import traceback

import jax

from tests import conftest
from tests.kernels import checks
from tests.ptx import pallas
from tests.ptx.compiler import ARCHITECTURES
from tests.ptx.launches import Gpu


# What launches which kernels, the longest first. `words.py`, `slots.py` and
# `index_message.py` are held to what their callers do.
CASES = (
    *(("triton", name) for name in ("partition_dense.py", "messages.py", "bitmap.py")),
    *(("pallas", name) for name in pallas.CHECKS),
    *(("triton", name) for name in ("exchange", "partition.py", "threshold_hash.py")),
)


@dataclasses.dataclass(frozen=True)
class Found:
    """What a check found.

    Attributes:
        case: The backend and the check.
        arch: The compute capability.
        seed: Of the orders.
        launches: How many kernels were launched.
        steps: Accesses, barriers and branches of all warps.
        seconds: How long it took, with the compiler.
        opcodes: All that the kernels use.
        fault: What is wrong, in words; empty if nothing.
    """

    case: tuple[str, str]
    arch: int
    seed: int
    launches: int
    steps: int
    seconds: float
    opcodes: tuple[str, ...]
    fault: str

    @property
    def name(self) -> str:
        return "/".join(self.case)

    def __str__(self):
        where = f"{self.name} on {ARCHITECTURES[self.arch]}, seed {self.seed}"
        if self.fault:
            return f"{where}: {self.fault}"
        counted = f"{self.launches} launches, {self.steps:,} steps"
        return f"{where}: holds; {counted}, {self.seconds:.0f} s"


def hold(case: tuple[str, str], gpu: Gpu, edit: checks.Edit | None = None) -> None:
    """Runs a check with a machine in place of the GPU; raises what it finds."""
    backend, name = case
    if backend == "pallas":
        assert edit is None, "Pallas' kernels are not loaded from their file"
        with pallas.launched_by(gpu):
            pallas.CHECKS[name](pallas.operations())
    else:
        made = checks.load(checks.FILES.get(name, name), gpu.launched, edit)
        checks.CHECKS[name](made)


def run(case: tuple[str, str], arch: int, seed: int) -> Found:
    """Runs a check; what is at fault comes with the shortest order that shows it."""
    gpu, start, fault = Gpu(arch, seed), time.perf_counter(), ""
    try:
        hold(case, gpu)
    except Exception as error:
        fault = said(gpu, error)
    seconds = time.perf_counter() - start
    counts, used = gpu.counts, tuple(sorted(gpu.used))
    return Found(
        case, arch, seed, counts["launches"], counts["steps"], seconds, used, fault
    )


def alone(case: tuple[str, str], arch: int, seed: int) -> Found:
    """The same in a process of its own, which has not used JAX before."""
    os.environ["XLA_FLAGS"] = " ".join(conftest.COMPILE_FAST)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 3)
    return run(case, arch, seed)


def said(gpu: Gpu, error: BaseException) -> str:
    """What is wrong, in words: the kernel, the fault, and an order in which it shows."""
    last = gpu.last
    if last is None:
        return f"before any launch: {_in_words(error)}"
    text = f"launch {gpu.counts['launches']}, {last.kernel}: "
    if last.error is None:  # the check found it, in what was launched up to here
        return text + _in_words(error)
    text += _in_words(last.error)
    order = last.shortest()
    if order is None:
        return f"{text}\nIn the same order of warps it does not show again."
    warps = "by number" if not order else f"{', '.join(map(str, order))}, then by number"
    return f"{text}\nThe shortest order of warps in which it shows: {warps}."


def _in_words(error):
    *_, frame = traceback.extract_tb(error.__traceback__)
    where = f"{pathlib.Path(frame.filename).name}:{frame.lineno}"
    return f"{type(error).__name__}: {str(error) or frame.line} ({where})"
