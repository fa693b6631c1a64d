"""Random words in place of messages, and what may become of them.

A few numbers that hypothesis draws say which: they are drawn in a millisecond, printed in a
line, and shrink to zeros.
"""

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st


KINDS = (
    *("zeros", "ones", "zeros and ones", "random", "few bits", "many bits"),
    *("flipped bits", "other words", "other parts"),
)
INT32 = np.iinfo(np.int32)
FILLS = 0xFFFFFFFF, 0x5A5A5A5A


@dataclasses.dataclass(frozen=True)
class Words:
    """What arrives in place of messages.

    Attributes:
        seed: Of all that NumPy draws.
        kind: One of KINDS; the last three change messages that are right.
        changes: How many bits, or words, of those.
        header: What the headers say; None as the words have it.
    """

    seed: int = 0
    kind: str = "zeros"
    changes: int = 1
    header: int | None = None


def drawn() -> st.SearchStrategy[Words]:
    """Words of all kinds; headers near all that is compared with them."""
    near = [0, 1, -1, 3, 4, 5, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 257]
    far = [INT32.max, INT32.min, INT32.max - 1, INT32.min + 1, 1 << 30, 1 << 16]
    header = st.one_of(
        st.none(),
        st.integers(1, 300),
        st.sampled_from(near + far),
        st.integers(INT32.min, INT32.max),
    )
    return st.builds(
        Words,
        seed=st.integers(0, 1 << 20),
        kind=st.sampled_from(KINDS),
        changes=st.integers(1, 40),
        header=header,
    )


def words_of(words: Words, right: np.ndarray) -> np.ndarray:
    """Random words in place of messages that are right: uint32 [senders, words]."""
    rng = np.random.default_rng(words.seed)
    draw = lambda: rng.integers(0, 1 << 32, right.shape, np.uint32)
    message = right.copy()
    at = tuple(rng.integers(0, size, words.changes) for size in right.shape)
    match words.kind:
        case "zeros":
            message[:] = 0
        case "ones":
            message[:] = 0xFFFFFFFF
        case "zeros and ones":
            # Slots of bytes that are all set are those in front of the first.
            message = np.where(draw() & 1, np.uint32(0xFFFFFFFF), np.uint32(0))
        case "random":
            message = draw()
        case "few bits":
            message = draw() & draw() & draw() & draw()
        case "many bits":
            message = draw() | draw() | draw()
        case "flipped bits":
            bits = np.uint32(1) << rng.integers(0, 32, words.changes).astype(np.uint32)
            np.bitwise_xor.at(message, at, bits)
        case "other words":
            message[at] = draw()[at]
        case "other parts":
            message = np.roll(message, words.changes, axis=0)
    if words.header is not None:
        message[:, 0] = np.int32(words.header).view(np.uint32)
    return message


def entries_of(case: Any, message: np.ndarray) -> int:
    """How many entries a reader may take, by the headers."""
    heads = message[:, 0].view(np.int32).astype(np.int64)
    # The difference is one of int32, as it is there.
    here = (heads - case.first + (1 << 31)) % (1 << 32) - (1 << 31)
    return np.clip(here, 0, case.length).sum()


def changed(before: Any, after: Any) -> int:
    """How many units have other bytes."""
    rows = [np.asarray(x).reshape(len(x), -1).view(np.uint8) for x in (before, after)]
    return (rows[0] != rows[1]).any(1).sum()


def size_of(case: Any) -> int:
    """How many units the array has in which entries are added up."""
    return case.striping.size if case.striping else case.width
