"""Entries whose values travel in a code: in the low bits of slots, or beside them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.units import bits
from sparsejax.units.bits import Slots
from sparsejax.units.entries import Entries
from sparsejax.units.indices import MOST_NUMBERED
from sparsejax.units.units import Source, rounded
from sparsejax.wire.collectives import Wire
from sparsejax.wire.value_codes.base import ValueCode
from sparsejax.wire.value_codes.codes import CODES


@dataclasses.dataclass(frozen=True)
class CodedMessages:
    """How the entries of some arrays, laid end to end, travel with their values in a code.

    A code of fewer than 8 bits is the lowest bits of a slot: slot and code are one number
    in a set that is as many times as wide, whose index code then has the value, too. Its
    low bits cost what they are; where an index code cuts off more of them it costs less.
    Wider codes, and those of sets that int32 could not number then, travel in the place of
    values, 8 bits or a multiple each. Each rank's tables travel by themselves, an
    all-gather before the messages.

    Attributes:
        code: The code.
        units: How many units the arrays have.
        arrays: How many arrays there are, each with its table.
    """

    code: ValueCode
    units: int
    arrays: int

    @classmethod
    def of(
        cls, name: str | None, units: int, arrays: int, dtype: jnp.dtype
    ) -> "CodedMessages | None":
        """How they travel; None where values travel as they are: in no more bits.

        Args:
            name: The code; None where there is none.
            units: How many units the arrays have.
            arrays: How many arrays there are.
            dtype: Of the values, were they to travel as they are.
        """
        if name is None or CODES[name].width > 8 * dtype.itemsize:
            return None
        return cls(CODES[name], units, arrays)

    @property
    def slot_bits(self) -> int:
        """The bits of a slot that are the code of its value."""
        numbered = -(-self.units // bits.WORD) * bits.WORD << self.code.width
        return self.code.width if self.code.width < 8 and numbered < MOST_NUMBERED else 0

    @property
    def unit_bytes(self) -> int:
        """Bytes of a value beside its slot."""
        return 0 if self.slot_bits else self.code.dtype.itemsize

    def table_bytes(self, ranks: int) -> int:
        """Bytes that a rank sends for its tables."""
        return (ranks - 1) * 4 * self.arrays * self.code.table

    def slots(self, x: Entries, width: int) -> Slots:
        """The slots of the entries, of `width` before codes are in them."""
        units, real = bits.listed(x.index, x.capacity)
        assert x.coded is not None
        at = units << self.slot_bits
        if self.slot_bits:
            at = at | x.coded.codes.astype(jnp.int32)
        ones = jnp.where(real, jnp.uint32(1) << (at & bits.WORD - 1).astype(jnp.uint32), 0)
        words = jnp.zeros((width << self.slot_bits) // bits.WORD, jnp.uint32)
        # No bit twice, so the sum of bits is their union.
        return Slots.of(words.at[at // bits.WORD].add(ones, mode="drop")[None])

    def source(self, x: Entries) -> Source:
        """Where messages find what they have beside slots."""
        assert x.coded is not None
        codes = x.coded.codes[:, None] if self.slot_bits else x.coded.codes
        place = x.source().units
        return Source(codes[:, :0] if self.slot_bits else codes, None, place)

    def reader(
        self, x: Entries, wire: Wire, dtype: Any
    ) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Sends the tables; from a sender, slots and codes to units and their values.

        Args:
            x: The entries.
            wire: The ranks.
            dtype: Of the values that the senders have.
        """
        assert x.coded is not None
        tables, _ = wire.all_gather(x.coded.table)
        starts = jnp.cumsum(jnp.array((0, *x.parts[:-1]), jnp.int32))

        def read(sender, slots, codes):
            units = slots >> self.slot_bits
            if self.slot_bits:
                codes = slots & (1 << self.slot_bits) - 1
            of = jnp.searchsorted(starts, units, side="right", method="scan_unrolled") - 1
            table = tables[sender, of].T if self.arrays > 1 else tables[sender, 0]
            return units, rounded(self.code.decode(codes.astype(jnp.uint32), table), dtype)

        return read
