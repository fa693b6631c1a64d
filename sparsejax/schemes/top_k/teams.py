"""SparDL's teams: the division of ranks and elements.

The n ranks are d teams of n / d neighbouring ranks. An array is cut into as many blocks as
a team has ranks, and L = d k / n elements are selected from each block. After
Spar-Reduce-Scatter each rank of a team has one block, and the ranks of one place have the
same block in all teams.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.schemes.top_k import base as top_k
from sparsejax.wire import gathers
from sparsejax.wire.collectives import Wire
from sparsejax.wire.ladder import Ladder


class Teams(NamedTuple):
    """The division of ranks into teams, and of elements into blocks.

    Attributes:
        within: The rings of the ranks of each team.
        number: d, the number of teams.
        blocks: The blocks.
        k: L, the number of elements to select from a block.
        recursive: Whether teams synchronize by R-SAG; else by B-SAG.
    """

    within: gathers.Rings
    number: int
    blocks: top_k.Blocks
    k: int
    recursive: bool

    @property
    def across(self) -> gathers.Rings:
        """The rings of the ranks of one place in all teams."""
        return gathers.Rings(self.within.ranks, self.number, self.within.size)

    def ladder(self, dtype: jnp.dtype, code: str, least: int | None = None) -> Ladder:
        """Returns the message sizes for selections from blocks."""
        return self.blocks.ladder(self.k, dtype, code, least)

    @property
    def least_h(self) -> int:
        """The least h of B-SAG, which suffices if no two teams select equal indices."""
        return max(1, self.k // self.number)


@dataclasses.dataclass(frozen=True)
class Member:
    """A rank as the member of its team, in one step.

    Attributes:
        teams: The division of ranks and elements.
        wire: The ranks.
        code: The name of the index code, or "auto".
        seed: The seed of the choice among equal elements, the same on all ranks.
    """

    teams: Teams
    wire: Wire
    code: str
    seed: jax.Array

    @property
    def place(self) -> jax.Array:
        """This rank's place in its team, which is also the number of its block."""
        return self.teams.within.place(self.wire.rank)

    @property
    def team(self) -> jax.Array:
        """The number of this rank's team."""
        return self.teams.across.place(self.wire.rank)

    def select(self, rows: jax.Array, k: jax.Array | int | None = None) -> jax.Array:
        """Selects the k largest elements of each block, L if k is None, as packed bits."""
        return top_k.select(rows, self.teams.k if k is None else k, self.seed)
