"""The kernels of Pallas in the machine, from what JAX lowers them to for a GPU.

JAX writes Triton's intermediate representation into the program, with no GPU needed; what
follows is Triton's compiler. So it is the lowering of the installed JAX that is executed.
"""

import contextlib
import functools
import types
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks.kernels import lowered
from pallas_kernels.pallas import bitmap, launch, messages, partition, threshold_hash
from tests.ptx import compiler
from tests.ptx.launches import Gpu


_OPERATIONS = {
    "bitmap_encode": bitmap,
    "bitmap_decode": bitmap,
    "compact": bitmap,
    "partition": partition,
    "threshold_hash": threshold_hash,
    "pack_message": messages,
    "unpack_message": messages,
}


def operations() -> types.SimpleNamespace:
    """The functions that launch kernels, as a module of those of Triton has them."""
    found = {
        name: functools.partial(getattr(module, name), interpret=False)
        for name, module in _OPERATIONS.items()
    }
    return types.SimpleNamespace(**found)


@contextlib.contextmanager
def launched_by(gpu: Gpu) -> Iterator[None]:
    """Launches kernels in the machine, on arrays with numbers in them."""
    original = launch.launch

    def run(kernel, name, programs, operands, results, *, in_place=None, warps=4, **_):
        def call(*operands):
            return original(
                kernel, name, programs, operands, results, in_place=in_place, warps=warps
            )

        like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        ((_, text),) = lowered.texts(lowered.for_cuda(call, *like))
        compiled = compiler.of_ir(text, warps, gpu.arch)
        done = gpu.run(compiled, programs, operands, results, in_place or {})
        return [jnp.asarray(x) for x in done]

    with mock.patch.object(launch, "launch", run):
        yield
