"""Messages of slots and their values: written in one launch, and read in one.

What is in a message is said in `pallas_kernels.reference.messages`. Sizes are data: the row
of places, where the run of entries begins and how many there are at most. A kernel has as
many programs as the longest message would take, and those after the last entry leave at
once; plain XLA goes over as many entries as there is room for. A kernel finds the bits of
its entries itself, so nothing but the message has the length of a message.
"""

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels import backends, checks, striping
from pallas_kernels.errors import KernelArgumentError
from pallas_kernels.reference import messages as reference
from pallas_kernels.reference.index_message import index_message as reference_of_index
from pallas_kernels.reference.messages import SINGLE, row_words
from pallas_kernels.striping import Striping


# What Triton can add atomically, and what kernels read and write of a message.
_ADDED = (jnp.float32, jnp.float64, jnp.float16, jnp.bfloat16, jnp.int32, jnp.uint32)
_TRAVELS = (jnp.float32, jnp.float16, jnp.bfloat16)
# What Pallas can add atomically (see `launch.add`), and numbers of an array that its int32
# addresses reach.
_ADDED_IN_PALLAS = (jnp.float32, jnp.float16)
_REACHED = 2**31 - 1


def pack_message(
    slots: jax.Array,
    counts: jax.Array,
    array: jax.Array,
    numbers: jax.Array,
    *,
    room: int,
    words: int,
    planes: int,
    dtype: jax.typing.DTypeLike | None = None,
    units: jax.Array | Striping | None = None,
    at: int = 0,
    end: int | None = None,
    ends: jax.Array | None = None,
    backend: str | None = None,
) -> jax.Array:
    """Writes entries of each part into a message: their slots, and their values.

    Args:
        slots: The slots of each part: as packed bits, uint32 [parts, k], or in a list,
            int32 [parts, room], ascending from the one of the first rank that is sent on,
            and anything after the last.
        counts: int32 [parts], how many slots each part has in all.
        array: [units, ...], in which the values are.
        numbers: int32, what is data and the same for all parts: the rank of the first entry
            that is sent, how many are sent at most, no more than there is room for, and
            where the parts of a message are (`reference.messages.Places`).
        room: Entries of the longest message, a multiple of 4.
        words: Of a message, whichever it is: wherever the values begin, those of the whole
            room must fit after it, and planes that are not sent begin after them.
        planes: For how many bytes of a slot the places say where they are.
        dtype: Of the values while they travel; that of the array if None.
        units: Where in the array the values of slots are: int32 [parts, room] beside a
            list, or the map from parts and slots to units; the slots themselves if None.
        at: Which of the numbers is the first that is meant.
        end: How many words of a message are returned, where its size is known: no fewer
            than it has. All if None.
        ends: int32 [parts, rows], how many bits slots have up to the end of each row of
            words (`reference.messages.row_ends`), where it is known; for packed bits.
        backend: See `backends`.

    Returns:
        uint32 [parts, end]; words of a message in which there is nothing are zero, and
        those after it may be anything.

    Example:
        >>> # A header, a bitmap of 32 slots at word 1, room for 4 values from word 2 on.
        >>> numbers = jnp.array([0, 4, 1, 1, 2, 0, 1, 0, 6], jnp.int32)
        >>> slots, counts = jnp.array([[1, 3, 32, 32]]), jnp.array([2])
        >>> message = pallas_kernels.pack_message(
        ...     slots, counts, jnp.arange(32.0), numbers, room=4, words=6, planes=0)
        >>> message[0, :2].tolist()  # two entries, and bits 1 and 3
        [2, 10]
    """
    _check_rows("slots", slots, ("uint32", "int32"))
    checks.integers("counts", counts)
    checks.entries(slots, counts, "counts")
    _check_sizes(numbers, room, planes, at)
    checks.positive("words", words)
    dtype = jnp.dtype(dtype or array.dtype)
    _check_travels(dtype)
    listed = slots.dtype == jnp.int32
    given = () if units is None or isinstance(units, Striping) else (units,)
    for name, x in [("slots", slots)] * listed + [("units", x) for x in given]:
        if x.shape != (len(counts), room) or not listed:
            raise KernelArgumentError(
                f"{name} of shape {list(x.shape)} must be a list, int32 "
                f"[{len(counts)}, {room}], of as many as there is room for; units are "
                "listed if slots are."
            )
    if end is not None and not 0 < end <= words:
        raise KernelArgumentError(f"end must be 1 to words, {words}, got {end}.")
    if ends is not None:
        _check_ends(ends, len(counts), 0 if listed else slots.shape[1])
    kernels = {
        "reference": reference.pack_message,
        "pallas": backends.in_pallas("messages", "pack_message"),
        "triton": backends.in_triton("messages", "pack_message"),
    }
    if dtype not in _TRAVELS or array.dtype not in _TRAVELS:
        kernels = {"reference": reference.pack_message}
    elif max(array.size, slots.size, len(counts) * words) > _REACHED:
        kernels.pop("pallas")
    kernels = backends.bound(
        kernels,
        room=room,
        words=words,
        planes=planes,
        dtype=dtype,
        units=None if given else units,
        at=at,
        end=words if end is None else end,
        searched=ends is not None,
    )
    operands = (slots, counts, numbers, array, *([] if ends is None else [ends]), *given)
    size = len(slots) * room * math.prod(array.shape[1:])
    return backends.run("pack_message", backend, kernels, size, *operands)


def unpack_message(
    into: jax.Array,
    message: jax.Array,
    numbers: jax.Array,
    *,
    room: int,
    longest: int,
    planes: int,
    dtype: jax.typing.DTypeLike | None = None,
    replaces: bool = False,
    units: Striping | None = None,
    at: int = 0,
    ends: jax.Array | None = None,
    values: jax.Array | None = None,
    first: int = 0,
    last: int | None = None,
    ordered: bool = False,
    bitmaps: bool = False,
    backend: str | None = None,
) -> jax.Array:
    """Adds the values of all messages to an array, or sets them in it.

    On a GPU values of the same unit are added in any order, by atomic additions. With
    `ordered` they are added sender by sender, without: the result has the same bits always
    (`reference.ordered`). No two entries of one message have one unit.

    Args:
        into: [units, ...].
        message: uint32 [senders, words], as of `pack_message`; what lies after a message
            is not looked at.
        numbers: As of `pack_message`, like the next.
        room: Entries of the longest message, a multiple of 4.
        longest: Words of the longest string or bitmap.
        planes: For how many bytes of a slot the places say where they are.
        dtype: Of the values while they travel; that of the array if None.
        replaces: Whether values replace those of the array; then no two entries have one
            unit.
        units: The map from senders and slots to units; the slots themselves if None.
        at: Which of the numbers is the first that is meant.
        ends: Those of `index_message`, of the same messages; then these may end where the
            places say, or where what `values` has begins.
        values: uint32 [senders, words], the values from the entry `first` on, where a
            message was sent in pieces.
        first: The first entry of each message that is meant, a multiple of 4.
        last: The one after the last; all that there is room for if None.
        ordered: Whether senders are added one after another: kernels take a launch each.
        bitmaps: Whether slots travel as bitmaps as wide as a part of `units`, all of them
            in these messages, and what they replace is zero: then kernels may write the
            array in its own order. `ends` are those of `index_message(bitmaps=True)`.
        backend: See `backends`.

    Returns:
        [units, ...]. What lies after the array is left out.

    Example:
        >>> numbers = jnp.array([0, 4, 1, 1, 2, 0, 1, 0, 6], jnp.int32)  # as there
        >>> message = pallas_kernels.pack_message(
        ...     jnp.array([[1, 3, 32, 32]]), jnp.array([2]), jnp.arange(32.0), numbers,
        ...     room=4, words=6, planes=0)
        >>> total = pallas_kernels.unpack_message(
        ...     jnp.zeros(32), message, numbers, room=4, longest=1, planes=0)
        >>> total[:5].tolist()
        [0.0, 1.0, 0.0, 3.0, 0.0]
    """
    _check_rows("message", message, ("uint32",))
    _check_sizes(numbers, room, planes, at)
    checks.positive("longest", longest)
    if ends is None and message.shape[1] < 1 + longest:
        raise KernelArgumentError(
            f"message has {message.shape[1]} words, too few for a header and a string of "
            f"{longest}."
        )
    if ends is None and (values is not None or (first, last) != (0, None)):
        raise KernelArgumentError("ends must be given where a message comes in pieces.")
    if ends is not None and not bitmaps:
        _check_ends(ends, len(message), longest)
    if bitmaps:
        _check_bitmaps(into, ends, len(message), longest, replaces, units)
    # A kernel needs an entry to go over, and knows of no more than there is room for.
    if first % 4 or not 0 <= first < (room if last is None else last) <= room:
        raise KernelArgumentError(
            f"first must be a multiple of 4 below last, and last at most room, {room}; got "
            f"{first} and {last}."
        )
    dtype = jnp.dtype(dtype or into.dtype)
    _check_travels(dtype)
    kernels = {
        "reference": reference.unpack_message,
        "triton": backends.in_triton("messages", "unpack_message"),
    }
    sizes = {
        "room": room,
        "longest": longest,
        "planes": planes,
        "dtype": dtype,
        "replaces": replaces,
        "units": units,
        "at": at,
        "ordered": ordered,
    }
    if bitmaps:
        kernels["triton"] = backends.in_triton("bitmap", "unpack_bitmaps")
    whole = not bitmaps and values is None and (first, last) == (0, None)
    last = room if last is None else last
    if not _has_kernel(into.dtype, dtype):
        kernels.pop("triton")
    kernels = backends.bound(kernels, **sizes, first=first, last=last)
    reached = max(into.size, message.size) <= _REACHED
    if ordered and units is not None and not replaces:
        whole = False  # Pallas' is given one message at a time, and knows no sender.
    if whole and reached and into.dtype in _ADDED_IN_PALLAS and dtype in _TRAVELS:
        kernels["pallas"] = functools.partial(
            backends.in_pallas("messages", "unpack_message"), **sizes
        )
    size = len(message) * room * math.prod(into.shape[1:])
    cut = [x for x in (ends, values) if x is not None]
    operands = into, message, numbers, *cut
    return backends.run("unpack_message", backend, kernels, size, *operands)


def index_message(
    message: jax.Array,
    numbers: jax.Array,
    *,
    longest: int,
    planes: int,
    at: int = 0,
    bitmaps: bool = False,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """What is looked up in messages that were received, whatever their size.

    Args:
        message: uint32 [senders, words], as of `pack_message`; it may end after strings.
        numbers: As of `pack_message`, like the next.
        longest: Words of the longest string or bitmap.
        planes: For how many bytes of a slot the places say where they are.
        at: Which of the numbers is the first that is meant.
        bitmaps: Whether strings are bitmaps, to be unpacked as such.
        backend: See `backends`.

    Returns:
        int32 [senders], the headers: how many entries each part has in all; and int32
        [senders, rows], how many bits strings have up to the end of each row of words. Of
        bitmaps instead int32 [longest, senders, 2]: each word, and the bits before it.

    Example:
        >>> # A header of two entries, and a bitmap of 32 slots that says which.
        >>> message = jnp.array([[2, 0b1010]], jnp.uint32)
        >>> numbers = jnp.array([0, 4, 1, 1, 2, 0, 1, 0, 6], jnp.int32)
        >>> heads, ends = pallas_kernels.index_message(
        ...     message, numbers, longest=1, planes=0)
        >>> heads.tolist(), ends.tolist()
        ([2], [[2]])
    """
    _check_rows("message", message, ("uint32",))
    checks.positive("longest", longest)
    kernels = {
        "reference": reference_of_index,
        "triton": backends.in_triton("messages", "index_message"),
    }
    sizes = {"longest": longest, "planes": planes, "at": at, "bitmaps": bitmaps}
    kernels = backends.bound(kernels, **sizes)
    size = len(message) * longest
    return backends.run("index_message", backend, kernels, size, message, numbers)


def unpacks_in_kernels(
    into: jax.typing.DTypeLike, dtype: jax.typing.DTypeLike, size: int
) -> bool:
    """Whether a kernel unpacks messages: one for all sizes, so that branches share it.

    It looks things up in messages, and branches pack what they send: where unpacking, which
    takes longest, is done by a kernel, so are the others (`backends.auto_prefers`).

    Args:
        into: The dtype of the array that values are added to.
        dtype: Of the values while they travel.
        size: Numbers of all messages that are received.

    Example:
        >>> with sparsejax.use_kernels("reference"):
        ...     pallas_kernels.unpacks_in_kernels(jnp.float32, jnp.float32, 4096)
        False
    """
    kernels = ("reference", *["triton"] * _has_kernel(jnp.dtype(into), jnp.dtype(dtype)))
    return backends.chosen("unpack_message", None, kernels, size) == "triton"


def _has_kernel(into, dtype):
    return dtype in _TRAVELS and into in _ADDED


def _check_rows(name, rows, dtypes):
    if rows.ndim != 2 or rows.dtype not in dtypes:
        raise KernelArgumentError(
            f"{name} must be {' or '.join(dtypes)} with a row for each part, got "
            f"{rows.dtype}{list(rows.shape)}."
        )


def _check_sizes(numbers, room, planes, at):
    checks.positive("room", room)
    if room % 4:
        raise KernelArgumentError(
            f"room must be a multiple of 4, since bytes of four entries fill a word, got "
            f"{room}."
        )
    checks.integers("numbers", numbers)
    needed = at + 2 + SINGLE + 2 * planes
    if numbers.size < needed:
        raise KernelArgumentError(
            f"numbers must be {needed}: from number {at} on the first rank, how many "
            f"entries, {SINGLE} places, 2 for each of {planes} planes; got {numbers.size}."
        )


def _check_ends(ends, parts, words):
    wanted = parts, -(-words // row_words(words))
    if ends.shape != wanted or ends.dtype != jnp.int32:
        raise KernelArgumentError(
            f"ends must be those of {parts} parts of {words} packed words, int32"
            f"{list(wanted)}, got {ends.dtype}{list(ends.shape)}."
        )


def _check_bitmaps(into, ends, senders, longest, replaces, units):
    if into.ndim > 1 or not replaces or units is None:
        raise KernelArgumentError(
            "bitmaps=True is for numbers that replace zeros, at the units of slots; got "
            f"into of shape {list(into.shape)}, replaces={replaces} and units={units}."
        )
    wide = striping.width(units.size, units.parts) // striping.WORD
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


def _check_travels(dtype):
    if dtype.itemsize not in (2, 4, 8):
        raise KernelArgumentError(
            f"values travel as numbers of 2, 4 or 8 bytes, not as {dtype}; cast them."
        )
