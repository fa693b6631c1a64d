"""The Triton kernels, interpreted in a process of their own, and their mutants."""

import importlib.util
import sys
import tempfile

import pytest

from tests.helpers import processes


# By name: the file, what stands there, and what the mutant has instead.
MUTANTS = {
    "a store for the swap": (
        "partition.py",
        'found = tl.atomic_cas(own + slot, expected, index, sem="relaxed")',
        "found = tl.load(own + slot)\n"
        "        tl.store(own + slot, index, mask=waiting & (found == -1))",
    ),
    "idle lanes swap": (
        "partition.py",
        "tl.where(waiting, -1, -2)",
        "tl.where(waiting, -1, -1)",
    ),
    "no end to the serial memory": (
        "partition.py",
        "fits = waiting & (ticket < MEMORY.serial)",
        "fits = waiting",
    ),
    "tickets without atomics": (
        "partition.py",
        'ticket = tl.atomic_add(counts_ptr + part, 1, mask=waiting, sem="relaxed")',
        "ticket = tl.load(counts_ptr + part)\n"
        "        tl.store(counts_ptr + part, ticket + 1, mask=waiting)",
    ),
    "a round with the seed of the part": (
        "partition.py",
        "tl.load(seeds_ptr + 1 + k)",
        "tl.load(seeds_ptr + k)",
    ),
    "what is left is not told": (
        "partition.py",
        "over = waiting & (ticket >= MEMORY.serial)",
        "over = waiting & (ticket > MEMORY.serial)",
    ),
    "a range for all that wait": (
        "partition.py",
        "many = tl.sum(ones)",
        "many = tl.sum(waiting.to(tl.int32))",
    ),
    "ranks from one": (
        "partition.py",
        "first + tl.cumsum(ones, 0) - 1, ticket",
        "first + tl.cumsum(ones, 0), ticket",
    ),
    "every block but the last": (
        "partition_dense.py",
        "(SIZE + BLOCK * PROGRAMS - 1) // (BLOCK * PROGRAMS)",
        "SIZE // (BLOCK * PROGRAMS)",
    ),
    "one chunk a block": (
        "partition_dense.py",
        "while first < whole:",
        "while first < tl.minimum(whole, CHUNK):",
    ),
    "what fills no chunk is not moved": (
        "partition_dense.py",
        "        tl.store(own + thread, rest, mask=thread < held)\n",
        "",
    ),
    "the scratch of another": (
        "partition_dense.py",
        "own = scratch_ptr + program * (BLOCK + CHUNK)",
        "own = scratch_ptr + (program + 1) * (BLOCK + CHUNK)",
    ),
    "bits in the wrong order": (
        "words.py",
        "flags.to(tl.uint32) << bit.to(tl.uint32)",
        "flags.to(tl.uint32) << (31 - bit).to(tl.uint32)",
    ),
    "the last element is not read": (
        "words.py",
        "lane.to(tl.uint32, bitcast=True) < SIZE",
        "lane.to(tl.uint32, bitcast=True) < SIZE - 1",
    ),
    "a round too few": ("words.py", "while rounds > 0:", "while rounds > 1:"),
    "every bit one too high": (
        "words.py",
        "return count_bits(words ^ (words - 1)) - 1",
        "return count_bits(words ^ (words - 1))",
    ),
    "a rank too high": (
        "bitmap.py",
        "+ tl.cumsum(counts, 0) - counts",
        "+ tl.cumsum(counts, 0)",
    ),
    "all runs begin at the first": (
        "bitmap.py",
        "tl.load(ends_ptr + program)",
        "tl.load(ends_ptr)",
    ),
    "positions past the capacity": ("words.py", "& (rank < ROOM)", ""),
    "a hash a word": (
        "threshold_hash.py",
        "words = words & (words - 1)",
        "words = words & 0",
    ),
    "a message without a header": (
        "messages.py",
        "tl.store(own, count, mask=begin == 0)",
        "tl.store(own, count, mask=begin == 1)",
    ),
    "a message begins with the first of all": (
        "messages.py",
        "tl.load(run) + rank, there",
        "rank, there",
    ),
    "one more entry than a message has room for": (
        "slots.py",
        "here = tl.minimum(count - tl.load(run_ptr), tl.load(run_ptr + 1))",
        "here = tl.minimum(count - tl.load(run_ptr), tl.load(run_ptr + 1) + 1)",
    ),
    "a program's first word lacks what is before it": (
        "messages.py",
        "is_first = (number > 0) & (before != word)",
        "is_first = before != word - 1",
    ),
    "a program's last word is not written": (
        "messages.py",
        "(rank + 1 == here) | (number + 1 == FORM.block) | (following != word)",
        "(rank + 1 == here) | (following != word)",
    ),
    "the last word of a string is not written": (
        "messages.py",
        "(rank + 1 == here) | (number + 1 == FORM.block) | (following != word)",
        "(number + 1 == FORM.block) | (following != word)",
    ),
    "bits are stored, not added": (
        "messages.py",
        'tl.atomic_add(string + word, sums, mask=there & is_last, sem="relaxed")',
        "tl.store(string + word, sums, mask=there & is_last)",
    ),
    "lanes behind the last entry": (
        "messages.py",
        "tl.store(lane + rank, low.to(tl.uint8), mask=there & sent)",
        "tl.store(lane + rank, low.to(tl.uint8), mask=sent)",
    ),
    "every plane has the lowest byte": (
        "messages.py",
        "low = (slot >> 8 * plane) & 255",
        "low = slot & 255",
    ),
    "numbers past the end of a value are written": (
        "messages.py",
        "tl.store(to, value.to(values.dtype.element_ty), mask=mask)",
        "tl.store(to, value.to(values.dtype.element_ty), mask=there[:, None])",
    ),
    "the first columns alone": (
        "messages.py",
        "array_ptr + unit[:, None] * FORM.width + at,",
        "array_ptr + unit[:, None] * FORM.width + at % FORM.columns,",
    ),
    "what arrives is stored, not added": (
        "messages.py",
        'tl.atomic_add(to, value, mask=mask, sem="relaxed")',
        "tl.store(to, value, mask=mask)",
    ),
    "numbers that arrive are stored, not added": (
        "messages.py",
        'tl.atomic_add(into_ptr + unit, value, mask=there, sem="relaxed")',
        "tl.store(into_ptr + unit, value, mask=there)",
    ),
    "numbers of one sender are stored, not added": (
        "messages.py",
        "tl.store(into_ptr + unit, held + value, mask=there)",
        "tl.store(into_ptr + unit, value, mask=there)",
    ),
    "rows of one sender are stored, not added": (
        "messages.py",
        "tl.store(to, held + value, mask=mask)",
        "tl.store(to, value, mask=mask)",
    ),
    "what lies behind the array is written": (
        "messages.py",
        "there = there & (unit >= 0) & (unit < FORM.size)",
        "there = there & (unit >= 0)",
    ),
    "the blocks of a bitmap": (
        "messages.py",
        "slot = (bit - tl.load(run + 5) * rank) << tl.load(run + 7)",
        "slot = (bit - rank) << tl.load(run + 7)",
    ),
    "a message of another sender": (
        "messages.py",
        "here = entries_here(tl.load(own).to(",
        "here = entries_here(tl.load(message_ptr).to(",
    ),
    "values are cleared, the rest is not": (
        "messages.py",
        "(word < end) & ((word < values) | (word >= values_end))",
        "(word < end) & (word >= values)",
    ),
    "what is behind the values is not cleared": (
        "messages.py",
        "(word < end) & ((word < values) | (word >= values_end))",
        "(word < end) & (word < values)",
    ),
    "half a word is not cleared": (
        "messages.py",
        "* UNIT // 4",
        "* UNIT // 4 + 1",
    ),
    "a rank's row is the one before": (
        "slots.py",
        "below = inside & (end <= rank)",
        "below = inside & (end < rank)",
    ),
    "the first word of a row": (
        "slots.py",
        "for _ in range(FORM.row - 1):",
        "for _ in range(0):",
    ),
    "half a word": ("slots.py", "for k in tl.static_range(5):", "for k in range(1, 5):"),
    "nothing is turned": (
        "slots.py",
        "turn += (ones & 1).to(tl.int32) * ((1 << k) % FORM.parts)",
        "turn += 0",
    ),
    "turned modulo a power of two": (
        "slots.py",
        "(part + FORM.parts - turn) % FORM.parts * FORM.column",
        "(part + FORM.parts - turn) * FORM.column",
    ),
    "a piece writes what came in those before": (
        "bitmaps",
        "(unit < FORM.size) & (rank >= first) & (rank < last)",
        "(unit < FORM.size) & (rank < last)",
    ),
    "a bit has the rank of the next": (
        "bitmaps",
        "((1 << bit) - 1).to(tl.uint32)",
        "((2 << bit) - 1).to(tl.uint32)",
    ),
    "the words of a column": (
        "bitmaps",
        "((slot >> 5) * FORM.parts + part) * 2",
        "((slot >> 5) * FORM.parts + column) * 2",
    ),
    "a run of slots is left out": (
        "bitmaps",
        "(tl.max(most, 0) < first)",
        "(tl.min(most, 0) < first)",
    ),
    "sums of rows begin anew": (
        "index of bitmaps",
        "before += tl.sum(counts, 0).to(tl.int32)",
        "before += 0",
    ),
    "a word has the rank of the next": (
        "index of bitmaps",
        "before + tl.cumsum(counts, 0) - counts",
        "before + tl.cumsum(counts, 0)",
    ),
    "in an exchange, a message lacks its last entry": (
        "exchange",
        "    there = rank < here\n    entry",
        "    there = rank < here - 1\n    entry",
    ),
}

# Each is a process of some ten to forty seconds: the tests take a few of each file, and the
# command `python -m tests.kernels.test_triton` takes all.
LEFT_TO_THE_COMMAND = {
    "no end to the serial memory",
    "a round too few",
    "a hash a word",
    "a message without a header",
    "half a word",
    "sums of rows begin anew",
    "ranks from one",
    "positions past the capacity",
    "all runs begin at the first",
    "nothing is turned",
    "a word has the rank of the next",
    "the words of a column",
    "a bit has the rank of the next",
    "a run of slots is left out",
    "idle lanes swap",
    "tickets without atomics",
    "a round with the seed of the part",
    "what is left is not told",
    "a range for all that wait",
    "every block but the last",
    "one chunk a block",
    "the scratch of another",
    "the last element is not read",
    "every bit one too high",
    "a message begins with the first of all",
    "one more entry than a message has room for",
    "a program's last word is not written",
    "the last word of a string is not written",
    "bits are stored, not added",
    "lanes behind the last entry",
    "every plane has the lowest byte",
    "numbers past the end of a value are written",
    "the first columns alone",
    "what arrives is stored, not added",
    "numbers that arrive are stored, not added",
    "numbers of one sender are stored, not added",
    "rows of one sender are stored, not added",
    "what lies behind the array is written",
    "the blocks of a bitmap",
    "a message of another sender",
    "values are cleared, the rest is not",
    "what is behind the values is not cleared",
    "half a word is not cleared",
    "a rank's row is the one before",
    "the first word of a row",
    "turned modulo a power of two",
    "in an exchange, a message lacks its last entry",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or importlib.util.find_spec("triton") is None,
        reason="needs Triton, which is there for Linux: pip install '.[triton]'",
    ),
]


def run(*arguments, folder):
    """The exit status of a worker, and what it has printed."""
    worker = "tests.kernels.triton_worker"
    process = processes.fork(worker, *arguments, MUTANTS=str(folder))
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        process.kill()
    return process.returncode, output


# A process for several, as starting one takes longer than most checks. What `words.py`,
# `slots.py` and `index_message.py` have is held to it by the kernels that call it.
@pytest.mark.parametrize(
    "files",
    [
        ("bitmap.py", "threshold_hash.py"),
        ("partition.py", "partition_dense.py"),
        # All messages: `python -m tests.kernels.triton_worker`, and `make ptx`.
        ("most messages",),
        ("exchange",),
    ],
    ids=lambda files: files[0],
)
def test_the_kernels_hold_what_the_contract_says(files, tmp_path):
    status, output = run("hold", *files, folder=tmp_path)
    assert status == 0, output[-2000:]
    holds = [line for line in output.splitlines() if line.endswith(" holds")]
    assert holds == [f"{name} holds" for name in files]


def why_not_caught(name, folder):
    """What is wrong with the checks, which let a mutant pass; None if they notice it."""
    status, output = run(*MUTANTS[name], folder=folder)
    if status == 0:
        return "the checks did not see it"
    if "is not once in" in output:
        return output[-2000:]
    # By a law that was broken, or by a crash: not because it does not run.
    crashed = status < 0
    return None if crashed or "AssertionError" in output else output[-2000:]


def test_what_is_left_to_the_command_is_there():
    assert LEFT_TO_THE_COMMAND < MUTANTS.keys()


@pytest.mark.parametrize("name", [x for x in MUTANTS if x not in LEFT_TO_THE_COMMAND])
def test_a_broken_kernel_is_caught(name, tmp_path):
    why = why_not_caught(name, tmp_path)
    assert why is None, why


def main():
    """Runs all mutants, and ends with how many are missed."""
    missed = 0
    for name in MUTANTS:
        with tempfile.TemporaryDirectory() as folder:
            why = why_not_caught(name, folder)
        missed += why is not None
        print(f"{name:60} {why or 'caught'}", flush=True)
    sys.exit(missed)


if __name__ == "__main__":
    main()
