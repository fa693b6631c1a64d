"""The programs that cases are given to, drawn from a seed.

Compiling takes a second or two and a run a few milliseconds: so there are a few hundred
programs, each with small shapes, and many cases of each. Ranks are those of `jax.vmap` with
an axis name, which compiles in less time than `jax.shard_map`; some programs have that.
Another seed draws other programs.
"""

import dataclasses
import itertools
import random

from tests.fuzz import messages
from tests.laws.test_exact_sum import SCHEMES


# By law: how many of a hundred programs.
LAWS = {"sum": 42, "tree": 22, "chosen": 12, "entries": 8, "rows": 8, "messages": 8}

UNITS = (
    *(1, 2, 3, 31, 32, 33, 37, 63, 64, 65, 127, 128, 129, 251, 255, 256, 257),
    *(509, 511, 512, 513, 1023, 1024, 1025, 2039, 2047, 2048, 2049, 3001, 4096, 4097),
    *(6007, 8191, 8193),
)
WIDTHS = (1, 2, 3, 5, 8, 16, 17)
DTYPES = ("float32",) * 6 + ("bfloat16", "bfloat16", "float16", "float64")
RANKS = (1, 2, 2, 3, 3, 4, 5, 7, 8)
# More than there are simulated devices.
RANKS_OF_VMAP = (*RANKS, 6, 12, 16)

# What is set in `sparsejax.wire.ladder` while a program is traced: small arrays then go in
# many tiles, sizes of messages and rounds, as large ones do.
LADDERS = {
    "small tiles": {"_TILE_NUMBERS": 64},
    "many sizes": {"_TILE_NUMBERS": 16, "_SHORT": 64, "ROUND": 256, "_TOP": 4096},
    "as it is": {},
}
TREES = ("alone", "with a bias", "with empty leaves", "with a table", "of two dtypes")
WRAPPERS = (
    "alone",
    "accumulate",
    "warm_up",
    "skip_nonfinite",
    "warm_up in accumulate",
    "accumulate in skip_nonfinite",
)
LOSSY = (
    "sparsifier top_k",
    "sparsifier dgc",
    "sparsifier random_k",
    "sparsifier threshold",
    "GTopk",
    "SparDL",
    "OkTopk",
    "PowerSGD",
)
# One that insists on ranks is no scheme for a transformation.
LOSSLESS = [name for name in SCHEMES if name != "zen_after_a_step"]
CHOSEN = ("GTopk", "SparDL", "SparDL, teams", "OkTopk", "OkTopk, rotated")
INDICES = ("int32",) * 4 + ("uint32", "int16", "uint8", "int8", "int64")


@dataclasses.dataclass(frozen=True)
class Program:
    """What is compiled.

    Attributes:
        law: What must hold, one of LAWS.
        scheme: A scheme's name in the tables of tests; of "messages" a way to read them.
        ranks: How many.
        shape: Of the array, or of the leaf that is always there; of "messages" none.
        dtype: Of the numbers.
        mapped: "vmap", or "shard_map" with or without checking of types.
        ladder: One of LADDERS.
        room: Entries of the longest message, of schemes that can be told; 0 as they are.
        narrow: Whether values travel as bfloat16.
        gpu: Whether it is traced as for GPUs: all messages at once, no loops.
        reduce: "sum" or "mean".
        steps: How many follow one another.
        tree: Which leaves there are, one of TREES.
        wrapper: One of WRAPPERS.
        listed: How many entries, or rows, a rank lists.
        indices: The dtype of what points at them.
        case: Of "messages": which of `tests.kernels.messages`.
    """

    law: str
    scheme: str
    ranks: int = 2
    shape: tuple[int, ...] = (33,)
    dtype: str = "float32"
    mapped: str = "vmap"
    ladder: str = "small tiles"
    room: int = 0
    narrow: bool = False
    gpu: bool = False
    reduce: str = "sum"
    steps: int = 1
    tree: str = "alone"
    wrapper: str = "alone"
    listed: int = 0
    indices: str = "int32"
    case: str = ""


def drawn(seed: int, count: int, law: str | None = None) -> list[Program]:
    """Programs of all laws, or of one; the first of fewer are the same."""
    rng = random.Random(seed)
    shares = {law: 1} if law else LAWS
    order = [name for name, share in shares.items() for _ in range(share)]
    rng.shuffle(order)
    names = {
        "sum": SCHEMES,
        "tree": [*LOSSLESS, *LOSSY, *LOSSY],
        "chosen": CHOSEN,
        "entries": ["none", "zen", "ag_sparse", "balanced", "sparse_ps", "all_reduce"],
        "rows": LOSSLESS,
        "messages": messages.READERS,
    }
    # Every scheme comes before any comes twice.
    decks = {name: _dealt(rng, cards) for name, cards in names.items()}
    draw = {
        "sum": _sum,
        "chosen": _chosen,
        "entries": _entries,
        "rows": _rows,
        "tree": _tree,
    }
    programs = []
    for name in itertools.islice(itertools.cycle(order), count):
        if name == "messages":
            programs.append(Program(name, next(decks[name]), case=messages.case(rng)))
            continue
        program = _drawn(rng, name, next(decks[name]))
        programs.append(draw[name](rng, program) if name in draw else program)
    return programs


def _dealt(rng, cards):
    cards = list(cards)
    while True:
        rng.shuffle(cards)
        yield from cards


def _drawn(rng, law, scheme):
    mapped = rng.choice(["vmap"] * 5 + ["shard_map", "shard_map without checking"])
    shape = (rng.choice(UNITS),)
    if rng.random() < 0.25:
        shape = (min(shape[0], 1025), rng.choice(WIDTHS))
    if rng.random() < 0.04:
        shape = rng.choice([(0,), (0, 3), (5, 0)])
    return Program(
        law,
        scheme,
        rng.choice(RANKS_OF_VMAP if mapped == "vmap" else RANKS),
        shape,
        rng.choice(DTYPES),
        mapped,
        rng.choice([*LADDERS]),
        gpu=rng.random() < 0.15,
        reduce=rng.choice(["sum", "mean"]),
    )


def _sum(rng, program):
    if not program.scheme.startswith("balanced"):
        return program
    if rng.random() < 0.5:
        # With room for few entries small arrays go in several rounds, too.
        program = dataclasses.replace(program, room=rng.choice([4, 8, 20]))
    if rng.random() < 0.6:
        return program
    return dataclasses.replace(program, narrow=True, dtype="float32")


def _tree(rng, program):
    wrapper = rng.choice(WRAPPERS)
    tree = rng.choice(TREES)
    steps = 1 if wrapper == "alone" and program.scheme not in LOSSY else 4
    shape = program.shape
    if program.scheme == "PowerSGD":
        shape = (rng.choice([8, 31, 33, 64]), rng.choice([8, 17, 32]))
    if program.scheme in LOSSY:
        # What is left out is kept in float32.
        shape = tuple(max(length, 16) for length in shape)
        program = dataclasses.replace(program, dtype="float32")
    return dataclasses.replace(
        program, wrapper=wrapper, tree=tree, steps=steps, shape=shape
    )


def _chosen(rng, program):
    size = rng.choice([units for units in UNITS if units > 60])
    shape, ranks = (size,), max(program.ranks, 2)
    if program.scheme == "SparDL, teams":
        ranks = rng.choice([4, 8])
    return dataclasses.replace(program, dtype="float32", ranks=ranks, shape=shape, steps=3)


def _entries(rng, program):
    shape = program.shape
    if rng.random() < 0.3:
        shape = (*shape[:1], 4)
    return dataclasses.replace(
        program,
        shape=shape,
        listed=rng.choice([0, 1, 7, 40, 65]),
        indices=rng.choice(INDICES),
        tree=rng.choice(["alone", "with a bias"]),
    )


def _rows(rng, program):
    units, width = (
        rng.choice([0, 1, 5, 33, 257, 2003, 5003]),
        rng.choice([0, 1, 3, 3, 4, 8]),
    )
    return dataclasses.replace(
        program,
        shape=(units, width),
        listed=rng.choice([0, 1, 5, 32, 32, 120, 120]),
        indices=rng.choice(INDICES),
    )
