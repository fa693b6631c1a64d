"""Packs and unpacks messages of slots and their values, in one launch each.

`pallas_kernels.reference.messages` describes the format. Sizes are data: the offsets in a
message, the first entry and the largest number of entries. A kernel has as many programs as
the longest message needs, and programs after the last entry return at once; plain XLA
processes as many entries as the capacity. A kernel finds the bits of its entries itself, so
no array except the message has the length of a message.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_kernels import backends, checks, striping
from pallas_kernels.errors import KernelArgumentError
from pallas_kernels.reference import messages as reference
from pallas_kernels.reference.index_message import index_message as reference_of_index
from pallas_kernels.reference.layout import SINGLE
from pallas_kernels.reference.messages import row_words
from pallas_kernels.reference.specs import (
    TRAVELS,
    MessageSpec,
    Received,
    SlotSets,
    Unpacking,
)


# The dtypes that Triton can add atomically.
_ADDED = (jnp.float32, jnp.float64, jnp.float16, jnp.bfloat16, jnp.int32, jnp.uint32)
_SUM = Unpacking()


def pack_message(
    sets: SlotSets,
    array: jax.Array,
    numbers: jax.Array,
    spec: MessageSpec,
    *,
    backend: str | None = None,
) -> jax.Array:
    """Writes the slots and values of each part into a message.

    Args:
        sets: The slots of each part.
        array: [units, ...], the array that has the values.
        numbers: int32 [numbers], the sizes that are data and equal for all parts: the rank
            of the first entry that is sent, the largest number of entries that are sent, at
            most `room`, and the offsets in a message (`reference.messages.Places`).
        spec: The static properties of the messages.
        backend: The backend: "auto", "reference", "pallas" or "triton"; see
            `sparsejax.use_kernels`.

    Returns:
        uint32 [parts, end], the messages. Unused words of a message are zero, and words
        after it are unspecified.

    Example:
        >>> # A header, a bitmap of 32 slots at word 1, room for 4 values from word 2 on.
        >>> numbers = jnp.array([0, 4, 1, 1, 2, 0, 1, 0, 6], jnp.int32)
        >>> spec = pallas_kernels.MessageSpec(room=4, words=6, longest=1)
        >>> sets = pallas_kernels.SlotSets(jnp.array([[1, 3, 32, 32]]), jnp.array([2]))
        >>> message = pallas_kernels.pack_message(sets, jnp.arange(32.0), numbers, spec)
        >>> message[0, :2].tolist()  # two entries, and bits 1 and 3
        [2, 10]

    See Also:
        `pallas_kernels.unpack_message`: adds the values of messages to an array.
        `pallas_kernels.index_message`: reads what all sizes of messages share.
    """
    slots, counts, units, ends = sets
    _check_rows("slots", slots, ("uint32", "int32"))
    checks.integers("counts", counts)
    checks.entries(slots, counts, "counts")
    spec = _checked(spec, numbers, array)
    checks.positive("words", spec.words)
    for name, x in [("slots", slots)] * sets.is_listed + [("units", units)]:
        if x is not None and (x.shape != (len(counts), spec.room) or not sets.is_listed):
            raise KernelArgumentError(
                f"{name} of shape {list(x.shape)} must be a list, int32 "
                f"[{len(counts)}, {spec.room}], of as many as there is room for; units are "
                "listed if slots are."
            )
    if not 0 < spec.packed <= spec.words:
        raise KernelArgumentError(
            f"end must be 1 to words, {spec.words}, got {spec.packed}."
        )
    if ends is not None:
        _check_ends(ends, len(counts), 0 if sets.is_listed else slots.shape[1])
    travels = {spec.dtype.name, array.dtype.name} <= {*TRAVELS}
    triton = "messages" if travels else None
    kernels = backends.kernels(reference.pack_message, triton=triton, spec=spec)
    size = len(slots) * spec.room * math.prod(array.shape[1:])
    return backends.run("pack_message", backend, kernels, size, sets, array, numbers)


def unpack_message(
    into: jax.Array,
    received: Received,
    numbers: jax.Array,
    spec: MessageSpec,
    how: Unpacking = _SUM,
    *,
    backend: str | None = None,
) -> jax.Array:
    """Adds the values of received messages to an array, or writes them into it.

    No two entries of one message have the same unit. On a GPU, values of the same unit from
    different senders are added in any order, by atomic additions. With `ordered` they are
    added sender by sender, and the result always has the same bits.

    Args:
        into: [units, ...], the array.
        received: The messages.
        numbers: The same as for `pack_message`.
        spec: The static properties of the messages.
        how: Which entries are unpacked, and whether they are added.
        backend: The backend: "auto", "reference", "pallas" or "triton"; see
            `sparsejax.use_kernels`.

    Returns:
        [units, ...]. Entries whose units lie after the end of the array are left out.

    Example:
        >>> numbers = jnp.array([0, 4, 1, 1, 2, 0, 1, 0, 6], jnp.int32)  # as there
        >>> spec = pallas_kernels.MessageSpec(room=4, words=6, longest=1)
        >>> sets = pallas_kernels.SlotSets(jnp.array([[1, 3, 32, 32]]), jnp.array([2]))
        >>> message = pallas_kernels.pack_message(sets, jnp.arange(32.0), numbers, spec)
        >>> total = pallas_kernels.unpack_message(
        ...     jnp.zeros(32), pallas_kernels.Received(message), numbers, spec)
        >>> total[:5].tolist()
        [0.0, 1.0, 0.0, 3.0, 0.0]

    See Also:
        `pallas_kernels.pack_message`: writes messages.
        `pallas_kernels.index_message`: reads what all sizes of messages share.
    """
    message, ends, values = received
    _check_rows("message", message, ("uint32",))
    spec = _checked(spec, numbers, into)
    checks.positive("longest", spec.longest)
    if ends is None and message.shape[1] < 1 + spec.longest:
        raise KernelArgumentError(
            f"message has {message.shape[1]} words, too few for a header and a string of "
            f"{spec.longest}."
        )
    is_whole = values is None and (how.first, how.last) == (0, None)
    if ends is None and not is_whole:
        raise KernelArgumentError("ends must be given where a message comes in pieces.")
    if spec.bitmaps:
        _check_bitmaps(into, received, spec, how)
    elif ends is not None:
        _check_ends(ends, len(message), spec.longest)
    # A kernel needs at least one entry, and processes at most `room`.
    last = how.until(spec.room)
    if how.first % 4 or not 0 <= how.first < last <= spec.room:
        raise KernelArgumentError(
            "first must be a multiple of 4 below last, and last at most room, "
            f"{spec.room}; got {how.first} and {last}."
        )
    triton = "messages" if _has_kernel(into.dtype, spec.dtype) else None
    kernels = backends.kernels(reference.unpack_message, triton=triton, spec=spec, how=how)
    size = len(message) * spec.room * math.prod(into.shape[1:])
    return backends.run("unpack_message", backend, kernels, size, into, received, numbers)


def index_message(
    message: jax.Array,
    numbers: jax.Array,
    spec: MessageSpec,
    *,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Reads the headers of received messages, and counts the bits of their strings.

    `unpack_message` can use the result, so that messages of all sizes share this work.

    Args:
        message: uint32 [senders, words], as `pack_message` makes them. It may end where the
            strings end.
        numbers: The same as for `pack_message`.
        spec: The static properties of the messages.
        backend: The backend: "auto", "reference", "pallas" or "triton"; see
            `sparsejax.use_kernels`.

    Returns:
        A pair of the headers, int32 [senders], which are the number of entries of each
        part; and int32 [senders, rows], the number of bits of a string up to the end of
        each row of words. For bitmaps the latter is int32 [longest, senders, 2]: each word
        and the number of bits before it.

    Example:
        >>> # A header of two entries, and a bitmap of 32 slots that says which.
        >>> message = jnp.array([[2, 0b1010]], jnp.uint32)
        >>> numbers = jnp.array([0, 4, 1, 1, 2, 0, 1, 0, 6], jnp.int32)
        >>> spec = pallas_kernels.MessageSpec(room=4, words=6, longest=1)
        >>> heads, ends = pallas_kernels.index_message(message, numbers, spec)
        >>> heads.tolist(), ends.tolist()
        ([2], [[2]])

    See Also:
        `pallas_kernels.pack_message`: writes messages.
        `pallas_kernels.unpack_message`: adds the values of messages to an array.
    """
    _check_rows("message", message, ("uint32",))
    checks.positive("longest", spec.longest)
    kernels = backends.kernels(reference_of_index, triton="index_message", spec=spec)
    size = len(message) * spec.longest
    return backends.run("index_message", backend, kernels, size, message, numbers)


def unpacks_in_kernels(
    into: jax.typing.DTypeLike, dtype: jax.typing.DTypeLike, size: int
) -> bool:
    """Returns whether `unpack_message` runs as a kernel, for these dtypes and this size.

    Unpacking takes longest. Where it runs as a kernel, packing and indexing do, too.

    Args:
        into: The dtype of the array that values are added to.
        dtype: The dtype of the values in the messages.
        size: The number of values in all received messages.

    Returns:
        True or False, when traced.

    Example:
        >>> with sparsejax.use_kernels("reference"):
        ...     pallas_kernels.unpacks_in_kernels(jnp.float32, jnp.float32, 4096)
        False
    """
    kernels = ("reference", *["triton"] * _has_kernel(jnp.dtype(into), jnp.dtype(dtype)))
    return backends.chosen("unpack_message", None, kernels, size) == "triton"


def _has_kernel(into, dtype):
    return dtype.name in TRAVELS and into in _ADDED


def _check_rows(name, rows, dtypes):
    if rows.ndim != 2 or rows.dtype not in dtypes:
        raise KernelArgumentError(
            f"{name} must be {' or '.join(dtypes)} with a row for each part, got "
            f"{rows.dtype}{list(rows.shape)}."
        )


def _checked(spec, numbers, array):
    """Checks a spec with its numbers and array, and returns it with the wire's dtype."""
    checks.positive("room", spec.room)
    if spec.room % 4:
        raise KernelArgumentError(
            "room must be a multiple of 4, since bytes of four entries fill a word, got "
            f"{spec.room}."
        )
    checks.integers("numbers", numbers)
    needed = spec.at + 2 + SINGLE + 2 * spec.planes
    if numbers.size < needed:
        raise KernelArgumentError(
            f"numbers must be {needed}: from number {spec.at} on the first rank, how many "
            f"entries, {SINGLE} places, 2 for each of {spec.planes} planes; got "
            f"{numbers.size}."
        )
    dtype = jnp.dtype(spec.dtype or array.dtype)
    if dtype.itemsize not in (1, 2, 4, 8):
        raise KernelArgumentError(
            f"values travel as numbers of 1, 2, 4 or 8 bytes, not as {dtype}; cast them."
        )
    return dataclasses.replace(spec, dtype=dtype)


def _check_ends(ends, parts, words):
    wanted = parts, -(-words // row_words(words))
    if ends.shape != wanted or ends.dtype != jnp.int32:
        raise KernelArgumentError(
            f"ends must be those of {parts} parts of {words} packed words, int32"
            f"{list(wanted)}, got {ends.dtype}{list(ends.shape)}."
        )


def _check_bitmaps(into, received, spec, how):
    (message, ends, _), units = received, spec.units
    if into.ndim > 1 or not how.replaces or units is None:
        raise KernelArgumentError(
            "bitmaps=True is for numbers that replace zeros, at the units of slots; got "
            f"into of shape {list(into.shape)}, replaces={how.replaces} and units={units}."
        )
    wide = striping.width(units.size, units.parts) // striping.WORD
    senders, longest = len(message), spec.longest
    if senders != units.parts or longest != wide or len(into) != units.size:
        raise KernelArgumentError(
            f"bitmaps=True: units are {units.size} in {units.parts} parts of {wide} words; "
            f"got {len(into)} units, {senders} messages and longest={longest}."
        )
    if ends is None or ends.shape != (longest, senders, 2) or ends.dtype != jnp.int32:
        has = None if ends is None else f"{ends.dtype}{list(ends.shape)}"
        raise KernelArgumentError(
            f"ends must be those of index_message(bitmaps=True), int32[{longest}, "
            f"{senders}, 2], got {has}."
        )
