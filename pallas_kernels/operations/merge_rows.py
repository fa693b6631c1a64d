"""Entries of one row of a table, several times in a batch, as one."""

import jax

from pallas_kernels import backends, checks, reference


def merge_rows(
    ids: jax.Array, values: jax.Array, rows: int, *, backend: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds up the values of equal ids.

    Args:
        ids: int32 [k]; those outside [0, rows) are left out.
        values: [k] or [k, ...].
        rows: How many rows the table has.
        backend: See `backends`.

    Returns:
        int32 [k], the ids that there are, ascending, `rows` behind the last; their sums,
        zero behind the last; and how many there are.
    """
    checks.integers("ids", ids)
    checks.positive("rows", rows)
    checks.places("the rows", rows)
    checks.entries(values, ids, "ids")
    kernels = backends.bound({"reference": reference.merge_rows}, rows=rows)
    return backends.run("merge_rows", backend, kernels, ids.size, ids, values)
