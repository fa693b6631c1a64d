"""The versions and settings that determine which programs a process compiles."""

import functools
import hashlib
import importlib.metadata
import importlib.resources
import os
import pathlib
import sys

import jax

from pallas_kernels import backends


PACKAGES = ("sparsejax", "jax", "jaxlib", "optax")
_SOURCES = ("sparsejax", "pallas_kernels")
# Options of JAX that change compiled programs, so that messages would be incompatible, or
# the bits of what replicas compute.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_prng_impl",
    "jax_random_seed_offset",
    "jax_threefry_partitionable",
    "jax_default_matmul_precision",
    "jax_optimization_level",
)
# Options of XLA. Any may change the bits of a program, except for those of dumps, which one
# process may write, of folders of caches, and the number of devices, which is compared
# separately.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_HARMLESS = (
    "--xla_dump_",
    "--xla_force_host_platform_device_count",
    "--xla_gpu_dump_",
    "--xla_gpu_kernel_cache_file",
    "--xla_gpu_per_fusion_autotune_cache_dir",
)


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that determine what is sent."""
    found = {name: _version(name) for name in PACKAGES}
    found["sources of sparsejax"] = _sources()
    return found | {"Python": f"{sys.version_info.major}.{sys.version_info.minor}"}


def settings() -> dict[str, str]:
    """Returns the settings that determine what is compiled."""
    found = {name: str(getattr(jax.config, name, "unknown")) for name in _SETTINGS}
    found |= {name: _flags(os.environ.get(name, "")) for name in _FLAGS}
    return found | {backends.VARIABLE: os.environ.get(backends.VARIABLE) or "auto"}


def _flags(text: str) -> str:
    """Returns those options of XLA that may change programs; of one name the last."""
    given = (x.partition("=") for x in text.split() if not x.startswith(_HARMLESS))
    last = {name: f"{name}{sign}{value}" for name, sign, value in given}
    return " ".join(last[name] for name in sorted(last)) or "none"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # run from a source tree


@functools.cache
def _sources() -> str:
    """Returns a hash of the library's files: checkouts may differ without a new version."""
    digest = hashlib.blake2b(digest_size=4)
    for package in _SOURCES:
        folder = pathlib.Path(str(importlib.resources.files(package)))
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
