"""The choice of the backend that computes an operation.

    reference   plain XLA, everywhere
    pallas      Pallas, through its Triton backend, on NVIDIA GPUs
    triton      Triton, on NVIDIA GPUs
    auto        Triton where it was measured to be faster than plain XLA on this kind of
                device (`winners.json`); reference elsewhere

The backend is that of the operation's argument; else that of the context `use_kernels`;
else that of the environment variable SPARSEJAX_KERNELS; else "auto". It is determined at
trace time, so a compiled function keeps the backend with which it was compiled.

Kernels may be called inside `jax.shard_map`. JAX can batch (`vmap`) and differentiate only
the reference.

A backend that is named but cannot run here raises an error with the reason. An operation
for which a backend has no kernel is computed by the reference, unless the backend was the
operation's own argument, which raises. With "auto" backends that cannot run are skipped,
and under `vmap` the reference is used; to differentiate, name the reference.

| backend | JAX 0.10 | JAX 0.11 | JAX 0.12 |
| --- | --- | --- | --- |
| reference | all platforms | all platforms | all platforms |
| pallas | CUDA | CUDA, deprecated by JAX | CUDA, deprecated by JAX |
| triton | CUDA, by jax-triton 0.3 | CUDA, by jax-triton 0.3 | CUDA, by JAX itself |
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Container, Iterator
from importlib import resources
from typing import Any

import jax
from jax import lax

from pallas_kernels.errors import BackendError, KernelArgumentError
from pallas_kernels.types import as_varying, varying_axes, without_types


BACKENDS = ("reference", "pallas", "triton")
VARIABLE = "SPARSEJAX_KERNELS"
# The compute capability of an H200, for which kernels are compiled without a GPU.
COMPUTE_CAPABILITY = 90
# The plugins of JAX, without one of which it sees no NVIDIA GPU.
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
# That of Ampere GPUs, the oldest for which XLA and Triton compile Triton kernels.
LEAST_CAPABILITY = 8.0


@dataclasses.dataclass(frozen=True)
class _Asked:
    name: str
    interpret: bool = False
    compile_only: bool = False
    prefers: str | None = None  # the backend that "auto" takes, if it can run


_asked: contextvars.ContextVar[_Asked | None] = contextvars.ContextVar(
    "sparsejax_kernels", default=None
)


@contextlib.contextmanager
def use_kernels(
    backend: str, *, interpret: bool = False, compile_only: bool = False
) -> Iterator[None]:
    """Sets the backend of the kernels for all that is traced inside the context.

        with sparsejax.use_kernels("reference"):
            step = jax.jit(train_step).lower(state, batch).compile()

    Args:
        backend: "auto" (by platform and operation), "reference" (plain XLA), "pallas" or
            "triton".
        interpret: Runs "pallas" kernels in XLA, on any platform and slowly, for tests.
        compile_only: Compiles for a GPU where there is none.

    Returns:
        A context manager.

    Example:
        >>> with sparsejax.use_kernels("reference"):
        ...     found = jax.jit(lambda x: pallas_kernels.compact(x, 8))(jnp.ones(32))
    """
    _check(backend, "backend")
    asked = _Asked(backend, interpret, compile_only)
    if backend != "auto" and (reason := why_not(asked)):
        raise BackendError(reason)
    with _asking(asked):
        yield


@contextlib.contextmanager
def auto_prefers(backend: str) -> Iterator[None]:
    """Sets the backend that "auto" prefers inside the context, where it has a kernel.

    It is for operations that belong together, since each was only measured alone.
    """
    with _asking(dataclasses.replace(_resolve(None), prefers=backend)):
        yield


@contextlib.contextmanager
def _asking(asked):
    token = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(token)


def run(
    operation: str, named: str | None, kernels: dict[str, Callable], size: int, *operands
):
    """Computes an operation by the backend that was asked for.

    Args:
        operation: The name of the operation.
        named: The backend that its caller named, or None.
        kernels: The function of each backend, as returned by `kernels`.
        size: The number of elements to process, on which the fastest backend depends.
        *operands: Pytrees of arrays.
    """
    asked, name = _resolve(named), chosen(operation, named, kernels, size)
    if name not in kernels:
        has = ", ".join(repr(one) for one in kernels)
        raise BackendError(
            f"{operation} has no kernel in the backend {name!r}; it has {has}."
        )
    if name == "reference" or size == 0:  # a launch needs at least one element
        return kernels["reference"](*operands)
    if asked.name != "auto" and (reason := why_not(dataclasses.replace(asked, name=name))):
        raise BackendError(reason)
    kernel = kernels[name]
    if name == "pallas":
        kernel = functools.partial(kernel, interpret=asked.interpret)
    # Kernels have no VMA types, so those of operands are removed, and added to results.
    arrays, tree = jax.tree.flatten(operands)
    axes = frozenset[str]().union(*map(varying_axes, arrays))
    arrays = without_types(arrays, axes)
    kernel, reference = (
        lambda *arrays, by=by: by(*tree.unflatten(arrays))
        for by in (kernel, kernels["reference"])
    )
    if asked.interpret:
        return as_varying(kernel(*arrays), axes)

    def on_its_platform(*arrays):
        return lax.platform_dependent(*arrays, cuda=kernel, default=reference)

    if asked.name == "auto":
        on_its_platform = _batched_by(reference, on_its_platform)
    return as_varying(on_its_platform(*arrays), axes)


def chosen(operation: str, named: str | None, kernels: Container[str], size: int) -> str:
    """Returns the backend that computes an operation for which some have kernels."""
    asked = _resolve(named)
    name = asked.name
    if name == "auto":
        liked = asked.prefers
        if liked is None or liked not in kernels or why_not(liked) is not None:
            liked = _winner(operation, size, kernels)
        name = liked
    return "reference" if name not in kernels and named is None else name


def _batched_by(reference, function):
    """Wraps a function so that `vmap` batches the reference instead."""
    function = jax.custom_batching.custom_vmap(function)

    @function.def_vmap
    def _(size, batched, *operands):
        del size
        axes = [0 if one else None for one in batched]
        result = jax.vmap(reference, in_axes=axes)(*operands)
        return result, jax.tree.map(lambda _: True, result)

    return function


def kernels(
    reference: Callable,
    *,
    pallas: str | None = None,
    triton: str | None = None,
    **static: Any,
) -> dict[str, Callable]:
    """Returns the function of each backend that computes an operation.

    Args:
        reference: The function in plain XLA. Those of other backends have the same name.
        pallas: The file of the Pallas kernel, or None; its function takes `interpret`.
        triton: The file of the Triton kernel, or None.
        **static: Keyword arguments of all functions, beside the operands.
    """
    files = {"pallas": pallas, "triton": triton}
    found = {
        backend: _kernel(f"pallas_kernels.{backend}.{file}", reference.__name__)
        for backend, file in files.items()
        if file is not None
    }
    return {
        name: functools.partial(function, **static)
        for name, function in {"reference": reference, **found}.items()
    }


def _kernel(module, operation):
    """Returns a function that imports its module when it is called."""

    def call(*operands, **how):
        return getattr(importlib.import_module(module), operation)(*operands, **how)

    call.__name__ = operation
    return call


def why_not(asked: str | _Asked) -> str | None:
    """Returns why a backend cannot run here, as a sentence; None if it can."""
    asked = _Asked(asked) if isinstance(asked, str) else asked
    if asked.name in ("auto", "reference"):
        return None
    if reason := _missing(asked.name):
        return reason
    if asked.interpret and asked.name == "triton":
        return (
            "Triton interprets its kernels outside of JAX; interpret=True is for 'pallas'."
        )
    if asked.interpret or asked.compile_only:
        return None
    instead = "Use 'auto' or 'reference'"
    if asked.name == "pallas":
        instead += "; for tests, use_kernels('pallas', interpret=True)"
    devices = _cuda_devices()
    for device in devices:
        # A string, as "9.0".
        has = getattr(device, "compute_capability", None)
        if has is not None and float(has) < LEAST_CAPABILITY:
            return (
                f"the backend {asked.name!r} needs a GPU of compute capability "
                f"{LEAST_CAPABILITY} or more, and JAX sees a {device.device_kind} of "
                f"{has}. {instead}."
            )
    if devices:
        return None
    kinds = sorted({device.device_kind for device in jax.devices()})
    if not any(map(importlib.util.find_spec, _PLUGINS)):
        instead += "; with such a GPU, pip install 'sparsejax[cuda13]'"
    return (
        f"the backend {asked.name!r} needs a CUDA GPU, and JAX sees only "
        f"{', '.join(kinds)}. {instead}."
    )


def compute_capability() -> int:
    """Returns the compute capability for Triton, such as 90, of the first GPU.

    With `compile_only` it is `COMPUTE_CAPABILITY`, without a GPU.
    """
    asked = _asked.get()
    if asked and asked.compile_only:
        return COMPUTE_CAPABILITY
    return int(_cuda_devices()[0].compute_capability.replace(".", ""))


@functools.cache
def _missing(name):
    """Returns why a backend cannot be imported, as a sentence; None if it can."""
    if name == "triton":
        # Imported by name, since that module imports this one.
        needs = importlib.import_module("pallas_kernels.triton.launch").missing()
    else:
        needs = _missing_of_pallas()
    return needs and f"the backend {name!r} needs {needs}. Use 'auto' or 'reference'."


def _missing_of_pallas():
    try:
        importlib.import_module("pallas_kernels.pallas.launch").triton_backend()
    except (ImportError, AttributeError) as error:
        return (
            "Pallas' Triton backend, which JAX has up to some version; JAX here is "
            f"{jax.__version__} ({error})"
        )
    return None


def _resolve(named):
    if named is not None:
        _check(named, "backend")
        context = _asked.get() or _Asked(named)
        return dataclasses.replace(context, name=named)
    if asked := _asked.get():
        return asked
    variable = os.environ.get(VARIABLE) or "auto"
    _check(variable, f"the environment variable {VARIABLE}")
    return _Asked(variable)


def _check(name, what):
    if name not in ("auto", *BACKENDS):
        known = ", ".join(repr(one) for one in ("auto", *BACKENDS))
        raise KernelArgumentError(f"{what} must be one of {known}, got {name!r}.")


def _winner(operation, size, kernels):
    """Returns the fastest backend measured on this kind of device, for the size below."""
    for device in _cuda_devices():
        best = "reference"
        for row in _winners().get(device.device_kind, {}).get(operation, []):
            if row["size"] <= size:
                best = row["backend"]
        return best if best in kernels and why_not(best) is None else "reference"
    return "reference"


@functools.cache
def _winners():
    """Returns, by device and operation, rows of size and fastest backend, by size."""
    path = resources.files("pallas_kernels") / "winners.json"
    return json.loads(path.read_text())


@functools.cache
def _cuda_devices() -> tuple[Any, ...]:
    try:
        return tuple(jax.devices("cuda"))
    except RuntimeError:  # no such backend
        return ()
