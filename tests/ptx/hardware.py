"""A GPU in place of the machine: the same PTX, the same checks, by the CUDA driver.

    python -m tests.ptx.hardware [opcodes instructions CASE ...] [--rounds 2] [--out FILE]

    opcodes        each opcode on the GPU, against the machine and against the ISA's words
    instructions   the programs of `test_instructions`, on the GPU
    triton/...     the checks of kernels that `python -m tests.ptx` runs in the machine

All if none is named. JAX computes on the CPU here, and the driver compiles the PTX. All
buffers of a launch are in one piece of memory, between canaries; what a kernel only reads
must stay as it was. Each kernel is launched twice on the same memory, and kernels whose
results then differ are listed: those whose atomics take turns in no order.

It needs a GPU of NVIDIA, and `cuda-bindings`.
"""

import argparse
import collections
import dataclasses
import functools
import importlib.util
import json
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np
import pytest

from tests.ptx import compiler, opcodes, programs, runs, test_instructions, test_opcodes
from tests.ptx.compiler import Compiled
from tests.ptx.launches import Gpu, bytes_of, noise, size_of
from tests.ptx.machine.lanes import LANES, OPCODES


_CAPABILITY = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY"
CANARY, GUARD = 0x7B, 4096  # a byte, and how many stand on each side of a buffer
SHARED = ".extern .shared .align 16 .b8 global_smem[];\n"
# Tests of orders and errors, and of "nop", which stands for what a mutant leaves out.
OF_THE_MACHINE = ("in_any_order", "is_an_error", "not_understood", "nop")


class Damaged(Exception):
    """A kernel wrote where nothing of its own is."""


@functools.cache
def driver():
    """The bindings of the CUDA driver."""
    from cuda.bindings import driver as cuda  # pyright: ignore[reportMissingImports]

    return cuda


def call(name: str, *given):
    """Calls a function of the driver; its results, or what went wrong."""
    cuda = driver()
    status, *results = getattr(cuda, name)(*given)
    if status != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name}: {status.name}")
    return results[0] if len(results) == 1 else results


@functools.cache
def context():
    """The context of the first GPU."""
    call("cuInit", 0)
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0))


def capability() -> int:
    """The compute capability of the GPU, as 90."""
    context()
    device = call("cuDeviceGet", 0)
    kinds = driver().CUdevice_attribute
    major, minor = (
        call("cuDeviceGetAttribute", getattr(kinds, f"{_CAPABILITY}_{name}"), device)
        for name in ("MAJOR", "MINOR")
    )
    return 10 * major + minor


@functools.cache
def function(compiled: Compiled):
    """The entry of a kernel, assembled by the driver."""
    text = compiled.ptx
    if "global_smem" in text and "global_smem[" not in text:
        text = text.replace(".visible .entry", SHARED + ".visible .entry")
    module = call("cuModuleLoadData", text.encode() + b"\0")
    entry = call("cuModuleGetFunction", module, compiled.code.program.name.encode())
    if compiled.shared > 48 << 10:
        attribute = driver().CUfunction_attribute
        most = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuFuncSetAttribute", entry, most, compiled.shared)
    return entry


class Memory:
    """Device memory for the buffers of a launch, which is kept for the next ones."""

    def __init__(self):
        self.size, self.pointer = 0, 0

    def of(self, size: int) -> int:
        if size > self.size:
            if self.size:
                call("cuMemFree", self.pointer)
            self.size = 2 * size
            self.pointer = int(call("cuMemAlloc", self.size))
        return self.pointer


@dataclasses.dataclass
class Hardware(Gpu):
    """Launches kernels on the GPU that is here.

    Attributes:
        memory: Of the device.
        differing: By kernel, how often two launches had other results.
        kernels: By kernel, how often it was launched.
    """

    memory: Memory = dataclasses.field(default_factory=Memory)
    differing: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    kernels: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def run(self, compiled, programs, operands, results, aliases, *, names=None, **how):
        """As in the machine; see `Gpu.run`."""
        name = compiled.code.program.name
        names = names or [f"operand {i}" for i in range(len(operands))]
        names = [*names, *(f"result {i}" for i in range(len(results)))]
        self.used |= {one.opcode for one in compiled.code.program.instructions}
        rng = np.random.default_rng(self.counts["launches"])
        given = [bytes_of(x) for x in operands]
        in_place = {result: operand for operand, result in aliases.items()}
        places = [*range(len(given))]
        for i, x in enumerate(results):
            if i in in_place:
                places.append(in_place[i])
                continue
            places.append(len(given))
            zeroed = how.get("zeroed")
            given.append(np.zeros(size_of(x), np.uint8) if zeroed else noise(rng, x))
        first, before, after = self._launched(compiled, programs, given, places)
        second, _, afterwards = self._launched(compiled, programs, given, places)
        self.counts["launches"] += 1
        self.kernels[name] += 1
        written = {places[len(operands) + i] for i in range(len(results))}
        for memory in (after, afterwards):
            self._check(name, names, given, written, before, memory)
        made = []
        for i, x in enumerate(results):
            place = places[len(operands) + i]
            made.append(first[place].view(x.dtype).reshape(x.shape))
        self.differing[name] += any((first[i] != second[i]).any() for i in written)
        return made

    def _launched(self, compiled, programs, given, places):
        """What the buffers hold after a launch, and all of the memory before and after."""
        call("cuCtxSetCurrent", context())
        starts, end = _starts(given)
        before = np.full(end, CANARY, np.uint8)
        for start, content in zip(starts, given, strict=True):
            before[start : start + content.size] = content
        base = self.memory.of(end)
        call("cuMemcpyHtoD", base, before.ctypes.data, end)
        pointers = [base + starts[place] for place in places]
        program = compiled.code.program
        # Triton's own, of which our kernels use none.
        pointers += [0] * (len(program.parameters) - len(pointers))
        values = np.array(pointers, np.uint64)
        arguments = values.ctypes.data + 8 * np.arange(len(values), dtype=np.uint64)
        entry, shape = function(compiled), (programs, 1, 1, program.threads, 1, 1)
        call("cuLaunchKernel", entry, *shape, compiled.shared, 0, arguments.ctypes.data, 0)
        call("cuCtxSynchronize")
        after = np.empty_like(before)
        call("cuMemcpyDtoH", after.ctypes.data, base, end)
        found = [
            after[start : start + content.size].copy()
            for start, content in zip(starts, given, strict=True)
        ]
        return found, before, after

    def _check(self, kernel, names, given, written, before, after):
        """Raises where a kernel wrote something else than its results."""
        starts, _ = _starts(given)
        is_own = np.zeros(before.size, bool)
        for i in written:
            is_own[starts[i] : starts[i] + given[i].size] = True
        wrong = np.flatnonzero((before != after) & ~is_own)
        if wrong.size:
            sizes = [content.size for content in given]
            raise Damaged(
                f"{kernel} changed {wrong.size} bytes that are not its results, the first "
                f"at {wrong[0]}; buffers of {sizes} bytes, {GUARD} between them ({names})"
            )


def _starts(given):
    """Where buffers begin in the memory of a launch, and where that ends."""
    starts, end = [], GUARD
    for content in given:
        starts.append(end)
        end += -(-content.size // 16) * 16 + GUARD
    return starts, end


def opcode_program(opcode: str) -> Compiled:
    """A kernel in which each lane loads operands, computes, and stores the result."""
    one = OPCODES[opcode]
    lines, registers, free = [], [], collections.Counter()

    def register(kind):
        bits = opcodes.bits_of(kind)
        prefix = {1: "%p", 16: "%rs", 32: "%r", 64: "%rd"}[bits]
        free[prefix] += 1
        return f"{prefix}{9 + free[prefix]}", max(bits, 16)

    def address(pointer, width):
        lines.append(f"mul.wide.u32 %rd30, %r1, {width // 8};")
        lines.append(f"add.s64 %rd31, %rd{pointer}, %rd30;")
        return "[%rd31]"

    for i, kind in enumerate(one.operands):
        name, width = register(kind)
        where = address(i + 1, width)
        if kind == "pred":
            lines += [f"ld.global.b16 %rs1, {where};", f"setp.ne.b16 {name}, %rs1, 0;"]
        else:
            lines.append(f"ld.global.b{width} {name}, {where};")
        registers.append(name)
    result, width = register(one.result)
    lines.append(f"{opcode} {', '.join([result, *registers])};")
    if one.result == "pred":
        lines += ["mov.b16 %rs2, 1;", "mov.b16 %rs3, 0;"]
        lines.append(f"selp.b16 %rs4, %rs2, %rs3, {result};")
        result = "%rs4"
    lines.append(f"st.global.b{width} {address(len(one.operands) + 1, width)}, {result};")
    return programs.compiled("\n".join(lines), len(one.operands) + 1)


def as_stored(lanes: np.ndarray) -> np.ndarray:
    """Registers as they are in memory: a predicate takes two bytes."""
    return lanes.astype(np.uint16) if lanes.dtype == bool else lanes


def hold_opcodes(gpu: Hardware, rounds: int = test_opcodes.ROUNDS) -> list[str]:
    """Each opcode on the GPU; what differs from the machine, or from the ISA's words."""
    wrong = []
    for opcode, one in sorted(OPCODES.items()):
        try:
            found = _opcode(gpu, opcode, one, rounds)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        if found:
            wrong.append(f"{opcode}: {found}")
    return wrong


def _opcode(gpu, opcode, one, rounds):
    rng = np.random.default_rng(0)
    kernel = opcode_program(opcode)
    different = []
    for _ in range(rounds):
        given = test_opcodes.operands(opcode, one.operands, rng)
        lanes = [
            test_opcodes.register(x, kind)
            for x, kind in zip(given, one.operands, strict=True)
        ]
        with np.errstate(all="ignore"):
            machine = as_stored(one.function(*lanes))
        stored = [as_stored(x) for x in lanes]
        (got,) = gpu.run(kernel, 1, stored, (machine,), {})
        wanted = opcodes.expected(opcode, given)
        for lane in range(LANES):
            operands = [hex(int(x[lane])) for x in lanes]
            ours, theirs = int(machine[lane]), int(got[lane])
            if wanted[lane] is not None and theirs != int(wanted[lane]):
                different.append(f"{operands}: {theirs:#x}, the ISA {int(wanted[lane]):#x}")
            elif theirs != ours:
                different.append(f"{operands}: {theirs:#x}, the machine {ours:#x}")
    return "; ".join(different[:4]) + f" ({len(different)})" if different else ""


def hold_instructions(gpu: Hardware) -> list[str]:
    """The programs of `test_instructions` on the GPU; the tests that fail."""

    def run(body, *operands, results=(), threads=32, blocks=1, shared=0, zeroed=False, **_):
        pointers = len(operands) + len(results)
        kernel = programs.compiled(body, pointers, threads, shared)
        return gpu.run(kernel, blocks, operands, results, {}, zeroed=zeroed)

    class Plugin:
        failed: list[str] = []  # noqa: RUF012
        modules: dict[Any, Any] = {}  # noqa: RUF012

        def pytest_collection_finish(self, session):
            # Pytest imports them by a name of its own.
            for item in session.items:
                self.modules.setdefault(item.module, item.module.run)
                item.module.run = run

        def pytest_runtest_logreport(self, report):
            if report.failed:
                self.failed.append(f"{report.nodeid}\n{report.longreprtext[-1500:]}")

    plugin = Plugin()
    unless = " and ".join(f"not {name}" for name in OF_THE_MACHINE)
    given = [test_instructions.__file__, "-q", "-p", "no:cacheprovider", "-k", unless]
    options = [*given, "-p", "no:benchmark", "-o", "filterwarnings="]
    try:
        status = pytest.main(options, plugins=[plugin])
    finally:
        for module, own in plugin.modules.items():
            module.run = own
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return [f"pytest ended with {status!r}", *plugin.failed]
    if not gpu.counts["launches"]:
        return ["no program ran on the GPU", *plugin.failed]
    return plugin.failed


def main() -> int:
    given = _arguments()
    if importlib.util.find_spec("cuda") is None:
        print("It needs cuda-bindings: pip install cuda-bindings", file=sys.stderr)
        return 2
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 3)
    arch = capability()
    checks = {"/".join(case): case for case in runs.CASES}
    rows, faults = [], 0
    for name in given.parts or ["opcodes", "instructions", *checks]:
        start = time.perf_counter()
        gpu, wrong = Hardware(arch), []
        if name == "opcodes":
            wrong = hold_opcodes(gpu)
        elif name == "instructions":
            wrong = hold_instructions(gpu)
        else:
            for _ in range(given.rounds):
                try:
                    runs.hold(checks[name], gpu)
                except Exception as error:
                    wrong.append(f"{type(error).__name__}: {str(error)[:1500]}")
        faults += bool(wrong)
        differing = {k: f"{n} of {gpu.kernels[k]}" for k, n in gpu.differing.items() if n}
        rows.append(
            {
                "part": name,
                "arch": compiler.ARCHITECTURES.get(arch, str(arch)),
                "launches": gpu.counts["launches"],
                "differing": differing if name != "opcodes" else {},
                "wrong": wrong,
                "seconds": round(time.perf_counter() - start, 1),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        if given.out:
            lines = "\n".join(map(json.dumps, rows))
            pathlib.Path(given.out).write_text(lines + "\n")
    print(f"{len(rows)} parts, {faults} at fault")
    return 1 if faults else 0


def _arguments():
    parser = argparse.ArgumentParser(
        "python -m tests.ptx.hardware",
        description="Holds kernels on a GPU to their checks.",
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="as triton/partition.py")
    parser.add_argument("--rounds", type=int, default=2, help="how often checks run")
    parser.add_argument("--out", help="a file for the results, as JSON lines")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
