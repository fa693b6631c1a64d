"""Kernels that are broken as programs of a GPU may be: the machine must find each.

    python -m tests.ptx.mutants [NAME ...]

Says what the machine finds in each mutant, and whether Triton's interpreter lets it pass.
It runs programs one after another, and the lanes of one all at once: no barrier is needed
there, and nothing that a thread does may come between a load and a store of another.
"""

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable

from tests.kernels import checks
from tests.ptx import runs
from tests.ptx.launches import Gpu, Race
from tests.ptx.machine.memory import Fault
from tests.ptx.machine.program import Instruction, Program


ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A kernel that is broken.

    Attributes:
        case: The backend and the check.
        old: What stands in the kernel's source, once; empty if its PTX is edited.
        new: What the mutant has instead.
        edit: What is done to its program.
        interpreted: Whether Triton's interpreter lets it pass; it runs no PTX.
    """

    case: tuple[str, str]
    old: str = ""
    new: str = ""
    edit: Callable[[Program], Program] | None = None
    interpreted: bool | None = None


def _without(opcode: str, kernel: str = "") -> Callable[[Program], Program]:
    """Removes the instructions with an opcode, from a kernel or from all."""

    def edit(program):
        if kernel and program.name != kernel:
            return program
        for number, one in enumerate(program.instructions):
            if one.opcode == opcode:
                program = program.without(number)
        return program

    return edit


def _each(prefix: str, **change: Callable[[Instruction], object]):
    """Changes fields of the instructions whose opcode begins so."""

    def changed(one):
        if not one.opcode.startswith(prefix):
            return one
        return dataclasses.replace(one, **{k: of(one) for k, of in change.items()})

    def edit(program):
        instructions = tuple(map(changed, program.instructions))
        return dataclasses.replace(program, instructions=instructions)

    return edit


def _other_atomics(old: str, new: str) -> Callable[[Program], Program]:
    """Another operation for some atomic ones."""
    return _each("atom", opcode=lambda one: one.opcode.replace(old, new))


def _unmasked(opcode: str) -> Callable[[Program], Program]:
    """Takes the predicate off the instructions with an opcode."""
    return _each(opcode, predicate=lambda one: None, negated=lambda one: False)


_PARTITION = "triton", "partition.py"
_DENSE = "triton", "partition_dense.py"
_MESSAGES = "triton", "some messages"
_SWAP = 'found = tl.atomic_cas(own + slot, expected, index, sem="relaxed")'
_TICKET = 'ticket = tl.atomic_add(counts_ptr + part, 1, mask=waiting, sem="relaxed")'
_RANGE = 'first = tl.atomic_add(counts_ptr + number, many, mask=many > 0, sem="relaxed")'

# Races, missing barriers, reservations that are not atomic, wrong masks, and operations of
# another type.
MUTANTS = {
    "slots are written and read back in one launch": Mutant(
        _PARTITION,
        _SWAP,
        """free = waiting & (tl.load(own + slot) == -1)
        tl.store(own + slot, index, mask=free)
        tl.debug_barrier()
        back = tl.load(own + slot)
        found = tl.where(free & (back == index), -1, index)""",
        interpreted=True,
    ),
    "a range of tickets is reserved by a load and a store": Mutant(
        _PARTITION,
        _RANGE,
        """first = tl.load(counts_ptr + number)
        tl.debug_barrier()
        tl.store(counts_ptr + number, first + many)""",
        interpreted=True,
    ),
    "a ticket is reserved by a load and a store": Mutant(
        _PARTITION,
        _TICKET,
        """ticket = tl.load(counts_ptr + part)
        tl.store(counts_ptr + part, ticket + 1, mask=waiting)""",
        interpreted=False,
    ),
    "bits of what is left are set by a load and a store": Mutant(
        _PARTITION,
        'tl.atomic_or(left_ptr + name // 32, bit, mask=over, sem="relaxed")',
        "tl.store(left_ptr + name // 32, tl.load(left_ptr + name // 32) | bit, mask=over)",
        interpreted=False,
    ),
    "the serial memory has no end": Mutant(
        _PARTITION,
        "fits = waiting & (ticket < MEMORY.serial)",
        "fits = waiting",
        interpreted=False,
    ),
    "what several senders sent is added without atomics": Mutant(
        _MESSAGES, "ALONE=int(each == 1)", "ALONE=1", interpreted=True
    ),
    "words of a string are stored by all that have bits there": Mutant(
        _MESSAGES,
        'tl.atomic_add(string + word, sums, mask=there & is_last, sem="relaxed")',
        "tl.store(string + word, sums, mask=there & is_last)",
        interpreted=False,
    ),
    "the last word of a bitmap and those past it": Mutant(
        ("triton", "bitmap.py"),
        "tl.store(words_ptr + word, words, mask=word < (SIZE + 31) // 32)",
        "tl.store(words_ptr + word, words, mask=word < (SIZE + 63) // 32)",
        interpreted=False,
    ),
    "warps of a cumulative sum do not wait": Mutant(
        ("triton", "bitmap.py"), edit=_without("bar.sync")
    ),
    "warps of a program that counts do not wait": Mutant(
        _DENSE, edit=_without("bar.sync", "partition_dense_kernel")
    ),
    "tickets are added as floats": Mutant(
        _PARTITION, edit=_other_atomics("add.u32", "add.f32")
    ),
    "numbers past the end are stored": Mutant(
        ("triton", "bitmap.py"), edit=_unmasked("st.global")
    ),
    "numbers past the end are loaded": Mutant(
        ("triton", "threshold_hash.py"), edit=_unmasked("ld.global")
    ),
    "entries past the end are swapped": Mutant(_PARTITION, edit=_unmasked("atom")),
}


def found(name: str, folder: pathlib.Path, seeds=range(3)) -> str | None:
    """What the machine finds in a mutant, in words; None if nothing."""
    mutant = MUTANTS[name]
    edit = checks.Edit(mutant.old, mutant.new, folder) if mutant.old else None
    for seed in seeds:
        gpu = Gpu(90, seed, edit=mutant.edit)
        try:
            runs.hold(mutant.case, gpu, edit)
        except (Fault, Race) as error:
            return f"{type(error).__name__}, launch {gpu.counts['launches']}: {error}"
        except AssertionError:
            return f"wrong numbers after launch {gpu.counts['launches']}"
    return None


def passes_interpreted(name: str, folder: pathlib.Path) -> bool:
    """Whether Triton's interpreter finds nothing in a mutant of a source."""
    mutant = MUTANTS[name]
    command = [sys.executable, "-m", "tests.kernels.triton_worker", mutant.case[1]]
    done = subprocess.run(
        [*command, mutant.old, mutant.new],
        cwd=ROOT,
        env=os.environ | {"MUTANTS": str(folder), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    if done.returncode > 0 and "AssertionError" not in done.stderr:
        raise RuntimeError(done.stderr[-2000:])
    return done.returncode == 0


def main(*names):
    """Says of each mutant what finds it; the exit status is how many the machine misses."""
    missed = 0
    for name in names or MUTANTS:
        with tempfile.TemporaryDirectory() as folder:
            text = found(name, pathlib.Path(folder))
            missed += text is None
            interpreted = ""
            if MUTANTS[name].old:
                passes = passes_interpreted(name, pathlib.Path(folder))
                interpreted = "the interpreter lets it pass; " if passes else ""
        print(f"{name}: {interpreted}{text or 'MISSED'}", flush=True)
    sys.exit(missed)


if __name__ == "__main__":
    main(*sys.argv[1:])
