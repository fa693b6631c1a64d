"""The platform for which a program is traced, if the mesh tells.

`lax.platform_dependent` traces all its alternatives, and drops those of other platforms
when the program is lowered. Inside `jax.shard_map` over devices, real or only described,
their platform is known at trace time, and only its alternative is traced, which is half of
an exchange. A program that is traced for one platform cannot be lowered for another.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax


def traced_for() -> str | None:
    """Returns the platform of the current mesh; None if it is unknown."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return getattr(device, "platform", None)


class Policy(NamedTuple):
    """The choices by which a program is adapted to a platform; results are equal.

    On CPUs a loop costs only what it computes, and XLA vectorizes simple code. On other
    platforms each operation is a launch, and the host waits for each number on which a
    program branches. A TPU also performs the updates of a scatter one after another, and
    pads rows to the width of its vectors.

    Attributes:
        at_once: Whether a stage works on whole arrays, in few operations, without loops
            whose length is data. If not, it loops over the entries, or searches for them.
        lanes: The number of neighbouring numbers that are combined before they are tested:
            a vector on CPUs; elsewhere 1, since a second step would be a second kernel.
        fused: The most successive steps that may be fused into one kernel, in which each
            step recomputes all earlier ones: none on CPUs.
        scatters: Whether a set is listed by a scatter with an update for each unit, or for
            each word of units, that is present. If not, the set is searched.
        numbers: Whether single numbers are worth listing, which takes an index and a
            scatter update for each. If not, they are summed densely.
        row: The multiple to which rows of a table are padded in memory; 1 if they are not.
        flags: The most rows of a table, for each listed id, for which flags of all rows are
            faster than a sort of the ids. On two CPU cores both are level at 300. A flag is
            a byte, so this also bounds their memory by that of the listed rows.
        overhead: The bytes that entries must save to be sent at all. On GPUs an exchange of
            entries takes 0.23 ms more than a dense sum, for launches and waits
            (`make device`). In that time a link of 25 Gbit/s sends this many bytes.
    """

    at_once: bool
    lanes: int
    fused: int
    scatters: bool
    numbers: bool = True
    row: int = 1
    flags: int = 256
    overhead: int = 0


_CPUS = Policy(at_once=False, lanes=8, fused=0, scatters=False)
_GPUS = Policy(at_once=True, lanes=1, fused=4, scatters=True, overhead=720_000)
_BY_PLATFORM = {
    None: _CPUS,
    "cpu": _CPUS,
    "tpu": _GPUS._replace(scatters=False, numbers=False, row=128, flags=0, overhead=0),
}


def policy() -> Policy:
    """Returns the policy of the platform that is traced for; that of CPUs if unknown."""
    return _BY_PLATFORM.get(traced_for(), _GPUS)


def by_platform(
    *operands: Any,
    cpu: Callable[..., Any],
    default: Callable[..., Any],
    tpu: Callable[..., Any] | None = None,
) -> Any:
    """Calls the function for the platform.

    Args:
        *operands: The operands of the function.
        cpu: The function for CPUs.
        default: The function for all other platforms.
        tpu: The function for TPUs; `default` if None.
    """
    own = {"cpu": cpu} | ({} if tpu is None else {"tpu": tpu})
    platform = traced_for()
    if platform is None:
        return lax.platform_dependent(*operands, **own, default=default)
    return own.get(platform, default)(*operands)
