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
    """Returns the rung and the entries of each round that together send `need` entries.

    A round takes the lowest rung with capacity for the entries that are left; or the next
    lower one, if that and a rung for the rest save more than 256 KiB in `messages` messages
    a round. On GPUs (`at_once`) all rounds but the last take the longest rung, and the last
    takes the lowest that fits: of all rungs if it is the only round, else of a few. Each of
    these is at most 1 / 1.38 of the next larger, the smallest at most 0.6 of the longest.
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
        name: The name of the primitive, the same in all versions of JAX.
        bytes: The bytes of its operands on one rank.
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
# Primitives that name axes and send nothing.
_SILENT = {
    "axis_index",
    "pvary",
    "pcast",
    "shard_map",
    "sparsejax_same_everywhere",
    # These name axes of an array, not of a mesh.
    "argmax",
    "argmin",
    "reduce_and",
    "reduce_max",
    "reduce_min",
    "reduce_or",
    "reduce_sum",
}


def collectives(program: Any, platform: str = "cpu") -> list[Collective]:
    """Returns the collectives of a jaxpr in the order of the program.

    Of a choice by platform, which is made at lowering, only the branch of `platform` is
    read, and the choice is not in paths.
    """
    return [
        Collective(name, sum(_bytes(x) for x in eqn.invars), path)
        for name, path, eqn in collective_equations(program, platform)
    ]


def collective_equations(
    program: Any, platform: str = "cpu"
) -> list[tuple[str, tuple[str, ...], Any]]:
    """Returns the name, the path and the equation of each of `collectives`."""
    return list(_walk(getattr(program, "jaxpr", program), (), platform))


def for_gpus() -> contextlib.AbstractContextManager[None]:
    """Makes JAX trace programs as for GPUs, inside; CPU devices can run them."""
    return traced_for("cuda")


@contextlib.contextmanager
def traced_for(platform: str, overhead: int = 0) -> Iterator[None]:
    """Makes JAX trace programs as for a platform, inside; CPU devices can run them.

    Platform warnings that were issued before are issued again.

    Args:
        platform: The name of the platform.
        overhead: The overhead of the policy of GPUs; 0 sends entries of small arrays, too.
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
    """Makes JAX trace the branches of all platforms, inside, not only those of CPUs.

    JAX reuses earlier traces of functions with a `jit` of their own. They have no
    collectives, so all collectives are seen.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platforms, "traced_for", lambda: None)
        yield


def traced_collectives(
    fn: Callable, x: Any, n: int, check_vma: bool = True, platform: str = "cpu"
) -> list[Collective]:
    """Returns the collectives of fn on n ranks of a platform, for x stacked by rank."""
    with contextlib.nullcontext() if platform == "cpu" else every_platform():
        return collectives(jax.make_jaxpr(stacked(fn, n, check_vma))(x), platform)


def scatters(program: Any) -> list[int]:
    """Returns for each scatter of a jaxpr the number of its updates."""
    found = [e for _, e in equations(program) if e.primitive.name.startswith("scatter")]
    return [math.prod(eqn.invars[1].aval.shape[:-1]) for eqn in found]


def equations(program: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yields the path, as of a `Collective`, and the equation, for each of a jaxpr."""
    for eqn in getattr(program, "jaxpr", program).eqns:
        yield path, eqn
        for key, value in eqn.params.items():
            for number, inner in enumerate(_jaxprs(value)):
                step = _step(eqn.primitive.name, key, number)
                yield from equations(inner, path + step)


def sent_bytes(collective: Collective, n: int) -> float:
    """Returns the bytes that one of n ranks sends, by the algorithms that send least."""
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
