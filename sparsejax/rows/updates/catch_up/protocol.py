"""The protocol by which a step lets the rows of a table catch up."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import jax

from sparsejax.rows.updates.call import Rows
from sparsejax.rows.updates.catch_up.missed import MissedSteps


class CatchUp(Protocol):
    """A method by which the rows of a table catch up on the steps that they have missed.

    A step asks it which rows are `due`, has the rows that it lists `advance` to the last
    step, and updates them. All rows of a table, at once, are `settled`.
    """

    @property
    def lags(self) -> bool:
        """Whether rows keep the number of the step that they have seen last."""
        ...

    @property
    def moves(self) -> bool:
        """Whether parameters of rows change in steps that miss them."""
        ...

    @property
    def is_cheap(self) -> bool:
        """Whether an update advances rows that were read once more, from its own state.

        Otherwise it takes over what was made to read them.
        """
        ...

    def due(self, height: int, step: jax.Array) -> jax.Array | None:
        """The rows that a step lists whether they have a gradient or not, if any.

        Args:
            height: How many rows the table has, which is the id of no row.
            step: The step.
        """
        ...

    def advance(self, missed: MissedSteps, rows: Mapping[int, Rows]) -> dict[int, Rows]:
        """Listed rows of tables that catch up so, as after the last step."""
        ...

    def settled(self, missed: MissedSteps, rows: Mapping[int, Rows]) -> dict[int, Rows]:
        """All rows of tables that catch up so, few of which are late, in the same way."""
        ...


@dataclasses.dataclass(frozen=True)
class Never:
    """Rows are unchanged."""

    lags = False
    moves = False
    is_cheap = True

    def due(self, height: int, step: jax.Array) -> None:
        """No rows."""
        del height, step

    def advance(self, missed: MissedSteps, rows: Mapping[int, Rows]) -> dict[int, Rows]:
        """The rows, unchanged."""
        del missed
        return dict(rows)

    settled = advance
