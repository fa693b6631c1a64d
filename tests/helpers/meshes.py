"""Meshes of simulated devices, Explicit as those of `jax.make_mesh`, and arrays on them.

On an Explicit axis the type of an array says how it is sharded, and JAX refuses operations
that do not fit. On an Auto axis XLA shards by itself. Code that is right on Explicit axes
is right on Auto axes, so tests use Explicit ones, and a few of each kind Auto ones.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec as P,
)


AXIS = "data"


@functools.cache
def mesh_of(n: int) -> Mesh:
    """Returns a mesh of one axis, "data", over the first n CPU devices."""
    return grid(**{AXIS: n})


def grid(**sizes: int) -> Mesh:
    """Returns a mesh of the first CPU devices with these axes: `grid(data=4, model=2)`."""
    devices = jax.devices("cpu")[: math.prod(sizes.values())]
    return jax.make_mesh((*sizes.values(),), (*sizes,), devices=devices)


def described(platform: str, **sizes: int) -> AbstractMesh:
    """Returns an abstract mesh of devices of a platform, for which programs are traced."""
    device = AbstractDevice(device_kind=platform, num_cores=None, platform=platform)
    return AbstractMesh((*sizes.values(),), (*sizes,), abstract_device=device)


def auto(mesh: Mesh) -> Mesh:
    """Returns the same mesh with Auto axes, as `jax.sharding.Mesh` makes it."""
    return Mesh(mesh.devices, mesh.axis_names)


# A parameter of tests: by name, a function from an Explicit mesh to one of that kind.
KINDS = {"explicit": lambda mesh: mesh, "auto": auto}


def placed(given: Any, mesh: Mesh, specs: Any) -> Any:
    """Places a tree of arrays on a mesh, by a tree of specs or a prefix of one."""
    full = jax.tree.broadcast(specs, given, is_leaf=lambda x: isinstance(x, P))
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    return jax.tree.map(put, given, full)


def partial_sums(x: Any, mesh: Mesh) -> jax.Array:
    """Returns partial sums [devices, ...] as one array, unreduced over all axes."""
    over = mesh.axis_names
    wanted = P(*[None] * (x.ndim - 1), unreduced=frozenset(over))
    own = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    made = jax.jit(own(lambda x: x[0], in_specs=P(over), out_specs=wanted))
    return made(placed(x, mesh, P(over)))


def shard_map(fn: Callable, *, mesh: Any, in_specs: Any, **options: Any) -> Callable:
    """Wraps `jax.shard_map`: on a mesh of devices, operands are placed by `in_specs`."""
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=in_specs, **options)

    def run(*operands):
        specs = in_specs if isinstance(in_specs, tuple) else (in_specs,) * len(operands)
        return mapped(*placed(operands, mesh, specs))

    return run if isinstance(mesh, Mesh) else mapped
