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
from sparsejax.jobs import versions
from sparsejax.jobs.texts import text_of


# Variables that hold the number of a process: that of scripts that name it for JAX, of
# Kubernetes' indexed jobs, of Open MPI, MPICH and its relatives, and of Slurm.
FOR_JAX = "JAX_PROCESS_ID"
NUMBERS = (FOR_JAX, "JOB_COMPLETION_INDEX", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
NUMBERS += ("PMIX_RANK", "SLURM_PROCID")


def of_process(arguments: Any, coordinator: str | None) -> dict[str, Any]:
    """Everything about this process that is known without devices."""
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
    """The numbers that launchers give this process, by the variables that hold them."""
    return {name: os.environ[name][:20] for name in NUMBERS if os.environ.get(name)}


def misnumbered(named: str, process: int, host: str) -> str:
    """The message about a process whose environment gives it another number."""
    return (
        f"{host} (process {process}) has {FOR_JAX}={named}: start it as that process, or "
        "unset the variable. As long as they disagree, two processes may have one number."
    )


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
    return {str(name): text_of(arguments[name]) for name in sorted(arguments, key=str)}


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


def _loopback() -> str:
    """What names this host's loopback: containers of one machine have one each."""
    parts = [platform.node()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        try:
            place = pathlib.Path(path)
            inside = place.is_symlink()
            parts.append(os.readlink(place) if inside else place.read_text().strip())
        except OSError:
            pass  # not Linux: the name alone distinguishes hosts
    return " ".join(parts)
