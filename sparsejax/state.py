"""Types of states that version 0.1 saved, so that a pickle of them can be read.

Such a state is recognised by every transformation, whose error says how to go on from it.
"""

from typing import Any, NamedTuple

from sparsejax.transforms.state.per_rank import PerRank as PerRank


class SparsifyState(NamedTuple):
    """The state of a sparsifier in version 0.1."""

    step: Any
    residual: Any
    momentum: Any
    sparsifiers: Any
    skipped: Any


class SyncState(NamedTuple):
    """The state of a synchronization in version 0.1."""

    step: Any
    schemes: Any
    residual: Any
    pending: Any
    traffic: Any
    sparsifier: Any = None
