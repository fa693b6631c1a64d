"""The optimizer inside a lazy one, and which tables it can update by rows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax.errors import ArgumentError
from sparsejax.rows.updates import anatomy as anatomies
from sparsejax.rows.updates.anatomy import Anatomy, Table
from sparsejax.units.row_grads import is_row_grads


@dataclasses.dataclass
class Inside:
    """The optimizer inside a lazy one, and what is known of it.

    Attributes:
        tx: The optimizer.
        exact: Whether rows catch up.
    """

    tx: optax.GradientTransformationExtraArgs
    exact: bool
    _known: dict[Any, Anatomy] = dataclasses.field(default_factory=dict)

    def anatomy(self, grads: Any, params: Any) -> Anatomy:
        """What the optimizer is made of for such gradients and parameters."""
        leaves, structure = jax.tree.flatten(grads, is_leaf=is_row_grads)
        both = [*leaves, *jax.tree.leaves(params)]
        key = structure, tuple((np.shape(x), jnp.result_type(x)) for x in both)
        if key not in self._known:
            self._known[key] = anatomies.study(self.tx, grads, params)
        return self._known[key]

    def lagging(self, anatomy: Anatomy) -> set[int]:
        """The tables whose rows catch up, by their numbers."""
        tables = anatomy.tables.items()
        return {at for at, t in tables if self.exact and t.lags and not self.why_not(t)}

    def why_not(self, table: Table) -> str | None:
        """Why a table cannot be updated by rows; None if it can."""
        return table.refused or (table.replay_refused if self.exact else None)

    def check(self, table: Table) -> None:
        """Raises if a table cannot be updated by rows."""
        reason = self.why_not(table)
        if not reason:
            return
        fix = "Use lazy(tx, exact=False), or leave that part out."
        if table.refused:
            fix = (
                "Leave that out of lazy(...), give it only leaves with dense gradients "
                "(optax.partition), or use what looks at each row alone, as optax.clip."
            )
        raise ArgumentError(
            f"lazy: {table.path!r} cannot be updated by rows: {reason}. {fix}"
        )
