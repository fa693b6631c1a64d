"""Columns of whole rows to who holds them, of several tables in one exchange.

On the wire: an all_to_all. Prior rows are as many as they are in a step, and a list has
room for all that a rank has read: a pmax of a number chooses one of eight lengths, in
sixteenths of the room. Delayed rows travel in lists of one length, without a choice: on
GPUs XLA overlaps with nothing what is inside one.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sparsejax.embrace.exchange import TableLists
from sparsejax.wire import Wire
from sparsejax.wire.channels import push


# How long lists may be, in sixteenths of their room.
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)


def columns_of(
    wire: Wire, rows: Sequence[jax.Array], counts: Sequence[jax.Array] | None = None
) -> tuple[list[jax.Array], jax.Array, float]:
    """Sends each rank its columns of this rank's rows.

    Args:
        wire: The ranks.
        rows: [room, n * columns] of each table.
        counts: int32 [n] of each table, how many rows at the beginning of its list each
            rank has, on all ranks; lists are sent whole if None.

    Returns:
        [n, room, columns] of each table, the rows of all ranks, zeros after the last; the
        bytes sent, and those for the choice of a length.
    """
    parts = _LENGTHS[-1:] if counts is None else _LENGTHS
    lengths = [[-(-len(x) * part // 16) for x in rows] for part in parts]
    lists = TableLists.of(wire, *lengths)
    most = [] if counts is None else [jnp.max(count) for count in counts]
    number, agreed = lists.agreed(most)
    n = wire.ranks
    split = [x.reshape(len(x), n, x.shape[1] // n) for x in rows]
    columns = [jnp.moveaxis(x, 1, 0) for x in split]
    return *lists.sent(push(wire), columns, number), agreed
