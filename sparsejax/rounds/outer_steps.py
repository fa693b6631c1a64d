"""The step between two rounds: it exchanges the ranks' offsets, and moves the anchor.

    mean    = sync(anchor - parameters of this rank)    on the wire
    update  = outer(mean)                               equal on all ranks
    anchor  = anchor + update
    offset  = blend (offset - update)

The last line determines where a rank continues: with a blend of 0 from the anchor. If the
exchange began some steps ago, those steps would then be lost. With a blend b the new
parameters of a rank are b times its old ones plus 1 - b times the new anchor.

The exchange is a separate function, so that `overlap` can compile it as a program.
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
    """The protocol of the ranks in a call: `OnRank`, or `Stacked`."""

    def differences(self, offset: RankState) -> Any:
        """Returns anchor minus parameters of a rank, in the form that `sync` takes."""
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
        """Returns the first state for the anchor of a fragment, in the offsets' dtypes."""
        return OuterState(self.first_sync(anchor), self.outer.init(anchor))

    def first_sync(self, anchor: Any) -> Any:
        """Returns the first state of the synchronization of a fragment."""
        with of_part():
            return self.sync.init(anchor)

    def exchange(
        self, ranks: LocalRanks, outgoing: RankState, state: Any, anchor: Any, **extra: Any
    ) -> tuple[Any, Any]:
        """Sends the ranks' offsets; no other part uses the network.

        Args:
            ranks: The ranks.
            outgoing: The offsets as they were when the exchange began.
            state: The state of the synchronization.
            anchor: The anchor, in the dtypes of the offsets.
            **extra: Further arguments of the synchronization.

        Returns:
            The gradient for `outer`, equal on all ranks, and the next state of the
            synchronization.
        """
        differences = ranks.differences(outgoing)
        with of_part():
            return self.sync.update(differences, state, anchor, **extra)

    def apply(
        self, exchanged: tuple[Any, Any], state: FragmentState, anchor: Any
    ) -> tuple[Any, FragmentState]:
        """Moves the anchor; nothing is sent.

        Args:
            exchanged: The result of `exchange`.
            state: The state of the fragment.
            anchor: The anchor, in the dtypes of the offsets.

        Returns:
            The updates of the anchor, and the next state.
        """
        mean, sync = exchanged
        updates, outer = self.outer.update(mean, state.of_outer.outer, anchor)
        offset = _blended(state.offset, updates, self.blend)
        return updates, state._replace(offset=offset, of_outer=OuterState(sync, outer))


def _blended(offset, updates, blend):
    """Returns the offsets from the new anchor times the blend, [ranks, ...]."""
    kept = lambda x, update: blend * (x - update.astype(x.dtype))
    value = offset.value
    if not blend:  # Not 0 * x: a NaN must not be kept.
        return offset.with_value(jax.tree.map(jnp.zeros_like, value))
    return offset.with_value(jax.tree.map(kept, value, updates))
