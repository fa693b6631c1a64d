"""Arguments that an optimizer asks for by keyword: the loss, as `value=`.

`optax.contrib.reduce_on_plateau` and `optax.polyak_sgd` fail without `value`. An optimizer
that does not is never given it: a transformation of a user's own may mean something else.
"""

import contextlib
from collections.abc import Iterator

from sparsejax.errors import ArgumentError
from sparsejax.placement.chains import missing_keywords


_OWN = (
    "In a shard_map of your own tx.update takes what you give it: see shard_map.md in "
    "sparsejax's docs"
)


class NeedsValueError(Exception):
    """The optimizer needs `value`; the step is traced once more, and gives it."""


@contextlib.contextmanager
def errors_named(has_value: bool, has_mean: bool) -> Iterator[None]:
    """Raises `NeedsValueError`, or an error by name, if arguments of an update are missing.

    Args:
        has_value: Whether the update is given `value`.
        has_mean: Whether the step computes the mean of the loss over the ranks.
    """
    try:
        yield
    except TypeError as error:
        names = missing_keywords(error)
        others = [name for name in names if name != "value"]
        if others:
            raise ArgumentError(
                f"data_parallel: tx needs {', '.join(f'{x}=' for x in others)} in each "
                "update, which a trainer does not have; of what optimizers ask for it "
                f"gives the loss, as value=. {_OWN}. ({error})"
            ) from error
        if names and not has_mean:
            raise ArgumentError(
                "data_parallel: tx needs value=, the mean of the loss over the ranks, and "
                "with overlap=True a step sends nothing, so it has none: leave overlap "
                f"out. ({error})"
            ) from error
        if names and not has_value:
            raise NeedsValueError from error
        raise
