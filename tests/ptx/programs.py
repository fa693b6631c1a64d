"""Small programs in PTX for tests of the machine."""

import numpy as np

from tests.ptx.compiler import Compiled
from tests.ptx.launches import Launched
from tests.ptx.machine.code import Code
from tests.ptx.machine.orders import Order
from tests.ptx.machine.program import read


# Of a kernel with pointers in %rd1, %rd2 ..., its thread in %r1, its block in %r2, the
# thread's number in the grid in %r3, and four bytes times that in %rd9.
_TEXT = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry small({parameters}
)
.reqntid {threads}
{{
	.reg .pred 	%p<20>;
	.reg .b16 	%rs<20>;
	.reg .b32 	%r<40>;
	.reg .b64 	%rd<40>;
{loads}
	mov.u32 	%r1, %tid.x;
	mov.u32 	%r2, %ctaid.x;
	mov.u32 	%r4, %ntid.x;
	mad.lo.s32 	%r3, %r2, %r4, %r1;
	mul.wide.u32 	%rd9, %r3, 4;
{body}
	ret;
}}
"""


def compiled(body: str, pointers: int, threads: int = 32, shared: int = 0) -> Compiled:
    """A kernel with this body."""
    lines = [line.strip() for line in body.strip().splitlines()]
    parameters = [f"\n\t.param .u64 .ptr .global .align 1 p_{i}" for i in range(pointers)]
    text = _TEXT.format(
        parameters=",".join(parameters),
        threads=threads,
        loads="\n".join(f"\tld.param.b64 \t%rd{i + 1}, [p_{i}];" for i in range(pointers)),
        body="\n".join(f"\t{line}" if line[-1] != ":" else line for line in lines if line),
    )
    return Compiled(Code(read(text)), shared, text)


def launch(
    body: str,
    *operands: np.ndarray,
    results: tuple[np.ndarray, ...] = (),
    threads: int = 32,
    blocks: int = 1,
    shared: int = 0,
    zeroed: bool = False,
) -> Launched:
    """A launch of such a kernel, whose pointers are operands and results."""
    kernel = compiled(body, len(operands) + len(results), threads, shared)
    names = [f"p_{i}" for i in range(len(operands) + len(results))]
    given = kernel.code, shared, blocks, operands, results, {}, names, zeroed
    return Launched(0, given)


def run(body: str, *operands: np.ndarray, seed: int = 0, **how) -> list[np.ndarray]:
    """Launches such a kernel; its results."""
    launched = launch(body, *operands, **how)
    launched.seed = seed
    return launched.run(Order(seed))
