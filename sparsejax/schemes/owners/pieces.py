"""The sum of which each rank needs one piece: a push to owners, and no pull.

On the wire, with n ranks:

    agree   one pmax of three numbers: see `counts`
    push    all_to_all: to each rank the entries of its piece; a reduce-scatter where that
            sends no more bytes

Rank i owns the i-th of n equal runs of units: its piece. Where entries lie decides how even
pieces are, and no hash, and the fullest one decides the length of all messages. Each unit
is added up in one place, which is the only one that needs it.
"""

import jax
import jax.numpy as jnp

from sparsejax.schemes import base
from sparsejax.schemes.or_dense import or_dense
from sparsejax.schemes.owners.push_pull import PushPull
from sparsejax.units import bits
from sparsejax.units.ownership import Contiguous
from sparsejax.units.units import Units, unit_bytes
from sparsejax.wire.collectives import Wire


def scatter(
    x: Units, count: int, wire: Wire, how: PushPull | None
) -> tuple[jax.Array, base.Traffic]:
    """This rank's piece of the sum, [count, ...], and what was sent for it.

    Args:
        x: [units, ...], n pieces of as many units, whole words of 32.
        count: The units of a piece that are used, its first ones.
        wire: The ranks.
        how: How entries travel; None sends a dense array.
    """
    n = wire.ranks
    if n == 1:
        done = base.nothing_to_send(x, (), wire)
        return done.total[:count], done.traffic
    if how is None or x.size == 0:
        total, sent = _densely(x, count, wire)
        return total, base.traffic(base.stage(sent, sent, 1), base.stage(), dense=sent)
    base.check_units(x)
    stages = how.over(x, wire, Contiguous().over(x.shape[0], n))
    wire, plan = stages.wire, stages.plan
    known = stages.count(x, x.present())
    dense = (n - 1) * count * unit_bytes(x, wire.travelling(x.dtype))

    def by_entries(x):
        total, push = stages.by_entries(x, known, comes_back=False)
        return total[:count].astype(x.dtype), push

    def densely(x):
        total, sent = _densely(x, count, wire)
        return total, base.stage(sent, sent, 1, known.imbalance)

    entry_bytes = plan.push_bytes(known.fullest)
    total, push = or_dense(wire, entry_bytes, dense, by_entries, densely, x)
    return total, base.traffic(
        push,
        base.stage(),
        scalars=known.sent,
        dense=dense,
        before=known.most.astype(jnp.float32) / (n * count),
        after=wire.maximum(bits.density(total))[0],
    )


def _densely(x, count, wire):
    """A reduce-scatter, in the dtype in which values travel."""
    dense = x.dense().astype(wire.travelling(x.dtype))
    pieces = dense.reshape(wire.ranks, x.shape[0] // wire.ranks, *x.shape[1:])
    total, sent = wire.reduce_scatter(pieces[:, :count])
    return total.astype(x.dtype), sent
