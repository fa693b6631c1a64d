"""An oracle in NumPy, in float64 or integers, with the simplest code possible."""

from typing import Any

import numpy as np


def total(x: np.ndarray) -> np.ndarray:
    """Sums x, [n, ...], over the ranks in float64."""
    return np.sum(np.asarray(x).astype(np.float64), axis=0)


def is_nonzero(x: np.ndarray) -> np.ndarray:
    """Returns where x is non-zero: NaN and denormals are, -0.0 is not."""
    return np.asarray(x).astype(np.float64) != 0


def unpacked(words: np.ndarray) -> np.ndarray:
    """Unpacks uint32 [..., n] to bool [..., 32 * n], lowest bit first."""
    words = np.asarray(words)
    shifts = np.arange(32, dtype=np.uint32)
    flags = (words[..., None] >> shifts) & np.uint32(1)
    return flags.astype(bool).reshape(*words.shape[:-1], -1)


def packed(flags: np.ndarray) -> np.ndarray:
    """Packs bool [..., 32 * n] to uint32 [..., n], the inverse of `unpacked`."""
    flags = np.asarray(flags, bool)
    octets = np.packbits(flags, axis=-1, bitorder="little")
    return np.ascontiguousarray(octets).view("<u4")


def places_of(flags: np.ndarray) -> str:
    """Describes, for a message, how many flags are set and between which indices."""
    flags = np.asarray(flags)
    places = np.argwhere(flags)
    spans = ", ".join(f"{axis.min()} to {axis.max()}" for axis in places.T)
    return f"{len(places):,} of {flags.size:,} numbers, in [{spans}]"


def assert_within(got: np.ndarray, wanted: np.ndarray, room: Any, where: str = "") -> None:
    """Raises if numbers differ by more than `room`; says how many, where and how much.

    Args:
        got: The computed array.
        wanted: The oracle's array, in float64.
        room: The absolute tolerance of each element.
        where: The name of the case, for the message.
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
