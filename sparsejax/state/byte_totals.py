"""Exact byte counts over a whole run, as multiples of 16 MiB and remainders.

A float32 above 16 Mi no longer counts single bytes, and JAX has no 64-bit integers by
default. The bytes of each step are a float32, which is split into two integers without
error; these are summed in 32 bits each, up to 2**56 bytes, 72 petabytes a rank.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from sparsejax.schemes.base import Traffic
from sparsejax.state import tree


_LOW, _HALF = 24, 0xFFF  # bits below 16 MiB, and the mask of half of them


class Totals(NamedTuple):
    """Sums over all exchanges so far.

    Attributes:
        counts: uint32 [7]: the number of exchanges; wire, payload and dense bytes divided
            by 16 MiB; and their remainders in bytes.
    """

    counts: jax.Array

    @classmethod
    def zero(cls) -> "Totals":
        """Returns the totals before the first exchange."""
        return cls(jnp.zeros(7, jnp.uint32))

    @property
    def exchanges(self) -> jax.Array:
        """The number of exchanges."""
        return self.counts[..., 0]

    @property
    def high(self) -> jax.Array:
        """Wire, payload and dense bytes, divided by 16 MiB and rounded down."""
        return self.counts[..., 1:4]

    @property
    def low(self) -> jax.Array:
        """Wire, payload and dense bytes modulo 16 MiB."""
        return self.counts[..., 4:7]

    def plus(self, traffic: Iterable[Traffic]) -> "Totals":
        """Returns the totals after one more exchange, whose buckets have this traffic."""
        counts = [(t.wire, t.payload, t.dense) for t in traffic]
        if not counts:
            # A sum over an empty axis crashes XLA's GPU compiler, as of JAX 0.11.2.
            return Totals(jnp.concatenate([self.exchanges[None] + 1, self.counts[1:]]))
        numbers = jnp.round(jnp.array(counts, jnp.float32).reshape(-1, 3))
        high = jnp.floor(numbers / 2**_LOW)
        low = (numbers - high * 2**_LOW).astype(jnp.uint32)
        # Remainders are summed in halves of 12 bits: with whole ones, 24 bits each, 256
        # buckets could overflow 32 bits. The old totals are added last, because a sum over
        # one bucket compiles to nothing.
        ones, carried = (
            half(low).sum(0, dtype=jnp.uint32) + half(self.low)
            for half in (lambda x: x & _HALF, lambda x: x >> 12)
        )
        carried += ones >> 12
        high = (
            high.astype(jnp.uint32).sum(0, dtype=jnp.uint32) + self.high + (carried >> 12)
        )
        low = (carried & _HALF) << 12 | ones & _HALF
        return Totals(jnp.concatenate([self.exchanges[None] + 1, high, low]))

    def numbers(self) -> dict[str, Any]:
        """Returns the number of exchanges and the totals, by their names in metrics.

        Totals are NumPy float64s, or traced float32s.
        """
        here = Totals(tree.here(self.counts))
        exchanges, high, low = here.exchanges, here.high, here.low
        if not isinstance(high, Tracer):
            high, low = np.asarray(high, np.float64), np.asarray(low, np.float64)
        totals = high * 2.0**_LOW + low
        names = ("total_wire_bytes", "total_payload_bytes", "total_dense_bytes")
        each = {name: totals[..., i] for i, name in enumerate(names)}
        return {"exchanges": exchanges, **each}
