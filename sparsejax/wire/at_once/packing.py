"""Packs this rank's messages: whole, or values where the size is known."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.operations.messages import pack_message
from pallas_kernels.reference.layout import Prefix
from pallas_kernels.reference.messages import row_ends
from pallas_kernels.reference.slots import slots_of
from pallas_kernels.reference.specs import MessageSpec, SlotSets
from sparsejax.units.bits import Slots
from sparsejax.units.units import Source
from sparsejax.wire.at_once.unpacking import is_known


def run_of(first: Any, length: Any, row: jax.Array) -> jax.Array:
    """Returns the numbers of a message, as one array: see `pallas_kernels.pack_message`."""
    numbers = [jnp.asarray(number, jnp.int32) for number in (first, length)]
    return jnp.concatenate([jnp.stack(numbers), row])


def ends_of(slots: Slots) -> jax.Array:
    """Returns the bits up to the end of each row of words, for messages of all sizes."""
    return row_ends(slots.words)


def pack(
    spec: MessageSpec,
    slots: Slots,
    source: Source,
    numbers: jax.Array,
    ends: jax.Array | None = None,
) -> jax.Array:
    """Packs consecutive entries of each part into a message of its own.

    Args:
        spec: The static properties of the messages, without the source's map to units.
        slots: The slots of each part.
        source: The values of the slots.
        numbers: int32 [numbers], as returned by `run_of`.
        ends: The result of `ends_of`, if it is known.
    """
    spec = _spec_of(spec, source)
    sets = _sets_of(spec, slots, source, numbers, ends)
    return pack_message(sets, source.array, numbers, spec)


def prefix(
    spec: MessageSpec, slots: Slots, source: Source, numbers: jax.Array, words: int
) -> Prefix:
    """Packs the words that precede values, as `pack` does; see there for the arguments."""
    spec = _spec_of(spec, source)
    return Prefix.of(_sets_of(spec, slots, source, numbers), numbers, spec, words)


def with_values(
    spec: MessageSpec, start: Prefix, source: Source, begin: int, room: int
) -> jax.Array:
    """Returns messages of one size, of a prefix and values: uint32 [parts, words].

    Args:
        spec: The static properties of the messages.
        start: The result of `prefix`.
        source: The values of the slots.
        begin: The offset of the values, in words.
        room: The capacity of a message.
    """
    values = start.values(source.array, _spec_of(spec, source), room)
    return jnp.concatenate([start.message[:, :begin], values], axis=1)


def _spec_of(spec, source):
    """Returns the spec with the map from slots to units, if kernels know the map."""
    return dataclasses.replace(spec, units=source.units) if _knows(source) else spec


def _knows(source):
    """Returns whether kernels can list the slots and compute the units of a source."""
    return source.names is None and is_known(source.units)


def _sets_of(spec, slots, source, numbers, ends=None):
    """Returns the sets of slots; as lists, with units, if kernels do not know the map."""
    if _knows(source):
        return SlotSets(slots.words, slots.counts, ends=ends)
    part = lax.broadcasted_iota(jnp.int32, (len(slots.counts), 1), 0)
    first = lax.index_in_dim(numbers, spec.at, keepdims=False)
    found, _ = slots_of(slots.words, first, spec.room, slots.counts)
    names = found if source.names is None else source.names(part, found)
    units = found if source.units is None else source.units(part, found)
    return SlotSets(names, slots.counts, units)
