"""Messages of slots and their values: written in one launch, and read in one.

What is in a message is said in `pallas_kernels.reference.messages`. Sizes are data: the row
of places, where the run of entries begins and how many there are at most. A kernel has as
many programs as the longest message would take, and those behind the last entry leave at
once; plain XLA goes over as many entries as there is room for.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import backends, checks, reference
from pallas_kernels.errors import KernelArgumentError
from pallas_kernels.reference.messages import SINGLE
from pallas_kernels.striping import Striping


# What Triton can add atomically, and what it reads and writes of a message.
_ADDED = (jnp.float32, jnp.float64, jnp.float16, jnp.bfloat16, jnp.int32, jnp.uint32)
_TRAVELS = (jnp.float32, jnp.float16, jnp.bfloat16)


def pack_message(
    slots: jax.Array,
    counts: jax.Array,
    array: jax.Array,
    first: jax.typing.ArrayLike,
    length: jax.typing.ArrayLike,
    places: jax.Array,
    *,
    words: int,
    dtype: jax.typing.DTypeLike | None = None,
    units: jax.Array | Striping | None = None,
    backend: str | None = None,
) -> jax.Array:
    """Writes entries of each part into a message: their slots, and their values.

    Args:
        slots: int32 [parts, room], ascending in each part from the entry of rank `first`
            on, and anything behind the last; the room is a multiple of 4.
        counts: int32 [parts], how many entries each part has in all.
        array: [units, ...], in which the values are.
        first: The rank of the first entry.
        length: How many entries a message has at most, at most the room.
        places: int32, where the parts of a message are: see `reference.messages.Places`.
        words: Of a message, whichever it is: wherever the values begin, those of the whole
            room must fit behind, and planes that are not sent begin behind them.
        dtype: Of the values while they travel; that of the array if None.
        units: Where in the array the values of slots are: int32 [parts, room], or the map
            from parts and slots to units; the slots themselves if None.
        backend: See `backends`. "pallas" has no such kernel: its Triton backend writes
            words of one dtype only, and a message has bytes and values of several.

    Returns:
        uint32 [parts, words]; all words in which there is nothing are zero.
    """
    _check(slots, counts, places, "slots")
    checks.positive("words", words)
    if slots.shape[1] % 4:
        raise KernelArgumentError(
            f"slots has room for {slots.shape[1]} entries a part, which must be a multiple "
            "of 4: bytes of four entries fill a word. Pad it with any slots."
        )
    dtype = jnp.dtype(dtype or array.dtype)
    _check_travels(dtype)
    given = (units,) if isinstance(units, jax.Array) else ()
    kernels = {
        "reference": reference.pack_message,
        "triton": backends.in_triton("messages", "pack_message"),
    }
    if dtype not in _TRAVELS or array.dtype not in _TRAVELS:
        kernels.pop("triton")
    sizes = {"words": words, "dtype": dtype, "units": None if given else units}
    kernels = backends.bound(kernels, **sizes)
    run = jnp.asarray(first, jnp.int32), jnp.asarray(length, jnp.int32)
    operands = (slots, counts, *run, places, array, *given)
    return backends.run("pack_message", backend, kernels, slots.size, *operands)


def unpack_message(
    into: jax.Array,
    message: jax.Array,
    counts: jax.Array,
    first: jax.typing.ArrayLike,
    length: jax.typing.ArrayLike,
    places: jax.Array,
    *,
    room: int,
    longest: int,
    dtype: jax.typing.DTypeLike | None = None,
    sets: bool = False,
    units: Striping | None = None,
    backend: str | None = None,
) -> jax.Array:
    """Adds the values of all messages to an array, or sets them in it.

    The bits of strings are found before, as a set's are (`rank_select.slots_of`); lanes and
    values of all messages are read, and the array is written, in one launch.

    Sums of the same unit come in any order on a GPU, in every backend: whoever needs the
    same bits on several ranks adds one message after another, or adds in one place.

    Args:
        into: [units, ...].
        message: uint32 [senders, words], as of `pack_message`.
        counts: int32 [senders], how many entries each sender has in all.
        first: The rank of the first entry.
        length: How many entries a message has at most.
        places: int32, where the parts of a message are.
        room: How many entries the longest message has, a multiple of 4.
        longest: Words of the longest string or bitmap.
        dtype: Of the values while they travel; that of the array if None.
        sets: Whether values replace what is there; then no two entries have one unit.
        units: The map from senders and slots to units; the slots themselves if None.
        backend: See `backends`. "pallas" has no such kernel: see `pack_message`.

    Returns:
        [units, ...]. What lies behind the array is left out.
    """
    _check(message, counts, places, "message")
    checks.positive("room", room)
    checks.positive("longest", longest)
    if room % 4:
        raise KernelArgumentError(f"room must be a multiple of 4, got {room}.")
    if message.dtype != jnp.uint32:
        raise KernelArgumentError(f"message must be uint32, got {message.dtype}.")
    if message.shape[1] < 1 + longest:
        raise KernelArgumentError(
            f"message has {message.shape[1]} words, too few for a header and a string of "
            f"{longest}."
        )
    dtype = jnp.dtype(dtype or into.dtype)
    _check_travels(dtype)
    kernels = {
        "reference": reference.unpack_message,
        "triton": backends.in_triton("messages", "unpack_message"),
    }
    if dtype not in _TRAVELS or into.dtype not in _ADDED:
        kernels.pop("triton")
    sizes = {"entries": room, "longest": longest, "dtype": dtype}
    kernels = backends.bound(kernels, **sizes, sets=sets, units=units)
    run = jnp.asarray(first, jnp.int32), jnp.asarray(length, jnp.int32)
    operands = (into, message, counts, *run, places)
    size = len(message) * room
    return backends.run("unpack_message", backend, kernels, size, *operands)


def _check(rows, counts, places, name):
    if rows.ndim != 2 or counts.shape != rows.shape[:1]:
        raise KernelArgumentError(
            f"{name} must have a row for each count, got shape {list(rows.shape)} for "
            f"counts of {list(counts.shape)}."
        )
    checks.integers("counts", counts)
    checks.integers("places", places)
    if places.size < SINGLE or places.size % 2:
        raise KernelArgumentError(
            f"places must have {SINGLE} numbers, and two for each byte of a slot that is "
            f"sent as it is, got {places.size}."
        )


def _check_travels(dtype):
    if dtype.itemsize not in (2, 4, 8):
        raise KernelArgumentError(
            f"values travel as numbers of 2, 4 or 8 bytes, not as {dtype}; cast them."
        )
