"""SparsePS: a sharded parameter server for sparse gradients, with a server on each rank.

Zen, appendix B.1; the part of Parallax for sparse variables. Servers own equal ranges of
units by default, so the fullest range determines the length of messages. `owners` describes
the messages. The sums return in one of two ways:

    point_to_point  each server sends its sums to each worker
    broadcast       each server broadcasts its sums by a scatter and an all-gather, all
                    servers at once, so the load of a full server is divided
"""

import dataclasses

import jax

from sparsejax import arguments
from sparsejax.schemes.baselines.pulls import Spread
from sparsejax.schemes.owners.pieces import SparseScheme
from sparsejax.schemes.owners.pulls import Gather
from sparsejax.schemes.zen.balanced import BalancedParallelism
from sparsejax.units.ownership import Contiguous, Ownership
from sparsejax.wire import index_codes, ladder


_PULLS = {"point_to_point": Gather(), "broadcast": Spread()}


@dataclasses.dataclass(frozen=True)
class SparsePS(SparseScheme):
    """Sums entries on servers of equal ranges: a sharded parameter server.

    Every rank is a server, too.

    Attributes:
        pull: How sums come back: "point_to_point", each server to each worker; or
            "broadcast", each server by a scatter and an all-gather.
        code: How indices are sent: "coo32" (the papers' own), "coo16", "coo8", "bitmap", or
            "auto" for the cheapest.
        ownership: Which server owns which unit.
        ratio: The ratio of successive message sizes.
        wire_dtype: The dtype of the values on the wire; that of x if None.

    Example:
        >>> tx = sparsejax.sync(sparsejax.schemes.SparsePS(pull="broadcast"))

    References:
        Wang et al., Zen: Empowering Distributed Training with Sparsity-driven Data
        Synchronization, OSDI 2025, appendix B.1

        Kim et al., Parallax: Sparsity-aware Data Parallel Training of Deep Neural Networks,
        EuroSys 2019
    """

    pull: str = "point_to_point"
    code: str = "coo32"
    ownership: Ownership = Contiguous()
    ratio: float = 2.0
    wire_dtype: jax.typing.DTypeLike | None = None

    def __post_init__(self):
        arguments.check_one_of("pull", self.pull, tuple(_PULLS))
        index_codes.parse(self.code)
        ladder.check_ratio(self.ratio)
        arguments.check_dtype("wire_dtype", self.wire_dtype)

    def init(self, like, wire):
        return self._scheme.init(like, wire)

    def __call__(self, x, state, wire, mean=False):
        return self._scheme(x, state, wire, mean=mean)

    def rows(self, tables, wire, mean=False):
        return self._scheme.rows(tables, wire, mean)

    def forecast(self, load):
        return self._scheme.forecast(load)

    @property
    def _scheme(self):
        return BalancedParallelism(
            self.ownership,
            self.code,
            self.code,
            self.ratio,
            self.wire_dtype,
            _PULLS[self.pull],
        )
