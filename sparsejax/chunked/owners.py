"""Owners of blocks: each sums its own, and sends the largest entries of the sums to all.

The blocks of each group of leaves (`blocks.Together`) are divided among n ranks: rank r
owns the c = ceil(B / n) blocks from r c on; blocks after the last one are padding, zeros.
Each rank sends to owner r a piece for each group, whose words are

    places    the places of c blocks: see `indices`
    values    c * kept codes: see `wire.value_codes`
    tables    T tables: the most leaves that have blocks in one piece

The codes are those of the message that a rank would send to all ranks. An owner sends sums
in the same format: `pulled` entries of each block, and a table for each leaf. With k = 64
of 4096, 256 of a sum, and two bits per value, N elements in whole blocks take

    push    0.15625 N / 8 / n bytes to each other owner, and 8 T bytes of tables
    pull    0.5 N / 8 / n bytes to each other rank, and 8 T bytes

for each group. Sums have a table for each leaf, too, so that a leaf that is equal on all
shards of another mesh axis stays equal, whatever other leaves its owner has.
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
        group: The group of leaves.
        ranks: The number of ranks.
        pulled: The number of entries of a block of a sum that its owner sends.
        code: The value code.
    """

    group: Together
    ranks: int
    pulled: int
    code: ValueCode

    @property
    def share(self) -> int:
        """The number of blocks of an owner, padding included."""
        return -(-self.group.blocks // self.ranks)

    @property
    def size(self) -> int:
        """The number of elements of an owner's blocks."""
        return self.share * self.group.length

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        """The number of the block after the last one of each leaf, int32 [leaves]."""
        return np.cumsum([cut.blocks for cut in self.group.cuts]).astype(np.int32)

    @functools.cached_property
    def _tables(self) -> np.ndarray:
        """The leaves whose tables the piece of each owner contains, int32 [ranks, T]."""
        ranks, last = np.arange(self.ranks), self.group.blocks - 1
        firsts = np.minimum(ranks * self.share, last)
        lasts = np.minimum((ranks + 1) * self.share - 1, last)
        of = lambda block: np.searchsorted(self._ends, block, side="right")
        room = int(np.max(of(lasts) - of(firsts))) + 1
        leaves = of(firsts)[:, None] + np.arange(room)
        return np.minimum(leaves, len(self.group.leaves) - 1).astype(np.int32)

    def words(self, kept: int) -> tuple[int, int, int]:
        """Returns the numbers of words of the places, values and tables of a piece."""
        tables = self.code.table * self._tables.shape[1]
        values = self.code.words(self.share * kept)
        return self._places(kept).words, values, tables

    def _places(self, kept):
        return PlaceCode.shortest(self.share, self.group.length, kept)

    def _rows(self, rank):
        """Returns the row of each block's table in the piece, and flags of real blocks."""
        block = rank * self.share + lax.iota(jnp.int32, self.share)
        of = jnp.minimum(block, self.group.blocks - 1)[:, None] >= self._ends
        leaf = jnp.sum(of, axis=1, dtype=jnp.int32)
        return leaf - leaf[0], block < self.group.blocks

    def push(self, coded: Coded) -> jax.Array:
        """Packs the piece for each owner, uint32 [ranks, words]."""
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
        """Selects entries of an owner's sums, and packs them.

        Args:
            sums: float32 [share, length], the sums.
            rank: int32 [], the owner.

        Returns:
            The words uint32 [words], and the entries with indices in the owner's blocks.
        """
        group, kept = self.group, self.pulled
        view = sums.reshape(self.share, 1, group.cuts[0].height, 1, group.cuts[0].width)
        places = selection.largest([view], kept)
        at = self._flat(places)
        values = sums.reshape(-1).at[at].get(mode="promise_in_bounds")
        codes, tables = self._encode(values, rank)
        decoded = self._decode(codes.reshape(places.shape), tables, rank)
        words = [
            self._places(kept).encode(places),
            self.code.pack(codes),
            lax.bitcast_convert_type(tables.reshape(-1), jnp.uint32),
        ]
        return jnp.concatenate(words), Selected(at, decoded.reshape(-1))

    def read(
        self, words: jax.Array, rank: jax.Array, kept: int
    ) -> tuple[jax.Array, jax.Array]:
        """Unpacks a piece; returns places int32 and values float32, each [share, kept].

        Args:
            words: uint32 [words], the piece.
            rank: int32 [], the owner of its blocks.
            kept: The number of entries of a block.
        """
        ends = np.cumsum(self.words(kept))
        places, codes, tables = jnp.split(words, ends[:2])
        codes = self.code.unpack(codes, self.share * kept).reshape(self.share, kept)
        tables = lax.bitcast_convert_type(tables, jnp.float32)
        tables = tables.reshape(self._tables.shape[1], self.code.table)
        values = self._decode(codes, tables, rank)
        return self._places(kept).decode(places), values

    def entries(self, words: jax.Array, rank: jax.Array) -> Selected:
        """Unpacks a piece that was pushed; indices are those in the owner's blocks."""
        places, values = self.read(words, rank, self.group.kept)
        return Selected(self._flat(places), values.reshape(-1))

    def real(self, rank: jax.Array) -> jax.Array:
        """Flags the blocks of an owner that are not padding, bool [share, 1]."""
        return self._rows(rank)[1][:, None]

    def _flat(self, places):
        starts = self.group.length * lax.iota(jnp.int32, self.share)
        return (places + starts[:, None]).reshape(-1)

    def _encode(self, values, rank):
        """Encodes the entries of a sum; returns codes, and the tables of its leaves."""
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
        """Decodes codes [share, kept] with the tables of their leaves."""
        return jax.vmap(self.code.decode)(codes, tables[self._rows(rank)[0]])


@dataclasses.dataclass(frozen=True)
class Owners:
    """The sum of some leaves by the owners of their blocks.

    Attributes:
        message: The format of the message of a rank.
        ranks: The number of ranks.
        pull_k: The number of entries of a whole block of a sum that its owner sends.
        chunk: The number of elements of a whole block.
    """

    message: RankMessage
    ranks: int
    pull_k: int
    chunk: int

    @functools.cached_property
    def pieces(self) -> tuple[DividedGroup, ...]:
        """The divided groups of leaves."""
        return tuple(
            DividedGroup(group, self.ranks, self._pulled(group), self.message.code)
            for group in self.message.groups
        )

    def _pulled(self, group):
        share = round(group.length * self.pull_k / self.chunk)
        # A sum has at most as many non-zero entries as all ranks have sent.
        most = min(group.length, self.ranks * group.kept)
        return min(max(1, share), most)

    @property
    def push_words(self) -> int:
        """The number of 32-bit words that a rank sends to each owner."""
        return sum(sum(one.words(one.group.kept)) for one in self.pieces)

    @property
    def pull_words(self) -> int:
        """The number of 32-bit words that an owner sends to each rank."""
        return sum(sum(one.words(one.pulled)) for one in self.pieces)

    @property
    def entries(self) -> int:
        """The number of entries of all leaves that owners send."""
        return sum(one.group.blocks * one.pulled for one in self.pieces)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of an owner's blocks, for each group."""
        return tuple(one.size for one in self.pieces)

    def push(self, coded: Sequence[Coded]) -> jax.Array:
        """Packs the words for each owner, uint32 [ranks, words]."""
        pairs = zip(self.pieces, coded, strict=True)
        parts = [one.push(given) for one, given in pairs]
        none = jnp.zeros((self.ranks, 0), jnp.uint32)
        return jnp.concatenate([none, *parts], axis=1)

    def entries_of(self, words: jax.Array, rank: jax.Array) -> list[Selected]:
        """Unpacks the words of a rank; returns the entries of each group of this owner."""
        return [one.entries(part, rank) for one, part in self._cut(words, is_pushed=True)]

    def pull(
        self, sums: Sequence[jax.Array], rank: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Selects entries of an owner's sums, and packs them for all ranks.

        Args:
            sums: For each group float32 [share, length], the sums.
            rank: int32 [], the owner.

        Returns:
            The words, and for each group the part of the sums that the owner holds back,
            with zeros in place of values that are not finite.
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
        """Unpacks the words of all owners [ranks, words]; returns dense float32 leaves."""
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
        """Returns dense leaves with an owner's blocks, [share, length] by group; else 0."""
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
        """Yields each group with its words."""
        start = 0
        for one in self.pieces:
            size = sum(one.words(one.group.kept if is_pushed else one.pulled))
            yield one, lax.slice_in_dim(words, start, start + size)
            start += size
