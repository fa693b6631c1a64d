"""Reads the text of a compiled program: its computations, and where each part was written.

A compiled program prints itself as HLO: computations of instructions in the order in which
they run, and tables of the Python frames that each of them came from. No part of XLA is
needed to read it.
"""

import dataclasses
import functools
import math
import re


class ProgramError(ValueError):
    """A program that cannot be counted: its text, a loop or an operation is not known."""


# Bits of a number of each type; what has no size is a token.
_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "c64": 64, "c128": 128, "token": 0}
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ENTRY = re.compile(r"(\d+) (?:\"(.*)\"|\{(.*)\})$")


@dataclasses.dataclass(frozen=True)
class Array:
    """A type and the lengths of the axes."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size."""
        bits = _BITS.get(self.dtype)
        if bits is None:
            digits = re.match(r"[a-z]+(\d+)", self.dtype)
            if digits is None:
                raise ProgramError(f"numbers of type {self.dtype} have no known size.")
            bits = int(digits[1])
        return -(-bits * math.prod(self.shape) // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: Its name, without the %.
        opcode: What it does.
        arrays: What it returns; of a tuple, however deep, its arrays in order.
        operands: The names of what it is given, in its own computation.
        rest: The text after the operands: attributes and metadata.
        literal: The text of the operands, which is the number of a parameter.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    rest: str
    literal: str = ""

    @property
    def bytes(self) -> int:
        """Of what it returns."""
        return sum(array.bytes for array in self.arrays)

    def called(self, attribute: str) -> str | None:
        """The name of the computation that an attribute names."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.rest)
        return found and found[1]

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations of a conditional, by the number that chooses; false is 0."""
        found = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
        if found:
            return tuple(name.strip().lstrip("%") for name in found[1].split(","))
        both = self.called("false_computation"), self.called("true_computation")
        return tuple(name for name in both if name)

    @property
    def trips(self) -> int | None:
        """How many turns a loop has, where that was known when it was compiled."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.rest)
        return int(found[1]) if found else None

    @property
    def group(self) -> int | None:
        """How many ranks talk to one another in a collective, if the text says so."""
        mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", self.rest)
        if mesh:
            sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
            return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", mesh[2]))
        if even := re.search(r"replica_groups=\[\d+,(\d+)\]<=", self.rest):
            return int(even[1])
        if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", self.rest):
            return listed[1].count(",") + 1
        return None


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they run, by name.

    Attributes:
        name: Its name.
        instructions: By name.
        root: The one whose result is the computation's.
    """

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Who is given the result of each instruction."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return users

    def given(self, instruction: Instruction) -> list[Instruction]:
        """The operands of an instruction."""
        return [self.instructions[name] for name in instruction.operands]


@dataclasses.dataclass(frozen=True)
class Program:
    """Everything that the text has.

    Attributes:
        computations: By name.
        entry: The one that runs.
        frames: By the number in metadata: file names with functions, outermost first.
    """

    computations: dict[str, Computation]
    entry: Computation
    frames: dict[int, tuple[str, ...]]

    def place(self, instruction: Instruction) -> tuple[str, ...]:
        """Where an instruction was written: "file.py:function", outermost first."""
        found = re.search(r"stack_frame_id=(\d+)", instruction.rest)
        return self.frames.get(int(found[1]), ()) if found else ()


def parse(text: str) -> Program:
    """Reads a program, as `compiled.as_text()` returns it."""
    tables: dict[str, dict[int, str]] = {}
    computations, entry = {}, None
    lines = iter(text.splitlines())
    for line in lines:
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            tables[line] = _table(lines)
        elif head := _HEAD.match(line):
            computation = _computation(head[2], lines)
            computations[computation.name] = computation
            entry = computation if head[1] else entry
    if entry is None:
        raise ProgramError("the text has no ENTRY: it is not a compiled program.")
    return Program(computations, entry, _frames(tables))


def _table(lines) -> dict[int, str]:
    """The lines of a table, up to the empty one behind it."""
    table = {}
    for line in lines:
        if not line.strip():
            break
        if found := _ENTRY.match(line.strip()):
            table[int(found[1])] = found[2] if found[2] is not None else found[3]
    return table


def _frames(tables) -> dict[int, tuple[str, ...]]:
    """The frames of each number, outermost first."""
    numbers = lambda line: {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", line)}
    files, functions = tables.get("FileNames", {}), tables.get("FunctionNames", {})
    locations = {k: numbers(v) for k, v in tables.get("FileLocations", {}).items()}
    frames: dict[int, tuple[str, ...]] = {0: ()}
    for key, line in sorted(tables.get("StackFrames", {}).items()):
        frame = numbers(line)
        place = locations[frame["file_location_id"]]
        file = files[place["file_name_id"]].rpartition("/")[2]
        # A parent's number is counted from one more, so that the outermost has one.
        outer = frames[frame["parent_frame_id"] - 1]
        frames[key] = (*outer, f"{file}:{functions[place['function_name_id']]}")
    return frames


def _computation(name: str, lines) -> Computation:
    instructions, root = {}, None
    for line in lines:
        if line.startswith("}"):
            break
        text = _COMMENT.sub("", line.strip())
        if " = " not in text:
            continue
        instruction = _instruction(text.removeprefix("ROOT "))
        instructions[instruction.name] = instruction
        root = instruction if text.startswith("ROOT ") or root is None else root
    if root is None:
        raise ProgramError(f"the computation {name} has no instructions.")
    return Computation(name, instructions, root)


def _instruction(text: str) -> Instruction:
    name, _, text = text.partition(" = ")
    shape, text = _split(text)
    opcode, _, _ = text.strip().partition("(")
    text = text.strip().removeprefix(opcode)
    inside, rest = _split(text)
    operands = () if opcode in ("constant", "parameter") else _names(inside)
    arrays = tuple(
        Array(dtype, tuple(int(length) for length in axes.split(",") if length))
        for dtype, axes in _ARRAY.findall(shape)
    )
    return Instruction(name.lstrip("%"), opcode, arrays, operands, rest, inside[1:-1])


def _names(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"%([\w.\-]+)", text))


def _split(text: str) -> tuple[str, str]:
    """What stands up to the closing parenthesis, or the first space, and the rest."""
    if not text.startswith("("):
        first, _, rest = text.partition(" ")
        return first, rest
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: i + 1], text[i + 1 :]
    raise ProgramError(f"a parenthesis is not closed in: {text[:80]}")
