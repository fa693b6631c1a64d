"""The operands of packing and unpacking messages, and their static properties.

Arrays that belong together are a `NamedTuple`. Static properties are a frozen dataclass,
which JAX and Triton compare to find a program that they have compiled.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.striping import Striping


# The dtypes of values that kernels read and write; each index here is a dtype's number.
TRAVELS = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class MessageSpec:
    """The static properties of messages, for which kernels are compiled.

    Attributes:
        room: The number of entries of the longest message, a multiple of 4.
        words: The number of words of the buffer of a message of any size. The values of
            `room` entries must fit after any offset of values. Planes that are not sent are
            placed after them.
        longest: The number of words of the longest string or bitmap.
        planes: The number of bytes of a slot for which `numbers` has an offset.
        dtype: The dtype of the values in a message; that of the array if None.
        units: The map from parts (or senders) and slots to units. If None, a slot is a
            unit.
        at: The index in `numbers` at which the numbers of these messages begin.
        end: The number of words of a message that are packed, if its size is known; at
            least as many as it has. All if None.
        bitmaps: Whether slots are sent as bitmaps as wide as a part of `units`, in all of
            these messages, and replace zeros. Kernels may then write the array in its own
            order.

    Example:
        >>> spec = pallas_kernels.MessageSpec(room=4, words=6, longest=1)
        >>> spec.planes, spec.units
        (0, None)
    """

    room: int
    words: int
    longest: int
    planes: int = 0
    dtype: Any = None
    units: Striping | None = None
    at: int = 0
    end: int | None = None
    bitmaps: bool = False

    @property
    def packed(self) -> int:
        """The number of words of a message that are packed."""
        return self.words if self.end is None else self.end


@dataclasses.dataclass(frozen=True)
class Unpacking:
    """The options by which values of received messages are written.

    Attributes:
        replaces: Whether values replace those of the array. Then no two entries have the
            same unit. If False, they are added.
        ordered: Whether senders are added one after another. Kernels then take one launch
            for each.
        first: The first entry of each message that is unpacked, a multiple of 4.
        last: The entry after the last one that is unpacked; `room` if None.

    Example:
        >>> pallas_kernels.Unpacking(ordered=True).replaces
        False
    """

    replaces: bool = False
    ordered: bool = False
    first: int = 0
    last: int | None = None

    def until(self, room: int) -> int:
        """Returns the end of the unpacked entries, for messages with this capacity."""
        return room if self.last is None else self.last


class SlotSets(NamedTuple):
    """The slots of each part whose values are packed.

    Attributes:
        slots: Packed bits, uint32 [parts, k]; or a list, int32 [parts, room], ascending
            from the first slot that is sent, with anything after the last.
        counts: int32 [parts], the number of slots of each part.
        units: With a list, int32 [parts, room]: the units of the slots, if the map of the
            `MessageSpec` does not give them.
        ends: With packed bits, int32 [parts, rows], where it is known: the number of bits
            up to the end of each row of words (`reference.messages.row_ends`).

    Example:
        >>> sets = pallas_kernels.SlotSets(jnp.array([[1, 3, 32, 32]]), jnp.array([2]))
        >>> sets.is_listed
        True
    """

    slots: jax.Array
    counts: jax.Array
    units: jax.Array | None = None
    ends: jax.Array | None = None

    @property
    def is_listed(self) -> bool:
        """Whether the slots are a list, and not packed bits."""
        return self.slots.dtype == jnp.int32


class Received(NamedTuple):
    """Received messages, whole or in pieces.

    Attributes:
        message: uint32 [senders, words], as `pack_message` makes them. Words after the end
            of a message are not read.
        ends: The second result of `index_message` for these messages, or None. With it,
            `message` may end where its strings end, or where `values` begins.
        values: uint32 [senders, words], the values from entry `Unpacking.first` on, where a
            message was sent in pieces.

    Example:
        >>> received = pallas_kernels.Received(jnp.array([[2, 0b1010]], jnp.uint32))
        >>> received.ends is None
        True
    """

    message: jax.Array
    ends: jax.Array | None = None
    values: jax.Array | None = None
