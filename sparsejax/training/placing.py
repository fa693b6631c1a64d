"""Places arrays of the user on the mesh: replicated ones, and shares of a batch.

Each process places its own arrays, and no leaf is sent. Arrays that must be equal on all
processes are checked once, when a state is made: each process hashes its leaves, and only
hashes are exchanged. If a mesh has devices of some processes only, nothing is checked, as
in JAX's own `device_put`.
"""

import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError
from sparsejax.jobs import agreement
from sparsejax.jobs.agreed import Agreed
from sparsejax.placement import specs
from sparsejax.state import tree


# Why a trainer takes no traced arrays, for messages.
TRACED = (
    "the trainer's step and evaluation are compiled by themselves. Call them outside of "
    "jax.jit, jax.lax.scan and jax.grad; inside of these write a shard_map of your own, as "
    "docs/shard_map.md does."
)
# What to do where processes have batches of different shapes, for messages.
_UNEVEN = (
    "All processes need batches of one length in a step: fill up the last one, and say "
    "with sparsejax.data_parallel(..., weight=lambda batch: batch['mask'].sum()) how much "
    "counts."
)


# Seconds to wait for processes that still read their first batch.
_TO_READ = 1800.0


def on_all_processes(given: Any, mesh: Mesh, wanted: Any, call: str) -> Any:
    """Makes global arrays of a tree that every process has; global arrays are unchanged.

    Args:
        given: A tree of arrays.
        mesh: The mesh. If it has devices of all processes, all of them must call this.
        wanted: The `PartitionSpec` of each leaf.
        call: The name of the public function, for the error.

    Raises:
        ArgumentError: The processes give different trees, or different numbers.
    """
    if NamedSharding(mesh, PartitionSpec()).is_fully_addressable:
        put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        return jax.tree.map(put, given, wanted)
    # Arrays that are not global are copied to the host, and placed from there.
    on_host = jax.tree.map(lambda x: x if _is_global(x) else _numbers(x), given)
    if len({device.process_index for device in mesh.devices.flat}) == jax.process_count():
        _check_alike(on_host, call)

    def placed(was, x, spec):
        if _is_global(was):
            return was
        sharding = NamedSharding(mesh, spec)
        x = jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])
        if not _is_key(was):
            return x
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(was))

    return jax.tree.map(placed, given, on_host, wanted)


def _is_global(x):
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def _is_key(x):
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _numbers(x):
    """Returns an array on the host, in the dtype that JAX would give it."""
    x = jax.random.key_data(x) if _is_key(x) else x
    return np.asarray(x, jax.dtypes.canonicalize_dtype(jnp.result_type(x)))


def _check_alike(on_host, call):
    """Raises on all processes if any has different leaves, or different numbers in one."""
    paths, leaves, _ = tree.flatten(on_host, call, rows=True)
    shapes, of_each = [], []
    # Of global arrays those of which each process has a copy, one on the host at a time.
    for path, x in zip(paths, tree.here(leaves), strict=True):
        if not _is_global(x):
            own = _numbers(x)
            shapes.append((path, own.shape, own.dtype.name))
            of_each.append(_hash(agreement.octets(own)))
    of_shapes = _hash(repr(shapes).encode())
    hashes = np.stack([of_shapes, *of_each])
    everyone = _of_all(np.stack([of_shapes, _hash(agreement.octets(hashes))]))
    if not _others(everyone[:, 0]):
        if not _others(everyone[:, 1]):
            return
        each = _others(_of_all(hashes[1:]))
        number = min(each)
        raise ArgumentError(
            f"{call}: process {each[number]} has different values of {shapes[number][0]!r} "
            "than process 0, and all must start from the same. Draw them on every process "
            "from one seed, or read them from one checkpoint."
        )
    raise ArgumentError(
        f"{call}: process {_others(everyone[:, 0])[0]} gives other leaves than process 0, "
        "or leaves of other shapes or dtypes; here they are "
        + ", ".join(f"{path} {list(shape)}" for path, shape, _ in shapes[:8])
        + (", ..." if len(shapes) > 8 else "")
        + ". Give all processes the same model."
    )


def _hash(data):
    """Returns a hash of bytes, uint32 [4]."""
    return np.frombuffer(hashlib.blake2b(data, digest_size=16).digest(), np.uint32)


def _of_all(x):
    """Gathers an array of all processes, [processes, ...]."""
    return np.asarray(multihost_utils.process_allgather(x))


def _others(hashes):
    """Returns the first process whose hash differs from that of process 0.

    Args:
        hashes: uint32 [processes, n, 4], or [processes, 4] for n = 1.

    Returns:
        A dict from the number of each hash that differs to the process.
    """
    hashes = hashes.reshape(len(hashes), -1, 4)
    differs = np.any(hashes != hashes[0], axis=-1)
    return {
        int(at): int(np.argmax(differs[:, at])) for at in np.flatnonzero(differs.any(0))
    }


def on_mesh(given: Any, mesh: Mesh, wanted: Any, call: str) -> Any:
    """Places a tree on the mesh as an output of `shard_map`, so that no step is recompiled.

    Args:
        given: A tree of arrays that every process has, or that are global.
        mesh: The mesh.
        wanted: The `PartitionSpec` of each leaf.
        call: The name of the public function, for the error.
    """
    there = lambda x, spec: is_placed(x, mesh, spec)
    if all(jax.tree.leaves(jax.tree.map(there, given, wanted))):
        return given
    copy = jax.shard_map(lambda x: x, mesh=mesh, in_specs=(wanted,), out_specs=wanted)
    return jax.jit(copy)(on_all_processes(given, mesh, wanted, call))


def is_unfit(dtype: Any) -> bool:
    """Returns whether a dtype is one of NumPy's that JAX has no numbers of: text, dates."""
    if not isinstance(dtype, np.dtype):
        return False  # PRNG keys
    # Narrow floats are of the kind "V", as structured arrays are.
    return dtype.kind in "USOTMm" or issubclass(dtype.type, np.void)


def _made_fit(dtype):
    """Returns what becomes of arrays of an unfit dtype, for a message."""
    if dtype.kind in "Mm":
        return "dates and times are made numbers, by (x - x[0]) / np.timedelta64(1, 's')"
    if dtype.kind == "V":
        return "the fields of a structured array are made arrays, {'a': x['a']}"
    return "texts are tokenized, and objects left out"


def _is_in_list(path):
    return bool(path) and isinstance(path[-1], jax.tree_util.SequenceKey)


def is_placed(x: Any, mesh: Mesh, spec: PartitionSpec) -> bool:
    """Returns whether an array is on the mesh already, sharded as the spec says."""
    sharding = NamedSharding(mesh, spec)
    return isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim)


class Batches:
    """Places batches on a mesh, split over the ranks along their leading axis."""

    # Whether several processes compare shapes.
    compares: bool = True

    def __init__(self, mesh: Mesh, axis_name: AxisName):
        self._processes = agreement.processes_of(mesh.devices.flat)
        self._agreed = Agreed("shapes", _UNEVEN)
        self._sharding = NamedSharding(mesh, PartitionSpec(axis_name))
        self._ranks = specs.ranks_of(mesh, axis_name)
        # The number of ranks that have a device in this process.
        places = self._sharding.addressable_devices_indices_map((self._ranks,))
        self._own_ranks = len({str(index) for index in places.values()})

    def placed(self, batch: Any, call: str) -> Any:
        """Returns the batch as global arrays.

        A process derives their shapes from those of its own share. So several processes
        compare shapes, once each.

        Args:
            batch: The batch, or this process's share of it.
            call: The public function, for the error.

        Raises:
            ArgumentError: The batch cannot be split, or processes have different shapes.
            JobError: The shapes are new to this process alone, which cannot go on.
        """
        batch = jax.tree_util.tree_map_with_path(self._placed, batch)
        if len(self._processes) > 1 and self.compares:
            leaves, structure = jax.tree.flatten(batch)
            key = structure, tuple((x.shape, x.dtype) for x in leaves)
            shapes = functools.partial(self._shapes, batch)
            self._agreed.check(call, key, shapes, self._processes, _TO_READ)
        return batch

    def _shapes(self, batch):
        """Returns the dtype of each array and the shape of a rank's share, by name."""
        paths, leaves, _ = tree.flatten(batch)
        share = lambda shape: [shape[0] // self._ranks, *shape[1:]]
        return {
            f"the array {path!r}": f"{x.dtype}{share(x.shape)} for each rank"
            for path, x in zip(paths, leaves, strict=True)
        }

    def _placed(self, path, x):
        if isinstance(x, Tracer):
            name = f"whose leaf {tree.named(path)!r}" if path else "that"
            raise ArgumentError(
                f"the trainer was given a batch {name} is being traced, "
                f"{jax.typeof(x)}: {TRACED}"
            )
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            self._check(path, x, self._ranks)
            return x
        self._check(path, x, self._own_ranks)
        if self._sharding.is_fully_addressable:
            return jax.device_put(x, self._sharding)
        return jax.make_array_from_process_local_data(self._sharding, np.asarray(x))

    def _check(self, path, x, ranks):
        dtype = None if isinstance(x, jax.Array) else np.asarray(x).dtype
        if dtype is not None and is_unfit(dtype):
            name = repr(tree.named(path)) if path else "this one"
            raise ArgumentError(
                f"a batch is a tree of arrays of numbers, and {name} is "
                f"{type(x).__name__} of {dtype.name}: {_made_fit(dtype)}, before "
                "trainer.step is given them."
            )
        shape = np.shape(x)
        if shape and shape[0] % ranks == 0:
            return
        name = f"the array {tree.named(path)!r}" if path else "the array"
        if not shape:
            listed = ""
            if dtype is not None and not hasattr(x, "dtype") and _is_in_list(path):
                listed = (
                    f", a {type(x).__name__} in a list, whose elements are leaves of their "
                    "own: give np.asarray of the list"
                )
            raise ArgumentError(
                "each array of a batch is split over the ranks along its leading axis; got "
                f"shape [] for {name}{listed}. What is not to be split belongs in the loss "
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
