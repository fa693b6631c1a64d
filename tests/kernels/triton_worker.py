"""The Triton kernels in Triton's interpreter, held to `contract`.

    python -m tests.kernels.triton_worker [hold FILE ...]
    python -m tests.kernels.triton_worker FILE OLD NEW

By itself in a process: the interpreter checks no bounds, and what runs past an array's end
may take the process down. The second holds a kernel's file that has NEW instead of OLD, and
the process must fail. Arrays lie between canaries, which must live.

The interpreter runs programs one after another, so it cannot show a race.
"""

import os
import pathlib
import sys


os.environ["TRITON_INTERPRET"] = "1"  # Before Triton is imported.

import jax
import numpy as np

from tests.kernels import checks


CANARY, GUARD = 0x7B, 4096  # a byte, and how many on each side


class Guarded:
    """A NumPy array between canaries, as the kind of tensor that Triton takes."""

    def __init__(self, x):
        x = np.ascontiguousarray(x)
        self._all = np.full(x.nbytes + 2 * GUARD, CANARY, np.uint8)
        self.array = self._all[GUARD : GUARD + x.nbytes].view(x.dtype).reshape(x.shape)
        self.array[...] = x

    @property
    def dtype(self):
        return str(self.array.dtype)

    @property
    def shape(self):
        return self.array.shape

    def data_ptr(self):
        return self.array.ctypes.data

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def size(self):
        return self.array.shape

    def storage_offset(self):
        return 0

    # The interpreter copies its arguments to the CPU and back; they are there already.
    def cpu(self):
        return self

    def untyped_storage(self):
        return self

    def new_empty(self, *_, **__):
        return self

    def set_(self, *_):
        return self

    def copy_(self, _):
        return self

    def check(self, name):
        guards = np.concatenate([self._all[:GUARD], self._all[-GUARD:]])
        assert (guards == CANARY).all(), f"{name} wrote past the end of an array"


def interpreted(
    kernel, programs, operands, *, in_place=(), results=(), warps=4, zeroed=False, **sizes
) -> list[np.ndarray]:
    """What a kernel leaves in place, and its results; arrays lie between canaries."""
    del warps
    assert programs <= 128, "the interpreter takes 14 ms a program"
    fill = 0 if zeroed else 0x5A5A5A5A
    reads = [Guarded(x) for x in operands]
    works = [Guarded(x) for x in in_place]
    fills = [Guarded(np.full(x.shape, 0, x.dtype) + x.dtype.type(fill)) for x in results]
    kernel[(programs,)](*reads, *works, *works, *fills, **sizes)
    for argument in (*reads, *works, *fills):
        argument.check(kernel.__name__)
    return [argument.array for argument in (*works, *fills)]


def main(file="hold", *given):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 3)
    names, edit = (given or checks.CHECKS, None) if file == "hold" else ([file], None)
    if file != "hold":
        edit = checks.Edit(*given, pathlib.Path(os.environ["MUTANTS"]))
    for name in names:
        made = checks.load(checks.FILES.get(name, name), interpreted, edit)
        checks.CHECKS[name](made)
        print(f"{name} holds", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
