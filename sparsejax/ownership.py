"""Which rank serves which unit, and where in that rank's part.

An `Ownership` laid over `size` units and `ranks` ranks gives a layout: a bijection between
units and pairs (part, slot), all parts of one width. Balance decides what a scheme costs,
because every buffer is as long as the fullest part needs: for a set of m units a hash gives
at most m/n + O(sqrt(m log(n) / n)) to a part, whatever the set is (Zen, Theorem 2).

`StripedHash`, the default, needs no table: consecutive units lie in columns, and the units
of one slot, one of each column, go to different parts, turned slot by slot. Sixteen million
units are split in 0.3 ms on two CPU cores where hashing each and sorting takes hundreds;
`pallas_kernels.striping` says how.

`MurmurHash` is the paper's own: every unit hashed by itself, with tables of each part's
units (the paper's I_i) and so as much memory as the gradient. `Contiguous` gives equal
ranges, as most systems do, and is not balanced.
"""

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import striping
from pallas_kernels.hashing import mix32
from pallas_kernels.striping import word_multiple
from sparsejax import bits, checks
from sparsejax.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Layout(abc.ABC):
    """A bijection between `size` units and (part, slot), for `ranks` parts.

    Attributes:
        size: How many units there are.
        ranks: How many parts.
        width: How many slots a part has, a multiple of 32; some belong to no unit.
    """

    size: int
    ranks: int
    width: int

    @abc.abstractmethod
    def assign(self, units: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The part and the slot of each unit."""

    @abc.abstractmethod
    def invert(self, parts: jax.Array, slots: jax.Array) -> jax.Array:
        """The unit of each slot; at least `size` where the slot belongs to none."""

    @abc.abstractmethod
    def split(self, flags: jax.Array) -> jax.Array:
        """Booleans [size] as packed bits by part, uint32 [ranks, width / 32]."""

    @abc.abstractmethod
    def join(self, dense: jax.Array) -> jax.Array:
        """Values by part [ranks, width, ...] in the order of the units [size, ...]."""


class Ownership(abc.ABC):
    """A rule that gives every unit to a rank. Frozen and hashable."""

    #: Whether `tables` returns anything.
    needs_tables: bool = False

    #: Whether any set is spread evenly, so that the fullest part is hardly fuller than the
    #: mean one.
    balanced: bool = True

    #: Whether the tables change with what was added up.
    follows_data: bool = False

    @abc.abstractmethod
    def over(self, size: int, ranks: int, tables: Any = ()) -> Layout:
        """Lays the rule over `size` units and `ranks` ranks."""

    def tables(self, size: int, ranks: int) -> Any:
        """Arrays that the layout needs, to be kept in a scheme's state."""
        del size, ranks
        return ()

    def width(self, size: int, ranks: int) -> int:
        """How many slots a part has."""
        return self.over(size, ranks).width

    def after(self, tables: Any, total: jax.Array) -> Any:
        """The tables for the next step, from those of this one and its sum."""
        del total
        return tables


@dataclasses.dataclass(frozen=True)
class StripedHash(Ownership):
    """Columns of consecutive units, turned slot by slot. See the module.

    Attributes:
        seed: Which turns; all ranks need the same.
    """

    seed: int = 0

    def __post_init__(self):
        checks.whole("seed", self.seed)

    def over(self, size, ranks, tables=()):
        del tables
        return _Striped(size, ranks, striping.width(size, ranks), self.seed)


@dataclasses.dataclass(frozen=True)
class _Striped(Layout):
    seed: int

    def assign(self, units):
        return striping.assign(units, self.size, self.ranks, self.seed)

    def invert(self, parts, slots):
        return striping.invert(parts, slots, self.size, self.ranks, self.seed)

    def split(self, flags):
        return striping.split(flags, self.ranks, self.seed)

    def join(self, dense):
        return striping.join(dense, self.size, self.seed)


@dataclasses.dataclass(frozen=True)
class Contiguous(Ownership):
    """Equal ranges of consecutive units: no hashing, and no balance.

    Attributes:
        ranges: How many ranges there are, dealt out to the ranks in turn; as many as ranks
            if None. With fewer, some ranks own nothing; with more, each owns several.
    """

    balanced = False
    ranges: int | None = None

    def __post_init__(self):
        if self.ranges is not None:
            checks.whole("ranges", self.ranges, 1, " or None")

    def over(self, size, ranks, tables=()):
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


@dataclasses.dataclass(frozen=True)
class MurmurHash(Ownership):
    """The paper's ownership: MurmurHash of every unit, and tables of each part's units.

    Attributes:
        seed: Which hash function; all ranks need the same.
    """

    needs_tables = True
    seed: int = 0

    def __post_init__(self):
        checks.whole("seed", self.seed)

    def over(self, size, ranks, tables=()):
        width = _murmur_width(size, ranks, self.seed)
        if not isinstance(tables, jax.Array):
            tables = self.tables(size, ranks)
        return _Tables(size, ranks, width, self.seed, tables)

    def width(self, size, ranks):
        return _murmur_width(size, ranks, self.seed)

    def tables(self, size, ranks):
        """int32 [ranks, width]: the units of each part, ascending, then `size`."""
        width = _murmur_width(size, ranks, self.seed)
        units = lax.iota(jnp.int32, size)
        part = _murmur_part(units.astype(jnp.uint32), ranks, self.seed)
        part, units = lax.sort((part.astype(jnp.int32), units), num_keys=1)
        start = jnp.searchsorted(part, lax.iota(jnp.int32, ranks)).astype(jnp.int32)
        table = jnp.full((ranks, width), size, jnp.int32)
        return table.at[part, lax.iota(jnp.int32, size) - start[part]].set(units)


def _murmur_part(units, ranks, seed):
    return mix32(units, seed) % np.uint32(ranks)


@functools.lru_cache
def _murmur_width(size: int, ranks: int, seed: int) -> int:
    with np.errstate(over="ignore"):
        part = _murmur_part(np.arange(size, dtype=np.uint32), ranks, seed)
    return word_multiple(int(np.bincount(part, minlength=1).max(initial=1)))


@dataclasses.dataclass(frozen=True, eq=False)
class _Tables(Layout):
    seed: int
    units: jax.Array

    def assign(self, units):
        part = _murmur_part(units.astype(jnp.uint32), self.ranks, self.seed)
        part = part.astype(jnp.int32)
        slots = lax.broadcasted_iota(jnp.int32, self.units.shape, 1)
        slot_of = jnp.zeros(self.size, jnp.int32).at[self.units].set(slots, mode="drop")
        return part, slot_of[units]

    def invert(self, parts, slots):
        return self.units[parts, slots]

    def split(self, flags):
        return bits.pack(jnp.pad(flags, (0, 1))[self.units])

    def join(self, dense):
        shape = (self.size, *dense.shape[2:])
        flat = dense.reshape(-1, *dense.shape[2:])
        return (
            jnp.zeros(shape, dense.dtype).at[self.units.reshape(-1)].set(flat, mode="drop")
        )


@dataclasses.dataclass(frozen=True)
class Shares(Layout):
    """Every part of a layout cut into even shares, one for each rank.

    A slot of the new part r is a pair: whose unit it is, and where in r's share of it.

    Attributes:
        layout: The layout whose parts are cut.
        shares: How each of its parts is.
    """

    layout: Layout
    shares: Layout

    @classmethod
    def of(cls, layout: Layout) -> "Shares":
        """Cuts the parts of a layout by a striped hash, another than is usual for parts."""
        shares = StripedHash(seed=0x1B56C4E9).over(layout.width, layout.ranks)
        return cls(layout.size, layout.ranks, layout.ranks * shares.width, layout, shares)

    def assign(self, units):
        part, slot = self.layout.assign(units)
        share, place = self.shares.assign(slot)
        return share, part * self.shares.width + place

    def invert(self, parts, slots):
        owner, place = slots // self.shares.width, slots % self.shares.width
        slot = self.shares.invert(parts, place)
        units = self.layout.invert(owner, jnp.minimum(slot, self.layout.width - 1))
        return jnp.where(slot < self.layout.width, units, self.layout.size)

    def split(self, flags):
        raise NotImplementedError("shares are cut from sums, not from units")

    def join(self, dense):
        raise NotImplementedError("shares are gathered as entries")
