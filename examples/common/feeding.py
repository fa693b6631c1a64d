"""Batches of examples in a shuffled order, by grain."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np


Batches = Callable[[int], Iterator[dict[str, np.ndarray]]]


def shuffled(arrays: Mapping[str, np.ndarray], size: int, seed: int) -> Batches:
    """A function from a step to the batches from that step on, without end.

    The batch of a step depends on the seed alone, so a run that resumes from a checkpoint
    has the same batches as one without interruption.

    Args:
        arrays: Of the same length; an example is a row of each.
        size: How many examples a batch has, those of all devices.
        seed: Of the order, which differs in each epoch.
    """
    import grain  # Takes seconds, which an example without it need not wait for.

    count = len(next(iter(arrays.values())))
    order = grain.MapDataset.range(count).seed(seed).shuffle().repeat().batch(size)
    batches = order.map(lambda chosen: {name: x[chosen] for name, x in arrays.items()})
    return lambda start: iter(batches[start:])
