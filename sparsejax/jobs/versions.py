"""What decides which programs a process compiles: versions, and settings."""

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
# What changes the programs that are compiled, so that messages would not fit together.
_SETTINGS = ("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable")


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide what is sent."""
    found = {name: _version(name) for name in PACKAGES}
    found["sources of sparsejax"] = _sources()
    return found | {"Python": f"{sys.version_info.major}.{sys.version_info.minor}"}


def settings() -> dict[str, str]:
    """Settings that decide what is compiled."""
    found = {name: str(getattr(jax.config, name)) for name in _SETTINGS}
    return found | {backends.VARIABLE: os.environ.get(backends.VARIABLE) or "auto"}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # of a source tree


@functools.cache
def _sources() -> str:
    """A hash of the library's files: a version alone does not distinguish checkouts."""
    digest = hashlib.blake2b(digest_size=4)
    for package in _SOURCES:
        folder = pathlib.Path(str(importlib.resources.files(package)))
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
