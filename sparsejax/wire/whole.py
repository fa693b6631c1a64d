"""Messages packed and unpacked whole, all parts at once: for GPUs, and all but CPUs.

What is in a message is said in `messages`. Here there is no loop: every part is taken to
have as many entries as the longest message holds, and those that are not there are left
out. A GPU writes a few megabytes for nothing in less time than it takes to ask the host
whether a loop goes on; a kernel does not even do that: see `pallas_kernels.pack_message`.

A message is unpacked by `pallas_kernels.unpack_message` where the fold says what it does in
a form that kernels know (`Into`); else its entries are read and given to the fold.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import pallas_kernels
from pallas_kernels.reference.messages import read_message
from pallas_kernels.striping import Striping
from sparsejax.axes import as_varying
from sparsejax.units import bits
from sparsejax.units.entries import Source
from sparsejax.units.slots import Slots
from sparsejax.wire.forms import Form


class Into(NamedTuple):
    """What a fold does with an array, in a form that kernels know.

    Attributes:
        sets: Whether values are set, no two of them at one place; else they are added.
        units: From the number of the sender and slots to places in the array; the slots
            themselves if None. Nothing is done at places behind its end.
    """

    sets: bool = False
    units: Any = None

    @property
    def is_known(self) -> bool:
        """Whether kernels know the map too."""
        return self.units is None or isinstance(self.units, Striping)


def pack(
    form: Form,
    slots: Slots,
    source: Source,
    first: jax.Array,
    length: jax.Array,
    row: jax.Array,
    axes: frozenset[str],
) -> jax.Array:
    """Writes a run of ranks of each part into a message of its own.

    Args:
        form: Where the parts of a message are.
        slots: The slots of each part.
        source: Their values.
        first: The rank of the first slot.
        length: How many slots a message has room for.
        row: The places of the message's parts.
        axes: The mesh axes over which messages vary.
    """
    parts, room = len(slots.counts), form.ladder.top
    part = lax.broadcasted_iota(jnp.int32, (parts, 1), 0)
    found, _ = bits.slots_of(slots.words, first, room, slots.counts)
    units = source.units
    if units is not None and not isinstance(units, Striping):
        units = units(part, found)
    message = pallas_kernels.pack_message(
        found if source.names is None else source.names(part, found),
        slots.counts,
        source.array,
        first,
        length,
        row,
        words=form.room,
        dtype=form.dtype,
        units=units,
    )
    message = jnp.pad(message, ((0, form.rows - parts), (0, 0)))
    return as_varying(message, axes)


def unpack(
    form: Form,
    message: jax.Array,
    counts: jax.Array,
    first: jax.Array,
    length: jax.Array,
    row: jax.Array,
    fold: Any,
    carry: Any,
) -> Any:
    """Folds the entries of the messages received.

    Args:
        form: Where the parts of a message are.
        message: uint32 [senders, words].
        counts: int32 [senders], how many entries each has in all.
        first: The rank of the first slot.
        length: How many slots a message has room for.
        row: The places of the message's parts.
        fold: What is made of the entries.
        carry: The result so far.
    """
    run = message, counts, first, length, row
    room, longest = form.ladder.top, form.longest
    if fold.into is not None and fold.into.is_known:
        return pallas_kernels.unpack_message(
            carry,
            *run,
            room=room,
            longest=longest,
            dtype=form.dtype,
            sets=fold.into.sets,
            units=fold.into.units,
        )
    slots, values, is_there = read_message(
        *run, entries=room, longest=longest, shape=form.shape, dtype=form.dtype
    )
    slots = jnp.where(is_there, slots, form.ladder.width)
    if not fold.in_order:
        sender = lax.broadcasted_iota(jnp.int32, slots.shape, 0).reshape(-1)
        values = values.reshape(-1, *form.shape)
        return fold.add(carry, sender, slots.reshape(-1), values)
    turn = lambda sender, carry: fold.add(carry, sender, slots[sender], values[sender])
    return lax.fori_loop(0, len(message), turn, carry)
