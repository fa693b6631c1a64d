"""Cases that once broke a law, shrunk; they come first."""

from typing import Any

from tests.fuzz import campaign, laws
from tests.fuzz.data import Data
from tests.fuzz.pool import Program
from tests.fuzz.words import Words


KEPT: list[tuple[Program, Any]] = [
    # Nothing is sent.
    (Program("sum", "zen"), Data()),
    # Under vmap all ranks had the same array, of which JAX's all-to-all made another shape.
    (Program("entries", "ag_sparse", 4, (509,), "bfloat16", reduce="mean"), Data()),
    # A tensor without room for an entry had none to be read.
    (Program("entries", "ag_sparse", 3, (2039,), gpu=True, tree="with a bias"), Data()),
    # Nor did anything of it differ by rank, where it was a bucket of its own.
    (
        Program(
            law="entries",
            scheme="balanced",
            ranks=2,
            shape=(1023, 4),
            mapped="shard_map",
            reduce="mean",
            tree="with a bias",
        ),
        Data(),
    ),
    # What is left out of a mean over steps counts as often as there are steps.
    (
        Program(
            law="tree",
            scheme="sparsifier random_k",
            ranks=8,
            shape=(509,),
            reduce="mean",
            steps=4,
            wrapper="accumulate",
        ),
        Data(sets="one unit"),
    ),
    # A header that says more than any message has room for, and no bits.
    (Program("messages", "tiles", case="coo8"), Words(header=2**31 - 1)),
]


def failures() -> int:
    """How many of them break their law; each is said."""
    failed = 0
    for program, data in KEPT:
        try:
            laws.check(program, data)
        except Exception as error:
            campaign.say(f"FAILED\n{campaign.Failure(program, data, repr(error))}")
            failed += 1
    return failed
