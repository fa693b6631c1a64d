"""A reader of jaxprs: the collectives of a program, and the bytes that they send."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import pytest

from pallas_kernels import platforms
from sparsejax import errors
from tests.helpers.runs import stacked


def _at_once(steps, need):
    full = max(0, -(-need // steps.top) - 1)
    rest = need - full * steps.top
    sizes = list(steps.rungs)
    if full:
        kept = [sizes.pop()]
        while sizes and kept[-1].capacity > 0.6 * steps.top:
            rung = sizes.pop()
            kept += [rung] if 1.38 * rung.capacity <= kept[-1].capacity else []
        sizes = kept[::-1]
    last = [rung for rung in sizes if rung.capacity >= rest]
    return [(steps.rungs[-1], steps.top)] * full + ([(last[0], rest)] if need else [])


def rounds_of(steps: Any, need: int, messages: int) -> list[tuple[Any, int]]:
    """The rung and the entries of each round that sends `need` entries, `messages` a round.

    The lowest rung that holds what is left; the next lower one where it and one for the
    rest save more than 256 KiB. On GPUs the longest, and for the rest, if it is not alone,
    one of a few: each at most as large as the one above over 1.38, the last at most 0.6 of
    the longest.
    """
    if steps.at_once:
        return _at_once(steps, need)
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
    return [
        Collective(name, sum(_bytes(x) for x in eqn.invars), path)
        for name, path, eqn in collective_equations(program, platform)
    ]


def collective_equations(
    program: Any, platform: str = "cpu"
) -> list[tuple[str, tuple[str, ...], Any]]:
    """The name and the path of each of `collectives`, and its equation in the jaxpr."""
    return list(_walk(getattr(program, "jaxpr", program), (), platform))


def for_gpus() -> contextlib.AbstractContextManager[None]:
    """Traces programs as for GPUs; CPU devices run them all the same."""
    return traced_for("cuda")


@contextlib.contextmanager
def traced_for(platform: str, overhead: int = 0) -> Iterator[None]:
    """Traces programs as for a platform; CPU devices run them all the same.

    What was said of the platform before is said again.

    Args:
        platform: Its name.
        overhead: Of the policy of GPUs: so that entries of small arrays are sent, too.
    """
    jax.clear_caches()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(platforms, "traced_for", lambda: platform)
            policy = platforms._GPUS._replace(overhead=overhead)
            patch.setattr(platforms, "_GPUS", policy)
            patch.setattr(errors, "_said", set())
            yield
    finally:
        jax.clear_caches()


@contextlib.contextmanager
def every_platform() -> Iterator[None]:
    """Traces all that a platform chooses among, though the tests' meshes are of CPUs.

    But for functions that are jitted by themselves and were traced before, which JAX keeps:
    collectives, of which there are none in such functions, are seen.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platforms, "traced_for", lambda: None)
        yield


def traced_collectives(
    fn: Callable, x: Any, n: int, check_vma: bool = True, platform: str = "cpu"
) -> list[Collective]:
    """The collectives that fn has on n ranks of a platform, for x stacked by rank."""
    with contextlib.nullcontext() if platform == "cpu" else every_platform():
        return collectives(jax.make_jaxpr(stacked(fn, n, check_vma))(x), platform)


def scatters(program: Any) -> list[int]:
    """How many updates each scatter of a jaxpr has: those of its indices."""
    indices = [eqn.invars[1].aval.shape for eqn in _scatters(program.jaxpr)]
    return [math.prod(shape[:-1]) for shape in indices]


def _scatters(jaxpr) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith("scatter"):
            yield eqn
        for value in eqn.params.values():
            for inner in _jaxprs(value):
                yield from _scatters(inner)


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


def _bytes(x) -> int:
    return x.aval.size * x.aval.dtype.itemsize


def _walk(jaxpr, path, platform) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _NAMES:
            yield _NAMES[name], path, eqn
            continue
        if name not in _SILENT and {"axis_name", "axes"} & set(eqn.params):
            raise AssertionError(f"{name} names axes: say in programs.py if it sends")
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
