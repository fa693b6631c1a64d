"""The machine in place of a GPU: launches of kernels, by the code that a GPU is given."""

import collections
import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from tests.ptx import compiler
from tests.ptx.code import Code
from tests.ptx.machine import Launch, Ran
from tests.ptx.memory import Memory
from tests.ptx.orders import Order


# Accesses that nothing orders, by kernel and kinds, and why they do no harm.
HARMLESS = {
    ("threshold_hash_kernel", "store", "store"): (
        "whichever element is the last to take a slot keeps it: any of them may"
    ),
    ("unpack_message_kernel", "load", "store"): (
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
        given: The order of the last launch, where it is not drawn, by its number.
        counts: Launches, steps and kernels.
        used: The opcodes of all kernels.
    """

    arch: int = 90
    seed: int = 0
    given: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    used: set[str] = dataclasses.field(default_factory=set)
    last: Ran | None = None

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
        code, number = compiled.code, self.counts["launches"]
        names = names or [f"operand {i}" for i in range(len(operands))]
        names = [*names, *(f"result {i}" for i in range(len(results)))]
        memory, rng = Memory(), np.random.default_rng((self.seed, number))
        given = [
            memory.add(name, _bytes(x), writable=i in aliases)
            for i, (name, x) in enumerate(zip(names, operands, strict=False))
        ]
        shared = {result: given[operand] for operand, result in aliases.items()}
        written = []
        for i, (name, x) in enumerate(zip(names[len(given) :], results, strict=False)):
            content = np.zeros(_size(x), np.uint8) if zeroed else _noise(rng, x)
            written.append(
                shared[i] if i in shared else memory.add(name, content, written=zeroed)
            )
        arguments = [*given, *written]
        # Triton's own two, of which our kernels use none.
        arguments += [None] * (len(code.program.parameters) - len(arguments))
        order = Order(1_000_003 * self.seed + number, self.given.get(number))
        launch = Launch(
            code, programs, arguments, memory, shared=compiled.shared, order=order
        )
        self.counts["launches"] += 1
        self.used |= {one.opcode for one in code.program.instructions}
        self.last = launch.ran
        launch.run()
        self.counts["steps"] += launch.ran.steps
        self._check(code, launch.ran)
        return [
            buffer.content.view(x.dtype).reshape(x.shape)
            for buffer, x in zip(written, results, strict=True)
        ]

    def _check(self, code: Code, ran: Ran):
        program = code.program
        kinds = lambda x: (x.first[0], x.second[0])
        is_harmless = lambda *kinds: (program.name, *sorted(kinds)) in HARMLESS
        conflicts = [x for x in ran.conflicts.values() if not is_harmless(*kinds(x))]
        if conflicts:
            one, *others = conflicts
            (was, first), (now, second) = one.first, one.second
            raise Race(
                f"{one.buffer}, byte {one.offset}: nothing orders a {was} by "
                f"{_thread(one.threads[0])} and a {now} by {_thread(one.threads[1])}, "
                f"{program.where(first)} and {program.where(second)}; and "
                f"{len(others)} more"
            )
        if ran.collisions and not is_harmless("store", "store"):
            (number, count), *_ = ran.collisions.items()
            raise Race(
                f"{program.where(number)}: {count} lanes store other values in one place"
            )


def _thread(number):
    return f"thread {number}" if number >= 0 else "several threads"


def _size(x):
    return int(np.prod(x.shape, dtype=int)) * np.dtype(x.dtype).itemsize


def _bytes(x):
    return np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8).copy()


def _noise(rng, x):
    return rng.integers(0, 256, _size(x), np.uint8)
