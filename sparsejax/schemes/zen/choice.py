"""The bytes that Zen's alternatives would send, from the growth of sums in the last step.

All ranks compute them from numbers on which they have agreed, so all make the same choice.
The bytes are those of the message sizes and index codes that each scheme would use.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from sparsejax.schemes import doubling
from sparsejax.schemes.ag_sparse import AGSparse
from sparsejax.schemes.forecast import above_mean, merged
from sparsejax.schemes.owners.push_pull import Stages
from sparsejax.schemes.zen.hierarchical import HierarchicalCentralization
from sparsejax.units.units import Units
from sparsejax.wire import collectives, ladder
from sparsejax.wire.collectives import Wire


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """The choice between owners and an alternative for one array.

    Attributes:
        x: The array.
        wire: The ranks.
        owners: The push and pull of Balanced Parallelism for this array.
        most: int32 [], the most non-zero units of any rank, equal on all ranks.
        curve: float32, the densities of partial sums in the last step; see `growth`.
    """

    x: Units
    wire: Wire
    owners: Stages
    most: jax.Array
    curve: jax.Array

    @functools.cached_property
    def counts(self) -> jax.Array:
        """int32 [hops + 1], the expected entries before each hop, and in the sum.

        They are those of the last step, scaled by the change of one rank's entries since.
        In a first step sums are assumed to be no fuller than one rank's array.
        """
        curve = self.curve[: doubling.hops(self.wire.ranks) + 1]
        scale = self.most.astype(jnp.float32) / jnp.maximum(curve[0], 1e-12)
        counts = jnp.minimum(curve * scale, self.x.shape[0])
        counts = jnp.round(counts).astype(jnp.int32)
        return jnp.where(curve[0] > 0, counts, self.most)

    @functools.cached_property
    def owner_bytes(self) -> jax.Array:
        """float32 [], the bytes that one rank is expected to send with owners."""
        n = self.wire.ranks
        ends = self.counts[jnp.array([0, doubling.hops(n)])]
        mean = ends.astype(jnp.float32) / n
        # The fullest of n parts of each of n ranks, and of n parts of the sum.
        over = jnp.array([above_mean(n * n), above_mean(n)], jnp.float32)
        fullest = jnp.ceil(mean + over * jnp.sqrt(mean)).astype(jnp.int32)
        fullest = jnp.minimum(fullest, self.owners.layout.width)
        return self.owners.plan.expected_bytes(fullest[0], fullest[1])

    def prefers_one_round(self, one_round: AGSparse) -> jax.Array:
        """Returns whether one gather of all entries takes less time than owners do."""
        gathered = one_round.expected_bytes(self.x, self.wire, self.most)
        return gathered < self.owner_bytes + ladder.ROUND

    def prefers_hierarchy(self, hierarchy: HierarchicalCentralization) -> jax.Array:
        """Returns whether Hierarchical Centralization sends fewer bytes than owners do.

        It must also send less than an all-reduce, even if this step's sets are disjoint.
        """
        sums = jnp.array(merged(self.wire.ranks), jnp.float32)
        disjoint = jnp.minimum(self.most.astype(jnp.float32) * sums, self.x.shape[0])
        plan = hierarchy.plan_of(self.x, self.wire)
        most_bytes = plan.expected_bytes(disjoint.astype(jnp.int32))
        expected = plan.expected_bytes(self.counts)
        seen = self.curve[0] > 0
        pays = collectives.pays(most_bytes, plan.dense_bytes)
        return seen & pays & (expected < self.owner_bytes)
