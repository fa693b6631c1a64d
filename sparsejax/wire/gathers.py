"""All-gathers and all-to-alls made of permutations, for any number of ranks.

    ring      n - 1 messages to the next neighbour, each what came last
    bruck     ceil(log2 n) messages, where latency counts
    doubling  log2 n messages, each all that is held; a fold for other numbers of ranks

As in `wire`, every function returns its result with the bytes that one rank sends. JAX
cannot see that what was gathered is the same on all ranks: results are typed as varying.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.axes import as_varying, varying_axes
from sparsejax.wire import channels
from sparsejax.wire.collectives import Permutation, Wire


def doubling_schedule(n: int) -> tuple[Permutation, tuple[Permutation, ...], Permutation]:
    """Who swaps with whom in a recursive doubling over any number of ranks.

    Returns:
        The fold (ranks from the largest power of two on send to a partner below), the
        swaps, and the unfold (the same pairs, back).
    """
    core = 1 << (n.bit_length() - 1)
    fold = tuple((extra, extra - core) for extra in range(core, n))
    swaps = tuple(
        tuple((me, me ^ (1 << k)) for me in range(core))
        for k in range(core.bit_length() - 1)
    )
    return fold, swaps, tuple((low, high) for high, low in fold)


GATHERS = ("auto", "ring", "doubling", "bruck")


@dataclasses.dataclass(frozen=True)
class Rings:
    """All ranks, in rings of one size.

    Attributes:
        ranks: How many ranks there are.
        size: How many of them a ring has; it divides them.
        stride: The distance of neighbours: 1 for rings of neighbouring ranks.
    """

    ranks: int
    size: int
    stride: int = 1

    def place(self, rank):
        """A rank's place in its ring."""
        return rank // self.stride % self.size

    def shift(self, distance: int) -> Permutation:
        """Each rank sends to the one so far ahead in its ring."""
        pairs = []
        for rank in range(self.ranks):
            place = self.place(rank)
            ahead = (place + distance) % self.size
            pairs.append((rank, rank + (ahead - place) * self.stride))
        return tuple(pairs)


def bruck_all_gather(
    x: jax.Array, wire: Wire, rings: Rings | None = None
) -> tuple[jax.Array, float]:
    """`all_gather` in ceil(log2 n) messages for any n; the result is typed as varying.

    After k rounds a rank holds the rows of itself and its next 2**k - 1 neighbours. Each
    round it gets as many again (fewer in the last) from the rank that far ahead.

    Args:
        x: This rank's row.
        wire: The ranks.
        rings: Ranks that gather among themselves; all together if None.
    """
    n = wire.ranks
    rings = rings or Rings(n, n)
    rows, cost = x[None], 0.0
    while len(rows) < rings.size:
        have = len(rows)
        send = rows[: min(have, rings.size - have)]
        got, sent = wire.permute(send, rings.shift(-have))
        rows, cost = jnp.concatenate([rows, got]), cost + sent
    return jnp.roll(rows, rings.place(wire.rank), axis=0), cost


def doubling_all_gather(x: jax.Array, wire: Wire) -> tuple[jax.Array, float]:
    """`all_gather` by recursive doubling, folded for any n; typed as varying.

    Partners swap everything they hold, log2 n times. Ranks beyond the largest power of
    two hand their row to a partner first and are given everything at the end.
    """
    n, me = wire.ranks, wire.rank
    # A row travels with the number of the rank it came from, plus one: what a rank that
    # gets no message receives is zeros, and says so.
    rows, names = wire.per_rank(
        (jnp.zeros((n, *x.shape), x.dtype), jnp.zeros(n, jnp.int32))
    )
    rows, names = rows.at[me].set(x), names.at[me].set(me.astype(jnp.int32) + 1)
    cost = 0.0
    for pairs, count in _rows_by_doubling(n):
        mine = jnp.nonzero(names, size=count, fill_value=n)[0].astype(jnp.int32)
        row = rows.at[mine].get(mode="fill", fill_value=0)
        name = names.at[mine].get(mode="fill", fill_value=0)
        row, row_bytes = wire.permute(row, pairs)
        name, name_bytes = wire.permute(name, pairs)
        where = jnp.where(name > 0, name - 1, n)
        rows = rows.at[where].set(row, mode="drop")
        names = names.at[where].set(name, mode="drop")
        cost += row_bytes + name_bytes
    return rows, cost


def _rows_by_doubling(n: int) -> list[tuple[Permutation, int]]:
    """Who sends to whom, and how many rows, in each message of `doubling_all_gather`."""
    fold, swaps, unfold = doubling_schedule(n)
    first = 2 if fold else 1
    held = [1, *(min(n, first << k) for k in range(len(swaps))), n]
    steps = zip([fold, *swaps, unfold], held, strict=True)
    return [(pairs, count) for pairs, count in steps if pairs]


def ring_all_gather(x: jax.Array, wire: Wire) -> tuple[jax.Array, float]:
    """`all_gather` in n - 1 messages to the next rank; the result is typed as varying."""
    n, me = wire.ranks, wire.rank
    onward = tuple((source, (source + 1) % n) for source in range(n))
    rows = wire.per_rank(jnp.zeros((n, *x.shape), x.dtype))
    rows = as_varying(rows, varying_axes(x)).at[me].set(x)

    def turn(step, rows):
        # What came last, or at first one's own, goes on.
        row, _ = wire.permute(rows[(me - step) % n], onward)
        return rows.at[(me - step - 1) % n].set(row)

    rows = lax.fori_loop(0, n - 1, turn, rows)
    return rows, (n - 1) * float(x.size * x.dtype.itemsize)


def gather_channel(wire: Wire, how: str) -> channels.Channel:
    """This rank's one message goes to all, by one of GATHERS."""
    if how == "auto":
        return channels.pull(wire)
    n = wire.ranks
    gather = {
        "ring": ring_all_gather,
        "doubling": doubling_all_gather,
        "bruck": bruck_all_gather,
    }[how]

    def send(x):
        return gather(x, wire)[0].reshape(n, *x.shape[1:])

    return channels.Channel(send, n, route(how, n))


def ring_channel(wire: Wire, rings: Rings) -> channels.Channel:
    """This rank's one message goes to all ranks of its ring, by Bruck's algorithm."""

    def send(x):
        return bruck_all_gather(x[0], wire, rings)[0]

    return channels.Channel(send, rings.size, route("bruck", rings.size))


def shift_channel(wire: Wire, rings: Rings, distance: int, parts: int) -> channels.Channel:
    """All of this rank's messages go, together, to the one so far ahead in its ring."""

    def send(x):
        return wire.permute(x, rings.shift(distance))[0]

    return channels.Channel(send, parts, channels.Route(parts))


def rotated_channel(wire: Wire, bucket: int) -> channels.Channel:
    """Message i goes to rank i, by permutations: to the next rank, the one after it, ...

    Every rank sends to another one at a time. So many messages are under way together; the
    next wait for them.
    """
    n = wire.ranks
    ring = Rings(n, n)

    def send(x):
        me, received = wire.rank, x
        for first in range(1, n, bucket):
            for distance in range(first, min(first + bucket, n)):
                row = lax.dynamic_index_in_dim(x, (me + distance) % n)
                row, _ = wire.permute(row, ring.shift(distance))
                at = (me - distance) % n
                received = lax.dynamic_update_index_in_dim(received, row, at, 0)
            received, x = lax.optimization_barrier((received, x))
        return received

    return channels.Channel(send, n, rotated_route(n, bucket))


def rotated_route(n: int, bucket: int) -> channels.Route:
    """What `rotated_channel` puts on the wire."""
    return channels.Route(n - 1, -(-(n - 1) // bucket))


def route(how: str, n: int) -> channels.Route:
    """What `gather_channel` puts on the wire, a row a message."""
    if how == "doubling":
        counts = [count for _, count in _rows_by_doubling(n)]
        # A row travels with the number of its rank.
        return channels.Route(sum(counts), waits(how, n), extra=1)
    return channels.Route(n - 1, 1 if how == "auto" else waits(how, n))


def waits(how: str, n: int) -> int:
    """How many messages of a gather wait for one another, each of them a latency."""
    if how == "doubling":
        return len(_rows_by_doubling(n))
    return (n - 1).bit_length() if how == "bruck" else n - 1
