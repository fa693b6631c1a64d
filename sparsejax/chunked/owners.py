"""Owners of blocks: each adds up its own, and sends the largest entries of the sums to all.

The blocks of each group of leaves (`blocks.Together`) are divided among n ranks: rank r has
the c = ceil(B / n) blocks from r c on, and those after the last block are zeros. What owner
r is sent of a group by each rank is, in words,

    places    of c blocks: see `indices`
    values    c * kept codes: see `values`
    tables    those of the T leaves of which a piece has blocks, of the piece with most

so the codes are those of the message that a rank would send to all. What it sends to all
is of the same kind: `pulled` entries of each block of the sums, and a table for each leaf.
With k = 64 of 4096, 256 of a sum, and two bits a value, N numbers in whole blocks take

    push    0.15625 N / 8 / n bytes to each other owner, and 8 T bytes of tables
    pull    0.5 N / 8 / n bytes to each other rank, and 8 T bytes

for each group. Tables are by leaf on the way back, too: leaves that are the same on all
shards of another mesh axis come back the same, whatever else their owner has.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax.axes import as_varying, varying_axes
from sparsejax.chunked import selection
from sparsejax.chunked.blocks import Together
from sparsejax.chunked.indices import PlaceCode
from sparsejax.chunked.message import Coded, RankMessage, Selected
from sparsejax.state import tree
from sparsejax.wire.value_codes import ValueCode


@dataclasses.dataclass(frozen=True)
class DividedGroup:
    """A group of leaves whose blocks are divided among the ranks.

    Attributes:
        group: The leaves.
        ranks: How many ranks.
        pulled: How many entries of a block of the sum are sent.
        code: How values travel.
    """

    group: Together
    ranks: int
    pulled: int
    code: ValueCode

    @property
    def share(self) -> int:
        """Blocks of an owner."""
        return -(-self.group.blocks // self.ranks)

    @property
    def size(self) -> int:
        """Numbers of an owner's blocks."""
        return self.share * self.group.length

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        """The block after the last one of each leaf, int32 [leaves]."""
        return np.cumsum([cut.blocks for cut in self.group.cuts]).astype(np.int32)

    @functools.cached_property
    def _tables(self) -> np.ndarray:
        """The leaves whose tables each owner has, int32 [ranks, T]."""
        ranks, last = np.arange(self.ranks), self.group.blocks - 1
        firsts = np.minimum(ranks * self.share, last)
        lasts = np.minimum((ranks + 1) * self.share - 1, last)
        of = lambda block: np.searchsorted(self._ends, block, side="right")
        room = int(np.max(of(lasts) - of(firsts))) + 1
        leaves = of(firsts)[:, None] + np.arange(room)
        return np.minimum(leaves, len(self.group.leaves) - 1).astype(np.int32)

    def words(self, kept: int) -> tuple[int, int, int]:
        """Words for the places, the values and the tables of a piece."""
        tables = self.code.table * self._tables.shape[1]
        values = self.code.words(self.share * kept)
        return self._places(kept).words, values, tables

    def _places(self, kept):
        return PlaceCode.shortest(self.share, self.group.length, kept)

    def _rows(self, rank):
        """The number of each block's leaf among those of the piece, and which are real."""
        block = rank * self.share + lax.iota(jnp.int32, self.share)
        of = jnp.minimum(block, self.group.blocks - 1)[:, None] >= self._ends
        leaf = jnp.sum(of, axis=1, dtype=jnp.int32)
        return leaf - leaf[0], block < self.group.blocks

    def push(self, coded: Coded) -> jax.Array:
        """The piece of each owner, uint32 [ranks, words]."""
        kept, n = self.group.kept, self.ranks
        missing = n * self.share - self.group.blocks
        none = lax.broadcasted_iota(jnp.int32, (missing, kept), 1)
        places = jnp.concatenate([coded.places, none]).reshape(n, self.share, kept)
        codes = jnp.pad(coded.codes, ((0, missing), (0, 0))).reshape(n, -1)
        tables = coded.tables[self._tables].reshape(n, -1)
        parts = [
            jax.vmap(self._places(kept).encode)(places),
            jax.vmap(self.code.pack)(codes),
            lax.bitcast_convert_type(tables, jnp.uint32),
        ]
        return jnp.concatenate(parts, axis=1)

    def pull(self, sums: jax.Array, rank: jax.Array) -> tuple[jax.Array, Selected]:
        """Selects of an owner's sums float32 [share, length]; see `RankMessage.select`."""
        group, kept = self.group, self.pulled
        view = sums.reshape(self.share, 1, group.cuts[0].height, 1, group.cuts[0].width)
        places = selection.largest([view], kept)
        at = self._flat(places)
        values = sums.reshape(-1).at[at].get(mode="promise_in_bounds")
        codes, tables = self._encode(values, rank)
        said = self._decode(codes.reshape(places.shape), tables, rank)
        words = [
            self._places(kept).encode(places),
            self.code.pack(codes),
            lax.bitcast_convert_type(tables.reshape(-1), jnp.uint32),
        ]
        return jnp.concatenate(words), Selected(at, said.reshape(-1))

    def read(
        self, words: jax.Array, rank: jax.Array, kept: int
    ) -> tuple[jax.Array, jax.Array]:
        """What a piece says: places int32 and values float32, [share, kept].

        Args:
            words: The piece, uint32 [words].
            rank: Its owner.
            kept: Entries of a block.
        """
        ends = np.cumsum(self.words(kept))
        places, codes, tables = jnp.split(words, ends[:2])
        codes = self.code.unpack(codes, self.share * kept).reshape(self.share, kept)
        tables = lax.bitcast_convert_type(tables, jnp.float32)
        tables = tables.reshape(self._tables.shape[1], self.code.table)
        values = self._decode(codes, tables, rank)
        return self._places(kept).decode(places), values

    def entries(self, words: jax.Array, rank: jax.Array) -> Selected:
        """What a rank's piece says, by indices in this owner's blocks."""
        places, values = self.read(words, rank, self.group.kept)
        return Selected(self._flat(places), values.reshape(-1))

    def real(self, rank: jax.Array) -> jax.Array:
        """Which blocks of an owner exist, [share, 1]."""
        return self._rows(rank)[1][:, None]

    def _flat(self, places):
        starts = self.group.length * lax.iota(jnp.int32, self.share)
        return (places + starts[:, None]).reshape(-1)

    def _encode(self, values, rank):
        """The codes of the entries of a sum, and the tables of its leaves."""
        room = self._tables.shape[1]
        rows, real = self._rows(rank)
        rows = jnp.repeat(jnp.where(real, rows, room), self.pulled)

        def of_leaf(codes, row):
            own, table = self.code.encode(values, rows == row)
            return jnp.where(rows == row, own, codes), table

        start = jnp.zeros(values.shape, jnp.uint32)
        start = as_varying(start, varying_axes(values))
        return lax.scan(of_leaf, start, lax.iota(jnp.int32, room))

    def _decode(self, codes, tables, rank):
        """The values [share, kept] of codes, by the tables of their leaves."""
        return jax.vmap(self.code.decode)(codes, tables[self._rows(rank)[0]])


@dataclasses.dataclass(frozen=True)
class Owners:
    """How ranks add up the blocks of some leaves, each its own.

    Attributes:
        message: What a rank sends of them.
        ranks: How many ranks.
        pull_k: Entries of a whole block of the sum.
        chunk: Numbers in a whole block.
    """

    message: RankMessage
    ranks: int
    pull_k: int
    chunk: int

    @functools.cached_property
    def pieces(self) -> tuple[DividedGroup, ...]:
        """Those of each group of leaves."""
        return tuple(
            DividedGroup(group, self.ranks, self._pulled(group), self.message.code)
            for group in self.message.groups
        )

    def _pulled(self, group):
        share = round(group.length * self.pull_k / self.chunk)
        # The entries are at most those that all ranks have sent.
        most = min(group.length, self.ranks * group.kept)
        return min(max(1, share), most)

    @property
    def push_words(self) -> int:
        """Words of 32 bits that a rank sends to each owner."""
        return sum(sum(one.words(one.group.kept)) for one in self.pieces)

    @property
    def pull_words(self) -> int:
        """Words that an owner sends to each rank."""
        return sum(sum(one.words(one.pulled)) for one in self.pieces)

    @property
    def entries(self) -> int:
        """Entries of all leaves that come back."""
        return sum(one.group.blocks * one.pulled for one in self.pieces)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of an owner's blocks of each group."""
        return tuple(one.size for one in self.pieces)

    def push(self, coded: Sequence[Coded]) -> jax.Array:
        """What goes to each owner, uint32 [ranks, words]."""
        pairs = zip(self.pieces, coded, strict=True)
        parts = [one.push(given) for one, given in pairs]
        none = jnp.zeros((self.ranks, 0), jnp.uint32)
        return jnp.concatenate([none, *parts], axis=1)

    def entries_of(self, words: jax.Array, rank: jax.Array) -> list[Selected]:
        """What a rank's words say of each group of this owner's blocks."""
        return [one.entries(part, rank) for one, part in self._cut(words, is_pushed=True)]

    def pull(
        self, sums: Sequence[jax.Array], rank: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Selects of an owner's sums.

        Args:
            sums: float32 [share, length] of each group.
            rank: The owner.

        Returns:
            The words that go to all ranks, and what the owner holds back: zeros where it
            would not be finite.
        """
        words, left = [jnp.zeros(0, jnp.uint32)], []
        for one, x in zip(self.pieces, sums, strict=True):
            x = jnp.where(one.real(rank), x, 0)
            own, sent = one.pull(x, rank)
            words.append(own)
            flat = x.reshape(-1)
            chosen = flat.at[sent.indices].get(mode="promise_in_bounds")
            after = tree.rounding_error(chosen, sent.values)
            flat = flat.at[sent.indices].set(
                after, mode="promise_in_bounds", unique_indices=True
            )
            rest = jnp.where(one.real(rank), flat.reshape(x.shape), 0)
            left.append(jnp.where(jnp.isfinite(rest), rest, 0))
        return jnp.concatenate(words), left

    def totals(self, words: jax.Array) -> list[jax.Array]:
        """What the words of all owners [ranks, words] say of each leaf, float32."""
        found = [jnp.zeros(cut.shape, jnp.float32) for cut in self.message.cuts]
        ranks = lax.iota(jnp.int32, self.ranks)

        def read(given):
            words, rank = given
            cut = self._cut(words, is_pushed=False)
            return [one.read(part, rank, one.pulled) for one, part in cut]

        read_all = lax.map(read, (words, ranks)) if self.pieces else []
        for one, parts in zip(self.pieces, read_all, strict=True):
            places, values = (x.reshape(-1, one.pulled)[: one.group.blocks] for x in parts)
            rows = zip(
                one.group.members,
                one.group.of_each(places),
                one.group.of_each(values),
                strict=True,
            )
            for (i, cut), at, x in rows:
                flat = jnp.zeros(cut.size, jnp.float32).at[cut.indices(at).reshape(-1)]
                flat = flat.set(
                    x.reshape(-1), mode="promise_in_bounds", unique_indices=True
                )
                found[i] = flat.reshape(cut.shape)
        return found

    def leaves(self, held: Sequence[jax.Array], rank: jax.Array) -> list[jax.Array]:
        """What an owner holds [share, length] of each group, as leaves; zeros elsewhere."""
        found = [jnp.zeros(cut.shape, jnp.float32) for cut in self.message.cuts]
        for one, x in zip(self.pieces, held, strict=True):
            blocks = jnp.zeros((self.ranks * one.share, one.group.length), jnp.float32)
            blocks = as_varying(blocks, varying_axes(x))
            blocks = lax.dynamic_update_slice_in_dim(blocks, x, rank * one.share, 0)
            of_each = one.group.of_each(blocks[: one.group.blocks])
            for (i, cut), own in zip(one.group.members, of_each, strict=True):
                found[i] = cut.join(own)
        return found

    def _cut(self, words, is_pushed):
        """The words of each group."""
        start = 0
        for one in self.pieces:
            size = sum(one.words(one.group.kept if is_pushed else one.pulled))
            yield one, lax.slice_in_dim(words, start, start + size)
            start += size
