"""Equal ranges of consecutive units, as most systems have them; they are not balanced."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.striping import word_multiple
from sparsejax import arguments
from sparsejax.errors import ArgumentError
from sparsejax.units import bits
from sparsejax.units.ownership.base import Layout, Ownership


@dataclasses.dataclass(frozen=True)
class Contiguous(Ownership):
    """Equal ranges of consecutive units: no hashing, and no balance.

    Attributes:
        ranges: The number of ranges, which are assigned to the ranks in turn; that of ranks
            if None. With fewer, some ranks own nothing; with more, some own several.
    """

    balanced = False
    ranges: int | None = None

    def __post_init__(self):
        if self.ranges is not None:
            arguments.check_whole("ranges", self.ranges, 1, " or None")

    def over(self, size, ranks, tables=None):
        del tables
        ranges = self.ranges or ranks
        length = word_multiple(-(-size // ranges))
        width = -(-ranges // ranks) * length
        if ranks * width >= 2**31:
            raise ArgumentError(
                f"{ranges} ranges of {size:,} units, dealt out to {ranks} ranks, need "
                f"{ranks * width:,} slots, more than int32 can number; use as many ranges "
                "as ranks."
            )
        return _Ranges(size, ranks, width, length)


@dataclasses.dataclass(frozen=True)
class _Ranges(Layout):
    length: int  # of a range

    def assign(self, units):
        number, place = units // self.length, units % self.length
        return number % self.ranks, number // self.ranks * self.length + place

    def invert(self, parts, slots):
        number = slots // self.length * self.ranks + parts
        return jnp.minimum(number * self.length + slots % self.length, self.size)

    def split(self, flags):
        rows = self.width // self.length
        whole = jnp.pad(flags, (0, self.ranks * self.width - self.size))
        words = bits.pack(whole).reshape(rows, self.ranks, -1)
        return words.swapaxes(0, 1).reshape(self.ranks, -1)

    def join(self, dense):
        rows = self.width // self.length
        parts = dense.reshape(self.ranks, rows, self.length, *dense.shape[2:])
        return parts.swapaxes(0, 1).reshape(-1, *dense.shape[2:])[: self.size]
