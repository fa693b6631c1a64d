"""The numbers of an optimizer's state that only the user changes, and since when."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


# How many changes of numbers by hand are remembered.
_CHANGES = 64


class History(NamedTuple):
    """The last values of the numbers of the state which only the user changes.

    Attributes:
        since: Of each such number int32 [changes], ascending: the first step of each of
            its values; the last is that of now.
        values: Of each such number, [changes].
    """

    since: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    def at(self, step: jax.Array) -> list[jax.Array]:
        """The values at a step."""

        def one(since, values):
            place = jnp.sum(since <= step, dtype=jnp.int32) - 1
            return values[jnp.maximum(place, 0)]

        return list(map(one, self.since, self.values))

    def noted(self, step: jax.Array, values: list[jax.Array]) -> "History":
        """The history with the values of a new step."""

        def one(since, old, new):
            pushed = lambda kept, last: jnp.where(
                new != old[-1],
                jnp.concatenate([kept[1:], jnp.asarray(last, kept.dtype)[None]]),
                kept,
            )
            return pushed(since, step), pushed(old, new)

        pairs = list(map(one, self.since, self.values, values))
        return History(*(tuple(x) for x in zip(*pairs, strict=True))) if pairs else self

    def has_lost(self, step: jax.Array, numbers: Sequence[int]) -> jax.Array:
        """Flags the steps at which some of the numbers had values that are forgotten."""
        first = [self.since[number][0] for number in numbers]
        return step < jnp.max(jnp.stack(first)) if first else jnp.zeros(step.shape, bool)


def history(values: list[jax.Array]) -> History:
    """The history that begins with some values."""
    kept = tuple(jnp.broadcast_to(jnp.asarray(value), (_CHANGES,)) for value in values)
    return History(tuple(jnp.full(_CHANGES, -1, jnp.int32) for _ in values), kept)
