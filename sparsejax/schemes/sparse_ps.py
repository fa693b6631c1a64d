"""SparsePS: a sharded parameter server for sparse gradients, every rank also a server.

Zen, appendix B.1; the side of Parallax that serves sparse variables. Units belong to the
servers by equal ranges, as usual, and so the fullest part decides. What goes over the wire
is in `owners`. The sums come back in one of two ways:

    point_to_point  each server sends its sums to each worker
    broadcast       each server broadcasts its sums by a scatter and an all-gather, all
                    servers at once: a full server is not alone with its load
"""

import dataclasses

import jax

from sparsejax import index_codes, ladder, wire
from sparsejax.ownership import Contiguous, Ownership
from sparsejax.schemes import base, owners, owners_forecast


_PULLS = {"point_to_point": "gather", "broadcast": "spread"}


@dataclasses.dataclass(frozen=True)
class SparsePS(base.Scheme):
    """Push to servers of equal ranges, pull from them.

    Attributes:
        pull: "point_to_point" or "broadcast".
        code: How indices travel: "coo32" (the papers' COO, and the default), "coo16",
            "coo8", "bitmap", or "auto" for the cheapest.
        ownership: Which server has which unit.
        ratio: How far apart the message sizes are.
        wire_dtype: The dtype of the values while they travel; that of x if None.
    """

    pull: str = "point_to_point"
    code: str = "coo32"
    ownership: Ownership = Contiguous()
    ratio: float = 2.0
    wire_dtype: jax.typing.DTypeLike | None = None

    def __post_init__(self):
        base.check_choice("pull", self.pull, tuple(_PULLS))
        index_codes.parse(self.code)
        ladder.check_ratio(self.ratio)

    @property
    def needs_ranks(self):
        return self.ownership.needs_tables

    def init(self, like, ranks):
        return self.ownership.tables(like.shape[0], ranks)

    def __call__(self, x, state, axis_name, *, present=None):
        n = wire.ranks(axis_name)
        if n == 1 or x.size == 0:
            return base.nothing_to_send(x, state, axis_name)
        base.check_units(x)
        layout = self.ownership.over(x.shape[0], n, state)
        total, traffic = owners.reduce(x, present, axis_name, layout, self._options)
        state = self.ownership.after(state, total)
        return base.Reduced(total, None, state, traffic)

    def forecast(self, load):
        return owners_forecast.forecast(load, self.ownership, self._options)

    @property
    def _options(self):
        pull = _PULLS[self.pull]
        return owners.Options(self.code, self.code, self.ratio, self.wire_dtype, pull)
