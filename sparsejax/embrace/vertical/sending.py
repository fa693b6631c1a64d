"""Sends columns of whole rows to the ranks that hold them, for several tables at once.

On the wire: an all_to_all. The number of prior rows differs by step, and a list has the
capacity for all rows that a rank has read: it is sent with one of eight lengths, in
sixteenths of the capacity, which all ranks compute from the ids that they have gathered.
Lists of delayed rows have one length, without a switch, because on GPUs XLA does not
overlap a collective inside a switch with other work.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sparsejax.embrace.exchange import TableLists
from sparsejax.wire.channels import push
from sparsejax.wire.collectives import Wire


# The lengths of lists, in sixteenths of their capacity.
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)


def columns_of(
    wire: Wire, rows: Sequence[jax.Array], counts: Sequence[jax.Array] | None = None
) -> tuple[list[jax.Array], jax.Array]:
    """Sends each rank its columns of this rank's rows.

    Args:
        wire: The wire.
        rows: [room, n * columns] for each table.
        counts: int32 [n] for each table, equal on all ranks: the number of rows at the head
            of the list of each rank. If None, lists are sent whole.

    Returns:
        [n, room, columns] for each table, the rows of all ranks, padded with zeros; and the
        bytes sent.
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
