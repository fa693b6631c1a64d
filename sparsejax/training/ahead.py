"""Checks of steps that are given the next batch, and the record of the announced batch."""

import warnings
from typing import Any

import jax
import numpy as np

from sparsejax.errors import ArgumentError, UntoldBatchWarning
from sparsejax.state.observing import Observed
from sparsejax.training.variables import kinds_of


MISSING: Any = object()


def check_chain(seen: Observed, by_rows: frozenset[str], capacity: Any) -> bool:
    """Returns whether a chain needs the next batch; raises if it could not use it.

    Args:
        seen: The result of `observing.observed` for the chain.
        by_rows: The paths of leaves whose gradients it accepts as `RowGrads`.
        capacity: The `capacity` of the trainer.
    """
    parts = [part for part in seen.ahead if part.paths or not part.inside]
    for part in parts:
        if part.inside:
            raise ArgumentError(
                "embrace_sync(vertical=True) delays rows to the very next step, and stands "
                "in a wrapper that leaves steps out, or takes others (accumulate, "
                "warm_up). Remove the wrapper, or use embrace_sync(vertical=False)."
            )
        for path in part.paths:
            if path not in by_rows:
                raise ArgumentError(
                    f"embrace_sync(vertical=True) delays rows of {path!r}, and no "
                    "sparsejax.lazy optimizer directly follows it, which alone can apply "
                    "delayed rows: optax.chain(sparsejax.embrace_sync(), "
                    "sparsejax.lazy(optax.adam(1e-3))); or use embrace_sync("
                    "vertical=False)."
                )
        if capacity is not None:
            raise ArgumentError(
                "data_parallel(capacity=...) shortens lists of rows that all ranks have, "
                "and embrace_sync(vertical=True) has lists of its own: leave capacity out, "
                "and give it to column_lookup(..., capacity=...)."
            )
    return bool(parts)


def check_next(is_ahead: bool, batch: Any, next_batch: Any) -> None:
    """Raises unless the next batch is given if and only if needed, with equal shapes."""
    if not is_ahead:
        if next_batch is MISSING:
            return
        raise ArgumentError(
            "trainer.step was given a next batch, and nothing in tx needs it: leave it "
            "out, or put sparsejax.embrace_sync() in front of sparsejax.lazy(...)."
        )
    if next_batch is MISSING:
        raise ArgumentError(
            "trainer.step(state, batch) was not given the next batch, which "
            "embrace_sync(vertical=True) needs: for batch, next_batch in "
            "sparsejax.embrace.lookahead(batches): trainer.step(state, batch, next_batch). "
            "None says that there is no next one."
        )
    if batch is None:
        raise ArgumentError(
            "trainer.step was given None for its batch: the data has ended. With its last "
            "batch the next one is None, as sparsejax.embrace.lookahead has it, and that "
            "step delays nothing."
        )
    if next_batch is None:
        return
    kinds = [kinds_of(x) for x in (batch, next_batch)]
    for path in sorted(kinds[0].keys() | kinds[1].keys()):
        own, following = (kind.get(path, "missing") for kind in kinds)
        if own != following:
            raise ArgumentError(
                f"the next batch has another shape than this one: {path or 'all'!r} is "
                f"{own} here, and {following} there. Fill it up with examples of weight 0 "
                "(data_parallel(..., weight=...)), leave it out, or end with next_batch="
                "None, and train on it as a run of its own."
            )


class ReportedBatch:
    """The record of the last step: its state, and the next batch that it was given."""

    def __init__(self, processes: int = 1):
        """Makes an empty record.

        Args:
            processes: The number of processes that have devices of the mesh.
        """
        self._processes = processes
        self._batch: Any = None
        self._step: Any = None

    def after(self, step: Any, next_batch: Any) -> None:
        """Records a step.

        Args:
            step: `TrainState.step` of the state that it returned.
            next_batch: The next batch that it was given; None if no rows are delayed.
        """
        self._step, self._batch = step, next_batch

    def is_kept(self, step: Any, batch: Any) -> bool:
        """Returns whether a step on this batch can be taken without a flush before it.

        It can if the batch is the announced one, or if no rows are delayed: then it reads
        no delayed rows. On a mesh of several processes the answer is yes for another batch,
        too, with a warning: each process sees only its own part of a batch, and a process
        that flushed alone would wait for the others forever.

        Args:
            step: `TrainState.step` of the state that the step is given.
            batch: The batch.
        """
        if step is not self._step:
            return False  # not the state of the last step, but one from a checkpoint, say
        if self._batch is None or _are_same(batch, self._batch):
            return True
        if self._processes > 1:
            warnings.warn(
                "trainer.step was given another batch than the next_batch of the last "
                "step. Of several processes each sees its own part, so none applies the "
                "delayed rows: rows that this batch reads may be one step old. No "
                "gradient is lost, and `stale` in the state of embrace_sync counts them. "
                "Give the batch that was next_batch, or let all processes begin with "
                "state = trainer.flush(state).",
                UntoldBatchWarning,
                stacklevel=3,
            )
            return True
        return False


def _are_same(ours, theirs):
    """Returns whether two batches are the same arrays, or have equal elements."""
    if ours is theirs:
        return True
    if jax.tree.structure(ours) != jax.tree.structure(theirs):
        return False
    pairs = list(zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True))
    return all(a is b or _are_equal(a, b) for a, b in pairs)


def _are_equal(a, b):
    """Returns whether two arrays are equal; of global ones, this process's shards."""
    own = []
    for x in (a, b):
        is_here = not isinstance(x, jax.Array) or x.is_fully_addressable
        own.append([x] if is_here else [shard.data for shard in x.addressable_shards])
    if not (len(own[0]) == len(own[1]) and np.shape(a) == np.shape(b)):
        return False
    pairs = zip(*own, strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)
