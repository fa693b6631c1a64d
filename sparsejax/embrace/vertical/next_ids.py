"""The check of the argument `next_ids` of an update."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from sparsejax.errors import ArgumentError


# Its default: None says that there is no next batch.
MISSING: Any = object()


def checked(name: str, next_ids: Any, paths: Sequence[str]) -> Mapping[str, Any] | None:
    """Returns the ids of the next batch, None at the end; raises if a table has none.

    Args:
        name: The name of the transformation, for messages.
        next_ids: The argument; `MISSING` if it was not given.
        paths: The paths of the tables.
    """
    if next_ids is None:
        return None
    fix = (
        "sparsejax.embrace.rows_read(loss_fn)(params, next_batch) finds them, and "
        "next_ids=None says that there is no next batch"
    )
    if next_ids is MISSING:
        raise ArgumentError(
            f"update of {name}(vertical=True) was not given the rows that this rank reads "
            f"in the next step: tx.update(grads, state, params, next_ids=ids). {fix}."
        )
    if not isinstance(next_ids, Mapping) or {*next_ids} != {*paths}:
        given = (
            sorted(next_ids) if isinstance(next_ids, Mapping) else type(next_ids).__name__
        )
        raise ArgumentError(
            f"update of {name}: next_ids must map the path of each table to ids, "
            f"{sorted(paths)}, and has {given}: {fix}."
        )
    for path, ids in next_ids.items():
        dtype = jnp.result_type(ids)
        if not jnp.issubdtype(dtype, jnp.integer):
            raise ArgumentError(
                f"update of {name}: next_ids of {path!r} must be integers, got {dtype}: "
                f"{fix}."
            )
    return next_ids
