"""The history of the numbers in an optimizer's state that only the user changes."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


# The number of values of each number that are remembered.
_CHANGES = 64


class History(NamedTuple):
    """The last values of the numbers of the state that only the user changes.

    Attributes:
        since: For each such number int32 [changes], ascending: the first step of each of
            its values. The last value is the current one.
        values: For each such number [changes], its values.
    """

    since: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    def at(self, step: jax.Array) -> list[jax.Array]:
        """Returns the values at a step."""

        def one(since, values):
            place = jnp.sum(since <= step, dtype=jnp.int32) - 1
            return values[jnp.maximum(place, 0)]

        return list(map(one, self.since, self.values))

    def noted(self, step: jax.Array, values: list[jax.Array]) -> "History":
        """Returns the history with the values of a new step."""

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
    """Returns the history that begins with some values."""
    kept = tuple(jnp.broadcast_to(jnp.asarray(value), (_CHANGES,)) for value in values)
    return History(tuple(jnp.full(_CHANGES, -1, jnp.int32) for _ in values), kept)
