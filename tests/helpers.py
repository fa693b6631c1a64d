"""What the tests share: an oracle in NumPy, inputs, runs over ranks, a jaxpr reader.

Everything that a test compares with is computed here in NumPy, in float64 or in integers,
by the plainest code there is.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P


AXIS = "data"


def slow(*values):
    """Values of a parameter, or tuples of values, whose tests are slow."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow
        )
        for value in values
    ]


# --- Runs over simulated ranks.


@functools.cache
def mesh_of(n: int) -> jax.sharding.Mesh:
    """A mesh of one axis, "data", over the first n CPU devices."""
    devices = jax.devices("cpu")[:n]
    return jax.make_mesh((n,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def stacked(fn: Callable, n: int, check_vma: bool = True) -> Callable:
    """Runs fn on n ranks: from arrays [n, ...], a row a rank, to results [n, ...]."""

    def on_rank(*args):
        result = fn(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda y: y[None], result)

    return jax.shard_map(
        on_rank, mesh=mesh_of(n), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=check_vma
    )


def ranked(fn: Callable, n: int, check_vma: bool = True) -> Callable:
    """`stacked`, compiled, with results in NumPy."""
    compiled = jax.jit(stacked(fn, n, check_vma))
    return lambda *args: jax.tree.map(np.asarray, compiled(*args))


def run_ranks(fn: Callable, x: Any, n: int, check_vma: bool = True) -> Any:
    """Runs fn once on n ranks; x and the results are stacked by rank."""
    return ranked(fn, n, check_vma)(x)


def is_replicated(fn: Callable, x: Any, n: int) -> bool:
    """Whether all results of fn are typed as equal on all ranks."""
    types = []

    def on_rank(x):
        result = jax.tree.leaves(fn(jax.tree.map(lambda x: x[0], x)))
        types.extend(jax.typeof(y).manual_axis_type.varying for y in result)
        return 0

    specs = {"mesh": mesh_of(n), "in_specs": P(AXIS), "out_specs": P()}
    jax.eval_shape(jax.shard_map(on_rank, **specs), x)
    assert types, "fn returns nothing"
    return not any(types)


def assert_same_on_all_ranks(results: Any) -> None:
    """Raises unless every rank, a row each, has the same bytes."""
    for leaf in jax.tree.leaves(results):
        rows = np.asarray(leaf)
        for rank in range(1, len(rows)):
            same = rows[rank].tobytes() == rows[0].tobytes()
            assert same, f"rank {rank} differs from rank 0"


# --- The oracle.


def total(x: np.ndarray) -> np.ndarray:
    """The sum over ranks of [n, ...], in float64."""
    return np.sum(np.asarray(x).astype(np.float64), axis=0)


def is_nonzero(x: np.ndarray) -> np.ndarray:
    """Where x is not zero: NaN and denormals count, -0.0 does not."""
    return np.asarray(x).astype(np.float64) != 0


def unpacked(words: np.ndarray) -> np.ndarray:
    """uint32 [..., n] as booleans [..., 32 * n], lowest bit first."""
    words = np.asarray(words)
    shifts = np.arange(32, dtype=np.uint32)
    flags = (words[..., None] >> shifts) & np.uint32(1)
    return flags.astype(bool).reshape(*words.shape[:-1], -1)


def packed(flags: np.ndarray) -> np.ndarray:
    """Inverse of `unpacked`."""
    flags = np.asarray(flags, bool)
    octets = np.packbits(flags, axis=-1, bitorder="little")
    return np.ascontiguousarray(octets).view("<u4")


# --- Inputs.


def strided_set(size: int, count: int, stride: int) -> np.ndarray:
    """`count` units a stride apart; at the end it starts again, one unit further on."""
    starts = -(-count // (size // stride))
    rounds = [np.arange(start, size, stride) for start in range(starts)]
    return np.sort(np.concatenate(rounds)[:count])


def zipf_set(size: int, count: int, seed: int = 0) -> np.ndarray:
    """`count` distinct units drawn with probability proportional to 1 / (unit + 1)."""
    rng = np.random.default_rng(seed)
    units = np.array([], np.int64)
    while len(units) < count:
        drawn = (size ** rng.random(2 * count)).astype(np.int64) - 1
        fresh = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
        units = np.concatenate([units, fresh[~np.isin(fresh, units)]])
    return np.sort(units[:count])


def adversarial_sets(size: int, count: int, n: int) -> dict[str, np.ndarray]:
    """Sets of `count` units that a bad ownership would give to few of n ranks.

    Zen's hash bound is to hold for any set. Where count strides do not fit into `size`, a
    strided set goes round again, one unit further on.
    """
    assert count <= size
    start = (size - count) // 3
    return {
        "a range": np.arange(start, start + count),
        "every n-th": strided_set(size, count, n),
        "every n*n-th": strided_set(size, count, n * n),
        "every 32nd": strided_set(size, count, 32),
        "every 1024th": strided_set(size, count, 1024),
        "every 65536th": strided_set(size, count, 65536),
        "every size/n-th": strided_set(size, count, size // n),
        "Zipf": zipf_set(size, count),
    }


def gradients(
    n: int,
    size: int,
    density: float | list[float],
    dtype: Any = np.float32,
    shape: tuple[int, ...] = (),
    seed: int = 0,
) -> np.ndarray:
    """Gradients [n, size, *shape] with that share of units non-zero, a density a rank.

    The numbers are small integers, so that every sum is exact in every dtype. A unit that
    is a row may hold zeros, and may sum to zero.
    """
    rng = np.random.default_rng(seed)
    densities = [density] * n if isinstance(density, (int, float)) else density
    x = np.zeros((n, size, *shape))
    for rank, share in enumerate(densities):
        units = rng.permutation(size)[: round(share * size)]
        rows = rng.integers(-4, 5, (len(units), math.prod(shape)))
        rows[(rows == 0).all(axis=1), 0] = 1
        x[rank, units] = rows.reshape(len(units), *shape)
    return x.astype(dtype)


# --- What a program sends.


def rounds_of(steps: Any, need: int, messages: int) -> list[tuple[Any, int]]:
    """The rung and the entries of each round that sends `need` entries, `messages` a round.

    The lowest rung that holds what is left; the next lower one where it and one for the
    rest save more than 256 KiB.
    """
    taken = []
    while need > 0:
        fits = [i for i, r in enumerate(steps.rungs) if r.capacity >= min(need, steps.top)]
        rung = steps.rungs[fits[0]]
        if fits[0] > 0:
            low = steps.rungs[fits[0] - 1]
            rest = next(
                (r for r in steps.rungs if r.capacity >= need - low.capacity),
                steps.rungs[-1],
            )
            saved = 4 * messages * (rung.words - low.words - rest.words)
            rung = low if low.capacity < need and saved > 262144 else rung
        taken.append((rung, min(need, rung.capacity)))
        need -= taken[-1][1]
    return taken


class Collective(NamedTuple):
    """One collective in a jaxpr.

    Attributes:
        name: The primitive, without what versions add to it.
        bytes: Of its operands, on one rank.
        path: The branches and loops around it, outermost first: "cond[1]", "while".
    """

    name: str
    bytes: int
    path: tuple[str, ...] = ()


_NAMES = {
    "psum": "psum",
    "psum_invariant": "psum",
    "pmax": "pmax",
    "pmin": "pmin",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_to_all": "all_to_all",
    "ppermute": "ppermute",
    "reduce_scatter": "reduce_scatter",
}
# They name axes and send nothing.
_SILENT = {
    "axis_index",
    "pvary",
    "pcast",
    "shard_map",
    "sparsejax_same_everywhere",
    # Axes of an array, not of a mesh.
    "argmax",
    "argmin",
    "reduce_and",
    "reduce_max",
    "reduce_min",
    "reduce_or",
    "reduce_sum",
}


def collectives(program: Any, platform: str = "cpu") -> list[Collective]:
    """The collectives of a jaxpr in the order of the program.

    Where it chooses by platform, which is settled before it is compiled, those of this
    one, as if the choice were not there. The tests run on CPUs.
    """
    return list(_walk(getattr(program, "jaxpr", program), (), platform))


def traced_collectives(
    fn: Callable, x: Any, n: int, check_vma: bool = True, platform: str = "cpu"
) -> list[Collective]:
    """The collectives that fn has on n ranks of a platform, for x stacked by rank."""
    return collectives(jax.make_jaxpr(stacked(fn, n, check_vma))(x), platform)


def sent_bytes(collective: Collective, n: int) -> float:
    """What one of n ranks sends for it, by the algorithms that send least."""
    share = {
        "psum": 2 * (n - 1) / n,
        "pmax": 2 * (n - 1) / n,
        "all_gather": n - 1,
        "all_to_all": (n - 1) / n,
        "reduce_scatter": (n - 1) / n,
        "ppermute": 1,
    }
    return share[collective.name] * collective.bytes


def _walk(jaxpr, path, platform) -> Iterator[Collective]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _NAMES:
            size = sum(x.aval.size * x.aval.dtype.itemsize for x in eqn.invars)
            yield Collective(_NAMES[name], size, path)
            continue
        if name not in _SILENT and {"axis_name", "axes"} & set(eqn.params):
            raise AssertionError(f"{name} names axes: say in helpers.py if it sends")
        platforms = eqn.params.get("branches_platforms")
        if platforms is not None:
            taken = next(i for i, p in enumerate(platforms) if p is None or platform in p)
            yield from _walk(_jaxprs(eqn.params["branches"])[taken], path, platform)
            continue
        for key, value in eqn.params.items():
            for number, inner in enumerate(_jaxprs(value)):
                yield from _walk(inner, path + _step(name, key, number), platform)


def _jaxprs(value) -> list[Any]:
    values = value if isinstance(value, (tuple, list)) else [value]
    inner = [getattr(x, "jaxpr", x) for x in values]
    return [x for x in inner if hasattr(x, "eqns")]


def _step(name, key, number) -> tuple[str, ...]:
    if name == "cond":
        return (f"cond[{number}]",)
    if name in ("while", "scan"):
        return ("while condition",) if key == "cond_jaxpr" else ("while",)
    return ()
