"""Which elements there are, as a bit each."""

import jax
import jax.numpy as jnp

from pallas_kernels import backends, checks
from pallas_kernels.reference import indices as reference


def bitmap_encode(
    x: jax.Array, units: jax.Array | None = None, *, backend: str | None = None
) -> jax.Array:
    """Packs which elements are non-zero, 32 to a word, the first lowest.

    With a list of units, as that of a server in Zen's hash bitmap, bit i tells of element
    `units[i]`. Bits after the last are zero.

    Args:
        x: Floating [n].
        units: int32 [m], if not all are meant; a unit out of range means the nearest.
        backend: See `backends`.

    Returns:
        uint32 [max(1, ceil(m / 32))].

    Example:
        >>> pallas_kernels.bitmap_encode(jnp.array([0.0, 2.0, 0.0, 1.0])).tolist()
        [10]
    """
    checks.floats("x", x)
    if units is not None:
        checks.integers("units", units)
        x = x.at[units].get(mode="clip")
    kernels = backends.kernels(reference.bitmap_encode, pallas="bitmap", triton="bitmap")
    return backends.run("bitmap_encode", backend, kernels, x.size, x)


def bitmap_decode(
    words: jax.Array,
    capacity: int,
    units: jax.Array | None = None,
    *,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The inverse: where the bits are set, or which units they stand for.

    Args:
        words: uint32 [w].
        capacity: How many to return at most.
        units: int32 [m], what the bits stand for; all bits from m on must be zero.
        backend: See `backends`.

    Returns:
        int32 [capacity], by ascending bit; after the last 32 * w, or -1 where units are
        given. And how many bits are set, which may exceed the capacity.

    Example:
        >>> words = pallas_kernels.bitmap_encode(jnp.array([0.0, 2.0, 0.0, 1.0]))
        >>> indices, count = pallas_kernels.bitmap_decode(words, capacity=3)
        >>> indices.tolist(), int(count)
        ([1, 3, 32], 2)
    """
    checks.words("words", words)
    checks.positive("capacity", capacity)
    kernels = backends.kernels(
        reference.bitmap_decode, pallas="bitmap", triton="bitmap", capacity=capacity
    )
    found, count = backends.run("bitmap_decode", backend, kernels, words.size, words)
    if units is not None:
        checks.integers("units", units)
        meant = units.at[found].get(mode="fill", fill_value=reference.EMPTY)
        found = jnp.where(found < 32 * words.size, meant, reference.EMPTY)
    return found, count
