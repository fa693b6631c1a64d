"""From kernels to PTX, as they are given to a GPU: by Triton's compiler, without a GPU.

A kernel of Triton is compiled from its source, for operands that begin at multiples of 16
bytes, as launchers promise. A kernel of Pallas comes as the intermediate representation
that JAX lowers it to. What follows in the pipeline, `ptxas`, is not run.
"""

import functools
import pathlib
import tempfile
from typing import Any, NamedTuple

from tests.ptx.machine.code import Code
from tests.ptx.machine.memory import ALIGNMENT
from tests.ptx.machine.program import read


ARCHITECTURES = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
_NAMES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32",
    "uint32": "u32", "uint16": "u16", "uint8": "u8",
}  # fmt: skip


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
    key = (kernel, dtypes, tuple(sorted(sizes.items())), warps, arch)
    return _of_triton(*key)


@functools.cache
def _of_triton(kernel, dtypes, sizes, warps, arch):
    from triton.compiler import ASTSource

    sizes, pointers = dict(sizes), iter(dtypes)
    signature, constants, attributes = {}, {}, {}
    for number, name in enumerate(kernel.arg_names):
        if name in sizes:
            signature[name], constants[(number,)] = "constexpr", sizes[name]
        else:
            signature[name] = f"*{_NAMES[next(pointers)]}"
            attributes[(number,)] = [["tt.divisibility", ALIGNMENT]]
    return _compiled(ASTSource(kernel, signature, constants, attributes), warps, arch)


@functools.cache
def of_ir(text: str, warps: int, arch: int) -> Compiled:
    """Compiles a kernel that is written in Triton's intermediate representation."""
    from triton.compiler.compiler import IRSource

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "kernel.ttir"
        path.write_text(text)
        make = lambda context, backend: IRSource(str(path), context, backend)
        return _compiled(make, warps, arch)


def _compiled(source, warps, arch):
    """Runs the stages of Triton's compiler up to PTX."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    target = GPUTarget("cuda", arch, 32)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    first = 0
    if callable(source):
        source, first = source(context, backend), 1
    options = backend.parse_options({"num_warps": warps} | source.parse_options())
    stages = {}
    backend.add_stages(stages, options, source.language)
    metadata = {**options.__dict__, "target": target}
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, functions, backend.get_module_map(), context)
    for name in ("ttir", "ttgir", "llir", "ptx")[first:]:
        module = stages[name](module, metadata)
    return Compiled(Code(read(module)), metadata["shared"], module)
