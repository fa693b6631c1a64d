"""Tables one under another: the rows of several as rows of one, and split again.

Tables of one width and dtype are exchanged together, which takes the collectives of one.
Each row keeps its place within its table, and those of a table are neighbours; so in a list
in ascending order the rows of each table are a run, and a window that is as long as the run
can be finds it, wherever it begins.
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
    """Where each of several runs in a row begins, and where the last ends."""
    return [0, *itertools.accumulate(lengths)]


def stacked(tables: Sequence[RowGrads]) -> RowGrads:
    """The rows of several tables as rows of the one that they make, one under another."""
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
    """Where in keys [k], ascending, the first is that is not below each of some bounds.

    On GPUs a search is a loop of launches, and to compare each with all is one.
    """
    by = lambda method: lambda: jnp.searchsorted(keys, bounds, method=method)
    return by_platform(cpu=by("scan"), default=by("compare_all")).astype(jnp.int32)


def apart(
    keys: jax.Array, rows: jax.Array, lengths: Sequence[int], rooms: Sequence[int]
) -> list[tuple[jax.Array, jax.Array]]:
    """The rows of each table, in windows of a list of all.

    Args:
        keys: int32 [k], ascending; those of a table follow those of the table before it.
        rows: [k, ...].
        lengths: How many keys each table has.
        rooms: How many of them there may be in the list, at most.

    Returns:
        For each table the keys within it, its length where there is none, in the order of
        the list but not always from the front; and their rows, zeros where there is none.
    """
    if len(lengths) == 1:
        return [(keys, rows)]
    starts = starts_of(lengths)
    begins = first_at(keys, jnp.array(starts[:-1], keys.dtype))
    found = []
    for i, (length, room) in enumerate(zip(lengths, rooms, strict=True)):
        size = min(room, keys.size)
        # A window that would run over the end begins before its table does.
        begin = jnp.minimum(begins[i], keys.size - size)
        places = lax.dynamic_slice_in_dim(keys, begin, size) - starts[i]
        inside = (places >= 0) & (places < length)
        own = lax.dynamic_slice_in_dim(rows, begin, size)
        own = jnp.where(jnp.expand_dims(inside, range(1, rows.ndim)), own, 0)
        found.append((jnp.where(inside, places, length), own))
    return found
