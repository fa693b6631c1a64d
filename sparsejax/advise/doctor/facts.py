"""What a process knows of itself: its host, versions, settings and devices."""

import argparse
import functools
import hashlib
import importlib.metadata
import importlib.resources
import ipaddress
import os
import pathlib
import platform
import re
import socket
import sys
from collections.abc import Mapping
from typing import Any

import jax

from pallas_kernels import backends


PACKAGES = ("sparsejax", "jax", "jaxlib", "optax")
_SOURCES = ("sparsejax", "pallas_kernels")
# What changes the programs that are compiled, so that messages would not fit together.
_SETTINGS = ("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable")


def of_process(arguments: Any, coordinator: str | None) -> dict[str, Any]:
    """Everything about this process that is known without devices."""
    return {
        "host": socket.gethostname(),
        "network": _loopback(),
        "own_address": addresses(socket.gethostname()),
        "coordinator": addresses(split(coordinator)[0]) if coordinator else [],
        "versions": versions(),
        "settings": settings(),
        "arguments": as_texts(arguments),
    }


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide what is sent."""
    found = {name: _version(name) for name in PACKAGES}
    found["sources of sparsejax"] = _sources()
    return found | {"Python": f"{sys.version_info.major}.{sys.version_info.minor}"}


def settings() -> dict[str, str]:
    """Settings that decide what is compiled."""
    found = {name: str(getattr(jax.config, name)) for name in _SETTINGS}
    return found | {backends.VARIABLE: os.environ.get(backends.VARIABLE) or "auto"}


def devices() -> dict[str, Any]:
    """This process's devices; the first question of this kind starts them."""
    local = jax.local_devices()
    return {
        "count": len(local),
        "platform": local[0].platform,
        "kinds": sorted({device.device_kind for device in local}),
        "kernels": {name: backends.why_not(name) or "" for name in ("triton", "pallas")},
    }


def as_texts(arguments: Any) -> dict[str, str]:
    """The arguments of a script, a text each: a mapping, a namespace or a list."""
    if arguments is None:
        return {}
    if isinstance(arguments, argparse.Namespace):
        arguments = vars(arguments)
    if not isinstance(arguments, Mapping):
        if isinstance(arguments, str):
            arguments = [arguments]
        texts = map(str, arguments)
        is_set = isinstance(arguments, (set, frozenset))
        return {"arguments": " ".join(sorted(texts) if is_set else texts)}
    return {str(name): _text(arguments[name]) for name in sorted(arguments, key=str)}


def _text(value: Any) -> str:
    """What is the same in processes that have the same value.

    Each process has its own order of a set, and its own addresses of objects.
    """
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_text, value))) + "}"
    if type(value) in (list, tuple):
        begin, end = "[]" if type(value) is list else "()"
        return begin + ", ".join(map(_text, value)) + end
    if isinstance(value, Mapping):
        pairs = sorted(f"{_text(key)}: {_text(one)}" for key, one in value.items())
        return "{" + ", ".join(pairs) + "}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def split(address: str) -> tuple[str, str]:
    """The name and the port of "name:port", the brackets of IPv6 taken off."""
    name, _, port = address.rpartition(":")
    return name.removeprefix("[").removesuffix("]"), port


def addresses(name: str) -> list[str]:
    """The addresses that a name stands for on this host; none if it is unknown."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(info[4][0]).partition("%")[0] for info in found})


def is_loopback(addresses: list[str]) -> bool:
    """Whether nobody but this host can reach any of the addresses."""
    return bool(addresses) and all(
        ipaddress.ip_address(address).is_loopback for address in addresses
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # of a source tree


@functools.cache
def _sources() -> str:
    """A hash of the library's files: a version alone does not tell checkouts apart."""
    digest = hashlib.blake2b(digest_size=4)
    for package in _SOURCES:
        folder = pathlib.Path(str(importlib.resources.files(package)))
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _loopback() -> str:
    """What names this host's loopback: containers of one machine have one each."""
    parts = [platform.node()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        try:
            place = pathlib.Path(path)
            inside = place.is_symlink()
            parts.append(os.readlink(place) if inside else place.read_text().strip())
        except OSError:
            pass  # not Linux: the name alone tells hosts apart
    return " ".join(parts)
