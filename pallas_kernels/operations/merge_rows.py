"""Rows of a table, several times in a batch, as one."""

import jax

from pallas_kernels import backends, checks
from pallas_kernels.reference import indices as reference


def merge_rows(
    ids: jax.Array, rows: int, *, room: int | None = None, backend: str | None = None
) -> reference.MergedRows:
    """Finds the distinct ids of a list, and the position of each id among them.

    `coo_add(places, values, room)` then sums the values of equal ids.

    Args:
        ids: int32 [k]. Those outside [0, rows) are left out.
        rows: The number of rows of the table.
        room: The largest number of distinct ids, at least k; k if None.
        backend: The backend: "auto", "reference", "pallas" or "triton"; see
            `sparsejax.use_kernels`.

    Returns:
        A `MergedRows`.

    Example:
        >>> ids, values = jnp.array([7, 2, 7]), jnp.array([1.0, 2.0, 3.0])
        >>> merged = pallas_kernels.merge_rows(ids, rows=10)
        >>> pallas_kernels.coo_add(merged.places, values, size=3).tolist()  # of 2, 7, none
        [2.0, 4.0, 0.0]
    """
    checks.integers("ids", ids)
    checks.positive("rows", rows)
    checks.places("the rows", rows)
    room = ids.size if room is None else room
    checks.room_for("room", room, ids.size)
    kernels = backends.kernels(reference.merge_rows, rows=rows, room=room)
    return backends.run("merge_rows", backend, kernels, ids.size, ids)
