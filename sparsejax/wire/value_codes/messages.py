"""Messages of entries with values in a code: in the low bits of slots, or beside them."""

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
    """The format of messages of entries of some arrays, end to end, with values in a code.

    A code of fewer than 8 bits is the lowest bits of a slot: slot and code are one number
    in a set that is 2**bits times as wide, whose index code then has the value, too. An
    entry's code costs its bits, or less where the wider set has a cheaper index
    code. Wider codes, and codes in sets whose slots int32 could not number, are sent in the
    place of values, with 8 bits or a multiple each. Each rank's tables are sent by an
    all-gather before the messages.

    Attributes:
        code: The value code.
        units: The number of units of all arrays.
        arrays: The number of arrays, each of which has a table.
    """

    code: ValueCode
    units: int
    arrays: int

    @classmethod
    def of(
        cls, name: str | None, units: int, arrays: int, dtype: jnp.dtype
    ) -> "CodedMessages | None":
        """Makes the format, or returns None if values are sent in their dtype.

        That is so if there is no code, or if codes have more bits than the dtype.

        Args:
            name: The name of the code, or None.
            units: The number of units of all arrays.
            arrays: The number of arrays.
            dtype: The dtype in which values travel without a code.
        """
        if name is None or CODES[name].bits > 8 * dtype.itemsize:
            return None
        return cls(CODES[name], units, arrays)

    @property
    def slot_bits(self) -> int:
        """The number of low bits of a slot that are the code of its value, or 0."""
        numbered = -(-self.units // bits.WORD) * bits.WORD << self.code.bits
        return self.code.bits if self.code.bits < 8 and numbered < MOST_NUMBERED else 0

    @property
    def unit_bytes(self) -> int:
        """Bytes that are sent for a value beside its slot."""
        return 0 if self.slot_bits else self.code.dtype.itemsize

    def table_bytes(self, ranks: int) -> int:
        """Returns the bytes that a rank sends for its tables."""
        return (ranks - 1) * 4 * self.arrays * self.code.table

    def slots(self, x: Entries, width: int) -> Slots:
        """Returns the slots of the entries, with codes in their low bits where these fit.

        Args:
            x: The entries.
            width: The number of slots without codes, a multiple of 32.
        """
        units, real = bits.listed(x.index, x.capacity)
        assert x.coded is not None
        at = units << self.slot_bits
        if self.slot_bits:
            at = at | x.coded.codes.astype(jnp.int32)
        ones = jnp.where(real, jnp.uint32(1) << (at & bits.WORD - 1).astype(jnp.uint32), 0)
        words = jnp.zeros((width << self.slot_bits) // bits.WORD, jnp.uint32)
        # No bit is set twice, so adding words is a bitwise or.
        return Slots.of(words.at[at // bits.WORD].add(ones, mode="drop")[None])

    def source(self, x: Entries) -> Source:
        """Returns the source of what is sent beside slots: codes, or nothing."""
        assert x.coded is not None
        codes = x.coded.codes[:, None] if self.slot_bits else x.coded.codes
        place = x.source().units
        return Source(codes[:, :0] if self.slot_bits else codes, None, place)

    def reader(
        self, x: Entries, wire: Wire, dtype: Any
    ) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Gathers the tables of all ranks, and returns a function that decodes entries.

        Args:
            x: The entries.
            wire: The ranks.
            dtype: The dtype of the values of the senders, to which values are decoded.

        Returns:
            A function of the number of the sender, slots and codes, which returns units and
            their values.
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
