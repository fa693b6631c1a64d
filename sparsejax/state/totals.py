"""Bytes over a whole run, exact however long it is: in 16 MiB and the rest.

A float32 that has counted 16 MiB no longer sees single bytes, and JAX has no 64-bit numbers
by default. Each step's bytes are a float32, which splits into two integers without error;
those are added up in 32 bits each, up to 2**56 bytes, 72 petabytes a rank.
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
        counts: uint32 [7], as one array: how many exchanges there were; of wire, payload
            and dense bytes the number of 16 MiB; and of each the bytes that are left.
    """

    counts: jax.Array

    @classmethod
    def zero(cls) -> "Totals":
        """The totals before the first exchange."""
        return cls(jnp.zeros(7, jnp.uint32))

    @property
    def exchanges(self) -> jax.Array:
        """How many exchanges there were."""
        return self.counts[..., 0]

    @property
    def high(self) -> jax.Array:
        """In 16 MiB: wire, payload and dense bytes."""
        return self.counts[..., 1:4]

    @property
    def low(self) -> jax.Array:
        """What is left of them, in bytes below 16 MiB."""
        return self.counts[..., 4:7]

    def plus(self, traffic: Iterable[Traffic]) -> "Totals":
        """The totals after one more exchange, of these buckets."""
        counts = [(t.wire, t.payload, t.dense) for t in traffic]
        if not counts:
            # A sum over nothing makes XLA's compiler for GPUs crash, as of JAX 0.11.2.
            return Totals(jnp.concatenate([self.exchanges[None] + 1, self.counts[1:]]))
        numbers = jnp.round(jnp.array(counts, jnp.float32).reshape(-1, 3))
        high = jnp.floor(numbers / 2**_LOW)
        low = (numbers - high * 2**_LOW).astype(jnp.uint32)
        # Halves of 12 bits: a model may have more buckets than whole ones leave room for.
        # What was there before is added last: a sum over one bucket compiles to nothing.
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
        """The exchanges, and each total: a float64 at rest, a float32 while traced."""
        here = Totals(tree.here(self.counts))
        exchanges, high, low = here.exchanges, here.high, here.low
        if not isinstance(high, Tracer):
            high, low = np.asarray(high, np.float64), np.asarray(low, np.float64)
        totals = high * 2.0**_LOW + low
        names = ("total_wire_bytes", "total_payload_bytes", "total_dense_bytes")
        each = {name: totals[..., i] for i, name in enumerate(names)}
        return {"exchanges": exchanges, **each}
