"""Which tensors to compress: DRAGONN's equation (1).

A tensor is worth compressing where that takes less time than it saves on the network:

    T_comp(d) < T_full(d) - T_spr(d)

The right side follows from a model of the network (`cost_tables`): a dense ring all-reduce
against an all-gather of entries. The left side is the work on the device, to select the
entries and to add up those of all ranks. It is measured once, at three sizes, and taken as
a fixed part and a part for each element; or it is given, where there is no device to ask.

All processes must decide alike, or they would wait for one another for ever. So what is
measured is that of the first process, and the others are told.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import pallas_kernels
from sparsejax import errors
from sparsejax.advise.papers import cost_tables
from sparsejax.errors import ArgumentError
from sparsejax.sparsifiers import base


_SIZES = (1 << 16, 1 << 19, 1 << 22)
_REPEATS = 5


@dataclasses.dataclass(frozen=True)
class CompressionCost:
    """The time to compress a tensor and to decompress those of all ranks.

    Attributes:
        fixed: Seconds a tensor.
        by_number: Seconds an element more.
    """

    fixed: float
    by_number: float

    def __post_init__(self):
        for name in ("fixed", "by_number"):
            value = getattr(self, name)
            if not errors.is_number(value) or not 0 <= value < float("inf"):
                raise ArgumentError(f"{name} must be seconds, at least 0, got {value!r}.")

    def time(self, numbers: int) -> float:
        """Seconds for a tensor of so many elements."""
        return self.fixed + self.by_number * numbers

    def save(self, path: str | Path) -> None:
        """Writes it as JSON."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self)) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "CompressionCost":
        """Reads what `save` wrote."""
        return cls(**json.loads(Path(path).read_text()))


def measure_compression(sparsifier: base.Selecting, ranks: int) -> CompressionCost:
    """Measures a sparsifier on this machine's default device; a second call remembers.

    In a job of several processes all of them call it, and get what the first one measured.

    Args:
        sparsifier: One of `sparsejax.sparsifiers` that selects.
        ranks: How many ranks' entries are decoded.
    """
    if not isinstance(sparsifier, base.Selecting):
        raise ArgumentError(
            f"{sparsifier!r} does not select elements, so nothing is compressed."
        )
    return _measured(sparsifier, ranks, jax.default_backend())


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
    """The median time to select the entries of a tensor and to add up those of all."""
    room = sparsifier.capacity(size)

    @jax.jit
    def compress(x, step):
        wanted = sparsifier.wanted(size, step)
        draw = base.Draw(step, step.astype(jnp.uint32), wanted)
        found, _ = sparsifier.select(x, sparsifier.init(size, x.dtype), draw, room)
        return found, x.at[found].get(mode="fill", fill_value=0)

    @jax.jit
    def decompress(found, values):
        found, values = (jnp.tile(y, ranks) for y in (found, values))
        return pallas_kernels.coo_add(found, values, size)

    x = jax.random.normal(jax.random.key(0), (size,))
    times = []
    for step in range(_REPEATS + 1):
        start = time.perf_counter()
        jax.block_until_ready(decompress(*compress(x, jnp.int32(step))))
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))


def worthwhile(
    *,
    ranks: int,
    gbit_per_s: float,
    latency_us: float,
    sparsifier: base.Selecting,
    cost: CompressionCost | None = None,
) -> Callable[[str, Any], bool]:
    """Says which leaves are worth compressing, for `compress=` of a sparsifier.

    Example:
        own = sparsejax.sparsifiers.Dragonn(0.001)
        chosen = sparsejax.worthwhile(
            ranks=16, gbit_per_s=25, latency_us=20, sparsifier=own)
        tx = optax.chain(
            sparsejax.sparsify(own, compress=chosen), sparsejax.zen_sync(), ...)

    Args:
        ranks: How many ranks there are.
        gbit_per_s: Of the network, for one rank.
        latency_us: Of a message.
        sparsifier: What compresses.
        cost: The time that takes; measured here (`measure_compression`) if None.

    Returns:
        A function from a leaf's path and the leaf to whether to compress it.
    """
    if cost is None:
        cost = measure_compression(sparsifier, ranks)
    alpha, bandwidth = latency_us * 1e-6, gbit_per_s * 1e9 / 8
    for name, value in (("ranks", ranks), ("gbit_per_s", gbit_per_s)):
        errors.check_positive(name, value)
    if latency_us < 0:
        raise ArgumentError(f"latency_us must be at least 0, got {latency_us!r}.")

    def pays(path: str, leaf: Any) -> bool:
        del path
        each = jnp.dtype(leaf.dtype).itemsize
        sent = sparsifier.expected(leaf.size) * (4 + each)
        ratio = sent / (leaf.size * each)
        return cost_tables.dragonn_pays(
            leaf.size, each, ratio, ranks, cost.time(leaf.size), alpha, bandwidth
        )

    return pays
