"""Columns of whole rows to their owners, of several tables in one exchange.

On the wire: an all_to_all. Prior rows are as many as they are in a step, and a list has
room for all that a rank has read: it has one of eight lengths, in sixteenths of the room,
which all ranks know from the ids that they have gathered. Delayed rows travel in lists of
one length, without a choice: on GPUs XLA overlaps with nothing what is inside one.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sparsejax.embrace.exchange import TableLists
from sparsejax.wire.channels import push
from sparsejax.wire.collectives import Wire


# How long lists may be, in sixteenths of their room.
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)


def columns_of(
    wire: Wire, rows: Sequence[jax.Array], counts: Sequence[jax.Array] | None = None
) -> tuple[list[jax.Array], jax.Array]:
    """Sends each rank its columns of this rank's rows.

    Args:
        wire: The ranks.
        rows: [room, n * columns] of each table.
        counts: int32 [n] of each table, how many rows at the beginning of its list each
            rank has, on all ranks; lists are sent whole if None.

    Returns:
        [n, room, columns] of each table, the rows of all ranks, zeros after the last; and
        the bytes sent.
    """
    parts = _LENGTHS[-1:] if counts is None else _LENGTHS
    lengths = [[-(-len(x) * part // 16) for x in rows] for part in parts]
    lists = TableLists.of(wire, *lengths)
    number = 0
    if counts is not None:
        number = wire.assume_same(lists.number([jnp.max(count) for count in counts]))
        number = wire.same_elsewhere(number)
    n = wire.ranks
    split = [x.reshape(len(x), n, x.shape[1] // n) for x in rows]
    return lists.sent(push(wire), [jnp.moveaxis(x, 1, 0) for x in split], number)
