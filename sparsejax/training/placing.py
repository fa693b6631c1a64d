"""What a user gives, on the mesh: what all ranks hold alike, and their shares of a batch.

Each process places what it has. Of what all are to hold alike JAX compares the bytes
between processes, once, when the state is made.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError
from sparsejax.transforms.state import specs, tree


def alike(x: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """A global array of what every process holds whole; a global array as it is."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return x
    sharding = NamedSharding(mesh, spec)
    if isinstance(x, jax.Array) and not sharding.is_fully_addressable:
        # Only what is on the host, or nowhere in particular, is placed on several.
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = alike(jax.random.key_data(x), mesh, spec)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        x = np.asarray(x)
    return jax.device_put(x, sharding)


def is_placed(x: Any, mesh: Mesh, spec: PartitionSpec) -> bool:
    """Whether an array is on the mesh already, as the spec says."""
    sharding = NamedSharding(mesh, spec)
    return isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim)


class Batches:
    """Places batches on a mesh, split over the ranks along their leading axis."""

    def __init__(self, mesh: Mesh, axis_name: AxisName):
        self._sharding = NamedSharding(mesh, PartitionSpec(axis_name))
        self._ranks = specs.ranks_of(mesh, axis_name)
        # The ranks that have a device in this process.
        places = self._sharding.addressable_devices_indices_map((self._ranks,))
        self._own_ranks = len({str(index) for index in places.values()})

    def placed(self, batch: Any) -> Any:
        """The batch as global arrays."""
        return jax.tree_util.tree_map_with_path(self._placed, batch)

    def _placed(self, path, x):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            self._check(path, x, self._ranks)
            return x
        self._check(path, x, self._own_ranks)
        if self._sharding.is_fully_addressable:
            return jax.device_put(x, self._sharding)
        return jax.make_array_from_process_local_data(self._sharding, np.asarray(x))

    def _check(self, path, x, ranks):
        dtype = None if isinstance(x, jax.Array) else np.asarray(x).dtype
        if dtype is not None and dtype.kind in "USO":
            name = repr(tree.named(path)) if path else "this one"
            raise ArgumentError(
                f"a batch is a tree of arrays of numbers, and {name} is "
                f"{type(x).__name__} of {dtype.name}: texts are tokenized, and objects "
                "left out, before trainer.step is given them."
            )
        shape = np.shape(x)
        if shape and shape[0] % ranks == 0:
            return
        name = f"the array {tree.named(path)!r}" if path else "the array"
        if not shape:
            raise ArgumentError(
                "each array of a batch is split over the ranks along its leading axis; got "
                f"shape [] for {name}. What is not to be split belongs into the loss "
                "function, or trainer.init(params, variables=...); a PRNG key is given to "
                "trainer.init(params, key=...)."
            )
        own = ""
        if ranks != self._ranks:
            own = f" of which this process, which gives its own share of it, has {ranks},"
        raise ArgumentError(
            f"each array of a batch is split over {self._ranks} ranks{',' if own else ''}"
            f"{own} along its leading axis, which {ranks} must divide; got shape "
            f"{list(shape)} for {name}. Drop what is left over, or fill it up and say with "
            "sparsejax.data_parallel(..., weight=lambda batch: batch['mask'].sum()) how "
            "much counts."
        )
