"""Rows of a step's gradient, and beside them rows of the step before that come only now.

Rows that no rank reads in the next step can wait for a step: `sparsejax.embrace_sync` sends
them where nothing waits for them. What an optimizer does with them is what it would have
done in their own step, so it has to know which they are. `sparsejax.lazy` does.
"""

import dataclasses
import functools
from typing import Any, NoReturn

import jax

from sparsejax.errors import LeafError
from sparsejax.units.row_grads import RowGrads


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("ids", "rows", "late"),
    meta_fields=("shape", "origin"),
)
@dataclasses.dataclass(frozen=True)
class LateRowGrads(RowGrads):
    """Rows of this step's gradient, and rows of the last step's.

    Attributes:
        late: Those of the last step. It has updated none of their rows, and the loss of
            this step has read none.
    """

    late: Any = None

    @classmethod
    def of(cls, now: RowGrads, late: RowGrads) -> "LateRowGrads":
        """Both of them."""
        return cls(now.ids, now.rows, now.shape, now.origin, late)

    @property
    def now(self) -> RowGrads:
        """The rows of this step's gradient."""
        return RowGrads(self.ids, self.rows, self.shape, self.origin)

    def check(self, name: str = "RowGrads") -> None:
        """Raises: who looks here for the rows of a gradient would lose the late ones."""
        self._refuse(name)

    def to_dense(self) -> jax.Array:
        """Raises, as `check` does."""
        self._refuse("a gradient of rows")

    def merged(self) -> RowGrads:
        """Raises, as `check` does."""
        self._refuse("a gradient of rows")

    def _refuse(self, name: str) -> NoReturn:
        raise LeafError(
            f"{name}: these {type(self).__name__} of a table {list(self.shape)} have rows "
            "of the last step among them, which embrace_sync(vertical=True) has held back, "
            "and only sparsejax.lazy applies them as of their own step. Put it around the "
            "optimizer, directly behind: optax.chain(sparsejax.embrace_sync(), "
            "sparsejax.lazy(optax.adam(1e-3))); or take embrace_sync(vertical=False)."
        )
