"""Reduce-scatters of entries, for sums of which each rank needs one piece: a push alone.

On the wire, with n ranks:

    agree   one pmax of three numbers: see `counts`
    push    all_to_all: to each rank the entries of its piece; a reduce-scatter where that
            sends no more bytes

Rank i owns the i-th of n equal ranges of units: its piece. Pieces are ranges and not parts
of a hash, so they may be uneven, and the fullest determines the length of all messages.
Each unit is summed by the only rank that needs it.
"""

import jax.numpy as jnp

from sparsejax.schemes import base
from sparsejax.schemes.or_dense import or_dense
from sparsejax.schemes.owners import row_pieces
from sparsejax.schemes.owners.pulls import Gather
from sparsejax.schemes.owners.push_pull import PushPull
from sparsejax.units import bits
from sparsejax.units.ownership import Contiguous
from sparsejax.units.units import unit_bytes
from sparsejax.wire import collectives
from sparsejax.wire.ladder import Message


class SparseScheme(base.Scheme):
    """A scheme of entries, whose reduce-scatter pushes entries to the ranks that need them.

    Example:
        >>> pieces = sparsejax.schemes.owners.pieces
        >>> isinstance(sparsejax.schemes.Zen(), pieces.SparseScheme)
        True
    """

    @property
    def push_pull(self) -> PushPull:
        """The push of entries to the ranks that need them."""
        # Without a pull there is less to compile, so sizes are closer, which pads less.
        message = Message(ratio=2**0.5)
        return PushPull(message, message, Gather(), self.wire_dtype)

    def scatter(self, x, count, wire):
        n = wire.ranks
        if n == 1 or x.size == 0:
            return base.scatter_densely(x, count, wire)
        base.check_units(x)
        stages = self.push_pull.over(x, wire, Contiguous().over(x.shape[0], n))
        wire, plan = stages.wire, stages.plan
        known = stages.count(x, x.present())
        dense = float(n - 1) * count * unit_bytes(x, wire.travelling(x.dtype))

        def by_entries(x):
            total, push = stages.by_entries(x, known, stages.travelling)
            return total[:count].astype(x.dtype), push

        def densely(x):
            total, traffic = base.scatter_densely(x, count, wire)
            return total, traffic.push._replace(imbalance=known.imbalance)

        pays = collectives.pays(plan.push_bytes(known.fullest), dense)
        total, push = or_dense(pays, by_entries, densely, x)
        return total, base.traffic(
            push,
            base.stage(),
            scalars=known.sent,
            dense=dense,
            before=known.most.astype(jnp.float32) / (n * count),
            after=wire.maximum(bits.density(total))[0],
        )

    def scatter_rows(self, tables, wire):
        return row_pieces.scatter(tables, wire.narrowed(self.wire_dtype))
