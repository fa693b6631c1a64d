"""Decides which tensors are worth compressing, by DRAGONN's equation (1).

A tensor is worth compressing if that takes less time than it saves on the network:

    T_comp(d) < T_full(d) - T_spr(d)

The right side follows from a model of the network (`saved`): a dense ring all-reduce
compared with an all-gather of entries. The left side is the work on the device, to select
the entries and to add those of all ranks. It is measured once, at three sizes, and modelled
as a constant plus a time for each element; or the caller gives it, without a device.

All processes must decide the same, or they would wait for one another forever. So the first
process measures, and sends its times to the others.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from sparsejax import arguments
from sparsejax.advise import codec
from sparsejax.advise.network import check_network
from sparsejax.errors import ArgumentError
from sparsejax.schemes.forecast import Network
from sparsejax.sparsifiers import base


_SIZES = (1 << 16, 1 << 19, 1 << 22)
_REPEATS = 5


@dataclasses.dataclass(frozen=True)
class CompressionCost:
    """The time to compress a tensor, and to decompress those of all ranks.

    For n elements it is, in seconds,

        fixed + by_number n

    Attributes:
        fixed: The seconds that do not depend on the size.
        by_number: The seconds for each element.

    Example:
        >>> cost = sparsejax.advise.CompressionCost(fixed=1e-4, by_number=1e-9)
        >>> pays = sparsejax.advise.worthwhile(
        ...     ranks=16, network=sparsejax.Network(1, 50), cost=cost,
        ...     sparsifier=sparsejax.sparsifiers.Dragonn(0.001))
        >>> pays("w", jax.ShapeDtypeStruct((10_000_000,), jnp.float32))
        True
    """

    fixed: float
    by_number: float

    def __post_init__(self):
        arguments.check_at_least("fixed", self.fixed, 0)
        arguments.check_at_least("by_number", self.by_number, 0)

    def time(self, numbers: int) -> float:
        """Returns the seconds for a tensor of `numbers` elements."""
        return self.fixed + self.by_number * numbers

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cost to a file."""
        codec.write(path, codec.dumps(self) + "\n", "the cost")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "CompressionCost":
        """Reads a cost that `save` has written."""
        where = f"the cost in {path}"
        return codec.decode(cls, codec.loads(codec.read(path, "the cost"), where), where)


def measure_compression(sparsifier: base.Selector, ranks: int) -> CompressionCost:
    """Measures the compression time of a sparsifier on the default device.

    Results are cached. In a job of several processes all call it, and all get the times of
    the first process.

    Args:
        sparsifier: A sparsifier of `sparsejax.sparsifiers` that selects elements.
        ranks: The number of ranks whose entries are added.

    Returns:
        The `CompressionCost`, for `worthwhile`.

    Example:
        >>> kind = sparsejax.sparsifiers.TopK(0.001)
        >>> cost = sparsejax.advise.measure_compression(kind, ranks=4)
    """
    _check(sparsifier, ranks)
    return _measured(sparsifier, ranks, jax.default_backend())


def _check(sparsifier, ranks):
    if not isinstance(sparsifier, base.Selector):
        raise ArgumentError(
            f"{sparsifier!r} does not select elements, so nothing is compressed."
        )
    arguments.check_whole("ranks", ranks, 1)


@functools.lru_cache
def _measured(sparsifier, ranks, platform):
    del platform
    times = np.zeros(len(_SIZES))
    if jax.process_index() == 0:
        times[:] = [_seconds(sparsifier, ranks, size) for size in _SIZES]
    if jax.process_count() > 1:
        times = np.asarray(multihost_utils.broadcast_one_to_all(times))
    each = max((times[-1] - times[0]) / (_SIZES[-1] - _SIZES[0]), 0.0)
    fixed = max(float(np.mean(times - each * np.array(_SIZES))), 0.0)
    return CompressionCost(fixed, float(each))


def _seconds(sparsifier, ranks, size):
    """Returns the median seconds to select a tensor's entries and add those of ranks."""
    room = sparsifier.capacity(size)

    @jax.jit
    def compress(x, step):
        wanted = sparsifier.wanted(size, step)
        draw = base.Draw(step, step.astype(jnp.uint32), wanted)
        indices, _ = sparsifier.select(x, sparsifier.init(size, x.dtype), draw, room)
        return indices, x.at[indices].get(mode="fill", fill_value=0)

    @jax.jit
    def decompress(indices, values):
        indices, values = (jnp.tile(y, ranks) for y in (indices, values))
        return jnp.zeros(size, values.dtype).at[indices].add(values, mode="drop")

    x = jax.random.normal(jax.random.key(0), (size,))
    times = []
    for step in range(_REPEATS + 1):
        start = time.perf_counter()
        jax.block_until_ready(decompress(*compress(x, jnp.int32(step))))
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))


def saved(size: float, ratio: float, ranks: int, alpha: float, bandwidth: float) -> float:
    """Returns T_full - T_spr, the seconds that compression saves (DRAGONN, 4.2).

    A dense ring all-reduce takes 2 (K - 1) (alpha + d A/(K B)), an all-gather of compressed
    tensors (K - 1) (alpha + c d A/B). The difference is (K - 1) (alpha + (2/K - c) d A/B).
    The paper prints it with 1/K in place of 2/K, which does not follow from the two.

    Args:
        size: d A, bytes of the tensor.
        ratio: c, the compressed size divided by d A, indices included.
        ranks: K.
        alpha: The latency of a message in seconds.
        bandwidth: B, in bytes a second.
    """
    return (ranks - 1) * (alpha + (2 / ranks - ratio) * size / bandwidth)


def worthwhile(
    *,
    ranks: int,
    network: Network,
    sparsifier: base.Selector,
    cost: CompressionCost | None = None,
) -> Callable[[str, Any], bool]:
    """Says which leaves are worth compressing, for `compress=` of a sparsifier.

    Args:
        ranks: The number of ranks.
        network: The bandwidth and latency between the ranks.
        sparsifier: The sparsifier that compresses.
        cost: The compression time; `measure_compression` measures it if None.

    Returns:
        A function from a leaf's path and the leaf to whether to compress it.

    Example:
        >>> dragonn = sparsejax.sparsifiers.Dragonn(0.001)
        >>> network = sparsejax.Network(gbit_per_s=25, latency_us=20)
        >>> pays = sparsejax.advise.worthwhile(
        ...     ranks=16, network=network, sparsifier=dragonn)
        >>> tx = optax.chain(
        ...     sparsejax.sparsify(dragonn, compress=pays), sparsejax.zen_sync())
    """
    check_network(network)
    _check(sparsifier, ranks)
    if cost is None:
        cost = measure_compression(sparsifier, ranks)
    alpha, bandwidth = network.latency_us * 1e-6, network.gbit_per_s * 1e9 / 8

    def pays(path: str, leaf: Any) -> bool:
        del path
        if not leaf.size:
            return False
        each = jnp.dtype(leaf.dtype).itemsize
        sent = sparsifier.expected(leaf.size) * (4 + each)
        ratio = sent / (leaf.size * each)
        return cost.time(leaf.size) < saved(
            leaf.size * each, ratio, ranks, alpha, bandwidth
        )

    return pays
