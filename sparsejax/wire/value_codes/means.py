"""Value codes of 1 to 4 bits, whose tables are means of the leaf's values."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from sparsejax.wire.value_codes import base


@dataclasses.dataclass(frozen=True)
class Powers(base.ValueCode):
    """The sign in bit 3, and an exponent in bits 0 to 2.

    Exponent e stands for 2^(e - 4) times the mean magnitude, and 0 for zero.
    """

    def encode(self, x, real=True):
        x, unit = base.in_units(x, real)
        magnitude = jnp.abs(x)
        mean = base.mean_where(magnitude, real)
        octaves = jnp.log2(magnitude / jnp.where(mean > 0, mean, 1))
        exponent = jnp.clip(jnp.floor(octaves + 4.5), 0, 7)
        exponent = jnp.where(jnp.isfinite(magnitude), exponent, 7).astype(jnp.uint32)
        return exponent | (x < 0).astype(jnp.uint32) << 3, mean[None] * unit

    def decode(self, codes, table):
        exponent = codes & 7
        # 2^(exponent - 4), by the bits of a float32.
        power = lax.bitcast_convert_type((exponent + 123) << 23, jnp.float32)
        # A product also for zeros: of a table that is not finite it is not finite.
        magnitude = table[0] * jnp.where(exponent == 0, 0, power)
        return jnp.where((codes & 8) != 0, -magnitude, magnitude)


@dataclasses.dataclass(frozen=True)
class TwoLevels(base.ValueCode):
    """The sign in bit 0, and in bit 1 whether the magnitude is above the mean."""

    def encode(self, x, real=True):
        x, unit = base.in_units(x, real)
        magnitude = jnp.abs(x)
        # A comparison with NaN is false, so with a NaN all values are in the lower mean.
        above = magnitude > base.mean_where(magnitude, real)
        means = [base.mean_where(magnitude, flags & real) for flags in (~above, above)]
        codes = (x < 0).astype(jnp.uint32) | above.astype(jnp.uint32) << 1
        return codes, jnp.stack(means) * unit

    def decode(self, codes, table):
        level = jnp.where((codes & 2) != 0, table[1], table[0])
        return jnp.where((codes & 1) != 0, -level, level)


@dataclasses.dataclass(frozen=True)
class FourBins(base.ValueCode):
    """The number of one of four bins of 1.5 standard deviations around the mean."""

    def encode(self, x, real=True):
        x, unit = base.in_units(x, real)
        mean, count = base.mean_where(x, real), base.count(x, real)
        squares = jnp.sum(jnp.where(real, jnp.square(x - mean), 0))
        spread = jnp.sqrt(squares / jnp.maximum(count - 1, 1))
        width = 6 * spread / 4
        bins = jnp.round((x - mean) / jnp.where(width > 0, width, 1) + 2)
        bins = jnp.where(jnp.isfinite(bins), jnp.clip(bins, 0, 3), 3).astype(jnp.uint32)
        means = [base.mean_where(x, (bins == i) & real) for i in range(4)]
        return bins, jnp.stack(means) * unit

    def decode(self, codes, table):
        low = jnp.where((codes & 1) != 0, table[1], table[0])
        high = jnp.where((codes & 1) != 0, table[3], table[2])
        return jnp.where((codes & 2) != 0, high, low)


@dataclasses.dataclass(frozen=True)
class OneLevel(base.ValueCode):
    """The sign: 1 for negative values, else 0."""

    def encode(self, x, real=True):
        x, unit = base.in_units(x, real)
        return (x < 0).astype(jnp.uint32), base.mean_where(jnp.abs(x), real)[None] * unit

    def decode(self, codes, table):
        return jnp.where(codes != 0, -table[0], table[0])
