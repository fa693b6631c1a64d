"""The message of a rank: the entries of all leaves, as one array of words.

Leaves are taken together by the shape of their blocks (`blocks.Together`). For each of
these groups the words are, with E entries in B blocks,

    places    see `indices`: low * ceil(E / 32) + ceil(B * stride / 32)
    values    see `values`: width * ceil(E / 32) below 8 bits, else ceil(E * width / 32)
    tables    as many numbers as the code has, for each leaf

Its size follows from the shapes alone: it has no counts, and ranks agree on nothing. With
k = 64 of 4096 and two bits a value, a leaf of N numbers in whole blocks takes

    6 N / 512 + N / 256 + 2 N / 512 bytes = 0.15625 bits a number, and 8 bytes of table
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
    """What is sent of a group of leaves, before it is packed.

    Attributes:
        places: int32 [blocks, kept], ascending in each block.
        codes: uint32 [blocks, kept].
        tables: float32 [leaves, table].
    """

    places: jax.Array
    codes: jax.Array
    tables: jax.Array


class Selected(NamedTuple):
    """The entries of a leaf that a rank sends.

    Attributes:
        indices: int32 [entries], distinct, in the flat leaf.
        values: float32 [entries], as all ranks receive them.
    """

    indices: jax.Array
    values: jax.Array


@dataclasses.dataclass(frozen=True)
class RankMessage:
    """How the entries of some leaves travel.

    Attributes:
        cuts: How each leaf is cut.
        code: How values travel.
    """

    cuts: tuple[BlockCut, ...]
    code: ValueCode

    @classmethod
    def of(
        cls, shapes: Sequence[Sequence[int]], k: int, chunk: int, code: ValueCode
    ) -> "RankMessage":
        """The message for leaves of these shapes."""
        return cls(tuple(BlockCut.of(shape, k, chunk) for shape in shapes), code)

    @functools.cached_property
    def groups(self) -> tuple[Together, ...]:
        """The leaves that are selected from together."""
        return blocks.together(self.cuts)

    def places(self, group: Together) -> PlaceCode:
        """How the places of a group travel."""
        return PlaceCode.shortest(group.blocks, group.length, group.kept)

    def parts(self, group: Together) -> tuple[int, int, int]:
        """Words for the places, the values and the tables of a group."""
        tables = self.code.table * len(group.leaves)
        return self.places(group).words, self.code.words(group.entries), tables

    @property
    def words(self) -> int:
        """Words of 32 bits that a rank sends to each other one."""
        return sum(sum(self.parts(group)) for group in self.groups)

    @property
    def entries(self) -> int:
        """Entries of all leaves."""
        return sum(group.entries for group in self.groups)

    def select(self, leaves: Sequence[jax.Array]) -> tuple[list[Coded], list[Selected]]:
        """Selects entries of float32 leaves.

        Returns:
            What is sent of each group, and what that says of each leaf.
        """
        coded, found = [], self._nothing()
        for group in self.groups:
            one, said = self._select(group, leaves)
            coded.append(one)
            found |= said
        return coded, [found[i] for i in range(len(self.cuts))]

    def pack(self, coded: Sequence[Coded]) -> jax.Array:
        """The message, uint32 [words]."""
        words = []
        for group, (places, codes, tables) in zip(self.groups, coded, strict=True):
            words.append(self.places(group).encode(places))
            words.append(self.code.pack(codes.reshape(-1)))
            words.append(lax.bitcast_convert_type(tables.reshape(-1), jnp.uint32))
        return jnp.concatenate(words) if words else jnp.zeros(0, jnp.uint32)

    def unpack(self, words: jax.Array) -> list[Selected]:
        """What the message of a rank says of each leaf."""
        found = self._nothing()
        for group, (places, codes, tables) in self._cut(words):
            inside = group.of_each(self.places(group).decode(places))
            codes = self.code.unpack(codes, group.entries).reshape(-1, group.kept)
            rows = zip(group.members, inside, group.of_each(codes), strict=True)
            for row, ((i, cut), at, own) in enumerate(rows):
                values = self.code.decode(own.reshape(-1), tables[row])
                found[i] = Selected(cut.indices(at).reshape(-1), values)
        return [found[i] for i in range(len(self.cuts))]

    def _select(self, group, leaves):
        """What is sent of a group, and what it says of its leaves."""
        places = group.largest(leaves)
        codes, tables, said = [], [], {}
        rows = zip(group.members, group.of_each(places), strict=True)
        for (i, cut), inside in rows:
            indices = cut.indices(inside).reshape(-1)
            chosen = leaves[i].reshape(-1).at[indices].get(mode="promise_in_bounds")
            own, table = self.code.encode(chosen)
            said[i] = Selected(indices, self.code.decode(own, table))
            codes.append(own)
            tables.append(table)
        codes = jnp.concatenate(codes).reshape(places.shape)
        return Coded(places, codes, jnp.stack(tables)), said

    def _cut(self, words) -> Iterator:
        """The words of each group, its tables as float32 [leaves, table]."""
        start = 0
        for group in self.groups:
            parts = []
            for size in self.parts(group):
                parts.append(lax.slice_in_dim(words, start, start + size))
                start += size
            table = lax.bitcast_convert_type(parts[2], jnp.float32)
            shape = len(group.leaves), self.code.table
            yield group, (parts[0], parts[1], table.reshape(shape))

    def _nothing(self):
        """What is said of leaves without numbers."""
        none = Selected(jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.float32))
        return {i: none for i, cut in enumerate(self.cuts) if not cut.size}


def message_bytes(
    shapes: Sequence[Sequence[int]], k: int = 64, chunk: int = 4096, values: str = "2bit"
) -> int:
    """Bytes of a rank's message for leaves of these shapes; it sends one to each other."""
    return 4 * RankMessage.of(shapes, k, chunk, code_of(values)).words
