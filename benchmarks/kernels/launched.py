"""The kernels of Triton that programs launch, and their PTX, whichever way they go.

Where JAX launches PTX it is what `pallas_kernels.triton.ptx` compiled. jax-triton compiles
by itself and leaves its PTX in a folder: there the two are compared, instruction by
instruction, so that what is tested on one version of JAX holds on the others.
"""

import contextlib
import pathlib
import re
from collections.abc import Iterable, Iterator
from unittest import mock

from benchmarks.kernels.h200 import SHARED
from pallas_kernels import backends
from pallas_kernels.triton import launch


@contextlib.contextmanager
def recorded() -> Iterator[list[launch.Launch]]:
    """Collects what is launched inside, in programs that are traced or lowered."""
    found: list[launch.Launch] = []
    name = "by_jax" if launch.by_ptx() else "by_jax_triton"
    launches = getattr(launch, name)

    def record(one):
        found.append(one)
        return launches(one)

    with mock.patch.object(launch, name, record):
        yield found


def compiled(launches: Iterable[launch.Launch]) -> list:
    """The kernels of launches, each once, as `pallas_kernels.triton.ptx` compiles them."""
    from pallas_kernels.triton import ptx

    capability = backends.COMPUTE_CAPABILITY
    found = {}
    for one in launches:
        code = ptx.compiled(one.kernel, one.dtypes, one.sizes, one.warps, capability)
        found[code.ptx] = code
    return [*found.values()]


def write(launches: Iterable[launch.Launch], folder: pathlib.Path) -> None:
    """Writes PTX and the IR before it, as jax-triton does: a folder a kernel."""
    for number, code in enumerate(compiled(launches)):
        own = folder / str(number)
        own.mkdir()
        (own / f"{code.name}.ptx").write_text(code.ptx)
        (own / f"{code.name}.ttir").write_text(code.ir)


def differing(launches: Iterable[launch.Launch], folder: pathlib.Path) -> list[str]:
    """What jax-triton compiled otherwise than `pallas_kernels.triton.ptx`, a line each.

    Args:
        launches: Everything that was launched.
        folder: Where jax-triton left its PTX.
    """
    ours = {tuple(without_lines(one.ptx)): one.name for one in compiled(launches)}
    theirs = {
        tuple(without_lines(path.read_text())): path.stem for path in folder.rglob("*.ptx")
    }
    wrong = [f"{ours[x]}: jax-triton has no such PTX" for x in ours.keys() - theirs.keys()]
    return wrong + [
        f"{theirs[x]}: jax-triton has other PTX" for x in theirs.keys() - ours.keys()
    ]


def without_lines(ptx: str) -> list[str]:
    """The instructions of a kernel, without what says from which line each comes."""
    code, _, _ = ptx.partition("\t.section\t.debug")
    code = re.sub(r"//.*", "", code)
    is_debug = re.compile(r"\s*(?:\.(?:loc|file)\b.*|\$L__(?:tmp|func_\w+?)\d*:)?\s*")
    return [line for line in code.splitlines() if not is_debug.fullmatch(line)]


def too_large(launches: Iterable[launch.Launch]) -> list[str]:
    """Which kernels take more shared memory than a launch may without asking for it."""
    return [
        f"{one.name} takes {one.shared:,} bytes of shared memory; {SHARED:,} are allowed."
        for one in compiled(launches)
        if one.shared > SHARED
    ]
