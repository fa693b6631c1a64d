"""All-gathers and all-to-alls made of permutations, for any number of ranks.

    ring      n - 1 messages to the next neighbour, each the row received last
    bruck     ceil(log2 n) messages, the fewest, where latency dominates
    doubling  log2 n messages, each of all rows held so far; where n is no power of two, a
              fold before and an unfold after them

As in `collectives`, each gather returns its result and the bytes that one rank sends. JAX
cannot infer that gathered rows are equal on all ranks, so results are typed as varying.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.axes import as_varying, varying_axes
from sparsejax.wire import channels
from sparsejax.wire.collectives import Permutation, Wire


def doubling_schedule(n: int) -> tuple[Permutation, tuple[Permutation, ...], Permutation]:
    """Returns the permutations of a recursive doubling over any number of ranks.

    Returns:
        The fold, in which the ranks from the largest power of two on each send to a partner
        below it; the swaps; and the unfold, which is the fold in the other direction.
    """
    folded, count = doubling_counts(n)
    core = n - folded
    fold = tuple((extra, extra - core) for extra in range(core, n))
    swaps = tuple(tuple((me, me ^ (1 << k)) for me in range(core)) for k in range(count))
    return fold, swaps, tuple((low, high) for high, low in fold)


def doubling_counts(n: int) -> tuple[int, int]:
    """Returns the ranks that a recursive doubling folds, and its number of swaps.

    They are those of `doubling_schedule(n)`, whose permutations have a pair for each rank.
    """
    swaps = n.bit_length() - 1
    return n - (1 << swaps), swaps


GATHERS = ("auto", "ring", "doubling", "bruck")


@dataclasses.dataclass(frozen=True)
class Rings:
    """A division of all ranks into rings of equal size.

    Attributes:
        ranks: The number of ranks.
        size: The number of ranks of a ring; it divides `ranks`.
        stride: The difference of successive ranks of a ring: 1 for rings of neighbours.
    """

    ranks: int
    size: int
    stride: int = 1

    def place(self, rank):
        """Returns a rank's place in its ring, from 0 to size - 1."""
        return rank // self.stride % self.size

    def shift(self, distance: int) -> Permutation:
        """Returns the permutation by which each rank sends `distance` ahead in its ring."""
        pairs = []
        for rank in range(self.ranks):
            place = self.place(rank)
            ahead = (place + distance) % self.size
            pairs.append((rank, rank + (ahead - place) * self.stride))
        return tuple(pairs)


def bruck_all_gather(
    x: jax.Array, wire: Wire, rings: Rings | None = None
) -> tuple[jax.Array, float]:
    """Gathers in ceil(log2 n) messages for any n; the result is typed as varying.

    After k rounds a rank holds the rows of itself and of its next 2**k - 1 neighbours. In
    each round it receives as many rows as it holds, or in the last as many as are missing,
    from the rank that many places ahead.

    Args:
        x: This rank's row.
        wire: The ranks.
        rings: The rings, each of which gathers its own rows; one ring of all ranks if None.
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
    """Gathers by recursive doubling, for any n; the result is typed as varying.

    Partners swap all rows that they hold, log2 n times. Ranks beyond the largest power of
    two first send their row to a partner, and receive all rows at the end.
    """
    n, me = wire.ranks, wire.rank
    # A row travels with the number of its rank, plus one, so that 0 marks no row: a rank to
    # which a permutation sends nothing receives zeros.
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
    """Returns the permutation and the number of rows of each doubling message."""
    fold, swaps, unfold = doubling_schedule(n)
    first = 2 if fold else 1
    held = [1, *(min(n, first << k) for k in range(len(swaps))), n]
    steps = zip([fold, *swaps, unfold], held, strict=True)
    return [(pairs, count) for pairs, count in steps if pairs]


def ring_all_gather(x: jax.Array, wire: Wire) -> tuple[jax.Array, float]:
    """Gathers in n - 1 messages to the next rank; the result is typed as varying."""
    n, me = wire.ranks, wire.rank
    onward = tuple((source, (source + 1) % n) for source in range(n))
    rows = wire.per_rank(jnp.zeros((n, *x.shape), x.dtype))
    rows = as_varying(rows, varying_axes(x)).at[me].set(x)

    def turn(step, rows):
        # Each step passes on the row received last, and the first step this rank's own.
        row, _ = wire.permute(rows[(me - step) % n], onward)
        return rows.at[(me - step - 1) % n].set(row)

    rows = lax.fori_loop(0, n - 1, turn, rows)
    return rows, (n - 1) * float(x.size * x.dtype.itemsize)


def gather_channel(wire: Wire, how: str) -> channels.Channel:
    """Makes a channel that sends this rank's one message to all, by one of `GATHERS`."""
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
    """Makes a channel that sends one message to all of a rank's ring, by Bruck's gather."""

    def send(x):
        return bruck_all_gather(x[0], wire, rings)[0]

    return channels.Channel(send, rings.size, route("bruck", rings.size))


def shift_channel(wire: Wire, rings: Rings, distance: int, parts: int) -> channels.Channel:
    """Makes a channel that sends `parts` messages to one rank ahead in its ring."""

    def send(x):
        return wire.permute(x, rings.shift(distance))[0]

    return channels.Channel(send, parts, channels.Route(parts))


def rotated_channel(wire: Wire, bucket: int) -> channels.Channel:
    """Makes a channel that sends message i to rank i by n - 1 rotations.

    In the d-th permutation each rank sends to the rank d places ahead, so no two ranks send
    to one rank at the same time. `bucket` permutations are in flight together; a barrier
    makes the next ones wait for them.
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
    """Returns the route of `rotated_channel`."""
    return channels.Route(n - 1, -(-(n - 1) // bucket))


def route(how: str, n: int) -> channels.Route:
    """Returns the route of `gather_channel`, with each row counted as a message."""
    if how == "doubling":
        counts = [count for _, count in _rows_by_doubling(n)]
        # A row travels with the number of its rank.
        return channels.Route(sum(counts), waits(how, n), extra=1)
    return channels.Route(n - 1, 1 if how == "auto" else waits(how, n))


def waits(how: str, n: int) -> int:
    """Returns the number of messages of a gather that follow one another (latencies)."""
    if how == "doubling":
        return len(_rows_by_doubling(n))
    return (n - 1).bit_length() if how == "bruck" else n - 1
