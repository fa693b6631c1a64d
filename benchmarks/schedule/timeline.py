"""A scheduled program as two lanes, the device and the network, and what runs beside what.

The device runs instructions in the order in which they are printed. A collective begins
where its start stands, once the network has done with those before it, and the device waits
for it where its done stands; one that is printed without the two is begun and waited for at
once. (Without anything between the two, XLA prints it so.) A kernel takes what its dot
products, or the bytes that it moves, or its launch take, whichever is most; so does a loop
whose number of turns is known, with those of all turns. Of branches that send more or less,
as prior rows have them, the one runs that sends a stated share.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple, Self

from benchmarks.device.hlo import Computation, Instruction, Program
from benchmarks.device.traffic import work_of


_FREE = {"bitcast", "constant", "get-tuple-element", "parameter", "tuple", "opt-barrier"}
_FREE |= {"after-all", "add-dependency"}
_SENT = {
    "all-reduce": lambda size, n: 2 * (n - 1) / n * size,
    "all-gather": lambda size, n: (n - 1) * size,
    "all-to-all": lambda size, n: (n - 1) / n * size,
}
_PLACE = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Costs:
    """What things take. Stated, not measured.

    Attributes:
        rate: Bits a second of a rank's link.
        latency: Seconds until a collective has begun.
        flops: A second, of dot products in TF32: half of what an H200 is described with.
        memory: Bytes a second that a kernel moves: 0.8 of the description.
        launch: Seconds of a kernel that does hardly anything.
    """

    rate: float
    latency: float = 30e-6
    flops: float = 0.5 * 494e12
    memory: float = 0.8 * 4.8e12
    launch: float = 3e-6


class Step(NamedTuple):
    """One instruction that takes time.

    Attributes:
        name: Its name in the program.
        kind: "kernel", or "start", "done" or "both" of a collective.
        what: The place in the model: "forward of block 2", "reduction of blocks/2".
        of: The start that a done waits for.
        flops: Of its dot products.
        moved: Bytes to and from memory.
        sent: Bytes that a rank sends.
        launches: How many kernels it is: of a loop those of all its turns.
        after: The names of all instructions on whose results it depends.
    """

    name: str
    kind: str
    what: str
    of: str
    flops: float
    moved: float
    sent: float
    launches: int
    after: frozenset[str]


class Reduction(NamedTuple):
    """A collective, and what the device does between its start and its done.

    Attributes:
        name: In the program.
        what: What is reduced.
        sent: Bytes that a rank sends.
        between: Of each place in the model the flops and how many kernels run meanwhile.
        free: The flops of forwards and backwards that do not depend on it, nor it on them.
        seconds: That it takes, by the costs.
        waited: Seconds that the device waits for it.
    """

    name: str
    what: str
    sent: float
    between: dict[str, tuple[float, int]]
    free: float
    seconds: float
    waited: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The instructions of a program that take time, in order."""

    steps: list[Step]

    @classmethod
    def of(cls, program: Program, share: float = 0.5) -> Self:
        """Reads a scheduled program.

        Args:
            program: The program.
            share: Of branches that send, the one runs that sends the least which is at
                least this share of what the largest one sends.
        """
        return cls(list(_steps(program, program.entry, share, frozenset())))

    def seconds(self, costs: Costs) -> dict[str, float]:
        """What each kernel, and each start of a collective, takes."""
        return {
            step.name: self._on_wire(step, costs)
            if step.kind in ("start", "both")
            else self._on_device(step, costs)
            for step in self.steps
            if step.kind != "done"
        }

    def total(self, costs: Costs) -> float:
        """Seconds of a step."""
        return self._run(costs)[0]

    def waiting(self, costs: Costs) -> float:
        """Seconds in which the device waits for the network."""
        return sum(waited for waited, _ in self._run(costs)[1].values())

    def reductions(self, costs: Costs) -> list[Reduction]:
        """What lies between the two ends of each collective."""
        _, lanes = self._run(costs)
        found = []
        for at, step in enumerate(self.steps):
            if step.kind not in ("start", "both"):
                continue
            ends = [i for i, other in enumerate(self.steps) if other.of == step.name]
            end = max(ends, default=at)
            between: dict[str, tuple[float, int]] = {}
            for other in self.steps[at + 1 : end]:
                if other.kind == "kernel":
                    flops, count = between.get(other.what, (0.0, 0))
                    between[other.what] = flops + other.flops, count + 1
            free = sum(
                other.flops
                for other in self.steps
                if other.what.startswith(("forward", "backward"))
                and step.name not in other.after
                and other.name not in step.after
            )
            waited, seconds = lanes[step.name]
            found.append(
                Reduction(step.name, step.what, step.sent, between, free, seconds, waited)
            )
        return found

    @staticmethod
    def _on_device(step, costs):
        launches = step.launches * costs.launch
        return max(launches, step.flops / costs.flops, step.moved / costs.memory)

    @staticmethod
    def _on_wire(step, costs):
        return costs.latency + step.sent * 8 / costs.rate

    def _run(self, costs):
        """Seconds in all; of each collective those waited for it, and those it takes."""
        device = network = 0.0
        ends: dict[str, float] = {}
        lanes: dict[str, tuple[float, float]] = {}
        for step in self.steps:
            if step.kind == "kernel":
                device += self._on_device(step, costs)
                continue
            name = step.of if step.kind == "done" else step.name
            if step.kind != "done":
                takes = self._on_wire(step, costs)
                network = max(network, device) + takes
                ends[name], lanes[name] = network, (0.0, takes)
            if step.kind != "start":
                waited = max(0.0, ends[name] - device)
                lanes[name] = waited, lanes[name][1]
                device += waited
        return max(device, network), lanes


def _steps(
    program: Program, within: Computation, share: float, before: frozenset[str]
) -> Iterator[Step]:
    after: dict[str, frozenset[str]] = {}
    for one in within.instructions.values():
        known = before.union(one.operands, *(after[name] for name in one.operands))
        after[one.name] = known
        if one.opcode in _FREE:
            continue
        if (branch := _chosen(program, one, share)) is not None:
            inside = list(_steps(program, branch, share, known))
            after[one.name] = known.union(step.name for step in inside)
            yield from inside
            continue
        base = _base(one)
        kind, sent, work = "kernel", 0.0, _NOTHING
        if base in _SENT:
            kind = {"": "both"}.get(one.opcode.removeprefix(base), one.opcode[-5:])
            kind = kind.lstrip("-")
            sent = _sent(within, one) if _sends(one) else 0.0
        elif one.opcode != base:
            if one.opcode.endswith("-done"):
                continue
        else:
            work = _work(program, within, one)
        of = one.operands[0] if kind == "done" else ""
        yield Step(one.name, kind, _what(program, one), of, *work[:2], sent, work[2], known)


def _base(one: Instruction) -> str:
    return re.sub(r"-(start|done)$", "", one.opcode)


def _sends(one: Instruction) -> bool:
    return _base(one) in _SENT and not one.opcode.endswith("-done")


def _sent(within: Computation, one: Instruction) -> float:
    size = sum(operand.bytes for operand in within.given(one))
    return _SENT[_base(one)](size, one.group or 1)


def _chosen(program: Program, one: Instruction, share: float) -> Computation | None:
    """The branch that runs, of those that send; None where none does."""
    if one.opcode != "conditional":
        return None
    branches = [program.computations[name] for name in one.branches]
    sent = [
        sum(_sent(each, x) for x in each.instructions.values() if _sends(x))
        for each in branches
    ]
    if not any(sent):
        return None
    enough = [at for at, size in enumerate(sent) if size >= share * max(sent)]
    return branches[min(enough, key=sent.__getitem__)]


_NOTHING = (0.0, 0.0, 1)


def _work(
    program: Program, within: Computation, one: Instruction
) -> tuple[float, float, int]:
    """The flops, the bytes moved and the launches of what is computed."""
    body = one.called("body") if one.opcode == "while" else None
    if body is None or one.trips is None:
        move = work_of(program, within, one)
        return _flops(program, within, one), move.read + move.written, 1
    inside = program.computations[body]
    parts = [
        _work(program, inside, each)
        for each in inside.instructions.values()
        if each.opcode not in _FREE
    ]
    # A body may have nothing in it but what is free.
    parts.append((0.0, 0.0, 0))
    flops, bytes_, launches = map(sum, zip(*parts, strict=True))
    return flops * one.trips, bytes_ * one.trips, launches * one.trips


def _what(program: Program, one: Instruction) -> str:
    """The place in the model, from the scopes in which an instruction was traced."""
    found = _PLACE.search(one.rest)
    place = found[1] if found else ""
    if inside := re.search(r"reduce ([^/]*(?:/\d+)?)/", place):
        is_sum = one.opcode.startswith("all-reduce")
        return f"{'reduction' if is_sum else 'update'} of {inside[1]}"
    if inside := re.search(r"/(prior rows|delayed rows|next ids)/", place):
        return f"exchange of {inside[1]}"
    if inside := re.search(r"jvp\((block \d+|head|words)\)", place):
        way = "backward" if "transpose(jvp" in place else "forward"
        return f"{way} of {inside[1]}"
    return "reduction" if one.opcode.startswith("all-reduce") else "other"


def _flops(program: Program, within: Computation, one: Instruction) -> float:
    """Of the dot products in an instruction."""
    if one.opcode == "fusion":
        inside = program.computations[one.called("calls") or ""]
        return sum(_of_dot(inside, each) for each in inside.instructions.values())
    return _of_dot(within, one)


def _contracted(rest: str) -> list[int]:
    """The axes of the first operand over which a dot product sums."""
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)
    found = found or re.search(r'"lhs_contracting_dimensions":\[([\d",]*)\]', rest)
    return [int(axis) for axis in re.findall(r"\d+", found[1])] if found else []


def _of_dot(inside: Computation, one: Instruction) -> float:
    by_library = one.opcode == "custom-call" and "__cublas" in one.rest
    if one.opcode != "dot" and not by_library:
        return 0.0
    left = inside.given(one)[0].arrays[0].shape
    length = math.prod(left[axis] for axis in _contracted(one.rest))
    return 2.0 * math.prod(one.arrays[0].shape) * length
