"""Shared parts of the schemes that select while they reduce: Ok-Topk, SparDL, gTopk.

Such a scheme is given the accumulated gradient, which is the gradient plus the residual. It
returns the sum of what all its selections kept, and for each rank what it left out, the
next residual. Two rules make the law of conservation hold:

    where the total is zero      a rank leaves out its accumulated gradient, as if unsent
    where the total is not zero  a rank leaves out what its own selections left out

So at each index either all ranks keep their accumulated gradients, or each contribution is
in the total or left out by exactly one rank. No selection keeps a zero, so every rank knows
the case from the total. (This is SparDL's global residual collection, Algorithm 1, for any
scheme.)

Units are elements. An array is cut into blocks of equal width, one for each of some ranks;
the selection from a block travels as one message of fixed size (`ladder.exactly`).
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import hashing
from sparsejax import arguments
from sparsejax.axes import as_varying, varying_axes
from sparsejax.branches import at_number
from sparsejax.errors import ArgumentError
from sparsejax.schemes import base
from sparsejax.units import bits
from sparsejax.units.bits import Slots
from sparsejax.units.selection import magnitudes
from sparsejax.wire import channels, ladder, messages
from sparsejax.wire.collectives import Sent


@dataclasses.dataclass(frozen=True)
class TopKScheme(base.LossyScheme):
    """A scheme that sends the largest elements and leaves out the others.

    Attributes:
        density: The share of elements that are not zero in the total; smaller sends less.
        code: How indices are sent: "coo32" (the papers'), "coo16", "coo8", "bitmap", or
            "auto" for the cheapest.

    Example:
        >>> sparsejax.schemes.OkTopk(density=0.01).k(1000)
        10

    References:
        Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP
        2022
    """

    unit = "element"
    density: float = 0.01
    code: str = "auto"

    def __post_init__(self):
        arguments.check_density("density", self.density)
        if callable(self.density):
            raise ArgumentError(
                f"density must be a number for {type(self).__name__}, whose messages have "
                "one size, got a schedule. Use sparsejax.warm_up, or a sparsifier with it."
            )

    def check_size(self, name: str, size: int) -> None:
        """Raises if the density of so few elements is less than one element."""
        check_size(name, size, self.density)

    def k(self, size: int) -> int:
        """Returns the number of elements to select from `size`: at least 1."""
        # The factor keeps rounding from raising a product that is a whole number.
        return max(1, min(size, math.ceil(self.density * size * (1 - 1e-12))))


def check_size(name: str, size: int, density: Any) -> None:
    """Raises if the density, where it is a number, is less than one element of `size`."""
    if size and not callable(density) and density * size < 1:
        raise ArgumentError(
            f"density={density:g} of the {size:,} elements of {name!r} is less than one "
            "element, so nothing would be sent. Use a density of at least "
            f"{min(1.06 / size, 1):.1e}, or a rule {{path: 'dense'}}."
        )


class StepCount(NamedTuple):
    """The state of a scheme that only counts its steps.

    Attributes:
        step: int32 [], the number of earlier calls.
    """

    step: jax.Array


def seed_of(step: jax.Array) -> jax.Array:
    """Returns the seed by which the selections of a step choose among equal elements."""
    return hashing.mix32(step.astype(jnp.uint32), 0x2545F491)


class Blocks(NamedTuple):
    """A division of an array into blocks of equal width.

    Attributes:
        number: The number of blocks.
        width: The number of elements of a block; the last block is padded.
    """

    number: int
    width: int

    @property
    def words(self) -> int:
        """The words of a block's packed bits, as `bits.pack_all` makes them."""
        return self.width // bits.WORD + 1

    @property
    def size(self) -> int:
        """The number of elements of all blocks, padding included."""
        return self.number * self.width

    def pad(self, x: jax.Array) -> jax.Array:
        """Pads an array with zeros to the end of the last block."""
        return jnp.pad(x, (0, self.size - x.size))

    def ladder(
        self,
        capacity: int,
        dtype: jnp.dtype,
        code: str,
        least: int | None = None,
    ) -> ladder.Ladder:
        """Returns the message sizes for selections from blocks.

        Args:
            capacity: The most entries selected from a block.
            dtype: The dtype of the elements.
            code: The name of the index code, or "auto".
            least: The smallest number of entries, if it varies.
        """
        width = self.words * bits.WORD
        return ladder.exactly(width, dtype.itemsize, capacity, code, least)


def cut(size: int, number: int) -> Blocks:
    """Cuts an array of `size` elements into `number` blocks."""
    return Blocks(number, -(-size // number))


def select(rows: jax.Array, k: jax.Array | int, seed: jax.Array) -> jax.Array:
    """Selects the k largest non-zero elements of each row, as packed bits [rows, words]."""
    k = jnp.asarray(k, jnp.int32)
    if len(rows) == 1:
        return magnitudes.largest(rows[0], k, seed)[None]
    return lax.map(lambda row: magnitudes.largest(row, k, seed), rows)


def unpacked(words: jax.Array, width: int) -> jax.Array:
    """Unpacks bits [rows, words] to booleans [rows, width]."""
    return bits.unpack(words).reshape(len(words), -1)[:, :width]


def source_of(rows: jax.Array) -> messages.Source:
    """Returns the source of the elements of rows [parts, width], one row for each part."""
    width = rows.shape[1]
    return messages.Source(rows.reshape(-1), units=lambda part, slots: part * width + slots)


def send_and_add(
    sizes: ladder.Ladder,
    channel: channels.Channel,
    words: jax.Array,
    source: messages.Source,
    starts: jax.Array,
    into: jax.Array,
    need: jax.Array | int | None = None,
) -> tuple[jax.Array, Sent]:
    """Sends the selection from each part, and adds the entries received to an array.

    Senders are added in order, so that ranks that receive the same messages compute the
    same bits.

    Args:
        sizes: The message sizes.
        channel: The channel that sends the messages.
        words: uint32 [parts, words], the selected slots of each part, packed.
        source: The values of the slots.
        starts: int32 [senders], the index in `into` of each sender's slot 0.
        into: The array.
        need: int32 [], the entries of the fullest message, equal on all ranks; the capacity
            of the longest message if None.

    Returns:
        The array with all entries added, and the bytes, rounds and counts.
    """
    slots = Slots.of(words)

    def add(into, sender, slots, values):
        start = at_number(starts, sender)
        at = into.at[bits.unique_places(slots + start, slots < sizes.width, into.size)]
        return at.add(values, mode="drop", unique_indices=True)

    need = jnp.asarray(sizes.top if need is None else need, jnp.int32)
    axes = varying_axes(into) | source.axes | varying_axes(starts)
    return messages.transmit(
        sizes,
        channel,
        slots,
        source,
        need,
        messages.Fold(as_varying(into, axes), add, in_order=True),
        typical=jnp.broadcast_to(need.astype(jnp.float32), (1,)),
    )


def residual(accumulated: jax.Array, left_out: jax.Array, total: jax.Array) -> jax.Array:
    """Returns this rank's residual by the two rules of this module.

    Args:
        accumulated: The accumulated gradient.
        left_out: What this rank's selections left out.
        total: The sum of what all ranks' selections kept.
    """
    return jnp.where(bits.nonzero(total), left_out, accumulated)
