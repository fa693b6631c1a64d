"""The exchange of a lookup: ids to all ranks, and columns of rows to who wants them.

On the wire: an all_gather of ids, and an all_to_all of columns, which JAX differentiates
into another. Where lists may be shorter than they have to be, one pmax of a number first,
by which all ranks decide the same.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import axes
from sparsejax.wire import Wire


@dataclasses.dataclass(frozen=True)
class ColumnExchange:
    """One exchange for several tables.

    Attributes:
        wire: The ranks.
        rooms: How many distinct ids of each table a rank may have.
        capacities: How many it has as a rule, or None.
    """

    wire: Wire
    rooms: Sequence[int]
    capacities: Sequence[int | None]

    @property
    def short(self) -> list[int]:
        """The lengths of the lists where they fit."""
        pairs = zip(self.rooms, self.capacities, strict=True)
        return [room if most is None else min(room, most) for room, most in pairs]

    def fits(self, found: list[jax.Array]) -> tuple[jax.Array | None, float]:
        """Whether the ids of all ranks fit into the shorter lists, and the bytes for it.

        None where no list would be shorter.
        """
        if self.short == list(self.rooms):
            return None, 0.0
        pairs = zip(self.wire.per_rank(found), self.short, strict=True)
        over = jnp.max(jnp.stack([count - most for count, most in pairs]))
        most, sent = self.wire.maximum(over)
        return most <= 0, sent

    def gathered(
        self, lists: list[jax.Array], fits: jax.Array | None
    ) -> tuple[list[jax.Array], Any]:
        """The ids that all ranks want of each table, [n, room], and the bytes sent."""

        def gather(*lists):
            joined, sent = self.wire.all_gather(jnp.concatenate(lists))
            return pieces(joined, [x.size for x in lists]), sent

        if not any(self.rooms):
            return [jnp.zeros((self.wire.ranks, 0), jnp.int32) for _ in lists], 0.0
        # What stands past the end of a shorter list is a row of no table.
        return self._sent(gather, lists, fits, axis=0, empty=np.int32(2**31 - 1))

    def exchanged(
        self, columns: list[jax.Array], fits: jax.Array | None
    ) -> tuple[list[jax.Array], Any]:
        """From columns of the rows that each rank wants to whole vectors.

        Args:
            columns: [n, room, columns] of each table.
            fits: As `fits` returns it.

        Returns:
            [room, n * columns] of each table, for this rank's ids, and the bytes sent.
        """

        def exchange(*columns):
            flat = [x.reshape(len(x), x.shape[1] * x.shape[2]) for x in columns]
            received, sent = self.wire.all_to_all(jnp.concatenate(flat, axis=1))
            parts = pieces(received, [x.shape[1] for x in flat])
            pairs = zip(parts, columns, strict=True)
            return [x.reshape(y.shape) for x, y in pairs], sent

        parts, sent = columns, 0.0
        if any(self.rooms):
            parts, sent = self._sent(exchange, columns, fits, axis=1, empty=0)
        whole = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], len(x) * x.shape[2])
        return [whole(x) for x in parts], sent

    def _sent(
        self,
        send: Callable[..., Any],
        arrays: list[jax.Array],
        fits: jax.Array | None,
        axis: int,
        empty: Any,
    ):
        """What is received for arrays, which are cut where that leaves nothing out."""
        if fits is None:
            return send(*arrays)

        def shorter(*arrays):
            pairs = zip(arrays, self.short, strict=True)
            cut = [jax.lax.slice_in_dim(x, 0, k, axis=axis) for x, k in pairs]
            received, sent = send(*cut)
            pairs = zip(received, self.rooms, strict=True)
            return [_filled_up(x, room, empty) for x, room in pairs], jnp.float32(sent)

        def longer(*arrays):
            received, sent = send(*arrays)
            return received, jnp.float32(sent)

        return axes.cond(fits, shorter, longer, *arrays)


def pieces(x: jax.Array, lengths: Sequence[int]) -> list[jax.Array]:
    """[n, sum of lengths] as an array of each length."""
    return jnp.split(x, np.cumsum(lengths)[:-1], axis=1)


def _filled_up(x, room, empty):
    """[n, k, ...] as [n, room, ...]."""
    pads = [(0, 0), (0, room - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, pads, constant_values=empty)
