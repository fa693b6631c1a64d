"""Random words in place of messages, read by the kernels of Triton in their interpreter.

    python -m tests.fuzz.triton_words [--cases 200] [--seed 0]

By itself in a process: the interpreter checks no bounds, and what runs past an array's end
may take the process down. Arrays lie between canaries, which must live; and since what is
read out there must change nothing, each case runs with two kinds of them.
"""

import argparse
from types import ModuleType

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import pallas_kernels


# First: it says that Triton is interpreted.
from tests.kernels import triton_worker  # isort: skip
from tests.fuzz import campaign, words
from tests.kernels import checks
from tests.kernels.messages import CASES


CANARIES = 0x7B, 0xC4


def check(made: ModuleType, name: str, given: words.Words, replaces: bool) -> None:
    """Raises unless the kernels take these words, and no more than there are."""
    case = CASES[name]
    message = words.words_of(given, case.received)
    into = np.ones((words.size_of(case), *case.shape), np.float32)
    how = pallas_kernels.Unpacking(replaces)
    found = []
    for canary, fill in zip(CANARIES, words.FILLS, strict=True):
        triton_worker.CANARY = canary
        message[:, case.form.ladder.rungs[case.rung].words :] = fill
        start, words_in, numbers = map(jnp.asarray, (into, message, case.numbers))
        heads, ends = made.index_message(words_in, numbers, spec=case.spec)
        received = pallas_kernels.Received(words_in, ends)
        total = made.unpack_message(start, received, numbers, spec=case.spec, how=how)
        found.append([np.asarray(x) for x in (heads, ends, total)])
    for one, other in zip(*found, strict=True):
        assert one.tobytes() == other.tobytes(), "it looks behind the end of an array"
    total = found[0][2]
    assert words.changed(into, total) <= words.entries_of(case, message)


def main() -> None:
    """Runs so many cases; prints how many there were."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.triton_words")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    made, tried = checks.load("messages.py", triton_worker.interpreted), 0

    @hypothesis.seed(given.seed)
    @hypothesis.settings(
        campaign.SETTINGS, max_examples=given.cases, verbosity=hypothesis.Verbosity.normal
    )
    @hypothesis.given(st.sampled_from([*CASES]), words.drawn(), st.booleans())
    def holds(name, given, replaces):
        nonlocal tried
        tried += 1
        check(made, name, given, replaces)

    holds()
    print(f"{tried} cases hold")


if __name__ == "__main__":
    main()
