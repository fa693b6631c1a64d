"""Tables whose rows are stored striped, so that contiguous shards are read evenly.

If a table is sharded by rows over the ranks, each rank has a contiguous range of rows and
receives their gradients. Ids often follow a Zipf law with the most frequent first, as
those of a vocabulary do: then the first rank receives most. In a striped table row i
belongs to shard i mod n, and every shard has rows of all frequencies.
"""

import dataclasses

import jax
import jax.numpy as jnp

from sparsejax import arguments
from sparsejax.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class StripedRows:
    """A storage order of the rows of a table that assigns them to shards in turn.

    Row i is stored in shard i mod n, at place i // n. In many data sets small ids are read
    most often; in this order they are on different shards. Store a table once by `stored`,
    and read it by the ids that `places` returns. `natural` puts it back in order, for an
    export or another number of shards.

    Attributes:
        rows: The number of rows of the table.
        shards: The number of shards: the ranks of the mesh axis.

    Example:
        >>> striped = sparsejax.rows.StripedRows(rows=5, shards=2)
        >>> table = jnp.arange(5.0)[:, None]
        >>> stored = striped.stored(table)
        >>> stored[:, 0].tolist()
        [0.0, 2.0, 4.0, 1.0, 3.0, 0.0]
        >>> stored[striped.places(jnp.array([3, 4]))][:, 0].tolist()
        [3.0, 4.0]
        >>> striped.natural(stored)[:, 0].tolist()
        [0.0, 1.0, 2.0, 3.0, 4.0]
    """

    rows: int
    shards: int

    def __post_init__(self):
        arguments.check_whole("rows", self.rows, 1)
        arguments.check_whole("shards", self.shards, 1)

    @property
    def height(self) -> int:
        """The number of stored rows, a multiple of the shards; the last may be unused."""
        return -(-self.rows // self.shards) * self.shards

    def stored(self, table: jax.Array) -> jax.Array:
        """Returns a table [rows, ...] in stored order, [height, ...], padded with zeros."""
        self._check(table, self.rows, "stored")
        free = self.height - self.rows
        whole = jnp.pad(table, ((0, free), *((0, 0) for _ in table.shape[1:])))
        return self._swapped(whole, self.height // self.shards, self.shards)

    def natural(self, stored: jax.Array) -> jax.Array:
        """Returns a stored table in its natural order: the inverse of `stored`."""
        self._check(stored, self.height, "natural")
        whole = self._swapped(stored, self.shards, self.height // self.shards)
        return whole[: self.rows]

    def places(self, ids: jax.Array) -> jax.Array:
        """Returns the stored rows of ids, to be looked up instead of them.

        Negative ids count from the last row, and ids out of range stay out of range.
        """
        ids = jnp.where(ids < 0, ids + self.rows, ids)
        places = ids % self.shards * (self.height // self.shards) + ids // self.shards
        return jnp.where((ids >= 0) & (ids < self.rows), places, self.height)

    def _check(self, table, rows, call):
        if table.ndim < 1 or table.shape[0] != rows:
            raise ArgumentError(
                f"StripedRows.{call} takes a table of {rows} rows, got one of shape "
                f"{list(table.shape)}."
            )

    @staticmethod
    def _swapped(x, outer, inner):
        """Transposes the rows of x as [outer, inner]; returns them with the shape of x."""
        return x.reshape(outer, inner, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
