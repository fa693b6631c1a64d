"""A program as the machine runs it: what computes, and what touches memory or waits.

Instructions that only compute are translated into Python, all of them up to the next one
that does something else, since nobody can see in which order warps compute. The others are
actions: objects with what the instruction says of them. Registers of a warp are a list; the
code knows the place of each.
"""

import dataclasses
import functools
import re
from collections.abc import Callable

import numpy as np

from tests.ptx.machine import flow
from tests.ptx.machine.lanes import LANES, OPCODES, TYPES
from tests.ptx.machine.program import Program, PtxError


# Where the shared memory of a block begins: as on Hopper, after what the system keeps.
SHARED = 1024
SPECIAL = ("%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x", "%laneid")
_BITS = {"%p": "pred", "%rs": "b16", "%r": "b32", "%rd": "b64"}
_REGISTER = re.compile(r"(%[a-z]+)(\d+)$")
_ADDRESS = re.compile(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?\s*\]$")
ORDERS = ("relaxed", "acquire", "release", "acq_rel")
MATRICES = (
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
    "stmatrix.sync.aligned.m8n8.x4.shared.b16",
)
# Of a fence or an atomic operation that blocks may share; of a block alone none is known.
SCOPES = ("gpu", "sys")
FENCES = ("membar.gl", "fence.acq_rel.gpu", "fence.sc.gpu")


@dataclasses.dataclass(frozen=True)
class Action:
    """An instruction that does more than compute.

    Attributes:
        number: Of the instruction.
        kind: "load", "store", "load matrices", "store matrices", "atomic", "barrier",
            "fence", "branch" or "return".
        predicate: The place of its predicate, if any, and whether it is negated.
        space: "global" or "shared".
        base: The place of the register with the address; None: it is the offset.
        offset: What is added to it.
        type: The type of an element.
        registers: The places of what is loaded or stored; None for what is left out.
        operands: For each operand of an atomic operation, the place of each element.
        operation: Of an atomic operation, as "add".
        orders: Whether it makes stores before it visible.
        target: Where a branch goes.
        uniform: Whether all lanes take a branch, or none.
    """

    number: int
    kind: str
    predicate: int | None = None
    negated: bool = False
    space: str = ""
    base: int | None = None
    offset: int = 0
    type: str = ""
    registers: tuple[int | None, ...] = ()
    operands: tuple[tuple[int, ...], ...] = ()
    operation: str = ""
    orders: bool = False
    target: int = 0
    uniform: bool = False


class Code:
    """A program, translated.

    Attributes:
        program: What it was translated from.
        dtypes: The dtype of each register, by place.
        constants: What registers hold from the start, by place.
        special: The places of `SPECIAL` and of the parameters, by name.
        actions: The action at each instruction; None where it computes.
        joins: For each branch that a predicate decides, where its ways meet.
        grain: The size of the smallest access, by space.
    """

    def __init__(self, program: Program):
        self.program = program
        self.dtypes: list[np.dtype] = []
        self.constants: dict[int, np.ndarray] = {}
        self.special: dict[str, int] = {}
        self._places: dict[str, int] = {}
        for name in SPECIAL:
            self.special[name] = self._place(name, "b32")
        for name in program.parameters:
            self.special[name] = self._place(name, "b64")
        self.actions: list[Action | None] = []
        self._lines: list[list[tuple[int, str]] | None] = []
        self._names: dict[str, object] = {"where": np.where}
        for number, one in enumerate(program.instructions):
            self._translate(number, one)
        branches = [one for one in self.actions if one and one.kind == "branch"]
        self.joins = flow.joins(program, {one.number: one.target for one in branches})
        self._meets = {*self.joins.values()}
        self.grain = {
            space: min((TYPES[one.type].itemsize for one in self._in(space)), default=4)
            for space in ("global", "shared")
        }

    def _in(self, space):
        return [one for one in self.actions if one is not None and one.space == space]

    def _place(self, name, kind):
        if name not in self._places:
            self._places[name] = len(self.dtypes)
            self.dtypes.append(TYPES[kind])
        return self._places[name]

    @functools.cache  # noqa: B019  # as long as the code lives
    def computes(self, start: int, masked: bool) -> tuple[Callable | None, int]:
        """What computes from an instruction on, and the instruction where it ends.

        It ends at an action, and where lanes meet that went different ways.

        Args:
            start: The instruction.
            masked: Whether it computes for some lanes alone.
        """
        end = start
        while self.actions[end] is None and (end == start or end not in self._meets):
            end += 1
        lines = []
        for number in range(start, end):
            if masked and ".sync" in self.program.instructions[number].opcode:
                raise PtxError(
                    f"{self.program.where(number)}: some lanes of a warp do not come here"
                )
            for to, value in self._lines[number]:
                value = f"where(M, {value}, R[{to}])" if masked else value
                lines.append(f"R[{to}] = {value}")
        if not lines:
            return None, end
        names = dict(self._names)
        body = "\n    ".join(lines)
        exec(f"def run(R, M):\n    {body}", names)  # all of its text is from here
        return names["run"], end

    # Operands.

    def _register(self, text, kind, one):
        """The place of an operand that has the width of a type."""
        if text in self.special:
            wanted = self.dtypes[self.special[text]]
            if wanted.itemsize != TYPES[kind].itemsize:
                raise PtxError(f"{self._where(one)}: {text} is not as wide as .{kind}")
            return self.special[text]
        found = _REGISTER.match(text)
        if found is None or found[1] not in _BITS:
            return self._constant(text, kind, one)
        bits = _BITS[found[1]]
        if TYPES[bits].itemsize != TYPES[kind].itemsize or (bits == "pred") != (
            kind == "pred"
        ):
            raise PtxError(f"{self._where(one)}: {text} is not as wide as .{kind}")
        return self._place(text, bits)

    def _constant(self, text, kind, one):
        width = TYPES[kind].itemsize
        try:
            number = _number(text)
        except ValueError:
            raise PtxError(f"{self._where(one)}: {text!r} is not understood") from None
        name = f"{number}.{kind}"
        dtype = TYPES["pred"] if kind == "pred" else np.dtype(f"u{width}")
        if name not in self._places:
            self._places[name] = len(self.dtypes)
            self.dtypes.append(dtype)
            value = bool(number) if kind == "pred" else number & ((1 << 8 * width) - 1)
            self.constants[self._places[name]] = np.full(LANES, value, dtype)
        return self._places[name]

    def _any_register(self, text, one):
        """The place of a register of any width; None for one that is left out."""
        if text == "_":
            return None
        found = _REGISTER.match(text)
        if found is None:
            raise PtxError(f"{self._where(one)}: {text!r} is no register")
        return self._place(text, _BITS[found[1]])

    def _where(self, one):
        return self.program.where(self.program.instructions.index(one))

    # Instructions.

    def _translate(self, number, one):
        action, lines = None, None
        parts = one.opcode.split(".")
        if one.opcode == "nop":
            lines = []
        elif parts[0] == "mov" and "{" in "".join(one.operands):
            lines = self._moved_apart(one, parts[1])
        elif one.opcode in OPCODES:
            if ".sync" in one.opcode and one.predicate is not None:
                raise PtxError(f"{self._where(one)}: some lanes of a warp take no part")
            lines = self._computed(one)
        elif parts[:2] == ["ld", "param"]:
            lines = self._parameter(one, parts[2])
        else:
            action = self._action(number, one, parts)
        if lines is not None and one.predicate is not None:
            predicate = f"R[{self._register(one.predicate, 'pred', one)}]"
            lines = [
                (to, f"where({predicate}, R[{to}], {value})")
                if one.negated
                else (to, f"where({predicate}, {value}, R[{to}])")
                for to, value in lines
            ]
        self.actions.append(action)
        self._lines.append(lines)

    def _computed(self, one):
        opcode = OPCODES[one.opcode]
        to, *given = one.operands
        if len(given) != len(opcode.operands):
            raise PtxError(f"{self._where(one)}: {len(given)} operands")
        places = [
            self._register(text, kind, one)
            for text, kind in zip(given, opcode.operands, strict=True)
        ]
        name = one.opcode.replace(".", "_")
        self._names[name] = opcode.function
        value = f"{name}({', '.join(f'R[{place}]' for place in places)})"
        return [(self._register(to, opcode.result, one), value)]

    def _parameter(self, one, kind):
        to = self._register(one.operands[0], kind, one)
        name = one.operands[1].strip("[] ")
        if name not in self.program.parameters or self.dtypes[to].itemsize != 8:
            raise PtxError(f"{self._where(one)}: {name!r} is no parameter")
        return [(to, f"R[{self.special[name]}]")]

    def _moved_apart(self, one, kind):
        """A register that is taken apart or put together, its lowest part first."""
        to, given = one.operands
        parts = [x.strip() for x in (to if to[0] == "{" else given)[1:-1].split(",")]
        part = f"b{int(kind[1:]) // len(parts)}"
        self._names |= {"part": _part, "together": _together}
        if to[0] == "{":
            source = self._register(given, kind, one)
            return [
                (self._register(name, part, one), f"part(R[{source}], {i}, {part!r})")
                for i, name in enumerate(parts)
                if name != "_"
            ]
        places = ", ".join(f"R[{self._register(name, part, one)}]" for name in parts)
        return [(self._register(to, kind, one), f"together({places})")]

    def _action(self, number, one, parts):
        head = parts[0]
        common = {"number": number, "negated": one.negated}
        if one.predicate is not None:
            common["predicate"] = self._register(one.predicate, "pred", one)
        if one.opcode == "ret":
            return Action(kind="return", **common)
        if one.opcode in ("bra", "bra.uni") and one.operands[0] in self.program.labels:
            target = self.program.labels[one.operands[0]]
            uniform = one.opcode == "bra.uni"
            return Action(kind="branch", target=target, uniform=uniform, **common)
        if (one.opcode, one.operands) == ("bar.sync", ("0",)) and one.predicate is None:
            return Action(kind="barrier", **common)
        if one.opcode in FENCES and one.predicate is None:
            return Action(kind="fence", orders=True, **common)
        if head in ("ld", "st") and parts[1] in ("global", "shared"):
            return self._moved(one, parts, common)
        if head == "atom":
            return self._atomic(one, parts, common)
        if one.opcode in MATRICES and one.predicate is None:
            at, what = (1, 0) if one.opcode.startswith("ld") else (0, 1)
            base, offset = self._address(one.operands[at], "shared", one)
            names = _vector(one.operands[what])
            registers = tuple(self._register(name, "b32", one) for name in names)
            kind = "load matrices" if at else "store matrices"
            return Action(
                kind=kind, space="shared", base=base, offset=offset, type="b32",
                registers=registers, **common,
            )  # fmt: skip
        raise PtxError(f"{self._where(one)}: the machine does not know {one.opcode!r}")

    def _moved(self, one, parts, common):
        head, space, *further, kind = parts
        count = {(): 1, ("v2",): 2, ("v4",): 4}.get(tuple(further))
        at, what = (1, 0) if head == "ld" else (0, 1)
        names = _vector(one.operands[what])
        if count != len(names) or kind not in TYPES or len(one.operands) != 2:
            raise PtxError(f"{self._where(one)}: the machine does not know {one.opcode!r}")
        base, offset = self._address(one.operands[at], space, one)
        if head == "ld":
            registers = tuple(self._any_register(name, one) for name in names)
        else:
            registers = tuple(self._stored(name, kind, one) for name in names)
        return Action(
            kind="load" if head == "ld" else "store", space=space, base=base,
            offset=offset, type=kind, registers=registers, **common,
        )  # fmt: skip

    def _stored(self, name, kind, one):
        found = _REGISTER.match(name)
        if found is None:
            return self._constant(name, kind, one)
        return self._place(name, _BITS[found[1]])

    def _atomic(self, one, parts, common):
        _, *words, kind = parts
        named = {word for word in words if word in ORDERS}
        count = {"v2": 2, "v4": 4}
        vector = [word for word in words if word in count]
        rest = [w for w in words if w not in (*ORDERS, *SCOPES, *count, "global", "noftz")]
        operation = rest[0] if len(rest) == 1 else None
        if (
            "global" not in words
            or operation not in lanes_of_atomics(kind)
            or not 2 < len(one.operands) < 5
        ):
            raise PtxError(f"{self._where(one)}: the machine does not know {one.opcode!r}")
        wide = count[vector[0]] if vector else 1
        base, offset = self._address(one.operands[1], "global", one)
        operands = tuple(
            tuple(self._register(name, kind, one) for name in _vector(text))
            for text in one.operands[2:]
        )
        registers = tuple(self._any_register(x, one) for x in _vector(one.operands[0]))
        if {len(registers), *map(len, operands)} != {wide}:
            raise PtxError(f"{self._where(one)}: vectors of other lengths")
        return Action(
            kind="atomic", space="global", base=base, offset=offset, type=kind,
            registers=registers, operands=operands, operation=operation,
            orders=bool(named & {"release", "acq_rel"}), **common,
        )  # fmt: skip

    def _address(self, text, space, one):
        found = _ADDRESS.match(text)
        if found is None:
            raise PtxError(f"{self._where(one)}: {text!r} is no address")
        base, offset = found[1], int(found[2] or 0)
        if base == "global_smem":
            return None, SHARED + offset
        return self._register(base, "b64" if space == "global" else "b32", one), offset


def lanes_of_atomics(kind):
    """The atomic operations that the machine has on a type."""
    if kind in ("f32",):
        return ("add",)
    if kind in ("f16", "bf16"):
        return ("add",)
    numbers = "add", "min", "max", "exch", "cas", "and", "or", "xor"
    return numbers if kind in ("u32", "s32", "b32") else ()


def _vector(text):
    return [x.strip() for x in text.strip("{} ").split(",")]


def _number(text):
    """An immediate operand, as bits."""
    if text == "global_smem":
        return SHARED
    if text[:2] == "0f":
        return int(text[2:], 16)
    return int(text.rstrip("U"), 0)


def _part(x, number, kind):
    bits = 8 * TYPES[kind].itemsize
    return (x >> x.dtype.type(bits * number)).astype(TYPES[kind])


def _together(*parts):
    bits = 8 * parts[0].itemsize
    dtype = np.dtype(f"u{parts[0].itemsize * len(parts)}")
    done = np.zeros(LANES, dtype)
    for number, part in enumerate(parts):
        done |= part.astype(dtype) << dtype.type(bits * number)
    return done
