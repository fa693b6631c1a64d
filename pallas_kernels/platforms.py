"""Which platform a program is traced for, where the mesh says so.

`lax.platform_dependent` traces all that it chooses among, and what the platform does not
take is dropped when the program is lowered. Inside `jax.shard_map` over devices, real or
described, their platform is known before, and nothing else is traced: half of an exchange.
A program that is traced over the devices of one platform is not for another.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh


def traced_for() -> str | None:
    """Returns the platform of the mesh that is being traced for; None if none says."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return getattr(device, "platform", None)


def described(platform: str) -> AbstractContextManager[Any]:
    """Returns a context in which a platform is traced for, and forecasts are made for it.

    Args:
        platform: "cpu", "gpu", "tpu", or another that JAX names.
    """
    device = AbstractDevice(device_kind=platform, num_cores=None, platform=platform)
    mesh = AbstractMesh((1,), ("device",), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


class Policy(NamedTuple):
    """How a program that is traced for a platform divides its work; results are equal.

    On CPUs a loop in a kernel costs what it computes, and XLA makes vectors of what is
    simple. Elsewhere each operation is a launch, and the host waits for each number that a
    program looks at. A TPU also writes what a scatter is given one after another, and keeps
    rows as wide as its vectors.

    Attributes:
        at_once: Whether a stage works on whole arrays, in few operations, and no loop's
            length is data. Else it walks over what there is, or searches for it.
        lanes: Numbers side by side that are joined before they are looked at: a vector
            on CPUs; elsewhere a second look would be a second kernel.
        fused: Steps, one after another, that may be one kernel, in which each does all
            those before it again: on CPUs none.
        scatters: Whether a set is listed by a scatter with an update for each unit, or each
            word of them: those that are present write themselves; else it is searched.
        numbers: Whether single numbers are worth listing, which takes an index, and an
            update of a scatter, for each; else they are summed densely.
        row: To how many numbers a row of a table is padded in memory; 1 if it is not.
        flags: Up to how many rows of a table for each id that is listed flags of all rows
            are faster than a sort of the ids. On two CPU cores they are level at 300; a
            flag is a byte, so this also bounds their memory by that of the rows listed.
        overhead: Bytes that must be saved for entries to be sent at all. On GPUs an
            exchange of entries launches and waits for 0.23 ms more than a dense sum does
            (`make device`), in which a link of 25 Gbit/s sends as many bytes.
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
    """Returns the policy of the platform that is traced for; that of CPUs if none is."""
    return _BY_PLATFORM.get(traced_for(), _GPUS)


def by_platform(
    *operands: Any,
    cpu: Callable[..., Any],
    default: Callable[..., Any],
    tpu: Callable[..., Any] | None = None,
) -> Any:
    """Calls the function that suits the platform.

    Args:
        *operands: What it is called with.
        cpu: That for CPUs.
        default: That for all others.
        tpu: That for TPUs; `default` if None.
    """
    own = {"cpu": cpu} | ({} if tpu is None else {"tpu": tpu})
    platform = traced_for()
    if platform is None:
        return lax.platform_dependent(*operands, **own, default=default)
    return own.get(platform, default)(*operands)


def alone(
    count: jax.Array, function: Callable[[], Any], cond: Callable[..., Any] = lax.cond
) -> Any:
    """Computes a function in kernels of its own, where XLA:CPU would not.

    XLA:CPU makes one loop of a gather, of all that computes its indices and of all that is
    done with its result: no part of that is vectorized, and an entry takes 50 ns where it
    takes 5 in three loops. An index that is used twice is computed twice, from arrays that
    are kept for it; and an array that is read in several such loops is copied before it is
    written. A branch that is always taken keeps them separate: that a count is never
    negative is more than XLA sees.

    Args:
        count: What is computed while the program runs, and is never negative.
        function: Returns arrays.
        cond: What chooses, where arrays may vary over the axes of a mesh.
    """
    like = jax.eval_shape(function)
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    return cond(count >= 0, function, zeros)


def alone_on_cpus(
    count: jax.Array, function: Callable[[], Any], cond: Callable[..., Any] = lax.cond
) -> Any:
    """`alone` in a program that may be for another platform, where nothing is gained."""
    return by_platform(cpu=lambda: alone(count, function, cond), default=function)
