"""Concatenates the rows of several tables into those of one, and splits them again.

Tables of one width and dtype are exchanged together, with as many collectives as one table
takes. The ids of each table are offset by the rows of earlier tables. So in an ascending
list the rows of each table are consecutive, and a window with the table's capacity contains
them, wherever they begin.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.platforms import by_platform
from sparsejax.units.indices import in_range
from sparsejax.units.row_grads import RowGrads


def starts_of(lengths: Sequence[int]) -> list[int]:
    """Returns the start of each of several consecutive ranges, and the end of the last."""
    return [0, *itertools.accumulate(lengths)]


def stacked(tables: Sequence[RowGrads]) -> RowGrads:
    """Concatenates several tables: returns their rows as rows of one table."""
    if len(tables) == 1:
        return tables[0]
    starts = starts_of([table.shape[0] for table in tables])
    ids = []
    for table, start in zip(tables, starts[:-1], strict=True):
        own = in_range(table.ids, table.shape[0])
        ids.append(jnp.where(own < table.shape[0], own + start, starts[-1]))
    rows = jnp.concatenate([table.rows for table in tables])
    return RowGrads(jnp.concatenate(ids), rows, (starts[-1], *tables[0].shape[1:]))


def first_at(keys: jax.Array, bounds: jax.Array) -> jax.Array:
    """Returns, for each bound, the position of the first key that is not below it.

    On GPUs a binary search is a loop of launches, but a comparison of all pairs is one.

    Args:
        keys: int32 [k], ascending.
        bounds: int32, of any shape.
    """
    by = lambda method: lambda: jnp.searchsorted(keys, bounds, method=method)
    return by_platform(cpu=by("scan"), default=by("compare_all")).astype(jnp.int32)


def by_table(
    keys: jax.Array, rows: jax.Array, lengths: Sequence[int], rooms: Sequence[int]
) -> list[tuple[jax.Array, jax.Array]]:
    """Splits a list of rows of several tables into windows, one for each table.

    Args:
        keys: int32 [k], ascending; the keys of a table follow those of the previous table.
        rows: [k, ...].
        lengths: The number of possible keys of each table.
        rooms: The most keys of each table in the list.

    Returns:
        For each table its keys, relative to its start, and their rows. They are in the
        order of the list, but may begin after unused places. An unused place has the
        table's length as its key, and a row of zeros.
    """
    if len(lengths) == 1:
        return [(keys, rows)]
    starts = starts_of(lengths)
    begins = first_at(keys, jnp.array(starts[:-1], keys.dtype))
    found = []
    for i, (length, room) in enumerate(zip(lengths, rooms, strict=True)):
        size = min(room, keys.size)
        # A window that would extend past the end begins before its table.
        begin = jnp.minimum(begins[i], keys.size - size)
        places = lax.dynamic_slice_in_dim(keys, begin, size) - starts[i]
        inside = (places >= 0) & (places < length)
        own = lax.dynamic_slice_in_dim(rows, begin, size)
        own = jnp.where(jnp.expand_dims(inside, range(1, rows.ndim)), own, 0)
        found.append((jnp.where(inside, places, length), own))
    return found
