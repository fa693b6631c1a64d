"""Value codes that are a narrower dtype, alone or with a scale for each leaf."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from sparsejax.units.units import rounded
from sparsejax.wire.value_codes import base


@dataclasses.dataclass(frozen=True)
class Rounded(base.ValueCode):
    """The bits of a floating dtype; finite values stay finite.

    Attributes:
        into: The name of the dtype.
    """

    into: str

    def encode(self, x, real=True):
        del real
        narrow = rounded(x, jnp.dtype(self.into))
        codes = lax.bitcast_convert_type(narrow, self.dtype)
        return codes.astype(jnp.uint32), jnp.zeros(0, jnp.float32)

    def decode(self, codes, table):
        del table
        narrow = codes.astype(self.dtype)
        return lax.bitcast_convert_type(narrow, jnp.dtype(self.into)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Int8(base.ValueCode):
    """Integer multiples of a step, plus 128, so that 128 is zero."""

    def encode(self, x, real=True):
        step = base.largest(x, real) / 127
        steps = jnp.round(x / jnp.where(step > 0, step, 1))
        steps = jnp.where(jnp.isfinite(steps), jnp.clip(steps, -127, 127), 127)
        return (steps + 128).astype(jnp.uint32), step[None]

    def decode(self, codes, table):
        return (codes.astype(jnp.float32) - 128) * table[0]


@dataclasses.dataclass(frozen=True)
class Float8(base.ValueCode):
    """float8_e4m3fn with a scale; its largest number is 448, and it has no infinity."""

    def encode(self, x, real=True):
        scale = base.largest(x, real) / 448
        scaled = jnp.clip(x / jnp.where(scale > 0, scale, 1), -448, 448)
        codes = lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), jnp.uint8)
        return codes.astype(jnp.uint32), scale[None]

    def decode(self, codes, table):
        narrow = codes.astype(jnp.uint8)
        x = lax.bitcast_convert_type(narrow, jnp.float8_e4m3fn).astype(jnp.float32)
        return x * table[0]
