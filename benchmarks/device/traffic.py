"""The work of a kernel: bytes to and from memory, operations, and scattered writes.

**Bytes.** An operand is read once, whole, unless the kernel only reads a part of it (a
slice, a gather). An update in place (of a slice, by a scatter) writes only the part that
changes. Caches are ignored, and so is that memory is read in sectors of 32 bytes.

**Operations.** An instruction counts one operation for each element of its result; a
reduction, for each element that it reads; a scatter, for each that it writes. Instructions
that only rename elements (a reshape, a broadcast) count none. An element may be computed
more than once, so this is a lower bound.

**Scattered writes.** These are updates of a scatter, shorter than a sector of memory (32
bytes), into an array that does not fit into the cache. Updates with sorted indices are not
counted: they are written sector by sector. Gathers are not counted either: those of a step
read mostly in order, which the program's text does not show.
"""

import dataclasses
import math
import re

from benchmarks.device.hlo import Computation, Instruction, Program


# Bytes of an H200: a sector of its memory, and its second-level cache.
SECTOR = 32
CACHE = 50_000_000
_NAMES = {
    "bitcast",
    "broadcast",
    "constant",
    "get-tuple-element",
    "parameter",
    "reshape",
    "tuple",
}
_SAME = {"bitcast", "convert", "copy", "reshape", "transpose", "negate", "not", "abs"}
_TAKES = {"dynamic-slice", "slice", "gather"}


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of a kernel.

    Attributes:
        read: Bytes read.
        written: Bytes written.
        operations: The number of scalar operations.
        scattered: The number of scattered writes.
    """

    read: float
    written: float
    operations: float = 0.0
    scattered: float = 0.0


def work_of(program: Program, within: Computation, instruction: Instruction) -> Work:
    """Returns the work of an instruction that runs as a kernel."""
    called = instruction.called("calls")
    if called is None or called not in program.computations:
        read, written = _alone(program, within, instruction)
        parts = [(within, instruction)]
    else:
        inside = program.computations[called]
        read = sum(
            min(one.bytes, _read(program, inside, one))
            for one in inside.instructions.values()
            if one.opcode == "parameter"
        )
        written = sum(_written(inside, one) for one in _results(inside))
        parts = [(inside, one) for one in inside.instructions.values()]
    operations = sum(_operations(*part) for part in parts)
    return Work(read, written, operations, sum(_scattered(*part) for part in parts))


def _numbers(instruction: Instruction) -> int:
    return sum(math.prod(array.shape) for array in instruction.arrays)


def _operations(within: Computation, one: Instruction) -> int:
    """Returns the operations of an instruction inside a kernel."""
    if one.opcode in _NAMES or one.opcode == "custom-call":
        return 0
    if one.opcode == "reduce":
        return _numbers(within.given(one)[0])
    if one.opcode == "scatter":
        return _numbers(within.given(one)[2])
    if one.opcode == "dynamic-update-slice":
        return _numbers(within.given(one)[1])
    return _numbers(one)


def _scattered(within: Computation, one: Instruction) -> int:
    """Returns the scattered writes of an instruction inside a kernel."""
    if one.opcode != "scatter" or one.bytes <= CACHE:
        return 0
    if "indices_are_sorted=true" in one.rest:
        return 0
    updates = within.given(one)[2]
    found = re.search(r"update_window_dims=\{([\d,]*)\}", one.rest)
    axes = map(int, filter(None, found[1].split(","))) if found else ()
    window = math.prod(updates.arrays[0].shape[axis] for axis in axes)
    number = _numbers(updates) // max(window, 1)
    return number if updates.bytes < SECTOR * number else 0


def _alone(program, within, instruction):
    """Returns the bytes read and written by an instruction that is a kernel by itself."""
    operands = within.given(instruction)
    if instruction.opcode in _TAKES:
        others = sum(one.bytes for one in operands[1:])
        return instruction.bytes + others, instruction.bytes
    if instruction.opcode == "dynamic-update-slice":
        return operands[1].bytes, operands[1].bytes
    if instruction.opcode == "scatter":
        again = _sums(program, instruction) * operands[2].bytes
        return sum(one.bytes for one in operands[1:]) + again, operands[2].bytes
    return sum(one.bytes for one in operands), instruction.bytes


def _read(program, inside, one) -> float:
    """Returns the bytes that all users inside a kernel read of a value."""
    total = 0.0
    if one.opcode != "parameter" and one in _results(inside):
        return float(one.bytes)
    for user in inside.users[one.name]:
        first = user.operands[0] == one.name and one.name not in user.operands[1:]
        if user.opcode in _TAKES and first:
            # Only a part of the slice may be read in turn.
            total += min(user.bytes, _read(program, inside, user))
        elif user.opcode == "dynamic-update-slice" and first:
            # In place: elements that do not change are not read.
            continue
        elif user.opcode == "scatter" and first:
            updates = inside.given(user)[2].bytes
            total += _sums(program, user) * updates
        elif user.opcode in _SAME and len(user.operands) == 1:
            total += _read(program, inside, user)
        elif user.opcode == "tuple":
            continue
        else:
            return float(one.bytes)
    return total


def _sums(program: Program, scatter: Instruction) -> int:
    """Returns 1 if a scatter combines updates with old elements, 0 if it replaces them."""
    combines = program.computations.get(scatter.called("to_apply") or "")
    if combines is None:
        return 1
    return int(not (combines.root.opcode == "parameter" and combines.root.literal == "1"))


def _results(inside: Computation) -> list[Instruction]:
    """Returns the instructions that a kernel writes: its root, or those of its tuple."""
    root = inside.root
    return inside.given(root) if root.opcode == "tuple" else [root]


def _written(inside: Computation, one: Instruction) -> float:
    while one.opcode == "bitcast":
        one = inside.given(one)[0]
    if one.opcode == "dynamic-update-slice":
        return float(inside.given(one)[1].bytes)
    if one.opcode == "scatter":
        return float(inside.given(one)[2].bytes)
    return float(one.bytes) if one.opcode != "parameter" else 0.0
