"""Which backend computes an operation: the one file that decides.

    reference   plain XLA, everywhere
    pallas      Pallas, through its Triton backend, on GPUs of NVIDIA
    triton      Triton, on the same
    auto        Triton where it was measured to be faster than plain XLA on this kind of
                device (`winners.json`); reference elsewhere

Asked for as an argument of the operation; else by `use_kernels`, as a context; else by the
variable SPARSEJAX_KERNELS; else it is "auto". The question is asked when a function is
traced, so a compiled function keeps what it was compiled with.

Kernels may stand inside `jax.shard_map`. JAX cannot batch them (`vmap`) nor differentiate
them; the reference it can.

A backend that is named and cannot run here raises and says why. An operation that a backend
has no kernel for is computed by reference, except where the operation itself was given the
name. With "auto" what cannot run is passed over, and under `vmap` the reference computes;
to differentiate, ask for the reference.

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
# Of an H200, which is what there is to compile for where there is no GPU.
COMPUTE_CAPABILITY = 90
# Of JAX, without one of which it sees no GPU of NVIDIA.
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
# Of Ampere GPUs, from which on XLA and Triton compile kernels of Triton.
LEAST_CAPABILITY = 8.0


@dataclasses.dataclass(frozen=True)
class _Asked:
    name: str
    interpret: bool = False
    compile_only: bool = False
    prefers: str | None = None  # of "auto", where it runs


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
    """With "auto" operations inside are computed by this backend, where it has them.

    For operations that belong together: which was the fastest is known of each by itself.
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
    """Computes an operation by the backend that is asked for.

    Args:
        operation: Its name.
        named: The backend that its caller named, if any.
        kernels: As of `kernels`.
        size: How many elements there are to go over; what is fastest depends on it.
        *operands: Pytrees of its arrays.
    """
    asked, name = _resolve(named), chosen(operation, named, kernels, size)
    if name not in kernels:
        has = ", ".join(repr(one) for one in kernels)
        raise BackendError(
            f"{operation} has no kernel in the backend {name!r}; it has {has}."
        )
    if name == "reference" or size == 0:  # a launch needs something to go over
        return kernels["reference"](*operands)
    if asked.name != "auto" and (reason := why_not(dataclasses.replace(asked, name=name))):
        raise BackendError(reason)
    kernel = kernels[name]
    if name == "pallas":
        kernel = functools.partial(kernel, interpret=asked.interpret)
    # A kernel knows nothing of the axes over which its operands vary inside shard_map.
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
    """The backend that computes an operation of which some backends have kernels."""
    asked = _resolve(named)
    name = asked.name
    if name == "auto":
        liked = asked.prefers
        if liked is None or liked not in kernels or why_not(liked) is not None:
            liked = _winner(operation, size, kernels)
        name = liked
    return "reference" if name not in kernels and named is None else name


def _batched_by(reference, function):
    """The function; under `vmap` the reference instead."""
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
    """The function of each backend that computes an operation.

    Args:
        reference: The one in plain XLA. Those of other backends have its name.
        pallas: In which file Pallas' is, if there is one; it takes `interpret`.
        triton: In which file Triton's is, if there is one.
        **static: What all are called with, beside operands.
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
    """A function of a module that is imported when it is called."""

    def call(*operands, **how):
        return getattr(importlib.import_module(module), operation)(*operands, **how)

    call.__name__ = operation
    return call


def why_not(asked: str | _Asked) -> str | None:
    """Why a backend cannot run here, as a sentence; None if it can."""
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
    """What Triton is to compile for, as 90: the GPU that is here, unless none need be."""
    asked = _asked.get()
    if asked and asked.compile_only:
        return COMPUTE_CAPABILITY
    return int(_cuda_devices()[0].compute_capability.replace(".", ""))


@functools.cache
def _missing(name):
    """Why a backend cannot be imported, as a sentence; None if it can."""
    if name == "triton":
        # By its name: it asks this module what to compile for.
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
    """The fastest backend measured on this kind of device, at the nearest size below."""
    for device in _cuda_devices():
        best = "reference"
        for row in _winners().get(device.device_kind, {}).get(operation, []):
            if row["size"] <= size:
                best = row["backend"]
        return best if best in kernels and why_not(best) is None else "reference"
    return "reference"


@functools.cache
def _winners():
    """By device and operation, rows of a size and what was fastest there, ascending."""
    path = resources.files("pallas_kernels") / "winners.json"
    return json.loads(path.read_text())


@functools.cache
def _cuda_devices() -> tuple[Any, ...]:
    try:
        return tuple(jax.devices("cuda"))
    except RuntimeError:  # no such backend
        return ()
