"""What a kernel does: bytes to and from memory, operations, and scattered writes.

**Bytes.** An operand is read once, whole, unless the kernel only takes a part of it (a
slice, a gather); what is written in place (a slice that is updated, a scatter) is as much
as the part that changes. Caches are left out, and so are the bytes around a number that
come with it, 32 at a time.

**Operations.** Each instruction of a kernel is one operation for each number of its result,
of a reduction for each number that it reads, of a scatter for each that it writes. What
only names numbers otherwise (a reshape, a broadcast) is none. A number may be computed more
than once, so this is a lower bound.

**Scattered writes.** An update of a scatter that is shorter than a sector of memory, 32
bytes, into an array that the cache cannot hold. Updates whose indices are sorted are
written sector by sector, and none. Gathers are not counted so: those of a step read mostly
in order, which their text does not say.
"""

import dataclasses
import math
import re

from benchmarks.device.hlo import Computation, Instruction, Program


# Of an H200, in bytes: what is moved at a time, and the cache of its second level.
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
    """What a kernel does.

    Attributes:
        read: Bytes read.
        written: Bytes written.
        operations: Operations on single numbers.
        scattered: Scattered writes.
    """

    read: float
    written: float
    operations: float = 0.0
    scattered: float = 0.0


def work_of(program: Program, within: Computation, instruction: Instruction) -> Work:
    """The work of an instruction that runs as a kernel."""
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
    """Operations of an instruction of a kernel."""
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
    """Scattered writes of an instruction of a kernel."""
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
    """The bytes that an instruction reads and writes that is a kernel by itself."""
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
    """Bytes that are read of a value inside a kernel, by all who take of it."""
    total = 0.0
    if one.opcode != "parameter" and one in _results(inside):
        return float(one.bytes)
    for user in inside.users[one.name]:
        first = user.operands[0] == one.name and one.name not in user.operands[1:]
        if user.opcode in _TAKES and first:
            # What is taken may itself be taken from.
            total += min(user.bytes, _read(program, inside, user))
        elif user.opcode == "dynamic-update-slice" and first:
            # In place: what stays is not looked at.
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
    """1 where a scatter combines what it writes with what is there, else 0."""
    combines = program.computations.get(scatter.called("to_apply") or "")
    if combines is None:
        return 1
    return int(not (combines.root.opcode == "parameter" and combines.root.literal == "1"))


def _results(inside: Computation) -> list[Instruction]:
    """What a kernel writes: its root, or the parts of a tuple."""
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
