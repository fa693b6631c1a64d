"""Unpacks the messages received, of any size, and pieces of them."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.operations.messages import (
    index_message,
    unpack_message,
    unpacks_in_kernels,
)
from pallas_kernels.reference.layout import Run
from pallas_kernels.reference.messages import read_message
from pallas_kernels.reference.specs import MessageSpec, Received, Unpacking
from pallas_kernels.striping import Striping
from sparsejax.units import bits
from sparsejax.wire import index_codes
from sparsejax.wire.formats import Form, Piece
from sparsejax.wire.ladder import Rung


def is_known(units: Any) -> bool:
    """Returns whether kernels can compute a map from slots to units; None: the identity."""
    return units is None or isinstance(units, Striping)


class Into(NamedTuple):
    """A fold into one array, in a form that kernels know.

    Attributes:
        replaces: Whether values replace zeros, no two of them at one place; if not, they
            are added.
        units: A function of the number of the sender and slots that returns places in the
            array. If None, slots are places. Entries with places past the end are dropped.
    """

    replaces: bool = False
    units: Any = None

    @property
    def is_known(self) -> bool:
        """Whether kernels can compute `units`."""
        return is_known(self.units)


def in_branches(form: Form, sources: int, fold: Any) -> bool:
    """Returns whether each size's branch unpacks its messages, by one kernel for all.

    In plain XLA the unpacking of each size would be compiled separately.

    Args:
        form: The offsets of the parts of a message.
        sources: The number of messages received.
        fold: The fold of the entries.
    """
    if fold.into is None or not fold.into.is_known:
        return False
    numbers = sources * form.ladder.top * math.prod(form.shape)
    return unpacks_in_kernels(fold.start.dtype, form.dtype, numbers)


class Head(NamedTuple):
    """The first pieces of received messages, with their headers and bit counts.

    Attributes:
        words: uint32 [senders, words], the pieces.
        counts: int32 [senders], the number of entries of each part in all.
        ends: The bit counts: see `pallas_kernels.index_message`.
        spec: The static properties of the messages.
    """

    words: jax.Array
    counts: jax.Array
    ends: jax.Array
    spec: MessageSpec

    @classmethod
    def of(cls, words: jax.Array, numbers: jax.Array, spec: MessageSpec) -> "Head":
        """Reads the headers of the pieces, and counts their bits."""
        return cls(words, *index_message(words, numbers, spec), spec)


def spec_of(form: Form, fold: Any, at: int, bitmaps: bool = False) -> MessageSpec:
    """Returns the static properties of messages that a fold takes in.

    Args:
        form: The offsets of the parts of a message.
        fold: The fold of the entries.
        at: The offset in `numbers` of the numbers of these messages.
        bitmaps: Whether the messages are unpacked in the order of the array.
    """
    spec = dataclasses.replace(form.spec, units=fold.into.units, at=at)
    if not bitmaps:
        return spec
    longest = form.ladder.width // bits.WORD
    return dataclasses.replace(spec, longest=longest, bitmaps=True)


def goes_in_order(form: Form, fold: Any) -> bool:
    """Returns whether each number of the array can look up its own value.

    Of rows each looks up its entry instead (`size_groups.goes_by_rows`).
    """
    into: Into | None = fold.into
    is_striped = into is not None and into.replaces and isinstance(into.units, Striping)
    return is_striped and not form.shape


def are_bitmaps(form: Form, rung: Rung, fold: Any) -> bool:
    """Returns whether the only messages, of a rung, are unpacked in the array's order."""
    return goes_in_order(form, fold) and rung.code is index_codes.BITMAP


def unpack_piece(
    piece: Piece, head: Head, words: jax.Array, numbers: jax.Array, fold: Any, carry: Any
) -> Any:
    """Folds the entries of a piece of the messages received.

    Args:
        piece: The words and entries of this piece.
        head: The first pieces of the messages.
        words: uint32 [senders, words], this piece of each message.
        numbers: int32 [numbers], as returned by `run_of`.
        fold: The fold of the entries.
        carry: The result so far.
    """
    if piece.first == piece.last:
        return carry
    received = Received(head.words, head.ends, None if words is head.words else words)
    how = Unpacking(fold.into.replaces, fold.in_order, piece.first, piece.last)
    return unpack_message(carry, received, numbers, head.spec, how)


def unpack(
    form: Form, message: jax.Array, numbers: jax.Array, fold: Any, carry: Any, at: int = 0
) -> Any:
    """Folds the entries of the messages received.

    Args:
        form: The offsets of the parts of a message.
        message: uint32 [senders, words], the messages.
        numbers: int32 [numbers], as returned by `run_of`.
        fold: The fold of the entries.
        carry: The result so far.
        at: The offset in `numbers` of the numbers of these messages.
    """
    if fold.into is not None and fold.into.is_known:
        how = Unpacking(fold.into.replaces, fold.in_order)
        spec = spec_of(form, fold, at)
        return unpack_message(carry, Received(message), numbers, spec, how)
    spec = dataclasses.replace(form.spec, at=at)
    run = Run.of(numbers, spec)
    slots, values, is_there = read_message(message, run, spec, form.shape)
    slots = jnp.where(is_there, slots, form.ladder.width)
    if not fold.in_order:
        sender = lax.broadcasted_iota(jnp.int32, slots.shape, 0).reshape(-1)
        values = values.reshape(-1, *form.shape)
        return fold.add(carry, sender, slots.reshape(-1), values)
    turn = lambda sender, carry: fold.add(carry, sender, slots[sender], values[sender])
    return lax.fori_loop(0, len(message), turn, carry)
