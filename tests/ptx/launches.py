"""The machine in place of a GPU: launches of kernels, by the code that a GPU is given."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from tests.ptx import compiler
from tests.ptx.machine.code import Code
from tests.ptx.machine.launch import Launch, Ran
from tests.ptx.machine.memory import Fault, Memory
from tests.ptx.machine.orders import Order, shortest
from tests.ptx.machine.program import Program, PtxError, read


# Accesses that nothing orders, by kernel, buffer and kinds, and why they do no harm.
HARMLESS = {
    ("threshold_hash_kernel", "_memory", "store", "store"): (
        "whichever element is the last to take a slot keeps it: any of them may"
    ),
    ("threshold_hash_kernel", "operand 3", "store", "store"): (
        "as that one, in Pallas: whichever element is the last to take a slot keeps it"
    ),
    ("partition_write_kernel", "operand 3", "store", "store"): (
        "the write step of Zen's Algorithm 1, in Pallas: whichever index is the last to "
        "take a slot keeps it, and the next launch lets the others go on"
    ),
    ("partition_write_kernel", "operand 3", "load", "store"): (
        "an index that still finds a slot free writes over another, as in that one; an "
        "index that finds it taken goes on"
    ),
    ("unpack_message_kernel", "_into", "load", "store"): (
        "where a tile has fewer elements than threads, several threads load the number to "
        "which one of them adds; what the others load goes nowhere, and two that add to "
        "one number are two stores, which are not let pass"
    ),
}


class Race(Exception):
    """Accesses of a kernel that nothing orders."""


@dataclasses.dataclass
class Gpu:
    """Launches kernels, each in an order of its own.

    Attributes:
        arch: The compute capability that they are compiled for.
        seed: From which the orders are drawn.
        edit: What is done to each program before it is launched, for a mutant.
        counts: Launches and steps.
        used: The opcodes of all kernels.
        last: The last launch: what it was given, and what it did.
    """

    arch: int = 90
    seed: int = 0
    edit: Callable[[Program], Program] | None = None
    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    used: set[str] = dataclasses.field(default_factory=set)
    last: "Launched | None" = None

    def launched(
        self,
        kernel,
        programs: int,
        operands: Sequence,
        *,
        in_place: Sequence = (),
        results: Sequence[jax.ShapeDtypeStruct] = (),
        warps: int = 4,
        zeroed: bool = False,
        **sizes,
    ) -> list[np.ndarray]:
        """As `pallas_kernels.triton.launch.launch`, from and to arrays of NumPy."""
        like = (*operands, *in_place, *in_place, *results)
        dtypes = tuple(np.dtype(x.dtype).name for x in like)
        compiled = compiler.of_triton(kernel, dtypes, sizes, warps, self.arch)
        names = [name for name in kernel.arg_names if name not in sizes]
        aliases = {len(operands) + i: i for i in range(len(in_place))}
        results = [*in_place, *results]
        operands = [*operands, *in_place]
        return self.run(
            compiled, programs, operands, results, aliases, names=names, zeroed=zeroed
        )

    def run(
        self,
        compiled: compiler.Compiled,
        programs: int,
        operands: Sequence,
        results: Sequence,
        aliases: dict[int, int],
        *,
        names: Sequence[str] | None = None,
        zeroed: bool = False,
    ) -> list[np.ndarray]:
        """Launches what was compiled; its results.

        Args:
            compiled: The kernel: it has a pointer for each operand and each result.
            programs: How many blocks.
            operands: Arrays that it reads.
            results: The shapes and dtypes of what it writes.
            aliases: Which operand, by number, becomes which result.
            names: Of the pointers, for errors.
            zeroed: Whether results are zero before it runs.
        """
        names = names or [f"operand {i}" for i in range(len(operands))]
        names = [*names, *(f"result {i}" for i in range(len(results)))]
        code = compiled.code
        if self.edit is not None:
            code = _edited(compiled.ptx, self.edit)
        number = self.counts["launches"]
        seed = 1_000_003 * self.seed + number
        given = code, compiled.shared, programs, operands, results, aliases, names, zeroed
        self.last = Launched(seed, given)
        self.counts["launches"] += 1
        self.used |= {one.opcode for one in code.program.instructions}
        try:
            return self.last.run(Order(seed))
        except (Fault, Race, PtxError) as error:
            self.last.error = error  # JAX may wrap it
            raise
        finally:
            self.counts["steps"] += self.last.ran.steps


@functools.cache
def _edited(ptx, edit):
    return Code(edit(read(ptx)))


@dataclasses.dataclass
class Launched:
    """One launch, which may be repeated in another order.

    Attributes:
        seed: Of its order, and of garbage.
        given: The kernel, and what it was launched with.
        ran: What it did, the last time.
        memory: Its buffers, the last time.
        error: What it raised the first time.
    """

    seed: int
    given: tuple
    ran: Ran | None = None
    memory: Memory | None = None
    error: Exception | None = None

    @property
    def kernel(self) -> str:
        return self.given[0].program.name

    def run(self, order: Order) -> list[np.ndarray]:
        """Launches the kernel on what it was given; its results."""
        code, shared, programs, operands, results, aliases, names, zeroed = self.given
        memory, rng = Memory(), np.random.default_rng(self.seed)
        self.memory = memory
        reads = [
            memory.add(name, bytes_of(x), writable=i in aliases)
            for i, (name, x) in enumerate(zip(names, operands, strict=False))
        ]
        in_place = {result: reads[operand] for operand, result in aliases.items()}
        writes = []
        for i, (name, x) in enumerate(zip(names[len(reads) :], results, strict=False)):
            content = np.zeros(size_of(x), np.uint8) if zeroed else noise(rng, x)
            writes.append(
                in_place[i] if i in in_place else memory.add(name, content, written=zeroed)
            )
        arguments = [*reads, *writes]
        # Triton's own two, of which our kernels use none.
        arguments += [None] * (len(code.program.parameters) - len(arguments))
        launch = Launch(code, programs, arguments, memory, shared=shared, order=order)
        self.ran = launch.ran
        try:
            launch.run()
        except Fault:
            _check(code.program, launch.ran)  # a race says why
            raise
        _check(code.program, launch.ran)
        return [
            buffer.content.view(x.dtype).reshape(x.shape)
            for buffer, x in zip(writes, results, strict=True)
        ]

    def fails(self, order: tuple[int, ...]) -> bool:
        """Whether it is at fault where warps go in this order, and then by number."""
        try:
            self.run(Order(self.seed, order))
        except (Fault, Race, PtxError):
            return True
        return False

    def shortest(self) -> tuple[int, ...] | None:
        """The shortest order found in which it is at fault; None: it is not as it was."""
        found = tuple(self.ran.order)
        return shortest(found, self.fails) if self.fails(found) else None


def _check(program: Program, ran: Ran):
    """Raises for a race that is not listed as harmless."""
    is_harmless = lambda name, *kinds: (program.name, name, *sorted(kinds)) in HARMLESS
    conflicts = [
        x
        for x in ran.conflicts.values()
        if not is_harmless(x.buffer, x.first[0], x.second[0])
    ]
    if conflicts:
        one, *others = conflicts
        (was, first), (now, second) = one.first, one.second
        raise Race(
            f"{one.buffer}, byte {one.offset}: nothing orders a {was} by "
            f"{_thread(one.threads[0])} and a {now} by {_thread(one.threads[1])}, "
            f"{program.where(first)} and {program.where(second)}; and "
            f"{len(others)} more"
        )
    for (number, name), count in ran.collisions.items():
        if not is_harmless(name, "store", "store"):
            raise Race(
                f"{program.where(number)}: {count} lanes store other values in one place "
                f"of {name}"
            )


def _thread(number):
    return f"thread {number}" if number >= 0 else "several threads"


def size_of(x) -> int:
    """The bytes of an array."""
    return int(np.prod(x.shape, dtype=int)) * np.dtype(x.dtype).itemsize


def bytes_of(x) -> np.ndarray:
    """An array as bytes, that may be written."""
    return np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8).copy()


def noise(rng, x) -> np.ndarray:
    """Bytes that may stand where an array will be."""
    return rng.integers(0, 256, size_of(x), np.uint8)
