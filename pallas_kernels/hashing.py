"""MurmurHash3 of 32-bit keys, and the seeds that all ranks use.

A hash determines the owner of a unit and its place, so ranks with different seeds would
lose entries without noticing. Seeds are therefore drawn from one Python number, which is
the same on all ranks when the program is traced, and never from the data of a rank.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.errors import KernelArgumentError


def mix32(x: Any, seed: Any) -> Any:
    """Computes MurmurHash3 of 32-bit keys, for NumPy and JAX arrays.

    Args:
        x: uint32, the keys.
        seed: A Python number, or uint32 that broadcasts against x.
    """
    if isinstance(seed, int):
        seed = np.uint32(seed & 0xFFFFFFFF)
    x = x * np.uint32(0xCC9E2D51)
    x = (x << np.uint32(15)) | (x >> np.uint32(17))
    x = (x * np.uint32(0x1B873593)) ^ seed
    x = (x << np.uint32(13)) | (x >> np.uint32(19))
    x = (x * np.uint32(5) + np.uint32(0xE6546B64)) ^ np.uint32(4)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def draw_seeds(count: int, seed: int = 0) -> np.ndarray:
    """Draws seeds of hashes; the same arguments give the same seeds.

    Args:
        count: The number of seeds. `partition` takes one more than it has hashes for slots.
        seed: The number from which seeds are drawn; the same on all ranks.

    Returns:
        uint32 [count].

    Example:
        >>> seeds = pallas_kernels.draw_seeds(4)
        >>> seeds.shape, str(seeds.dtype)
        ((4,), 'uint32')
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise KernelArgumentError(f"count must be a positive int, got {count!r}.")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise KernelArgumentError(f"seed must be an int of at least 0, got {seed!r}.")
    return np.random.SeedSequence(seed).generate_state(count)


def place(keys: Any, seed: Any, places: int) -> Any:
    """Hashes int32 keys to places in [0, places), as int32."""
    hashed = mix32(keys.astype(np.uint32), seed)
    return (hashed % np.uint32(places)).astype(jnp.int32)
