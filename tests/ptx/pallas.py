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
from pallas_kernels.pallas import bitmap, launch, partition, threshold_hash
from tests.kernels import checks
from tests.ptx import compiler
from tests.ptx.launches import Gpu


_OPERATIONS = {
    "bitmap_encode": bitmap,
    "bitmap_decode": bitmap,
    "partition": partition,
    "threshold_hash": threshold_hash,
}


CHECKS = {
    "bitmap.py": checks.check_bitmap,
    "partition.py": checks.check_partition,
    "threshold_hash.py": checks.check_threshold_hash,
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
    """Launches kernels in the machine, while JAX runs a program or outside of one."""
    original = launch.launch

    def run(kernel, programs, operands, results, *, in_place=None, **sizes):
        def call(*operands):
            return original(kernel, programs, operands, results, in_place=in_place, **sizes)

        like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]

        def launched(*operands):
            with checks.ALONE:
                ((_, text),) = lowered.texts(lowered.for_cuda(call, *like))
                compiled = compiler.of_ir(text, launch.WARPS, gpu.arch)
                return gpu.run(compiled, programs, operands, results, in_place or {})

        if any(isinstance(x, jax.core.Tracer) for x in operands):
            return jax.pure_callback(launched, list(results), *operands)
        return [jnp.asarray(x) for x in launched(*operands)]

    with mock.patch.object(launch, "launch", run):
        yield
