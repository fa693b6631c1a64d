"""An oracle in NumPy: in float64 or in integers, by the plainest code there is."""

from typing import Any

import numpy as np


def total(x: np.ndarray) -> np.ndarray:
    """The sum over ranks of [n, ...], in float64."""
    return np.sum(np.asarray(x).astype(np.float64), axis=0)


def is_nonzero(x: np.ndarray) -> np.ndarray:
    """Where x is not zero: NaN and denormals count, -0.0 does not."""
    return np.asarray(x).astype(np.float64) != 0


def unpacked(words: np.ndarray) -> np.ndarray:
    """uint32 [..., n] as booleans [..., 32 * n], lowest bit first."""
    words = np.asarray(words)
    shifts = np.arange(32, dtype=np.uint32)
    flags = (words[..., None] >> shifts) & np.uint32(1)
    return flags.astype(bool).reshape(*words.shape[:-1], -1)


def packed(flags: np.ndarray) -> np.ndarray:
    """Inverse of `unpacked`."""
    flags = np.asarray(flags, bool)
    octets = np.packbits(flags, axis=-1, bitorder="little")
    return np.ascontiguousarray(octets).view("<u4")


def places_of(flags: np.ndarray) -> str:
    """How many booleans are set, and between which indices of each axis, for a message."""
    flags = np.asarray(flags)
    places = np.argwhere(flags)
    spans = ", ".join(f"{axis.min()} to {axis.max()}" for axis in places.T)
    return f"{len(places):,} of {flags.size:,} numbers, in [{spans}]"


def assert_within(got: np.ndarray, wanted: np.ndarray, room: Any, where: str = "") -> None:
    """Raises where numbers are further apart than `room`: says how many, where, how far.

    Args:
        got: What was computed.
        wanted: What the oracle says, in float64.
        room: By how much each may be off.
        where: Which case it is.
    """
    got, wanted = np.broadcast_arrays(np.asarray(got).astype(np.float64), wanted)
    error = np.abs(got - wanted)
    wrong = ~(error <= room)  # a NaN is wrong, too
    if not wrong.any():
        return
    first = tuple(np.argwhere(wrong)[0])
    raise AssertionError(
        f"{where + ': ' if where else ''}wrong are {places_of(wrong)}, by "
        f"{error[wrong].max():.3g} at most; the first, at {[*map(int, first)]}, is "
        f"{got[first]:.6g} and not {wanted[first]:.6g}"
    )
