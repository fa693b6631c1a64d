"""What is given to a GPU in place of the machine, on a driver that is the machine."""

import ctypes
import importlib.util

import numpy as np
import pytest

from tests.ptx import hardware, programs, test_instructions
from tests.ptx.machine.lanes import OPCODES
from tests.ptx.machine.launch import Launch
from tests.ptx.machine.memory import Memory
from tests.ptx.machine.orders import Order


BASE = 1 << 32  # where the driver's memory begins


class Driver:
    """The functions of the CUDA driver that are called, over memory of the host."""

    def __init__(self):
        self.memory = np.zeros(1 << 20, np.uint8)

    def __call__(self, name, *given):
        if name == "cuMemAlloc":
            assert given[0] <= self.memory.size
            return BASE
        if name.startswith("cuMemcpy"):
            to, source, size = given
            here, there = (to, source) if name.endswith("HtoD") else (source, to)
            host = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(int(there)))
            held = self.memory[here - BASE :][:size]
            into, what = (held, host) if name.endswith("HtoD") else (host, held)
            into[:] = what
        if name == "cuLaunchKernel":
            self._launch(given)
        return None

    def _launch(self, given):
        compiled, blocks, *_, shared, _, arguments, _ = given
        count = len(compiled.code.program.parameters)
        places = (ctypes.c_uint64 * count).from_address(arguments)
        pointers = [ctypes.c_uint64.from_address(place).value for place in places]
        memory = Memory()
        # All that is behind a pointer, so that a write past an end is seen by canaries.
        buffers = {
            pointer: memory.add(str(pointer), self._behind(pointer).copy(), writable=True)
            for pointer in {*pointers} - {0}
        }
        kernel = [buffers.get(pointer) for pointer in pointers]
        Launch(compiled.code, blocks, kernel, memory, shared=shared, order=Order(0)).run()
        for pointer, buffer in buffers.items():
            before = self._behind(pointer)
            changed = before != buffer.content
            before[changed] = buffer.content[changed]

    def _behind(self, pointer):
        start = pointer - BASE
        return self.memory[start : start + hardware.GUARD]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(hardware, "call", Driver())
    monkeypatch.setattr(hardware, "context", lambda: None)
    monkeypatch.setattr(hardware, "function", lambda compiled: compiled)
    return hardware.Hardware(90)


def test_an_opcode_is_held_to_the_machine_and_to_the_isa(gpu, monkeypatch):
    assert hardware.hold_opcodes(gpu, rounds=1) == []
    assert gpu.counts["launches"] == len(OPCODES)
    subtracts = hardware.opcode_program("sub.s32")
    monkeypatch.setattr(hardware, "opcode_program", lambda opcode: subtracts)
    assert ", the ISA " in hardware._opcode(gpu, "add.s32", OPCODES["add.s32"], 1)
    # What the ISA leaves open is held to the machine.
    monkeypatch.setattr(hardware.opcodes, "expected", lambda opcode, given: [None] * 32)
    assert ", the machine " in hardware._opcode(gpu, "add.s32", OPCODES["add.s32"], 1)


COPIED = """
    add.s64 %rd10, %rd1, %rd9;
    ld.global.b32 %r10, [%rd10];
    add.s64 %rd11, %rd2, %rd9;
    st.global.b32 [%rd11{}], %r10;
"""


def test_what_is_written_past_the_end_of_a_result_is_an_error(gpu):
    x = np.arange(32, dtype=np.int32)
    (got,) = gpu.run(programs.compiled(COPIED.format(""), 2), 1, [x], [x], {})
    np.testing.assert_array_equal(got, x)
    with pytest.raises(hardware.Damaged, match=r"small changed 4 bytes .* not its results"):
        gpu.run(programs.compiled(COPIED.format("+4"), 2), 1, [x], [x], {})


def test_what_is_only_read_stays_as_it_was(gpu):
    x = np.arange(32, dtype=np.int32)
    body = "add.s64 %rd10, %rd1, %rd9;\nst.global.b32 [%rd10], 7;"
    with pytest.raises(hardware.Damaged, match="small changed 31 bytes"):
        gpu.run(programs.compiled(body, 2), 1, [x], [x], {})
    (got,) = gpu.run(programs.compiled(body, 2), 1, [x], [x], {0: 0})
    np.testing.assert_array_equal(got, np.full(32, 7))


@pytest.mark.slow
def test_the_programs_of_instructions_run_on_the_gpu(gpu):
    own = test_instructions.run
    assert hardware.hold_instructions(gpu) == []
    assert gpu.counts["launches"] > 60
    assert test_instructions.run is own


def test_without_the_bindings_it_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(hardware.sys, "argv", ["hardware"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert hardware.main() == 2
    assert "pip install cuda-bindings" in capsys.readouterr().err
