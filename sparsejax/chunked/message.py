"""The message of a rank: the entries of all leaves, in one array of words.

Leaves are grouped by the shape of their blocks (`blocks.Together`). For each group the
words are, with E entries in B blocks,

    places    see `indices`: low * ceil(E / 32) + ceil(B * stride / 32)
    values    see `wire.value_codes`: bits * ceil(E / 32) below 8 bits, else
              ceil(E * bits / 32)
    tables    the table of the value code, for each leaf

Its size follows from the shapes alone: it has no counts, and ranks need not agree on one.
With k = 64 of 4096 and two bits per value, a leaf of N elements in whole blocks takes

    6 N / 512 + N / 256 + 2 N / 512 bytes = 0.15625 bits per element, and 8 bytes of table
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.chunked import blocks
from sparsejax.chunked.blocks import BlockCut, Together
from sparsejax.chunked.indices import PlaceCode
from sparsejax.wire.value_codes import ValueCode, code_of


class Coded(NamedTuple):
    """The entries of a group of leaves, before they are packed.

    Attributes:
        places: int32 [blocks, kept], ascending in each block.
        codes: uint32 [blocks, kept], the codes of the values.
        tables: float32 [leaves, table], the tables of the codes.
    """

    places: jax.Array
    codes: jax.Array
    tables: jax.Array


class Selected(NamedTuple):
    """The entries of a leaf that a rank sends.

    Attributes:
        indices: int32 [entries], distinct indices of the flat leaf.
        values: float32 [entries], decoded, as all ranks receive them.
    """

    indices: jax.Array
    values: jax.Array


@dataclasses.dataclass(frozen=True)
class RankMessage:
    """The format of the message of some leaves.

    Attributes:
        cuts: The cut of each leaf into blocks.
        code: The value code.
    """

    cuts: tuple[BlockCut, ...]
    code: ValueCode

    @classmethod
    def of(
        cls, shapes: Sequence[Sequence[int]], k: int, chunk: int, code: ValueCode
    ) -> "RankMessage":
        """Returns the format for leaves of these shapes."""
        return cls(tuple(BlockCut.of(shape, k, chunk) for shape in shapes), code)

    @functools.cached_property
    def groups(self) -> tuple[Together, ...]:
        """The groups of leaves from which entries are selected together."""
        return blocks.together(self.cuts)

    def places(self, group: Together) -> PlaceCode:
        """Returns the code of the places of a group."""
        return PlaceCode.shortest(group.blocks, group.length, group.kept)

    def parts(self, group: Together) -> tuple[int, int, int]:
        """Returns the numbers of words of the places, values and tables of a group."""
        tables = self.code.table * len(group.leaves)
        return self.places(group).words, self.code.words(group.entries), tables

    @property
    def words(self) -> int:
        """The number of 32-bit words of the message, which is sent to each other rank."""
        return sum(sum(self.parts(group)) for group in self.groups)

    @property
    def entries(self) -> int:
        """The number of entries of all leaves."""
        return sum(group.entries for group in self.groups)

    def select(self, leaves: Sequence[jax.Array]) -> tuple[list[Coded], list[Selected]]:
        """Selects and encodes entries of float32 leaves.

        Returns:
            The coded entries of each group, and the decoded ones of each leaf.
        """
        coded, found = [], self._no_entries()
        for group in self.groups:
            one, decoded = self._select(group, leaves)
            coded.append(one)
            found |= decoded
        return coded, [found[i] for i in range(len(self.cuts))]

    def pack(self, coded: Sequence[Coded]) -> jax.Array:
        """Packs coded entries into the message, uint32 [words]."""
        words = []
        for group, (places, codes, tables) in zip(self.groups, coded, strict=True):
            words.append(self.places(group).encode(places))
            words.append(self.code.pack(codes.reshape(-1)))
            words.append(lax.bitcast_convert_type(tables.reshape(-1), jnp.uint32))
        return jnp.concatenate(words) if words else jnp.zeros(0, jnp.uint32)

    def unpack(self, words: jax.Array) -> list[Selected]:
        """Returns the entries of each leaf in the message of a rank."""
        found = self._no_entries()
        for group, (places, codes, tables) in self._cut(words):
            inside = group.of_each(self.places(group).decode(places))
            codes = self.code.unpack(codes, group.entries).reshape(-1, group.kept)
            rows = zip(group.members, inside, group.of_each(codes), strict=True)
            for row, ((i, cut), at, own) in enumerate(rows):
                values = self.code.decode(own.reshape(-1), tables[row])
                found[i] = Selected(cut.indices(at).reshape(-1), values)
        return [found[i] for i in range(len(self.cuts))]

    def _select(self, group, leaves):
        """Returns the coded entries of a group, and the decoded ones by leaf."""
        places = group.largest(leaves)
        codes, tables, decoded = [], [], {}
        rows = zip(group.members, group.of_each(places), strict=True)
        for (i, cut), inside in rows:
            indices = cut.indices(inside).reshape(-1)
            chosen = leaves[i].reshape(-1).at[indices].get(mode="promise_in_bounds")
            own, table = self.code.encode(chosen)
            decoded[i] = Selected(indices, self.code.decode(own, table))
            codes.append(own)
            tables.append(table)
        codes = jnp.concatenate(codes).reshape(places.shape)
        return Coded(places, codes, jnp.stack(tables)), decoded

    def _cut(self, words) -> Iterator:
        """Yields each group with its words; its tables are float32 [leaves, table]."""
        start = 0
        for group in self.groups:
            parts = []
            for size in self.parts(group):
                parts.append(lax.slice_in_dim(words, start, start + size))
                start += size
            table = lax.bitcast_convert_type(parts[2], jnp.float32)
            shape = len(group.leaves), self.code.table
            yield group, (parts[0], parts[1], table.reshape(shape))

    def _no_entries(self):
        """Returns the entries of leaves without elements: none."""
        none = Selected(jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.float32))
        return {i: none for i, cut in enumerate(self.cuts) if not cut.size}


def message_bytes(
    shapes: Sequence[Sequence[int]], k: int = 64, chunk: int = 4096, values: str = "2bit"
) -> int:
    """Returns the bytes of the message for leaves of these shapes, sent to each rank."""
    return 4 * RankMessage.of(shapes, k, chunk, code_of(values)).words
