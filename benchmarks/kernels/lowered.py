"""The atomic operations of Triton kernels, read from their IR before it is compiled.

Pallas puts Triton's IR into a program when it is lowered, without a GPU or a plugin.
jax-triton leaves it in a folder when it compiles. Interpreters run neither: an operation
that is lowered wrongly shows here alone.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax


class Atomic(NamedTuple):
    """An atomic operation of a kernel.

    Attributes:
        kernel: The kernel's name.
        operation: "fadd", "add", "or", and so on; "cas" for a comparison and exchange.
        dtype: The element type in MLIR's words, as "f32" or "i32".
    """

    kernel: str
    operation: str
    dtype: str

    @property
    def is_wrong(self) -> bool:
        """Whether it takes integers for floats, or floats for integers."""
        if self.operation == "fadd":
            return not self.dtype.startswith(("f", "bf"))
        return self.operation == "add" and not self.dtype.startswith("i")


def for_cuda(function: Callable, *like: Any) -> Any:
    """A `jax.stages.Lowered` for GPUs of NVIDIA, where there is none.

    Args:
        function: What is traced.
        *like: The shapes and dtypes of its arguments.
    """
    with _described():
        return jax.jit(function).trace(*like).lower(lowering_platforms=("cuda",))


def _described():
    """A GPU for JAX 0.12 to lower for, which wants to know its kind; else nothing."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("gpu",), auto, abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def in_pallas(lowered: Any) -> list[Atomic]:
    """Those of the kernels of Pallas in a program lowered for CUDA.

    Args:
        lowered: A `jax.stages.Lowered`.
    """
    return [one for kernel, text in texts(lowered) for one in in_text(kernel, text)]


def texts(lowered: Any) -> list[tuple[str, str]]:
    """The names of the kernels of Pallas in such a program, and Triton's IR of each."""
    from jaxlib.mlir import ir
    from jaxlib.triton import dialect

    module = lowered.compiler_ir("stablehlo")
    with module.context as context:
        dialect.register_dialect(context)
        kernels = _kernels(module.operation, ir)
        return [(name, str(ir.Module.parse(code))) for name, code in kernels]


def _kernels(operation, ir) -> Iterator[tuple[str, bytes]]:
    """The names and the serialized IR of the kernels in an operation."""
    for region in operation.regions:
        for inner in (op for block in region for op in block):
            if "mhlo.backend_config" in inner.attributes:
                config = inner.attributes["mhlo.backend_config"]
                if "ir" in config:
                    name = ir.StringAttr(config["name"]).value
                    yield name, ir.StringAttr(config["ir"]).value_bytes
            yield from _kernels(inner.operation, ir)


def in_text(kernel: str, text: str) -> list[Atomic]:
    """Those in the text of a kernel's IR."""
    # Of a tensor the type is written tensor<4x8xf32, #layout>, of a number f32.
    result = r"-> (?:tensor<(?:\d+x)*)?(b?[fi]\d+)"
    pattern = rf"tt\.atomic_(?:rmw (\w+)|(cas))\b.*{result}"
    return [
        Atomic(kernel, rmw or cas, dtype) for rmw, cas, dtype in re.findall(pattern, text)
    ]
