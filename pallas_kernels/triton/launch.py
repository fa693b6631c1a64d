"""Launches Triton kernels, by an implementation that depends on the version of JAX.

    JAX 0.10, 0.11      jax-triton, which compiles the kernel, by a custom call of its own
    JAX 0.12 and later  PTX (`pallas_kernels.triton.ptx`), launched by JAX itself, with
                        `jax.experimental.thunky.ptx_kernel`

A kernel's arguments are the operands, then the arrays that it updates in place, then its
results, then sizes as Python numbers, which are compiled in. An array in place is passed
twice, as operand and as result: two pointers to the same memory. Both implementations
compile the same source to the same PTX.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, PartitionSpec as P

from pallas_kernels import backends


# The first version of JAX that launches PTX; jax-triton 0.3 and 0.4 fail on it.
LAUNCHES_PTX = (0, 12)


class Launch(NamedTuple):
    """The arguments of a launch; see `launch`."""

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
        """The dtypes of the arrays of the kernel's pointers, in order."""
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
    """Runs a kernel in a number of programs.

    Args:
        kernel: A function of `triton.jit`.
        programs: The number of programs.
        operands: The arrays that it reads.
        in_place: The arrays that it reads and writes.
        results: The shapes and dtypes of the arrays that it only writes.
        warps: The number of warps, of 32 threads, of a program.
        zeroed: Whether results are zeros before it runs; else they are not initialized.
        **sizes: The values of its `constexpr` parameters.

    Returns:
        The arrays in place after the launch, then the results.
    """
    given = tuple(operands), tuple(in_place), tuple(results)
    one = Launch(kernel, programs, *given, warps, zeroed, sizes)
    return (by_jax if by_ptx() else by_jax_triton)(one)


def by_ptx() -> bool:
    """Returns whether this version of JAX launches PTX itself."""
    return jax.__version_info__ >= LAUNCHES_PTX


def missing() -> str | None:
    """Returns what launches need but is not installed, and the fix; None if nothing."""
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
    """Launches a kernel by a custom call of jax-triton."""
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
    """Launches PTX as one of the program's own kernels, which CUDA graphs may contain."""
    from jax.experimental import thunky  # pyright: ignore[reportAttributeAccessIssue]

    from pallas_kernels.triton import ptx

    capability = backends.compute_capability()
    code = ptx.compiled(one.kernel, one.dtypes, one.sizes, one.warps, capability)
    read = len(one.operands) + len(one.in_place)
    written = len(one.in_place) + len(one.results)
    own = code.pointers - read - written  # those that Triton adds; no kernel here uses them

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
    """Wraps a function in a `shard_map` over all mesh axes, as JAX requires of a launch.

    Along axes that were not manual before, each device has whole arrays and computes all.
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
