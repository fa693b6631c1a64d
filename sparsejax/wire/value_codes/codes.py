"""The value codes, by the names that `values=` takes; `base` describes their contract.

    float32     32 bits, not rounded
    bfloat16    16 bits, rounded
    float16     16 bits, rounded
    int8        8 bits; the table has the step, the largest magnitude of the leaf over 127
    fp8         8 bits, float8_e4m3fn; the table has a scale, the largest magnitude over 448
    4bit        the sign, and 0 or a power of two from 1/8 to 8 times the mean magnitude,
                which is the table
    2bit        the sign, and whether the magnitude is above the mean; the table has the
                means of the magnitudes below and above
    2bit-bins   SparseLoCo's: four bins of 1.5 standard deviations around the mean; the
                table has the mean of the values in each
    sign        the sign; the table has the mean magnitude

A new code is a class in a file of this folder, and a line of `CODES`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import arguments
from sparsejax.units.indices import Origin
from sparsejax.units.sparse_tensor import CodedValues
from sparsejax.units.units import rounded
from sparsejax.wire.value_codes import dtypes, means
from sparsejax.wire.value_codes.base import ValueCode


CODES: dict[str, ValueCode] = {
    "float32": dtypes.Rounded(32, 0, "float32"),
    "bfloat16": dtypes.Rounded(16, 0, "bfloat16"),
    "float16": dtypes.Rounded(16, 0, "float16"),
    "int8": dtypes.Int8(8, 1),
    "fp8": dtypes.Float8(8, 1),
    "4bit": means.Powers(4, 1),
    "2bit": means.TwoLevels(2, 2),
    "2bit-bins": means.FourBins(2, 4),
    "sign": means.OneLevel(1, 1),
}


def code_of(name: Any) -> ValueCode:
    """Returns the code of a name; raises if there is none of that name."""
    arguments.check_one_of("values", name, CODES)
    return CODES[name]


def coded(
    x: jax.Array, real: jax.Array, name: str, dtype: Any
) -> tuple[jax.Array, CodedValues]:
    """Rounds values to a code; returns the rounded values, and the values in the code.

    Args:
        x: [n], of any floating dtype, zero where there is no value.
        real: Booleans [n], where there is a value.
        name: The name of the code.
        dtype: The dtype of the rounded values.
    """
    code = code_of(name)
    codes, table = code.encode(rounded(x, jnp.float32), real)
    values = jnp.where(real, rounded(code.decode(codes, table), dtype), 0)
    return values, CodedValues(codes.astype(code.dtype), table[None], name, Origin(values))
