"""The facts of a process: its host, versions, settings and devices."""

import argparse
import ipaddress
import os
import pathlib
import platform
import socket
from collections.abc import Mapping
from typing import Any

import jax

from pallas_kernels import backends
from pallas_kernels.errors import BackendError, KernelArgumentError
from sparsejax.jobs import versions
from sparsejax.jobs.texts import text_of


# Environment variables with the index of a process: set by scripts for JAX, by Kubernetes'
# indexed jobs, by Open MPI, by MPICH and its relatives, and by Slurm.
FOR_JAX = "JAX_PROCESS_ID"
NUMBERS = (FOR_JAX, "JOB_COMPLETION_INDEX", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
NUMBERS += ("PMIX_RANK", "SLURM_PROCID")


def of_process(arguments: Any, coordinator: str | None) -> dict[str, Any]:
    """Returns the facts about this process that are known without devices."""
    return {
        "host": socket.gethostname(),
        "network": _loopback(),
        "launcher": launcher(),
        "own_address": addresses(socket.gethostname()),
        "coordinator": addresses(split(coordinator)[0]) if coordinator else [],
        "versions": versions.versions(),
        "settings": versions.settings(),
        "arguments": as_texts(arguments),
    }


def launcher() -> dict[str, str]:
    """Returns the indices that launchers give this process, by environment variable."""
    return {name: os.environ[name][:20] for name in NUMBERS if os.environ.get(name)}


def misnumbered(named: str, process: int, host: str) -> str:
    """Returns the message about a process whose environment gives it another index."""
    return (
        f"{host} (process {process}) has {FOR_JAX}={named}: start it as that process, or "
        "unset the variable. As long as they disagree, two processes may have one number."
    )


def devices() -> dict[str, Any]:
    """Returns facts about this process's devices, which it starts if they are not yet."""
    local = jax.local_devices()
    return {
        "count": len(local),
        "platform": local[0].platform,
        "kinds": sorted({device.device_kind for device in local}),
        "kernels": {name: backends.why_not(name) or "" for name in ("triton", "pallas")},
        "asked": _why_not_asked(),
    }


def _why_not_asked():
    """Returns why the backend that the environment names cannot run; "" if it can."""
    name = os.environ.get(backends.VARIABLE) or "auto"
    try:
        with backends.use_kernels(name):
            return ""
    except (KernelArgumentError, BackendError) as error:
        return f"{backends.VARIABLE}={name!r}: {error}"


def as_texts(arguments: Any) -> dict[str, str]:
    """Returns the arguments of a script (a mapping, namespace or list) as text by name."""
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
    return {str(name): text_of(arguments[name]) for name in sorted(arguments, key=str)}


def split(address: str) -> tuple[str, str]:
    """Splits "name:port" into name and port, without the brackets of IPv6."""
    name, _, port = address.rpartition(":")
    return name.removeprefix("[").removesuffix("]"), port


def addresses(name: str) -> list[str]:
    """Returns the addresses to which a name resolves on this host; [] if unknown."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(info[4][0]).partition("%")[0] for info in found})


def is_loopback(addresses: list[str]) -> bool:
    """Whether there are addresses, and only this host can reach them."""
    return bool(addresses) and all(
        ipaddress.ip_address(address).is_loopback for address in addresses
    )


def _loopback() -> str:
    """Returns text that identifies this host's loopback; each container has its own."""
    parts = [platform.node()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        try:
            place = pathlib.Path(path)
            inside = place.is_symlink()
            parts.append(os.readlink(place) if inside else place.read_text().strip())
        except OSError:
            pass  # Without /proc the name alone distinguishes hosts.
    return " ".join(parts)
