"""What a compiled program has: its size, its temporaries, scatters, and copies."""

import math
import re
import time
from typing import Any, NamedTuple

from benchmarks.device import hlo
from benchmarks.tpu.steps import Step


class Found(NamedTuple):
    """What a step is as a program.

    Attributes:
        compile: Seconds that it took to compile.
        temporary: Bytes of temporaries on a chip.
        code: Bytes of the program.
        updates: Of its largest scatter; 0 without one.
        copied: Numbers of the largest array that is copied as a whole.
        operations: How many there are of the kinds that cost most.
    """

    compile: float
    temporary: int
    code: int
    updates: int
    copied: int
    operations: dict[str, int]


_KINDS = ("fusion", "scatter", "sort", "while", "conditional", "copy", "copy-start")


def compiled(lowered: Any) -> Found:
    """Compiles a step that was lowered."""
    start = time.perf_counter()
    program = lowered.compile()
    seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    sizes = memory.temp_size_in_bytes, memory.generated_code_size_in_bytes
    return Found(seconds, *sizes, *read(program.as_text()))


def read(text: str) -> tuple[int, int, dict[str, int]]:
    """The updates of the largest scatter, the largest copy, and counts of operations."""
    updates, copied, counts = 0, 0, dict.fromkeys(_KINDS, 0)
    for computation in hlo.parse(text).computations.values():
        for one in computation.instructions.values():
            if one.opcode in counts:
                counts[one.opcode] += 1
            if one.opcode == "scatter":
                updates = max(updates, _updates(computation, one))
            if one.opcode in ("copy", "copy-start"):
                copied = max(copied, math.prod(one.arrays[0].shape))
    return updates, copied, counts


def _updates(computation: hlo.Computation, scatter: hlo.Instruction) -> int:
    """How many updates a scatter has: those of its indices."""
    operands = computation.given(scatter)
    (indices,) = operands[len(operands) // 2].arrays
    found = re.search(r"index_vector_dim=(\d+)", scatter.rest)
    at = int(found[1]) if found else len(indices.shape)
    return math.prod(n for axis, n in enumerate(indices.shape) if axis != at)


def exceeded(step: Step, found: Found) -> list[str]:
    """What a program has more of than it may."""
    pairs = [
        ("a scatter of", found.updates, step.updates, "updates"),
        ("code of", found.code, step.code, "bytes"),
    ]
    wrong = [
        f"{step.named()} has {what} {has:,} {unit}, ceiling {most:,}."
        for what, has, most, unit in pairs
        if most is not None and has > most
    ]
    if step.table is not None and found.copied >= step.table:
        wrong.append(
            f"{step.named()} copies an array of {found.copied:,} numbers, and a table has "
            f"{step.table:,}."
        )
    return wrong
