"""Walks a scheduled program and counts what it does on a GPU.

How XLA runs a program on a GPU, as of JAX 0.11:

* A fusion, a copy, or any other instruction that computes is one launch; constants, tuples
  and bitcasts are none. A collective is one launch, counted where it starts.
* A loop whose length is known at compile time launches its body that many times. One whose
  length is data computes its condition on the device and copies the result to the host,
  which waits for it: once an iteration, and once more to leave.
* A conditional copies the index of its branch to the host, which waits for it.

XLA may capture consecutive launches in a CUDA graph (a command buffer) after this program
was printed. Then launches cost less; that is not counted here.
"""

import dataclasses
from collections.abc import Callable

from benchmarks.device.hlo import Computation, Instruction, Program, ProgramError
from benchmarks.device.traffic import Work, work_of


_FREE = {
    "add-dependency",
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "tuple",
}
_KERNELS = {
    "broadcast",
    "concatenate",
    "copy",
    "convert",
    "custom-call",
    "dynamic-slice",
    "dynamic-update-slice",
    "fusion",
    "gather",
    "iota",
    "pad",
    "partition-id",
    "reduce",
    "replica-id",
    "reverse",
    "scatter",
    "select",
    "slice",
    "transpose",
}
# The bytes that one of n ranks sends, as a function of the bytes of the operand.
_SENT: dict[str, Callable[[float, int], float]] = {
    "all-reduce": lambda size, n: 2 * (n - 1) / n * size,
    "reduce-scatter": lambda size, n: (n - 1) / n * size,
    "all-gather": lambda size, n: (n - 1) * size,
    "all-to-all": lambda size, n: (n - 1) / n * size,
    "collective-permute": lambda size, n: size,
}


@dataclasses.dataclass
class Counts:
    """The counts of a program; fractions, if a branch is taken in some runs only.

    Attributes:
        launches: The number of kernels, copies and collectives that the host launches.
        waits: The number of times that the host waits for a result of the device.
        read: Bytes read from the device's memory.
        written: Bytes written to the device's memory.
        sent: Bytes that this rank sends.
        collectives: The number of collectives of each kind.
        kernels: For each kernel the number of times that it runs, and its work.
    """

    launches: float = 0
    waits: float = 0
    read: float = 0
    written: float = 0
    sent: float = 0
    collectives: dict[str, float] = dataclasses.field(default_factory=dict)
    kernels: list[tuple[float, Work]] = dataclasses.field(default_factory=list)

    def add(self, other: "Counts", times: float = 1) -> None:
        """Adds the counts of another program that runs `times` times."""
        for name in ("launches", "waits", "read", "written", "sent"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        for kind, number in other.collectives.items():
            self.collectives[kind] = self.collectives.get(kind, 0) + times * number
        self.kernels += [(times * often, work) for often, work in other.kernels]


def _is_empty(one: Instruction) -> bool:
    """Returns whether it only allocates a buffer, uninitialized, for a Triton kernel."""
    return one.opcode == "custom-call" and '="AllocateBuffer"' in one.rest


# From the place of a loop to its mean iterations each time that it begins.
Turns = Callable[[tuple[str, ...]], float]
# From the place of a conditional, and its number of branches, to the share of runs in which
# each is taken.
Taken = Callable[[tuple[str, ...], int], list[float]]
# From the place of a kernel of this library to its work; None if it reads all its operands
# and writes all its results.
OfKernel = Callable[[tuple[str, ...]], Work | None]


@dataclasses.dataclass(frozen=True)
class Walk:
    """Counts one program.

    Attributes:
        program: The program.
        turns: Returns the iterations of a loop whose length is data.
        taken: Returns the shares of branches that are taken.
        ranks: The number of ranks of a collective that names no groups.
        kernel: Returns the work of kernels that exit early where they have no entries.
    """

    program: Program
    turns: Turns
    taken: Taken
    ranks: int
    kernel: OfKernel | None = None

    def __call__(self) -> Counts:
        """Returns the counts of one run of the program."""
        return self._computation(self.program.entry)

    def _called(self, name: str | None, instruction: Instruction) -> Counts:
        if name not in self.program.computations:
            raise ProgramError(f"{instruction.name} calls {name}, which is not there.")
        return self._computation(self.program.computations[name])

    def _computation(self, computation: Computation) -> Counts:
        counts = Counts()
        for instruction in computation.instructions.values():
            counts.add(self._instruction(computation, instruction))
        return counts

    def _instruction(self, within: Computation, one: Instruction) -> Counts:
        opcode = one.opcode.removesuffix("-start")
        if one.opcode in _FREE or one.opcode.endswith("-done") or _is_empty(one):
            return Counts()
        if opcode in _SENT:
            return self._collective(within, one, opcode)
        if opcode == "while":
            return self._loop(one)
        if opcode == "conditional":
            return self._conditional(one)
        if opcode == "call":
            return self._called(one.called("to_apply"), one)
        if opcode == "async":
            return self._called(one.called("calls"), one)
        if opcode in _KERNELS:
            if one.opcode != opcode:
                # The first result of an asynchronous start is that of the operation.
                one = dataclasses.replace(one, opcode=opcode, arrays=one.arrays[:1])
            known = opcode == "custom-call" and self.kernel is not None
            work = self.kernel(self.program.place(one)) if known else None
            work = work or work_of(self.program, within, one)
            bytes_ = {"read": work.read, "written": work.written}
            return Counts(launches=1, **bytes_, kernels=[(1, work)])
        raise ProgramError(
            f"{one.name} is a {one.opcode}, of which it is not known what it launches: say "
            "so in benchmarks/device/walk.py."
        )

    def _collective(self, within, one, kind):
        size = sum(operand.bytes for operand in within.given(one))
        n = one.group or self.ranks
        results = {"all-gather": size * n, "reduce-scatter": size / n}.get(kind, size)
        return Counts(
            launches=1,
            kernels=[(1, Work(size, results))],
            read=size,
            written=results,
            sent=_SENT[kind](size, n),
            collectives={kind: 1},
        )

    def _loop(self, one):
        counts = Counts()
        if one.trips is not None:
            counts.add(self._called(one.called("body"), one), one.trips)
            return counts
        turns = self.turns(self.program.place(one))
        counts.waits = turns + 1
        counts.add(self._called(one.called("condition"), one), turns + 1)
        if turns:
            counts.add(self._called(one.called("body"), one), turns)
        return counts

    def _conditional(self, one):
        counts = Counts(waits=1)
        shares = self.taken(self.program.place(one), len(one.branches))
        for name, share in zip(one.branches, shares, strict=True):
            # A branch that is never taken may have loops that `turns` does not know.
            if share:
                counts.add(self._called(name, one), share)
        return counts
