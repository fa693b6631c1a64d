"""The elements that are not zero, as packed bits and as a list of indices."""

import jax
import jax.numpy as jnp

from pallas_kernels import backends, checks
from pallas_kernels.reference import bitmap as reference


def bitmap_encode(
    x: jax.Array, units: jax.Array | None = None, *, backend: str | None = None
) -> jax.Array:
    """Packs flags of the elements that are not zero, 32 to a word, the first lowest.

    With a list of units, such as that of an owner in Zen's hash bitmap, bit i stands for
    element `units[i]`. Bits after the last one are zero.

    Args:
        x: Floating [n].
        units: int32 [m], the elements that bits stand for; all elements if None. A unit out
            of range stands for the nearest one.
        backend: The backend: "auto", "reference", "pallas" or "triton"; see
            `sparsejax.use_kernels`.

    Returns:
        uint32 [max(1, ceil(m / 32))], the words.

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
    """Finds the set bits of a bitmap, or the units they stand for.

    Args:
        words: uint32 [w], as `bitmap_encode` makes them.
        capacity: The largest number of results.
        units: int32 [m], the unit of each bit. All bits from m on must be zero.
        backend: The backend: "auto", "reference", "pallas" or "triton"; see
            `sparsejax.use_kernels`.

    Returns:
        A pair of int32 [capacity], the set bits in ascending order, or their units; and the
        number of set bits, which may exceed the capacity. The list is padded with 32 * w,
        or with -1 if there are units.

    Example:
        >>> words = pallas_kernels.bitmap_encode(jnp.array([0.0, 2.0, 0.0, 1.0]))
        >>> indices, count = pallas_kernels.bitmap_decode(words, capacity=3)
        >>> indices.tolist(), int(count)
        ([1, 3, 32], 2)
    """
    checks.words("words", words)
    none = 32 * words.size
    found, count = _decoded(words, capacity, none, backend)
    if units is not None:
        checks.integers("units", units)
        meant = units.at[found].get(mode="fill", fill_value=reference.EMPTY)
        found = jnp.where(found < none, meant, reference.EMPTY)
    return found, count


def compact(
    x: jax.Array, capacity: int, *, backend: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Finds the non-zero elements of a vector: `bitmap_decode` of its `bitmap_encode`.

    An element is not zero if any bit but the sign is set: denormals and NaN count, -0.0
    does not.

    Args:
        x: Floating [n].
        capacity: The largest number of indices.
        backend: The backend: "auto", "reference", "pallas" or "triton"; see
            `sparsejax.use_kernels`.

    Returns:
        A pair of int32 [capacity], the indices in ascending order, n after the last; and
        the number of elements found, which may exceed the capacity.

    Example:
        >>> x = jnp.array([0.0, 2.0, 0.0, 1.0])
        >>> indices, count = pallas_kernels.compact(x, capacity=3)
        >>> indices.tolist(), int(count)
        ([1, 3, 4], 2)

    See Also:
        `pallas_kernels.threshold_hash`: elements of at least a given magnitude, at most one
        for each slot of a hash.
    """
    return _decoded(bitmap_encode(x, backend=backend), capacity, x.size, backend)


def _decoded(words, capacity, fill, backend):
    """Returns the set bits, padded with `fill`, and their number."""
    checks.positive("capacity", capacity)
    kernels = backends.kernels(
        reference.bitmap_decode,
        pallas="bitmap",
        triton="bitmap",
        capacity=capacity,
        fill=fill,
    )
    return backends.run("bitmap_decode", backend, kernels, words.size, words)
