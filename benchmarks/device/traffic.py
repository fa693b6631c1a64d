"""Bytes that a kernel moves to and from a GPU's memory.

An operand is read once, whole, unless the kernel only takes a part of it (a slice, a
gather); what is written in place (a slice that is updated, a scatter) is as much as the
part that changes. Caches are left out, and so are the bytes around a number that come with
it, 32 at a time.
"""

import dataclasses

from benchmarks.device.hlo import Computation, Instruction, Program


_SAME = {"bitcast", "convert", "copy", "reshape", "transpose", "negate", "not", "abs"}
_TAKES = {"dynamic-slice", "slice", "gather"}


@dataclasses.dataclass(frozen=True)
class Moved:
    """Bytes read and written."""

    read: float
    written: float


def moved(program: Program, within: Computation, instruction: Instruction) -> Moved:
    """What an instruction that runs as a kernel moves."""
    called = instruction.called("calls")
    if called is None or called not in program.computations:
        return _alone(program, within, instruction)
    inside = program.computations[called]
    read = 0.0
    for one in inside.instructions.values():
        if one.opcode == "parameter":
            read += min(one.bytes, _read(program, inside, one))
    return Moved(read, sum(_written(inside, one) for one in _results(inside)))


def _alone(program, within, instruction):
    """An instruction that is a kernel by itself."""
    operands = within.given(instruction)
    if instruction.opcode in _TAKES:
        others = sum(one.bytes for one in operands[1:])
        return Moved(instruction.bytes + others, instruction.bytes)
    if instruction.opcode == "dynamic-update-slice":
        return Moved(operands[1].bytes, operands[1].bytes)
    if instruction.opcode == "scatter":
        again = _sums(program, instruction) * operands[2].bytes
        return Moved(sum(one.bytes for one in operands[1:]) + again, operands[2].bytes)
    return Moved(sum(one.bytes for one in operands), instruction.bytes)


def _read(program, inside, one) -> float:
    """Bytes that are read of a value inside a kernel, by all who take of it."""
    total = 0.0
    for user in inside.users[one.name]:
        first = user.operands[0] == one.name and one.name not in user.operands[1:]
        if user.opcode in _TAKES and first:
            total += user.bytes
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
