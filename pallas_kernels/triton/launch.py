"""Launches kernels of Triton: the one file that chooses by which way, by the JAX here.

    JAX 0.10, 0.11      jax-triton, which compiles the kernel, by a custom call of its own
    JAX 0.12 and later  PTX (`pallas_kernels.triton.ptx`), launched by JAX itself, with
                        `jax.experimental.thunky.ptx_kernel`

A kernel's arguments are the operands, then what it works on in place, then its results,
then sizes as Python numbers, compiled in. What is in place comes twice, as operand and as
result: two pointers to the same memory. Both ways compile the same source to the same PTX.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, PartitionSpec as P

from pallas_kernels import backends


# The first JAX that launches PTX; jax-triton 0.3 fails on it, and so does 0.4.
LAUNCHES_PTX = (0, 12)


class Launch(NamedTuple):
    """What is launched; see `launch`."""

    kernel: Any
    programs: int
    operands: tuple[Any, ...]
    in_place: tuple[Any, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    warps: int
    zeroed: bool
    sizes: dict[str, Any]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of what the pointers of the kernel point to, in order."""
        like = (*self.operands, *self.in_place, *self.in_place, *self.results)
        return tuple(x.dtype.name for x in like)


def launch(
    kernel: Any,
    programs: int,
    operands: Sequence[jax.Array],
    *,
    in_place: Sequence[jax.Array] = (),
    results: Sequence[jax.ShapeDtypeStruct] = (),
    warps: int = 4,
    zeroed: bool = False,
    **sizes: Any,
) -> list[jax.Array]:
    """Runs a kernel in as many programs; what it left in place, then its other results.

    Args:
        kernel: Of `triton.jit`.
        programs: How many there are.
        operands: What it reads.
        in_place: What it reads and writes.
        results: The shapes and dtypes of what it only writes.
        warps: Of 32 threads, for a program.
        zeroed: Whether results are zero before it runs; else they may hold anything.
        **sizes: Python numbers that the kernel was written for.
    """
    given = tuple(operands), tuple(in_place), tuple(results)
    one = Launch(kernel, programs, *given, warps, zeroed, sizes)
    return (by_jax if by_ptx() else by_jax_triton)(one)


def by_ptx() -> bool:
    """Whether the JAX here launches PTX itself."""
    return jax.__version_info__ >= LAUNCHES_PTX


def missing() -> str | None:
    """What launches need that is not here, and how to get it; None if nothing."""
    version, extra = jax.__version__, "pip install 'sparsejax[triton]'"
    if sys.platform != "linux":
        return f"Triton, which there is for Linux, and this is {sys.platform}"
    try:
        import triton  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        return f"Triton 3.6 ({error}): {extra}"
    if by_ptx():
        try:
            from jax.experimental import thunky  # pyright: ignore[reportAttributeAccessIssue]

            _ = thunky.jit, thunky.memzero, thunky.ptx_kernel
        except (ImportError, AttributeError) as error:
            return (
                f"jax.experimental.thunky.ptx_kernel, which JAX {version} has not as "
                f"JAX 0.12 has it ({error}): pip install 'jax==0.12.*'"
            )
        return None
    try:
        import jax_triton  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        return (
            f"jax-triton 0.3 on JAX {version}, and CUDA for it ({error}): pip install "
            "'sparsejax[cuda13,triton]'; or JAX 0.12, which needs no jax-triton"
        )
    return None


def by_jax_triton(one: Launch) -> list[jax.Array]:
    """Launches by a custom call of jax-triton."""
    import jax_triton  # pyright: ignore[reportMissingImports]  # it needs a GPU's jaxlib

    first = len(one.operands)
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in one.in_place]
    written = range(len(like), len(like) + len(one.results))
    return list(
        jax_triton.triton_call(
            *one.operands,
            *one.in_place,
            kernel=one.kernel,
            out_shape=[*like, *one.results],
            grid=(one.programs,),
            num_warps=one.warps,
            compute_capability=backends.compute_capability(),
            zeroed_outputs=tuple(written) if one.zeroed else (),
            input_output_aliases={first + i: i for i in range(len(like))},
            **one.sizes,
        )
    )


def by_jax(one: Launch) -> list[jax.Array]:
    """Launches PTX, as one of the program's own kernels: XLA captures it in CUDA graphs."""
    from jax.experimental import thunky  # pyright: ignore[reportAttributeAccessIssue]

    from pallas_kernels.triton import ptx

    capability = backends.compute_capability()
    code = ptx.compiled(one.kernel, one.dtypes, one.sizes, one.warps, capability)
    read = len(one.operands) + len(one.in_place)
    written = len(one.in_place) + len(one.results)
    own = code.pointers - read - written  # Triton's, which no kernel here uses

    @thunky.jit
    def run(*buffers):
        if one.zeroed:
            for buffer in buffers[read + len(one.in_place) :]:
                thunky.memzero(buffer)
        thunky.ptx_kernel(
            *buffers,
            *[buffers[0]] * own,
            written=[False] * read + [True] * written + [False] * own,
            kernel_name=code.name,
            ptx=code.ptx,
            grid_dim=(one.programs, 1, 1),
            block_dim=(code.threads, 1, 1),
            shmem_bytes=code.shared,
        )

    def call(operands, in_place):
        works = [jax.new_ref(x) for x in in_place]
        made = [jax.empty_ref(x) for x in one.results]
        run(*operands, *works, *works, *made)
        return [ref[...] for ref in (*works, *made)]

    return _on_each_device(call)(one.operands, one.in_place)


def _on_each_device(call: Callable) -> Callable:
    """The function inside `shard_map` over all axes of the mesh, as JAX asks of a launch.

    Over axes that were not manual before, every device has whole arrays and computes all.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    free = {axis for axis, kind in kinds.items() if kind != AxisType.Manual}
    if not free:
        return call
    if AxisType.Explicit in kinds.values():
        whole = lambda x: jax.sharding.reshard(x, P(*[None] * x.ndim))
    else:
        whole = lambda x: x
    alone = jax.shard_map(call, in_specs=P(), out_specs=P(), axis_names=free)
    return lambda *given: alone(*jax.tree.map(whole, given))
