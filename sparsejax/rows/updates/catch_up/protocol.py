"""The protocol of the methods by which the rows of a table catch up."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import jax

from sparsejax.rows.updates.call import Rows
from sparsejax.rows.updates.catch_up.missed import MissedSteps


class CatchUp(Protocol):
    """A method by which the rows of a table catch up on the steps that they have missed.

    A step adds the rows that are `due` to its list, calls `advance` to catch up the listed
    rows to the last step, and updates them. `settled` catches up all rows of a table.
    """

    @property
    def lags(self) -> bool:
        """Whether the state records the last step that each row has seen."""
        ...

    @property
    def moves(self) -> bool:
        """Whether parameters of rows may change in steps that do not list them."""
        ...

    @property
    def is_cheap(self) -> bool:
        """Whether an update catches up rows again that were caught up to be read.

        Otherwise it uses the rows of the reader.
        """
        ...

    def due(self, height: int, step: jax.Array) -> jax.Array | None:
        """Returns ids that a step lists whether they have a gradient or not, or None.

        Args:
            height: The number of rows of the table, which is also the id of padding.
            step: int32 [], the step.
        """
        ...

    def advance(self, missed: MissedSteps, rows: Mapping[int, Rows]) -> dict[int, Rows]:
        """Catches up listed rows, by table, to the last step."""
        ...

    def settled(self, missed: MissedSteps, rows: Mapping[int, Rows]) -> dict[int, Rows]:
        """Catches up all rows of tables, of which few are late, to the last step."""
        ...


@dataclasses.dataclass(frozen=True)
class Never:
    """The method that leaves rows unchanged."""

    lags = False
    moves = False
    is_cheap = True

    def due(self, height: int, step: jax.Array) -> None:
        """Returns None: no rows are due."""
        del height, step

    def advance(self, missed: MissedSteps, rows: Mapping[int, Rows]) -> dict[int, Rows]:
        """Returns the rows unchanged."""
        del missed
        return dict(rows)

    settled = advance
