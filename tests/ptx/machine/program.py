"""PTX, read into instructions.

A kernel's text has one entry with 64-bit parameters, declarations of registers, and
instructions. What is not known is an error that names the kernel and the line, and is
never skipped: what the machine did not understand it would not test.
"""

import dataclasses
import re


class PtxError(Exception):
    """Something in the text that the machine does not know."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: As written, as "add.s32".
        operands: As written; a vector or an address is one operand.
        predicate: The register that decides which lanes execute it, if any.
        negated: Whether those execute it whose predicate is false.
        text: All of it.
        line: Its line in the PTX.
        source: The line of the kernel's source that it comes from, as "words.py:31".
    """

    opcode: str
    operands: tuple[str, ...]
    predicate: str | None
    negated: bool
    text: str
    line: int
    source: str


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel.

    Attributes:
        name: Its entry.
        parameters: The names of its parameters, in order.
        threads: Of a block.
        instructions: In order.
        labels: The instruction at which each label stands.
    """

    name: str
    parameters: tuple[str, ...]
    threads: int
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    def without(self, number: int) -> "Program":
        """The program without one instruction."""
        kept = list(self.instructions)
        nothing = dataclasses.replace(kept[number], opcode="nop", operands=())
        kept[number] = nothing
        return dataclasses.replace(self, instructions=tuple(kept))

    def where(self, number: int) -> str:
        """An instruction in words: its text, its line in the PTX and in the source."""
        one = self.instructions[number]
        return f"{self.name}, line {one.line} of the PTX ({one.source}): {one.text}"


_CLASSES = {"pred": "%p", "b16": "%rs", "b32": "%r", "b64": "%rd"}
_ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)\s*((?:\.\w+ [\w, ]+\n)*)\{", re.S)
_PARAMETER = re.compile(r"\.param \.(u64|b64)\b.*?(\w+)\s*$")
_REGISTERS = re.compile(r"\.reg \.(\w+)\s+(%\w+)<\d+>")
_SOURCE = re.compile(r"([\w./<>-]+):(\d+):\d+")
_INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
# Directives inside a body that say nothing about what is computed.
_SILENT = (".pragma", ".loc", ".file")


def read(text: str) -> Program:
    """Reads the text of a kernel."""
    entry = _ENTRY.search(text)
    if entry is None:
        raise PtxError("there is no entry in this PTX")
    name, given, directives = entry.groups()
    threads = re.search(r"\.reqntid (\d+)", directives)
    if threads is None:
        raise PtxError(f"{name} does not say how many threads a block has")
    reader = _Reader(name)
    first = text.count("\n", 0, entry.end()) + 1
    for number, line in enumerate(text[entry.end() :].split("\n"), first):
        if reader.take(line, number):
            break
    return Program(
        name,
        tuple(_parameter(name, one) for one in given.split(",") if one.strip()),
        int(threads[1]),
        tuple(reader.instructions),
        reader.labels,
    )


def _parameter(kernel, text):
    found = _PARAMETER.match(text.strip())
    if found is None:
        raise PtxError(f"{kernel}: parameters are 64 bits wide, got {text.strip()!r}")
    return found[2]


class _Reader:
    """Reads the lines of a kernel's body: one instruction each, as LLVM writes them."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.instructions, self.labels = [], {}
        self._source = "?"

    def take(self, line, number) -> bool:
        """Reads one line; whether it ended the body."""
        if line.startswith("}"):
            return True
        code, _, comment = line.partition("//")
        code = code.strip()
        if code.startswith(".loc"):
            found = _SOURCE.search(comment)
            self._source = f"{found[1]}:{found[2]}" if found else "?"
        elif label := re.match(r"(\$?\w+):$", code):
            self.labels[label[1]] = len(self.instructions)
        elif code and code not in "{}" and not code.startswith(_SILENT):
            if not code.endswith(";") or ";" in code[:-1]:
                raise PtxError(f"{self.kernel}, line {number}: {code!r} is not understood")
            self._statement(code[:-1].strip(), number)
        return False

    def _statement(self, text, number):
        if registers := _REGISTERS.match(text):
            kind, name = registers.groups()
            if _CLASSES.get(kind) != name:
                raise PtxError(
                    f"{self.kernel}, line {number}: registers {name} of .{kind} are not "
                    "known"
                )
            return
        found = _INSTRUCTION.match(text)
        if found is None:
            raise PtxError(f"{self.kernel}, line {number}: {text!r} is not understood")
        negated, predicate, opcode, rest = found.groups()
        operands = tuple(_split(rest))
        self.instructions.append(
            Instruction(
                opcode, operands, predicate, negated == "!", text, number, self._source
            )
        )


def _split(text):
    """The operands of an instruction: those in braces or brackets are one."""
    depth, current = 0, ""
    for letter in text:
        depth += letter in "{["
        depth -= letter in "}]"
        if letter == "," and depth == 0:
            yield current.strip()
            current = ""
        else:
            current += letter
    if current.strip():
        yield current.strip()
