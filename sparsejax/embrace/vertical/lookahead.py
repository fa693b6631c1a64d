"""An iterator over pairs of a batch and the next one."""

from collections.abc import Iterable, Iterator
from typing import Any

from sparsejax.errors import ArgumentError


_END: Any = object()


def lookahead(batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Iterates over pairs of a batch and the next one, which is None for the last batch.

    It fetches one batch ahead. The batches may come from a generator, a list, a
    `torch.utils.data.DataLoader`, or a `grain` dataset or iterator. Each batch is the same
    object in both of its pairs, so a loader that reuses the memory of a batch must give
    copies.

    The iterator holds one batch on which no step was taken yet. To save the position of
    grain's iterator, save its `get_state()` before the next batch is fetched, or end the
    pairs by `trainer.step(state, batch, None)`.

    Args:
        batches: The batches, of one shape.

    Returns:
        An iterator over pairs (batch, next batch).

    Example:
        >>> for batch, next_batch in sparsejax.embrace.lookahead(batches):
        ...     state, loss = trainer.step(state, batch, next_batch)
    """
    try:
        fetched = iter(batches)
    except TypeError:
        raise ArgumentError(
            f"lookahead: batches must be iterable, got a {type(batches).__name__}. A "
            "function that makes batches is called: lookahead(make_batches())."
        ) from None
    return _pairs(fetched)


def _pairs(fetched):
    batch = next(fetched, _END)
    while batch is not _END:
        following = next(fetched, _END)
        yield batch, None if following is _END else following
        batch = following
