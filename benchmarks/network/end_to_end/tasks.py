"""What is trained: parameters and batches, for JAX and for PyTorch alike.

The process that starts a run draws the batches and writes them into a folder, from which
the hosts read them: they are all on one machine. JAX is not needed to read them.
"""

import pathlib
from typing import NamedTuple

import numpy as np

from benchmarks.data import clicks
from benchmarks.network.end_to_end.options import Settings


class Task(NamedTuple):
    """Parameters and batches.

    Attributes:
        params: By name.
        batches: Of all hosts, by name; the first axis of each array is cut for the hosts.
    """

    params: dict[str, np.ndarray]
    batches: list[dict[str, np.ndarray]]

    def of_host(self, rank: int, ranks: int) -> list[dict[str, np.ndarray]]:
        """The batches of one host."""

        def cut(x):
            size = len(x) // ranks
            return x[rank * size : (rank + 1) * size]

        return [{name: cut(x) for name, x in batch.items()} for batch in self.batches]


def write(settings: Settings, hosts: int) -> None:
    """Draws the task of `settings.task`, and writes it into `settings.data`."""
    if settings.task == "language":
        from examples import lm_model
        from examples.data import docstrings

        corpus = docstrings.load()
        words = len(corpus.words)
        _save(settings, "params", lm_model.init(words, settings.width))
        drawn = lm_model.batches(corpus.tokens, words, hosts)
    else:
        of_clicks = clicks.batches(settings.rows, settings.ids, hosts, settings.examples)
        drawn = ({"ids": ids, "clicked": clicked} for ids, clicked in of_clicks)
    for number in range(settings.count):
        _save(settings, f"batch-{number}", next(drawn))


def read(settings: Settings) -> Task:
    """The task that was written; large tables are drawn by each host."""
    batches = [_load(settings, f"batch-{number}") for number in range(settings.count)]
    if settings.task == "language":
        return Task(_load(settings, "params"), batches)
    return Task({"table": clicks.table(settings.rows)}, batches)


def _path(settings, name):
    return pathlib.Path(settings.data) / f"{settings.task}-{name}.npz"


def _save(settings, name, arrays):
    np.savez(_path(settings, name), **arrays)


def _load(settings, name):
    with np.load(_path(settings, name)) as stored:
        return dict(stored)
