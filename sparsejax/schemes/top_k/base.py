"""What schemes share that choose and send in one motion.

Such a scheme is given what is due, the gradient and what waited, and returns the sum of
what it chose; the rest is its residual. Two rules make the law of conservation hold:

    where the total is zero   a rank keeps what was due, as if nothing had been sent
    where it is not           each rank keeps what it has itself left out of the total

An index is then either kept by all ranks as it was, or all that was due at it is either in
the total or left out by exactly one rank. Nothing that is chosen is zero, so which of the
two it is shows in the total, on every rank.

Units are elements. An array is cut into blocks of equal width, one for each of some ranks;
what is chosen of a block travels as a message of fixed size (`ladder.exactly`).
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import hashing
from sparsejax import errors, wire
from sparsejax.axes import as_varying, varying_axes
from sparsejax.errors import ArgumentError
from sparsejax.schemes import base
from sparsejax.units import bits, magnitudes
from sparsejax.wire import ladder, messages


@dataclasses.dataclass(frozen=True)
class Selecting(base.Scheme):
    """A scheme that sends the largest elements and keeps the others.

    Attributes:
        density: The share of elements that the total has.
        code: How indices travel: "auto" for the cheapest, or "coo32" (the papers'),
            "coo16", "coo8" or "bitmap".
    """

    lossless = False
    selects = True
    density: float = 0.01
    code: str = "auto"

    def __post_init__(self):
        errors.check_density("density", self.density)
        if callable(self.density):
            raise ArgumentError(
                f"density must be a number for {type(self).__name__}, whose messages have "
                "one size, got a schedule. Use warmup_steps, or a sparsifier with it."
            )

    @property
    def keeps_residual(self):
        return True

    def check_size(self, name: str, size: int) -> None:
        """Raises where nothing of an array would be chosen."""
        check_size(name, size, self.density)

    def k(self, size: int) -> int:
        """How many of so many elements are chosen."""
        # A product that is a whole number but for its rounding is that number.
        return max(1, min(size, math.ceil(self.density * size * (1 - 1e-12))))


def check_size(name: str, size: int, density: Any) -> None:
    """Raises where a density, if it is a number, is that of less than one element."""
    if size and not callable(density) and density * size < 1:
        raise ArgumentError(
            f"density={density:g} of the {size:,} elements of {name!r} is less than one "
            "element, so nothing would be sent. Use a density of at least "
            f"{1.06 / size:.1e}, or a rule {{path: 'dense'}}."
        )


class Counted(NamedTuple):
    """The state of a scheme that only counts its calls.

    Attributes:
        step: int32: calls before this one.
    """

    step: jax.Array

    @property
    def seed(self) -> jax.Array:
        """Which of equal elements go: another run of them in each step."""
        return hashing.mix32(self.step.astype(jnp.uint32), 0x2545F491)

    def after(self) -> "Counted":
        """The state of the next call."""
        return Counted(self.step + 1)


class Blocks(NamedTuple):
    """How an array is cut.

    Attributes:
        number: How many blocks.
        width: Elements of a block; the last may be shorter.
    """

    number: int
    width: int

    @property
    def words(self) -> int:
        """Words of a block's packed bits, as `bits.pack_all` makes them."""
        return self.width // bits.WORD + 1

    @property
    def size(self) -> int:
        """Elements of all blocks."""
        return self.number * self.width

    def of(self, x: jax.Array) -> jax.Array:
        """The array, zeros behind it up to the last block's end."""
        return jnp.pad(x, (0, self.size - x.size))

    def ladder(
        self, parts: int, capacity: int, dtype: jnp.dtype, code: str, least=None
    ) -> ladder.Ladder:
        """Messages for so many entries of a block."""
        width = self.words * bits.WORD
        return ladder.exactly(width, dtype.itemsize, parts, capacity, code, least)


def blocks(size: int, count: int) -> Blocks:
    """An array of so many elements in so many blocks."""
    return Blocks(count, -(-size // count))


def largest(rows: jax.Array, k: jax.Array | int, seed: jax.Array) -> jax.Array:
    """The k largest of each row, none of them zero, as packed bits [rows, words]."""
    k = jnp.asarray(k, jnp.int32)
    if len(rows) == 1:
        return magnitudes.largest(rows[0], k, seed)[None]
    return lax.map(lambda row: magnitudes.largest(row, k, seed), rows)


def flags(words: jax.Array, width: int) -> jax.Array:
    """Packed bits [rows, words] as booleans [rows, width]."""
    return bits.unpack(words).reshape(len(words), -1)[:, :width]


def of_rows(rows: jax.Array) -> messages.Source:
    """The elements of rows [parts, width], a part a row."""
    at = (jnp.arange(len(rows), dtype=jnp.int32) * rows.shape[1])[:, None]
    return messages.Source(rows.reshape(-1), units=lambda slots: at + slots)


def deliver(
    steps: ladder.Ladder,
    channel: wire.Channel,
    words: jax.Array,
    source: messages.Source,
    starts: jax.Array,
    into: jax.Array,
    need: jax.Array | int | None = None,
) -> tuple[jax.Array, messages.Sent]:
    """Sends what was chosen of some parts, and adds what arrives to an array.

    One sender after another is added, in their order, so that ranks that receive the same
    end with the same bits.

    Args:
        steps: The message sizes.
        channel: Where the messages go.
        words: Which slots of each part, packed.
        source: The values of the slots.
        starts: int32 [sources], where in the array slot 0 of each sender belongs.
        into: The array.
        need: Entries of the fullest message, equal on all ranks; all that fit if None.
    """
    sets = bits.bit_sets(words, len(words) * steps.tile)

    def add(into, slots, values):
        real = slots < steps.width
        places = bits.apart(slots + starts[:, None], real, into.size)

        def one(sender, into):
            at = into.at[places[sender]]
            return at.add(values[sender], mode="drop", unique_indices=True)

        return lax.fori_loop(0, channel.sources, one, into)

    need = jnp.asarray(steps.top if need is None else need, jnp.int32)
    axes = varying_axes(into) | varying_axes(source.array) | varying_axes(starts)
    return messages.transmit(
        steps,
        channel,
        sets,
        source,
        need,
        add,
        as_varying(into, axes),
        typical=jnp.broadcast_to(need.astype(jnp.float32), (1,)),
    )


def left_over(due: jax.Array, left: jax.Array, total: jax.Array) -> jax.Array:
    """What a rank keeps: what it left out where there is a total, else what was due."""
    return jnp.where(bits.nonzero(total), left, due)
