"""Some rows of a table, and a call of the optimizer with rows in place of tables."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from sparsejax.rows.updates.layout import OptimizerLayout


class Rows(NamedTuple):
    """Some rows of a table.

    Attributes:
        param: [n, ...], of the parameter.
        own: Of each leaf of the state that has rows of it.
        last: int32 [n], the step that each has seen last.
    """

    param: Any
    own: tuple[jax.Array, ...]
    last: jax.Array


@dataclasses.dataclass(frozen=True)
class RowCall:
    """The optimizer, called with some rows in place of tables.

    Attributes:
        tx: The optimizer.
        layout: Which leaves of its state have the rows of a table.
        structures: Those of the parameters and of its state.
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
        """The updates and the state, leaf by leaf.

        Args:
            grads: The leaves of the gradients, those of rows among them.
            params: The leaves of the parameters; None where they are not known.
            state: The leaves of the state.
            rows: What stands in place of tables, in the parameters and in the state.
            **extra: What the optimizer is given besides.
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
