"""An iterator that gives the next batch, too."""

from collections.abc import Iterable, Iterator
from typing import Any

from sparsejax.errors import ArgumentError


_END: Any = object()


def lookahead(batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Pairs of a batch and the next one; None beside the last.

    Fetches one batch ahead, so what loads batches is to run in front of it: a generator, a
    list, a `torch.utils.data.DataLoader`, or a `grain` dataset or iterator. Each batch is
    the same object in both pairs that it is in. A loader that writes the next batch over
    the last one has to give copies: what was announced is to be what comes.

    A generator of pairs holds one batch that was not trained on yet. To save where grain's
    iterator is in the data, save `get_state()` of the iterator before the batch is fetched
    that comes next, or end the pairs with `trainer.step(state, batch, None)`.

    Example:
        >>> for batch, next_batch in sparsejax.embrace.lookahead(batches):
        ...     state, loss = trainer.step(state, batch, next_batch)

    Args:
        batches: The batches, of one shape.

    Returns:
        An iterator over (batch, next batch).
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
