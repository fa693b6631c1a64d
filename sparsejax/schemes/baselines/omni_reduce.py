"""OmniReduce: blocks that are not zero are sent to aggregators, and the sums back.

Fei et al., SIGCOMM 2021. The array is cut into blocks of 256 numbers. A block of zeros is
not sent; a block that is sent takes a single index. Aggregators own equal ranges of blocks,
so their loads are as uneven as the gradient is skewed. `owners` describes the messages, in
which a block is a unit.

It differs from the authors' program in three ways. Any dtype is supported. Numbers below a
threshold are not set to zero, so the sum is exact. Each message has the capacity of the
fullest, where theirs waits for the next non-zero block of any worker.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from sparsejax import arguments
from sparsejax.schemes import base
from sparsejax.schemes.owners import forecast as owners_forecast, rows as owned_rows
from sparsejax.schemes.owners.pieces import SparseScheme
from sparsejax.schemes.owners.pulls import Gather
from sparsejax.schemes.owners.push_pull import PushPull
from sparsejax.units import bits
from sparsejax.units.dense import Dense
from sparsejax.units.ownership import Contiguous
from sparsejax.wire import ladder
from sparsejax.wire.ladder import Message


@dataclasses.dataclass(frozen=True)
class OmniReduce(SparseScheme):
    """Sums blocks that are not zero: they are sent to aggregators, and the sums back.

    The array is cut into blocks, and an index stands for a block. Aggregators own equal
    ranges of blocks.

    Attributes:
        block: The number of elements in a block. Larger blocks need fewer indices, and send
            more zeros.
        aggregators: The number of ranges, dealt out to the ranks in turn; as many as ranks
            if None.
        ratio: The ratio of successive message sizes.
        wire_dtype: The dtype of the values on the wire; that of x if None.

    Example:
        >>> tx = sparsejax.sync(sparsejax.schemes.OmniReduce(block=64))

    References:
        Fei et al., Efficient Sparse Collective Communication and its Application to
        Accelerate Distributed Deep Learning, SIGCOMM 2021
    """

    block: int = 256
    aggregators: int | None = None
    ratio: float = 2.0
    wire_dtype: jax.typing.DTypeLike | None = None

    def __post_init__(self):
        arguments.check_whole("block", self.block, 1)
        if self.aggregators is not None:
            arguments.check_whole("aggregators", self.aggregators, 1, " or None")
        ladder.check_ratio(self.ratio)
        arguments.check_dtype("wire_dtype", self.wire_dtype)

    def __call__(self, x, state, wire, mean=False):
        n = wire.ranks
        if n == 1 or x.size == 0:
            return base.nothing_to_send(x, state, wire)
        base.check_units(x)
        width = x.size // x.shape[0]
        units = self._units(width)
        count = -(-x.shape[0] // units)
        rest = count * units - x.shape[0]
        wire = wire.narrowed(self.wire_dtype)
        flags, x = x.present(), x.dense()
        blocks = jnp.pad(x, ((0, rest), *((0, 0),) * (x.ndim - 1)))
        blocks = blocks.reshape(count, units * width)
        before = jnp.mean(flags.astype(jnp.float32))
        flags = jnp.any(jnp.pad(flags, (0, rest)).reshape(count, units), axis=1)
        layout = Contiguous(self.aggregators).over(count, n)
        total, traffic = self._push_pull(Dense(blocks, flags), wire, layout, mean)
        total = total.reshape(-1, *x.shape[1:])[: x.shape[0]]
        after = bits.density(total)
        before, sent = wire.maximum(before)
        traffic = traffic._replace(
            scalars=traffic.scalars + sent,
            density_before=before,
            density_after=after,
            dense=jnp.float32(wire.dense_bytes(x.size, x.dtype)),
        )
        return base.Reduced(total, None, state, traffic)

    def rows(self, tables, wire, mean=False):
        """Sums listed rows by the aggregators of their ranges; each row is a block."""
        ranges = Contiguous(self.aggregators)
        return owned_rows.add_up(tables, wire.narrowed(self.wire_dtype), ranges, mean)

    def forecast(self, load):
        ranges = Contiguous(self.aggregators)
        # With fewer aggregators than ranks, each owns more than one rank's share.
        share = max(1.0, load.ranks / (self.aggregators or load.ranks))
        skews = [max(skew, share) for skew in (load.skewness, load.sum_skewness)]
        if load.listed:
            load = dataclasses.replace(load, skewness=skews[0], sum_skewness=skews[1])
            return owners_forecast.of_rows(load, ranges, self.wire_dtype)
        units = self._units(load.numbers)
        blocks = -(-load.units // units)
        # Units are assumed to be in random blocks; clustered units take fewer blocks.
        counts = tuple(
            -blocks * math.expm1(units * math.log1p(-min(c / load.units, 1 - 1e-12)))
            for c in load.counts
        )
        # A range cannot have more non-zero blocks than it has blocks.
        most = [share * max(1.0, blocks / max(c, 1e-9)) for c in (counts[0], counts[-1])]
        whole = dataclasses.replace(
            load,
            units=blocks,
            numbers=units * load.numbers,
            counts=counts,
            skewness=min(skews[0], most[0]),
            sum_skewness=min(skews[1], most[1]),
        )
        return owners_forecast.forecast(whole, ranges, self._push_pull)

    def _units(self, width):
        """Returns the number of units in a block, at least one."""
        return max(1, self.block // width)

    @property
    def _push_pull(self):
        message = Message("coo32", self.ratio)
        return PushPull(message, message, Gather(), self.wire_dtype)
