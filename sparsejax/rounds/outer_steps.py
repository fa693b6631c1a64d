"""The step between two rounds: it exchanges the ranks' offsets, and moves the anchor.

    mean    = sync(anchor - parameters of this rank)    over the wire
    update  = outer(mean)                               the same on all ranks
    anchor  = anchor + update
    offset  = blend (offset - update)

The last line is where a rank continues. With a blend of 0 it continues from the anchor.
Where the exchange began some steps ago, those steps would be lost: with a blend b the
parameters of a rank become b times what they were plus 1 - b times the anchor.

The exchange is a function of its own, so that `overlap` can make a program of it.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from sparsejax.rounds.state import FragmentState, OuterState
from sparsejax.state.per_rank import RankState
from sparsejax.transforms.buckets import of_part


class LocalRanks(Protocol):
    """The ranks in a call: one inside `shard_map`, or all stacked."""

    def differences(self, offset: RankState) -> Any:
        """The anchor minus the parameters of a rank, as `sync` is given it."""
        ...


@dataclasses.dataclass(frozen=True)
class OuterSteps:
    """The exchange of a fragment, and the step of the outer optimizer.

    Attributes:
        outer: The optimizer of the anchor.
        sync: The chain that synchronizes.
        blend: The share of its own parameters that a rank keeps.
    """

    outer: optax.GradientTransformationExtraArgs
    sync: optax.GradientTransformationExtraArgs
    blend: float = 0.0

    def init(self, anchor: Any) -> OuterState:
        """The first state of a fragment, in the dtypes of the offsets."""
        return OuterState(self.first_sync(anchor), self.outer.init(anchor))

    def first_sync(self, anchor: Any) -> Any:
        """The first state of the synchronization of a fragment."""
        with of_part():
            return self.sync.init(anchor)

    def exchange(
        self, ranks: LocalRanks, outgoing: RankState, state: Any, anchor: Any, **extra: Any
    ) -> tuple[Any, Any]:
        """Sends the ranks' offsets; the only part that uses the network.

        Args:
            ranks: The ranks.
            outgoing: The offsets as they were when the exchange began.
            state: Of the synchronization.
            anchor: In the dtypes of the offsets.
            **extra: Further arguments of the synchronization.

        Returns:
            What `outer` is given as a gradient, the same on all ranks, and the next state
            of the synchronization.
        """
        differences = ranks.differences(outgoing)
        with of_part():
            return self.sync.update(differences, state, anchor, **extra)

    def apply(
        self, exchanged: tuple[Any, Any], state: FragmentState, anchor: Any
    ) -> tuple[Any, FragmentState]:
        """Moves the anchor; nothing is sent.

        Args:
            exchanged: What `exchange` has returned.
            state: Of the fragment.
            anchor: In the dtypes of the offsets.

        Returns:
            The updates of the anchor, and the next state.
        """
        mean, sync = exchanged
        updates, outer = self.outer.update(mean, state.of_outer.outer, anchor)
        offset = _blended(state.offset, updates, self.blend)
        return updates, state._replace(offset=offset, of_outer=OuterState(sync, outer))


def _blended(offset, updates, blend):
    """The share of the offsets from the new anchor that ranks keep, [ranks, ...]."""
    kept = lambda x, update: blend * (x - update.astype(x.dtype))
    value = offset.value
    if not blend:  # Nothing is kept, NaN neither.
        return offset.with_value(jax.tree.map(jnp.zeros_like, value))
    return offset.with_value(jax.tree.map(kept, value, updates))
