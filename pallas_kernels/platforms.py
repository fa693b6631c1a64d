"""Which platform a program is traced for, where the mesh says so.

`lax.platform_dependent` traces all that it chooses among, and what the platform does not
take is dropped when the program is lowered. Inside `jax.shard_map` over devices, real or
described, their platform is known before, and nothing else is traced: half of an exchange.
A program that is traced over the devices of one platform is not for another.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def traced_for() -> str | None:
    """Returns the platform of the mesh that is being traced for; None if none says."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return getattr(device, "platform", None)


def is_elsewhere() -> bool:
    """Whether the mesh says that the program is for something else than CPUs."""
    return traced_for() not in (None, "cpu")


def by_platform(
    *operands: Any, cpu: Callable[..., Any], default: Callable[..., Any]
) -> Any:
    """Calls the function that suits the platform: one for CPUs, one for all others."""
    platform = traced_for()
    if platform is None:
        return lax.platform_dependent(*operands, cpu=cpu, default=default)
    return (cpu if platform == "cpu" else default)(*operands)
