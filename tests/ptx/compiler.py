"""From kernels to PTX, as they are given to a GPU: by Triton's compiler, without a GPU.

A kernel of Triton is compiled as it is where it is launched. A kernel of Pallas comes as
the intermediate representation that JAX lowers it to. What follows in the pipeline,
`ptxas`, is not run.
"""

import functools
import pathlib
import tempfile
from typing import Any, NamedTuple

from tests.ptx.machine.code import Code
from tests.ptx.machine.program import read


ARCHITECTURES = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}


class Compiled(NamedTuple):
    """A kernel for one architecture.

    Attributes:
        code: For the machine.
        shared: How many bytes of shared memory a block has.
        ptx: The text.
    """

    code: Code
    shared: int
    ptx: str


def of_triton(
    kernel: Any, dtypes: tuple[str, ...], sizes: dict[str, Any], warps: int, arch: int
) -> Compiled:
    """Compiles a kernel of `triton.jit`.

    Args:
        kernel: The kernel.
        dtypes: Of its pointers, in order.
        sizes: Its numbers by name, compiled in.
        warps: Of a program.
        arch: The compute capability: 80, 90 or 100.
    """
    from pallas_kernels.triton import ptx

    one = ptx.compiled(kernel, dtypes, sizes, warps, arch)
    return _translated(one.ptx, one.shared)


@functools.cache
def of_ir(text: str, warps: int, arch: int) -> Compiled:
    """Compiles a kernel that is written in Triton's intermediate representation."""
    from triton.compiler.compiler import IRSource

    from pallas_kernels.triton import ptx

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "kernel.ttir"
        path.write_text(text)
        source = lambda context, backend: IRSource(str(path), context, backend)
        _, made, metadata = ptx.to_ptx(source, warps, arch, ptx.STAGES[1:])
    return _translated(made, metadata["shared"])


@functools.cache
def _translated(text, shared):
    return Compiled(Code(read(text)), shared, text)
