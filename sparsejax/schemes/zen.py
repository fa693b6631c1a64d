"""Zen: the better of the two optima of Theorem 1.

On the wire: what `HierarchicalCentralization` or `BalancedParallelism` puts there. The
paper's equations (1) and (2) compare them by how sets grow when they are added up. Between
two ranks the answer needs no measurement: with g the growth over both, one swap of a whole
set against (g + 1) / 2 of it, and g is at least 1. With more ranks Balanced Parallelism is
the better one unless sets hardly overlap, and there it loses little (9% in the paper's
worst case), so it is the default.
"""

import dataclasses

import jax

from sparsejax import wire
from sparsejax.errors import ArgumentError
from sparsejax.ownership import Ownership, StripedHash
from sparsejax.schemes import base
from sparsejax.schemes.balanced_parallelism import BalancedParallelism
from sparsejax.schemes.hierarchical_centralization import HierarchicalCentralization


@dataclasses.dataclass(frozen=True)
class Zen(base.Scheme):
    """Chooses between Balanced Parallelism and Hierarchical Centralization.

    Attributes:
        optimum: "balanced", "hierarchical", or "auto": the latter for two ranks, the
            former for more.
        ownership: Who owns which unit, for Balanced Parallelism.
        wire_dtype: The dtype of the values while they travel; that of x if None.
    """

    optimum: str = "auto"
    ownership: Ownership = StripedHash()
    wire_dtype: jax.typing.DTypeLike | None = None

    def __post_init__(self):
        if self.optimum not in ("auto", "balanced", "hierarchical"):
            raise ArgumentError(
                'optimum must be "auto", "balanced" or "hierarchical", '
                f"got {self.optimum!r}."
            )

    @property
    def needs_ranks(self):
        return self._balanced().needs_ranks

    def init(self, like, ranks):
        return self._balanced().init(like, ranks)

    def __call__(self, x, state, axis_name, *, present=None):
        two = wire.ranks(axis_name) == 2
        if self.optimum == "hierarchical" or (self.optimum == "auto" and two):
            scheme = HierarchicalCentralization(wire_dtype=self.wire_dtype)
        else:
            scheme = self._balanced()
        return scheme(x, state, axis_name, present=present)

    def _balanced(self):
        return BalancedParallelism(ownership=self.ownership, wire_dtype=self.wire_dtype)
