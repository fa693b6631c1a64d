"""Compiles Triton kernels to PTX, without a GPU and without an assembler.

Pointers are declared to be multiples of 16, as JAX's buffers are. After a kernel's own
arguments Triton adds pointers to scratch memory. No kernel here uses these, so they may
point anywhere.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from triton._C.libtriton import ir  # pyright: ignore[reportMissingImports]
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]
from triton.compiler.compiler import (  # pyright: ignore[reportMissingImports]
    make_backend,
)


ALIGNMENT = 16
STAGES = ("ttir", "ttgir", "llir", "ptx")
# JAX's names of dtypes, and Triton's.
_TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
}


class Compiled(NamedTuple):
    """A kernel for GPUs of one compute capability.

    Attributes:
        name: The name of its entry point.
        ptx: The text of its PTX.
        ir: Triton's intermediate representation, before it is optimized.
        pointers: The number of its parameters, including those that Triton adds.
        threads: The number of threads of a program.
        shared: The bytes of shared memory of a program.
    """

    name: str
    ptx: str
    ir: str
    pointers: int
    threads: int
    shared: int


def compiled(
    kernel: Any,
    dtypes: Sequence[str],
    sizes: Mapping[str, Any],
    warps: int,
    capability: int,
) -> Compiled:
    """Compiles a kernel, and caches the result for the same arguments.

    Args:
        kernel: A function of `triton.jit`.
        dtypes: JAX's names of the dtypes of the arrays of its pointers, in order.
        sizes: The values of its `constexpr` parameters, by name.
        warps: The number of warps, of 32 threads, of a program.
        capability: The compute capability, such as 80, 90 or 100.
    """
    numbers = tuple(sorted(sizes.items()))
    return _compiled(kernel, tuple(dtypes), numbers, warps, capability)


@functools.cache
def _compiled(kernel, dtypes, numbers, warps, capability):
    source = _source(kernel, dtypes, dict(numbers))
    first, module, metadata = to_ptx(lambda *_: source, warps, capability)
    if metadata["global_scratch_size"] or metadata["profile_scratch_size"]:
        raise NotImplementedError(f"{metadata['name']} needs scratch memory")
    return Compiled(
        name=metadata["name"],
        ptx=module,
        ir=first,
        pointers=len(parameters(module)),
        threads=32 * metadata["num_warps"],
        shared=metadata["shared"],
    )


def to_ptx(
    source: Callable[[Any, Any], Any],
    warps: int,
    capability: int,
    stages: Sequence[str] = STAGES,
) -> tuple[str, str, dict[str, Any]]:
    """Runs Triton's compiler up to PTX.

    Args:
        source: A function of a context and a backend that returns the source to compile.
        warps: The number of warps of a program.
        capability: The compute capability.
        stages: The stages to run: all, unless the source is the result of some of them.

    Returns:
        The first intermediate representation, the PTX, and the compiler's metadata.
    """
    target = GPUTarget("cuda", capability, 32)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    of = source(context, backend)
    options = backend.parse_options({"num_warps": warps} | of.parse_options())
    known: dict[str, Any] = {}
    backend.add_stages(known, options, of.language)
    metadata = {**options.__dict__, "target": target}
    functions = backend.get_codegen_implementation(options)
    module = of.make_ir(target, options, functions, backend.get_module_map(), context)
    first = str(module)
    for name in stages:
        module = known[name](module, metadata)
    return first, module, metadata


def _source(kernel, dtypes, numbers):
    pointers = iter(dtypes)
    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in numbers:
            signature[name], constants[(place,)] = "constexpr", numbers[name]
        else:
            signature[name] = f"*{_TYPES[next(pointers)]}"
            attributes[(place,)] = [["tt.divisibility", ALIGNMENT]]
    if any(True for _ in pointers):
        raise TypeError(f"{kernel.__name__} has fewer pointers than {len(dtypes)}")
    return ASTSource(kernel, signature, constants, attributes)


def parameters(ptx: str) -> list[str]:
    """Returns the parameters of a kernel's entry point, as lines of PTX."""
    (entry,) = re.findall(r"\.entry\s+\w+\s*\(([^)]*)\)", ptx)
    return [line.strip() for line in entry.split(",") if ".param" in line]
