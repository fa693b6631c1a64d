"""Fragments: parts of the parameters that are exchanged at different steps.

With P fragments and rounds of H steps each fragment is sent every H steps, and some
fragment every H / P steps, so that a link carries a part at a time instead of all at once.
What is sent at the end of step t is applied at the end of step t + delay. Until then the
inner steps continue.

Leaves are assigned by size, the largest first, each to the fragment that is the smallest so
far. The assignment depends on shapes alone, so it is equal on all ranks.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax import arguments
from sparsejax.errors import ArgumentError
from sparsejax.state.pending import Period


@dataclasses.dataclass(frozen=True)
class FragmentSchedule:
    """The steps at which fragments are sent, and at which results are applied.

    Attributes:
        every: The number of steps of a round.
        fragments: The number of fragments.
        delay: The number of steps from sending a fragment to applying the result.
    """

    every: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self):
        arguments.check_whole("every", self.every, 1)
        arguments.check_whole("fragments", self.fragments, 1)
        arguments.check_whole("delay", self.delay, 0)
        if self.every % self.fragments:
            fitting = [n for n in range(1, self.every + 1) if self.every % n == 0]
            near = min(fitting, key=lambda n: abs(n - self.fragments))
            raise ArgumentError(
                f"fragments must divide every={self.every}, so that one is sent after "
                f"equally many steps, got {self.fragments}: take fragments={near}."
            )
        if self.delay >= self.every:
            raise ArgumentError(
                f"delay must be less than every={self.every}, since a fragment is sent "
                f"again after that, got {self.delay}: take {self.every - 1} or less."
            )

    @property
    def period(self) -> Period | None:
        """The numbers by which exchanges are in flight; None if none ever is."""
        return Period(self.every, self.delay) if self.delay else None

    def is_sent(self, step: Any, number: int) -> Any:
        """Returns whether a fragment is sent at the end of a step; steps count from 0."""
        place = (number + 1) * (self.every // self.fragments) % self.every
        return (step + 1) % self.every == place

    def is_applied(self, step: Any, number: int) -> Any:
        """Returns whether a sent fragment is applied at the end of a step."""
        return (step >= self.delay) & self.is_sent(step - self.delay, number)

    def is_pending(self, step: int, number: int) -> bool:
        """Returns whether it was sent by the end of a step, and not applied before that."""
        since = range(max(0, step - self.delay), step + 1)
        return any(self.is_sent(before, number) for before in since)


@dataclasses.dataclass(frozen=True)
class Fragments:
    """The fragment of each leaf.

    Attributes:
        structure: The structure of the tree of parameters.
        numbers: The number of the fragment of each leaf, in the order of the tree.
        count: The number of fragments.
    """

    structure: Any
    numbers: tuple[int, ...]
    count: int

    @classmethod
    def of(cls, params: Any, count: int) -> "Fragments":
        """Assigns parameters to fragments; raises if there are fewer leaves."""
        leaves, structure = jax.tree.flatten(params)
        sizes = [math.prod(jnp.shape(x)) for x in leaves]
        if count > max(len(sizes), 1):
            raise ArgumentError(
                f"fragments={count} is more than the {len(sizes)} leaves of the "
                f"parameters, and a leaf is in one fragment: take {max(len(sizes), 1)} or "
                "less, or keep layers in leaves of their own."
            )
        numbers, filled = [0] * len(sizes), [0] * count
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            numbers[i] = min(range(count), key=lambda n: filled[n])
            filled[numbers[i]] += max(sizes[i], 1)
        return cls(structure, tuple(numbers), count)

    def only(self, number: int, tree: Any) -> Any:
        """Masks all leaves of a tree like the parameters but those of a fragment."""
        if self.count == 1:
            return tree
        pairs = zip(self.structure.flatten_up_to(tree), self.numbers, strict=True)
        return self.structure.unflatten(
            [x if own == number else optax.MaskedNode() for x, own in pairs]
        )

    def together(self, trees: Sequence[Any]) -> Any:
        """Merges the trees of all fragments into one, the inverse of `only`."""
        if self.count == 1:
            return trees[0]
        rows = list(map(self.structure.flatten_up_to, trees))
        return self.structure.unflatten(
            [rows[own][i] for i, own in enumerate(self.numbers)]
        )

    def replaced(self, number: int, tree: Any, part: Any) -> Any:
        """Returns a tree whose leaves of a fragment are those of `part`."""
        both = [part if n == number else self.only(n, tree) for n in range(self.count)]
        return self.together(both)
