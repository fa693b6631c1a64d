"""A tree that is cut into blocks: its leaves, and the block of each."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import optax

from sparsejax.embrace.horizontal import blocks
from sparsejax.embrace.horizontal.blocks import Block
from sparsejax.errors import ArgumentError
from sparsejax.state import sharded, tree


class Cut(NamedTuple):
    """A tree of parameters, or of gradients, cut into blocks.

    Attributes:
        paths: The paths of the leaves, except for those in `Sharded` nodes.
        leaves: The leaves.
        structure: The structure of the tree without such nodes.
        shards: The `Sharded` nodes.
        blocks: The blocks.
        carried: For each leaf, whether it is carried.
    """

    paths: list[str]
    leaves: list[Any]
    structure: Any
    shards: sharded.Apart
    blocks: list[Block]
    carried: list[bool]

    def only(self, keep: Callable[[str], bool]) -> Any:
        """Returns the tree with all leaves masked that are not carried or not kept."""
        rows = zip(self.paths, self.leaves, self.carried, strict=True)
        kept = [x if held and keep(path) else optax.MaskedNode() for path, x, held in rows]
        return self.structure.unflatten(kept)

    def of_block(self, block: Block) -> Any:
        """Returns the tree with all leaves masked but those of a block."""
        members = set(block.paths)
        return self.only(lambda path: path in members)

    def rest(self) -> Any:
        """Returns the tree with carried leaves masked; None if all are carried."""
        if all(self.carried) and not self.shards.places:
            return None
        pairs = zip(self.leaves, self.carried, strict=True)
        kept = [optax.MaskedNode() if held else x for x, held in pairs]
        return self.shards.together(self.structure.unflatten(kept), self.shards.nodes)

    def merged(self, leaves: Sequence[Any], rest: Any) -> Any:
        """Returns the whole tree, from carried leaves and a tree of the others.

        Args:
            leaves: All leaves, of which those that are carried are used.
            rest: A tree like `rest()`, of which the others are used.
        """
        whole = self.shards.structure if self.shards.places else self.structure
        others = whole.flatten_up_to(rest)
        nodes = [others[at] for at in self.shards.places]
        others = [x for at, x in enumerate(others) if at not in self.shards.places]
        rows = zip(leaves, others, self.carried, strict=True)
        kept = [own if held else other for own, other, held in rows]
        return self.shards.together(self.structure.unflatten(kept), nodes)

    def with_leaves(self, leaves: Sequence[Any]) -> Any:
        """Returns the whole tree with its leaves replaced."""
        return self.shards.together(self.structure.unflatten(leaves), self.shards.nodes)

    @classmethod
    def of(cls, given: Any, order: Any, at_once: Sequence[str]) -> Self:
        """Cuts a tree.

        Args:
            given: The parameters, or gradients of them.
            order: The `order` argument of `horizontal`.
            at_once: The path prefixes of leaves that are not carried.
        """
        shards = sharded.apart(given)
        paths, leaves, structure = tree.flatten(shards.rest, "horizontal", rows=True)
        now = blocks.among(at_once, paths, "at_once")
        there = [path for path, out in zip(paths, now, strict=True) if not out]
        if not there:
            raise ArgumentError(
                "horizontal has nothing to carry: all leaves are named in at_once, or are "
                "tables that ranks share out. Use the chain without it."
            )
        found = blocks.cut(there, order)
        carried = [not out for out in now]
        return cls(paths, leaves, structure, shards, found, carried)
