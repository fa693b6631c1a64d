"""Columns of whole rows to who holds them, of several tables in one exchange.

On the wire: an all_to_all for each dtype. Prior rows are as many as they are in a step, and
a list has room for all that a rank has read: a pmax of a number chooses one of eight
lengths, in sixteenths of the room. Delayed rows travel in lists of one length, without a
choice: on GPUs XLA overlaps with nothing what is inside one.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import axes
from sparsejax.embrace.exchange import pieces
from sparsejax.wire import Wire


# How long lists may be, in sixteenths of their room.
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)


def columns_of(wire: Wire, rows: Sequence[jax.Array]) -> tuple[list[jax.Array], float]:
    """Sends each rank its columns of this rank's rows.

    Args:
        wire: The ranks.
        rows: [k, n * columns] of each table.

    Returns:
        [n, k, columns] of each table, the rows of all ranks, and the bytes sent.
    """
    n, sent = wire.ranks, 0.0
    received = [jnp.zeros((n, len(x), x.shape[1] // n), x.dtype) for x in rows]
    alike: dict[Any, list[int]] = {}
    for i, x in enumerate(rows):
        if x.size:
            alike.setdefault(x.dtype, []).append(i)
    for places in alike.values():
        parts = (rows[i].reshape(len(rows[i]), n, -1) for i in places)
        flat = [jnp.moveaxis(part, 1, 0).reshape(n, -1) for part in parts]
        arrived, cost = wire.all_to_all(jnp.concatenate(flat, axis=1))
        sent += cost
        each = pieces(arrived, [x.shape[1] for x in flat])
        for i, part in zip(places, each, strict=True):
            received[i] = part.reshape(received[i].shape)
    return received, sent


def columns_of_some(
    wire: Wire, rows: Sequence[jax.Array], counts: Sequence[jax.Array]
) -> tuple[list[jax.Array], Any, float]:
    """The same for rows at the beginnings of lists, of which only these are sent.

    Args:
        wire: The ranks.
        rows: [room, n * columns] of each table.
        counts: int32 [n] of each table, how many rows each rank has, on all ranks.

    Returns:
        [n, room, columns] of each table, zeros after the last, the bytes sent, and those
        for the choice.
    """
    shortened = [[-(-len(x) * part // 16) for x in rows] for part in _LENGTHS]
    lengths = list(dict.fromkeys(map(tuple, shortened)))
    if len(lengths) == 1 or wire.ranks == 1:
        received, sent = columns_of(wire, rows)
        return received, jnp.float32(sent), 0.0
    most = [jnp.max(count) for count in counts]
    too_short = [
        jnp.any(jnp.stack([m > k for m, k in zip(most, each, strict=True)]))
        for each in lengths[:-1]
    ]
    number = jnp.sum(jnp.stack(too_short), dtype=jnp.int32)
    number, agreed = wire.maximum(number)

    def of_lengths(each):
        def send(*rows):
            cut = [x[:k] for x, k in zip(rows, each, strict=True)]
            received, sent = columns_of(wire, cut)
            filled = [
                jnp.pad(x, [(0, 0), (0, len(whole) - x.shape[1]), (0, 0)])
                for x, whole in zip(received, rows, strict=True)
            ]
            return filled, jnp.float32(sent)

        return send

    received, sent = axes.switch(number, [of_lengths(each) for each in lengths], *rows)
    return received, sent, agreed
