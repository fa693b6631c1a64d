"""What a program is given: a few numbers that hypothesis draws, and arrays made of them.

Hypothesis sees a handful of numbers and words, so a case is drawn in a millisecond, printed
in a line, and shrinks to few units and small integers. NumPy makes the arrays.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from benchmarks.data import workloads
from pallas_kernels import hashing, striping


SETS = (
    "none",
    "one unit",
    "random",
    "all",
    "same",
    "disjoint",
    "one rank",
    "one block",
    "ends",
    "stride",
    "one owner",
    "recorded",
)
RECORDED = ("language", "translation", "clicks")
VALUES = ("integers", "normal", "wide", "cancel", "denormal", "largest")
# Sums over steps are told from their parts where no number hides the others.
TAME = ("integers", "normal", "cancel")
SPECIALS = ("nan", "inf", "-inf", "max", "-max", "denormal", "-0.0")
LISTS = (
    "none",
    "uniform",
    "one row",
    "same",
    "ascending",
    "one owner",
    "zipf",
    "out of range",
    "negative",
    "behind",
    "extremes",
)


@dataclasses.dataclass(frozen=True)
class Data:
    """What a case gives to a program.

    Attributes:
        seed: Of all that NumPy draws.
        sets: Which units each rank has, one of SETS; or what it lists, one of LISTS.
        density: The share of units, where the sets have one.
        values: Which numbers they have.
        specials: Numbers put in at last: the rank, the place, and which.
    """

    seed: int = 0
    sets: str = "none"
    density: float = 0.1
    values: str = "integers"
    specials: tuple[tuple[int, int, str], ...] = ()


def drawn(sets=SETS, values=VALUES, specials=SPECIALS) -> st.SearchStrategy[Data]:
    """Data, with as many special numbers as four."""
    # Most are so low that entries are sent.
    density = st.one_of(
        st.sampled_from((0.01, 0.001, 0.1, 0.3, 0.5, 0.8, 0.95, 1.0)),
        st.floats(0, 0.25, width=16),
        st.floats(0, 1, width=16),
    )
    special = st.tuples(
        st.integers(0, 7), st.integers(0, 1 << 13), st.sampled_from(specials or ("",))
    )
    return st.builds(
        Data,
        seed=st.integers(0, 1 << 20),
        sets=st.sampled_from(sets),
        density=density,
        values=st.sampled_from(values),
        specials=st.lists(special, max_size=4 if specials else 0).map(tuple),
    )


def gradients(data: Data, n: int, steps: int, shape, dtype, leaf: int = 0) -> np.ndarray:
    """Gradients of n ranks, [n, steps, *shape]; a unit is a row of the leading axis."""
    x = np.zeros((n, steps, *shape), jnp.dtype(dtype))
    if not x.size:
        return x
    rng = np.random.default_rng((data.seed, leaf))
    units = shape[0] if shape else 1
    for step in range(steps):
        there = flags(data, rng, n, units)
        values = _values(data.values, rng, (n, *shape), x.dtype)
        if data.values == "cancel":
            # Of a rank that has no partner nothing is left.
            there = np.broadcast_to(there.any(0), there.shape)
        mask = there.reshape(n, *([units] if shape else []), *[1] * (len(shape) - 1))
        x[:, step] = np.where(mask, values, 0)
    for rank, place, name in data.specials:
        flat = x[rank % n].reshape(-1)
        flat[place % flat.size] = _special(name, x.dtype)
    return x


def flags(data: Data, rng: np.random.Generator, n: int, units: int) -> np.ndarray:
    """Which units each rank has: booleans [n, units]."""
    unit, rank = np.arange(units), np.arange(n)[:, None]
    random = rng.random((n, units)) < data.density
    some = max(1, round(data.density * units))
    first = int(rng.integers(units))
    match data.sets:
        case "none":
            kept = unit < 0
        case "all":
            kept = unit >= 0
        case "one unit":
            kept = unit == first
        case "random":
            kept = random
        case "same":
            kept = random[0]
        case "disjoint":
            kept = random & (unit % n == rank)
        case "one rank":
            kept = random & (rank == data.seed % n)
        case "one block":
            kept = (unit >= first) & (unit < first + some)
        case "ends":
            kept = (unit < some // 2 + 1) | (unit >= units - some // 2)
        case "stride":
            stride = rng.choice([max(n, 2), max(n * n, 2), 32, 64, 256, 1024])
            kept = unit % stride == first % stride
        case "one owner":
            kept = random | (owner_of(units, n) == data.seed % n)
            kept &= owner_of(units, n) == data.seed % n
        case "recorded":
            kept = _recorded(data.seed, n, units)
        case other:
            raise ValueError(other)
    return np.broadcast_to(kept, (n, units))


@functools.cache
def owner_of(units: int, n: int) -> np.ndarray:
    """The owner of each unit by the striped hash, in NumPy: int [units]."""
    width = striping.width(units, n)
    unit = np.arange(units)
    column, slot = unit // max(width, 1), unit % max(width, 1)
    seeds = striping.turn_seeds(n, 0)
    with np.errstate(over="ignore"):
        words = [hashing.mix32((slot >> 5).astype(np.uint32), seed) for seed in seeds]
    turn = np.zeros(units, np.int64)
    for k, word in enumerate(words):
        turn += (np.asarray(word).astype(np.int64) >> (slot & 31) & 1) * ((1 << k) % n)
    return (column + turn) % n


@functools.cache
def _recording(name, n):
    sets = workloads.all_workloads()[name].sets(n)
    # Rows behind the recorded table are nobody's.
    return sets[:, : np.flatnonzero(sets.any(0))[-1] + 1]


def _recorded(seed, n, units):
    """A window of sets that were recorded in training; again from the front at the end."""
    sets = _recording(RECORDED[seed % len(RECORDED)], min(n, 8))
    first = seed * 97 % sets.shape[1]
    places = (first + np.arange(units)) % sets.shape[1]
    return sets[np.arange(n) % len(sets)][:, places]


def _values(kind, rng, shape, dtype):
    info = jnp.finfo(dtype)
    if kind in ("integers", "cancel"):
        x = rng.integers(-4, 5, shape).astype(np.float64)
        if kind == "cancel":
            x[:] = x[:1] * np.resize([1, -1], shape[0]).reshape(-1, *[1] * (len(shape) - 1))
            x[-1] *= shape[0] % 2 == 0
        return x
    if kind == "denormal":
        least = float(info.smallest_subnormal)
        return least * rng.integers(-1 << info.nmant, 1 << info.nmant, shape)
    if kind == "largest":
        return float(info.max) * rng.choice([-1.0, 1.0, 0.5, 2.0**-20], shape)
    x = rng.standard_normal(shape)
    most = 2 if dtype == np.float16 else 15
    return x * 10.0 ** rng.integers(-most, most + 1, shape) if kind == "wide" else x


def _special(name, dtype):
    info = jnp.finfo(dtype)
    named = {"max": info.max, "-max": -info.max, "denormal": info.smallest_subnormal}
    return np.asarray(named[name] if name in named else float(name)).astype(dtype)


def listed(data: Data, n: int, count: int, height: int, dtype) -> np.ndarray:
    """What ranks list, [n, count] of an integer dtype: mostly in [0, height), or hostile.

    What the dtype does not have is cut to its bits, here and not in the library.
    """
    rng = np.random.default_rng(data.seed)
    info, shape = np.iinfo(dtype), (n, count)
    rows = max(height, 1)
    match data.sets:
        case "none":
            ids = np.full(shape, height)
        case "uniform":
            ids = rng.integers(0, rows, shape)
        case "one row":
            ids = np.full(shape, rng.integers(rows))
        case "same":
            ids = np.broadcast_to(rng.integers(0, rows, count), shape)
        case "ascending":
            ids = np.broadcast_to(np.arange(count) % rows, shape)
        case "one owner":
            own = np.flatnonzero(owner_of(height, n) == data.seed % n)
            ids = np.resize(own if own.size else [height], shape)
        case "zipf":
            ids = np.minimum(rng.zipf(1.3, shape), rows) - 1
        case "out of range":
            ids = rng.integers(-height - 1, 3 * height + 2, shape)
        case "negative":
            ids = -1 - rng.integers(0, rows, shape)
        case "behind":
            ids = height + rng.integers(0, rows, shape)
        case "extremes":
            some = [0, -1, height - 1, height, height + 1, 1 << 31, -(1 << 31), 1 << 32]
            some += [(1 << 31) - 1, (1 << 32) + 1, info.min, info.max, -height, 1 << 15]
            ids = rng.choice(np.array(some, np.int64), shape)
        case other:
            raise ValueError(other)
    return np.asarray(ids, np.int64).astype(dtype)
