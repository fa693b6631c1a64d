"""Checks that replicas are equal bit for bit: `check_replicas`.

On the wire: two words of 32 bits for each leaf, gathered from all devices. Each device
computes a checksum of its copy (`checksums`), in one pass. Each process compares those of
all devices, so that all have the same result and raise the same error.

The arrays are typed as equal on all devices, so XLA may replace the gather by copies of one
device's checksum. To prevent this, each device combines its checksum by xor with a number
that differs by device, and the processes remove it again.
"""

import collections
import functools
import socket
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import hashing
from sparsejax import arguments, axes
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError, JobError, ReplicaError
from sparsejax.jobs import agreement, background, store
from sparsejax.jobs.agreed import Agreed
from sparsejax.jobs.texts import listed
from sparsejax.monitor import checksums
from sparsejax.placement import specs
from sparsejax.state import sharded, tree
from sparsejax.state.per_rank import PerRank
from sparsejax.wire.collectives import Wire


_CALL = "sparsejax.check_replicas"
_SEED = 0x52657031
_AGREED = Agreed("leaves", "Give all processes the same tree.")
_MOST = 4  # leaves that an error names
_TO_NAME_HOSTS = 10.0  # seconds


def check_replicas(
    tree: Any, axis_name: AxisName | None = None, *, step: int | None = None, every: int = 1
) -> None:
    """Raises on all processes if replicas of an array differ in any bit.

    Replicas diverge silently: a device computes wrongly, a host reads another copy of a
    checkpoint, an update was never synchronized. Each rank then trains a model of its own,
    and the loss shows it late or never. The function compares the copies of each leaf by a
    checksum of their bits. It finds every difference in one element of at most 32 bits, and
    misses any other one with a probability of 2**-64.

    It reads each leaf once, sends eight bytes for it, and waits for the result, which is
    cheap at every 100th step. All processes call it, in the same steps, or those that do
    wait without a word; and for the same tree: the first time they compare its paths,
    shapes and dtypes. The trainer of
    `sparsejax.data_parallel(..., check_every=100)` calls it by itself.

    Arrays without copies are not compared: those sharded over the ranks, such as a
    `ColumnTable`; state by rank (`PerRank`), such as residuals; and arrays on one device.
    For a leaf that is sharded over another mesh axis, the copies of each shard are
    compared.

    Args:
        tree: Parameters, an optimizer's state, a `TrainState`, or any tree of arrays on a
            mesh, outside `jax.jit`.
        axis_name: The mesh axis of the ranks, or axes. None compares all devices that hold
            the same part of an array.
        step: The number of the step, a Python int, which the error names.
        every: With `step`: nothing is done unless it is a multiple of this.

    Raises:
        ArgumentError: On all processes, if they give other leaves that are new to all.
        JobError: The leaves are new to this process alone, or another does not come in
            time. The process cannot go on: it is one call ahead of the others.
        ReplicaError: With the first leaves that differ, and the ranks, with their processes
            and hosts, whose copies differ from those of the majority.

    Example:
        >>> from jax.sharding import NamedSharding
        >>> params = jax.device_put(params, NamedSharding(mesh, P()))
        >>> for step in range(3):
        ...     sparsejax.check_replicas(params, step=step, every=100)  # and train

    See Also:
        `sparsejax.check_job`: compares the processes at the start.
        `sparsejax.doctor`: checks the whole job before training.
    """
    arguments.check_whole("every", every, 1)
    if step is None:
        if every != 1:
            raise ArgumentError(
                f"{_CALL}(every={every}) needs the number of the step, which it does not "
                f"count: {_CALL}(params, step=i, every={every})."
            )
    elif isinstance(step, jax.Array):
        raise ArgumentError(
            f"{_CALL}: step must be a Python int, got a JAX array, for which each step "
            "would wait: count steps in the loop, for step in range(steps)."
        )
    else:
        arguments.check_whole("step", step, 0)
        if step % every:
            return
    background.wait()
    _compare(tree, axis_name, "" if step is None else f" before step {step}")


class _Leaf(NamedTuple):
    """A leaf that may have copies, with its key path."""

    keys: tuple
    array: jax.Array

    @property
    def mesh(self) -> Mesh:
        return self.array.sharding.mesh  # type: ignore

    @property
    def spec(self) -> PartitionSpec:
        return self.array.sharding.spec  # type: ignore


def _compare(given, axis_name, when):
    axes.check_axis_name(axis_name, _CALL)
    tree.check_not_donated(given, _CALL)
    by_mesh: dict[Mesh, list[tuple[_Leaf, tuple[str, ...]]]] = {}
    for leaf in _leaves(given):
        if copied := _copied_over(leaf, axis_name):
            by_mesh.setdefault(leaf.mesh, []).append((leaf, copied))
    _check_same(by_mesh)
    found: list[_Mismatch] = []
    for mesh, pairs in by_mesh.items():
        leaves = [leaf for leaf, _ in pairs]
        sums = _checksums(mesh, leaves)
        found += _differences(mesh, pairs, sums, axis_name)
    if found:
        count = sum(map(len, by_mesh.values()))
        raise ReplicaError(_message(found, count, when))


def _check_same(by_mesh):
    """Raises on all processes if they give other leaves, which nothing could gather."""
    leaves = [leaf for pairs in by_mesh.values() for leaf, _ in pairs]
    key = tuple((x.keys, x.array.shape, x.array.dtype, x.array.sharding) for x in leaves)

    def shown():
        name = lambda leaf: f"the leaf {tree.named(leaf.keys)!r}"
        kind = lambda x: f"{x.dtype}{[*x.shape]}"
        placed = lambda leaf: f" sharded {_shortest(leaf.spec)}" if any(leaf.spec) else ""
        return {name(x): f"{kind(x.array)}{placed(x)}" for x in leaves}

    devices = [device for mesh in by_mesh for device in mesh.devices.flat]
    processes = agreement.processes_of(devices)
    _AGREED.check(_CALL, key, shown, processes, agreement.TIMEOUT)


def _leaves(given: Any) -> Iterator[_Leaf]:
    """Yields the arrays that should be equal on all ranks, and are on several devices."""
    is_node = lambda node: isinstance(node, PerRank) or sharded.is_sharded(node)
    pairs = jax.tree_util.tree_leaves_with_path(given, is_leaf=is_node)
    for keys, node in pairs:
        if sharded.is_sharded(node):
            continue
        if isinstance(node, PerRank):
            keys, node = (*keys, jax.tree_util.GetAttrKey("ranks")), node.ranks
        if isinstance(node, Tracer):
            raise ArgumentError(
                f"{_CALL} compares what devices hold, and was called where a function is "
                "traced: call it between steps, outside jax.jit and jax.shard_map."
            )
        if not isinstance(node, jax.Array) or len(node.sharding.device_set) == 1:
            continue
        if not isinstance(node.sharding, NamedSharding):
            raise ArgumentError(
                f"{_CALL}: the leaf {tree.named(keys)!r} lies on several devices by a "
                f"{type(node.sharding).__name__}, which names no mesh axes: place it with "
                "jax.device_put(x, jax.sharding.NamedSharding(mesh, P()))."
            )
        if node.size:
            yield _Leaf(keys, node)


def _copied_over(leaf: _Leaf, axis_name: AxisName | None) -> tuple[str, ...]:
    """Returns the mesh axes over which a leaf is replicated."""
    names = leaf.mesh.axis_names
    if axis_name is not None:
        names = axes.axis_names(axis_name)
        specs.check_axes(leaf.mesh, names, f"{_CALL}: the leaf {tree.named(leaf.keys)!r}")
    parts = (() if part is None else axes.axis_names(part) for part in leaf.spec)
    split = {name for part in parts for name in part}
    return tuple(n for n in names if n not in split and leaf.mesh.shape[n] > 1)


def _checksums(mesh: Mesh, leaves: Sequence[_Leaf]) -> np.ndarray:
    """Returns the checksums of each device's copies, uint32 [devices, leaves, 2]."""
    program = _program(mesh, tuple(_shortest(leaf.spec) for leaf in leaves))
    sums = tree.here(program([leaf.array for leaf in leaves]))
    hidden = hashing.mix32(np.arange(mesh.size, dtype=np.uint32), _SEED)
    return np.asarray(sums) ^ hidden[:, None, None]


def _shortest(spec: PartitionSpec) -> PartitionSpec:
    """Returns a spec without a None at its end, as JAX writes it on Explicit meshes."""
    parts = list(spec)
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


@functools.lru_cache(maxsize=64)
def _program(mesh: Mesh, of_leaves: tuple[PartitionSpec, ...]):
    """Returns a program from arrays on a mesh to the hidden checksums of all devices.

    It is cached by mesh and specs; `jax.jit` compiles it again for other shapes and dtypes.
    """
    wire = Wire(mesh.axis_names)

    def on_device(arrays):
        rows = [wire.per_rank(checksums.words(x)) for x in arrays]
        hidden = hashing.mix32(wire.rank.astype(jnp.uint32), _SEED)
        sums, _ = wire.all_gather(checksums.of_arrays(rows) ^ hidden)
        return sums

    mapped = jax.shard_map(
        on_device, mesh=mesh, in_specs=([*of_leaves],), out_specs=PartitionSpec()
    )
    return jax.jit(mapped)


class _Mismatch(NamedTuple):
    """Copies of a leaf, or of one of its shards, that are not all equal.

    Attributes:
        keys: The key path of the leaf.
        mesh: The mesh of the leaf.
        groups: The positions in the mesh of devices with equal copies, the largest first.
        over: The mesh axes of the ranks.
    """

    keys: tuple
    mesh: Mesh
    groups: list[list[int]]
    over: tuple[str, ...]

    @property
    def is_tied(self) -> bool:
        """Whether the two largest groups are of one size, so that none is the majority."""
        return len(self.groups[0]) == len(self.groups[1])


def _differences(mesh, pairs, sums, axis_name) -> list[_Mismatch]:
    """Returns the leaves whose copies are not all equal, in the order of the tree."""
    over = mesh.axis_names if axis_name is None else axes.axis_names(axis_name)
    found = []
    for at, (leaf, copied) in enumerate(pairs):
        own = sums[:, at]
        for devices in _copies(mesh, copied):
            if (own[devices] == own[devices[0]]).all():
                continue
            groups = collections.defaultdict(list)
            for device in devices:
                groups[own[device].tobytes()].append(int(device))
            by_size = sorted(groups.values(), key=lambda group: (-len(group), group))
            found.append(_Mismatch(leaf.keys, mesh, by_size, over))
    return found


@functools.lru_cache(maxsize=64)
def _copies(mesh: Mesh, copied: tuple[str, ...]) -> np.ndarray:
    """Returns the positions in the mesh of each shard's copies: int [shards, copies]."""
    numbers = np.arange(mesh.size).reshape(mesh.devices.shape)
    at = [mesh.axis_names.index(name) for name in copied]
    numbers = np.moveaxis(numbers, at, range(-len(at), 0))
    return numbers.reshape(-1, int(np.prod([mesh.shape[name] for name in copied])))


def _message(found: list[_Mismatch], count: int, when: str) -> str:
    hosts = _hosts(found)
    names = tree.unboxed([one.keys for one in found])
    paths = [tree.written(keys) or "it" for keys in names]
    differing = list(dict.fromkeys(paths))
    lines = []
    for path in differing[:_MOST]:
        each = [one for one, own in zip(found, paths, strict=True) if own == path]
        lines.append(f"{path!r}: {_groups(each[0], hosts)}")
    more = len(differing) - _MOST
    lines += [f"and {more} more"] if more > 0 else []
    return (
        f"replicas are not the same{when}: of {len(differing)} of {count} leaves ranks "
        "hold different bits.\n* "
        + "\n* ".join(lines)
        + "\nRanks train models of their own "
        "from here on: go back to a checkpoint that passes this check. If it comes back on "
        "the same rank, that device or host is at fault; if on all, an update is not "
        "synchronized, or what a rank was given of its own is declared to be the same."
    )


def _groups(one: _Mismatch, hosts) -> str:
    """Returns which ranks differ from the others in one leaf, as text."""
    label = lambda numbers: listed([_rank(one, i, hosts) for i in numbers], 4)
    if one.is_tied:
        sides = [label(group) for group in one.groups]
        return "one value on " + ", and another on ".join(sides)
    odd = [number for group in one.groups[1:] for number in group]
    verb = "differs" if len(odd) == 1 else "differ"
    return f"{label(odd)} {verb} from the other {len(one.groups[0])}"


def _rank(one: _Mismatch, number: int, hosts) -> str:
    """Returns the rank of a device, with its place, as text.

    Args:
        one: The copies that differ.
        number: The position of the device in the mesh.
        hosts: The text about the host of each process, by index.
    """
    shape = one.mesh.devices.shape
    at = dict(zip(one.mesh.axis_names, np.unravel_index(number, shape), strict=True))
    sizes = [one.mesh.shape[name] for name in one.over]
    rank = int(np.ravel_multi_index([at[name] for name in one.over], sizes))
    rest = [
        f"{n} {i}" for n, i in at.items() if n not in one.over and one.mesh.shape[n] > 1
    ]
    device = one.mesh.devices.flat[number]
    where = [*rest, f"{device.platform}:{device.id}"]
    if jax.process_count() > 1:
        where.append(f"process {device.process_index}{hosts.get(device.process_index, '')}")
    return f"rank {rank} ({', '.join(where)})"


def _hosts(found: list[_Mismatch]) -> dict[int, str]:
    """Returns the hosts of processes for the message; all processes raise, and call it."""
    known: dict[int, str] = {}
    for mesh in dict.fromkeys(one.mesh for one in found):
        processes = agreement.processes_of(mesh.devices.flat)
        if len(processes) == 1 or store.place().processes == 1:
            continue
        own = f" on host {socket.gethostname()}"
        try:
            answers = store.of_all("its host", own, _TO_NAME_HOSTS, processes=processes)
        except JobError:
            continue  # The message then names processes without hosts.
        known |= dict(zip(processes, answers, strict=True))
    return known
