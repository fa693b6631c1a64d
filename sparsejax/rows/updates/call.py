"""Rows of a table, and a call of the optimizer with rows in place of tables."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from sparsejax.rows.updates.layout import OptimizerLayout


class Rows(NamedTuple):
    """Some rows of a table.

    Attributes:
        param: [n, ...], the rows of the parameter.
        own: The same rows of each leaf of the state that has rows of this table.
        last: int32 [n], the last step that each row has seen.
    """

    param: Any
    own: tuple[jax.Array, ...]
    last: jax.Array


@dataclasses.dataclass(frozen=True)
class RowCall:
    """Calls the optimizer with some rows in place of tables.

    Attributes:
        tx: The optimizer.
        layout: The layout, which says what leaves of its state have the rows of a table.
        structures: The tree structures of the parameters and of its state.
    """

    tx: optax.GradientTransformationExtraArgs
    layout: OptimizerLayout
    structures: tuple[Any, Any]

    def __call__(
        self,
        grads: Sequence[Any],
        params: Sequence[Any],
        state: Sequence[Any],
        rows: Mapping[int, Rows],
        **extra: Any,
    ) -> tuple[list[Any], list[Any]]:
        """Returns the leaves of the updates, and those of the next state.

        Args:
            grads: The leaves of the gradients; for tables in `rows`, those of the rows.
            params: The leaves of the parameters; None where they are not known.
            state: The leaves of the state.
            rows: The rows that replace tables in the parameters and in the state, by the
                numbers of the tables.
            **extra: The extra arguments of the optimizer.
        """
        params, state = list(params), list(state)
        for at, part in rows.items():
            params[at] = part.param
            for j, own in zip(self.layout.tables[at].own, part.own, strict=True):
                state[j] = own
        of_params, of_state = self.structures
        whole = lambda flat: jax.tree.unflatten(of_params, flat)
        made, new = self.tx.update(
            whole(grads),
            jax.tree.unflatten(of_state, state),
            None if any(x is None for x in params) else whole(params),
            **extra,
        )
        return of_params.flatten_up_to(made), jax.tree.leaves(new)
