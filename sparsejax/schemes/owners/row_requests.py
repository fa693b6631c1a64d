"""Sends rows of a table that is sharded by rows to the ranks that read them.

On the wire, with n ranks, each of which reads K rows:

    agree    one pmax: the most rows that a rank reads of one shard
    ask      all_to_all of slots: to each rank those of its shard that this rank reads
    answer   all_to_all of rows: one for each slot asked for

A row that a rank reads several times is asked for once. Rank i holds the i-th of n equal
ranges of rows. Messages have a capacity of up to K rows, and one of several sizes: all
ranks take the smallest that holds the fullest message. The table itself is not moved.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.schemes.owners.row_push import RowsByOwner, in_messages
from sparsejax.units import bits
from sparsejax.wire import channels
from sparsejax.wire.collectives import Wire
from sparsejax.wire.sizes import Sizes, send_heads


def read(
    ids: jax.Array,
    height: int,
    wire: Wire,
    rows_of: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Returns the rows of ids, [*ids.shape, ...]; ids out of range are clipped.

    Args:
        ids: Integers, row numbers of the whole table.
        height: The number of rows of a shard.
        wire: The ranks, over which the table is sharded.
        rows_of: A function of slots int32 [m] of this rank's shard, with the sentinel
            `height` for no row, which returns their rows [m, ...].
    """
    n = wire.ranks
    flat = jnp.clip(ids.reshape(-1), 0, n * height - 1).astype(jnp.int32)
    if n == 1 or not flat.size:
        rows = rows_of(flat)
        return rows.reshape(*ids.shape, *rows.shape[1:])
    room = min(flat.size, height)
    asked = RowsByOwner.of(flat, [0, height], n)
    place, slots = in_messages(asked.keys, asked.starts[:, 0], height, room)

    most, _ = wire.maximum(jnp.max(asked.counts))
    sizes = Sizes.down_to_share(room, n)
    number, channel = sizes.number(most), channels.push(wire)
    words = lax.bitcast_convert_type(slots, jnp.uint32)
    given = send_heads(channel, words, sizes.rooms, number, n)
    inside = lax.iota(jnp.int32, room) < jnp.array(sizes.rooms, jnp.int32)[number]
    wanted = lax.bitcast_convert_type(given, jnp.int32)
    rows = rows_of(jnp.where(inside, wanted, height).reshape(-1))

    words = bits.words_of(rows.reshape(n, room, -1))
    each = words.shape[-1]
    columns = [each * size for size in sizes.rooms]
    received = send_heads(channel, words.reshape(n, -1), columns, number, n)
    numbers = math.prod(rows.shape[1:])
    found = bits.rows_of(received.reshape(n * room, each), rows.dtype, numbers)
    found = found[place[asked.of_row]]
    return found.reshape(*ids.shape, *rows.shape[1:])
