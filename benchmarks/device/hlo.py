"""Parses the text of a compiled program: its computations, and the source of each part.

The text is HLO: computations, with instructions in the order in which they run, and tables
of the Python frames that instructions come from. No part of XLA is needed to parse it.
"""

import dataclasses
import functools
import math
import re


class ProgramError(ValueError):
    """A program cannot be counted: its text, a loop or an operation is not known."""


# Bits of an element of types whose name does not say it; a token has no size.
_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "c64": 64, "c128": 128, "token": 0}
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ENTRY = re.compile(r"(\d+) (?:\"(.*)\"|\{(.*)\})$")


@dataclasses.dataclass(frozen=True)
class Array:
    """The dtype and the shape of an array."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size in bytes."""
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
        opcode: Its HLO opcode.
        arrays: The arrays that it returns; those of a nested tuple in order.
        operands: The names of its operands, instructions of the same computation.
        rest: The text after the operands: attributes and metadata.
        literal: The text of the operands; for a parameter, its number.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    rest: str
    literal: str = ""

    @property
    def bytes(self) -> int:
        """The bytes of the arrays that it returns."""
        return sum(array.bytes for array in self.arrays)

    def called(self, attribute: str) -> str | None:
        """Returns the name of the computation in an attribute, or None."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.rest)
        return found and found[1]

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations of a conditional, by the index of the branch; false is 0."""
        found = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
        if found:
            return tuple(name.strip().lstrip("%") for name in found[1].split(","))
        both = self.called("false_computation"), self.called("true_computation")
        return tuple(name for name in both if name)

    @property
    def trips(self) -> int | None:
        """The number of iterations of a loop, if it was known at compile time."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.rest)
        return int(found[1]) if found else None

    @property
    def group(self) -> int | None:
        """The size of the replica groups of a collective, if the text has them."""
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
    """A computation: instructions in the order in which they run.

    Attributes:
        name: Its name.
        instructions: The instructions, by name.
        root: The instruction whose result the computation returns.
    """

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that have each instruction as an operand, by its name."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return users

    def given(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions that are operands of an instruction."""
        return [self.instructions[name] for name in instruction.operands]


@dataclasses.dataclass(frozen=True)
class Program:
    """A parsed program.

    Attributes:
        computations: The computations, by name.
        entry: The computation that runs.
        frames: The Python frames of each `stack_frame_id` in metadata, outermost first, as
            "file.py:function".
    """

    computations: dict[str, Computation]
    entry: Computation
    frames: dict[int, tuple[str, ...]]

    def place(self, instruction: Instruction) -> tuple[str, ...]:
        """Returns the Python frames of an instruction: "file.py:function", outermost first.

        It is empty if the text has none.
        """
        found = re.search(r"stack_frame_id=(\d+)", instruction.rest)
        return self.frames.get(int(found[1]), ()) if found else ()


def parse(text: str) -> Program:
    """Parses a program from the text of `compiled.as_text()`."""
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
    """Parses the lines of a table, up to the empty line after it."""
    table = {}
    for line in lines:
        if not line.strip():
            break
        if found := _ENTRY.match(line.strip()):
            table[int(found[1])] = found[2] if found[2] is not None else found[3]
    return table


def _frames(tables) -> dict[int, tuple[str, ...]]:
    """Returns the frames of each number, outermost first."""
    numbers = lambda line: {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", line)}
    files, functions = tables.get("FileNames", {}), tables.get("FunctionNames", {})
    locations = {k: numbers(v) for k, v in tables.get("FileLocations", {}).items()}
    frames: dict[int, tuple[str, ...]] = {0: ()}
    for key, line in sorted(tables.get("StackFrames", {}).items()):
        frame = numbers(line)
        place = locations[frame["file_location_id"]]
        file = files[place["file_name_id"]].rpartition("/")[2]
        # The number of a parent is one more than its key, so that 1 is "no parent".
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
    """Splits a text after its closing parenthesis, or at the first space."""
    if not text.startswith("("):
        first, _, rest = text.partition(" ")
        return first, rest
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: i + 1], text[i + 1 :]
    raise ProgramError(f"a parenthesis is not closed in: {text[:80]}")
