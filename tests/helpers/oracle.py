"""An oracle in NumPy: in float64 or in integers, by the plainest code there is."""

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
