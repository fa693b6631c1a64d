"""The contract of a sparsifier.

A sparsifier is a frozen dataclass that says which elements of an array are sent in this
step. It is called with the accumulated gradient, which is the gradient plus the residual,
in float32 or wider. The selected elements are sent as a `SparseTensor`; the others are the
next residual (`transforms.feedback`), so

    accumulated gradient == sent + residual

and nothing is lost. A `Selector` returns the indices of the selected elements;
`ByMagnitude` is one that computes a threshold, from which the indices follow. `Rounding`
returns another array, all elements of it in a few bits each.

The number of selected elements may vary from step to step, their capacity does not. If
more elements are above a threshold than fit, the largest are selected, and of equal ones a
run whose start changes from step to step: by index, the last ones would never be sent.

Thresholds are keys (`units.magnitudes`). Random numbers are a hash of the step, so ranks
agree on them without a message.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax import arguments
from sparsejax.units.selection import magnitudes
from sparsejax.units.selection.corrections import Correction
from sparsejax.units.selection.selections import Arrays


# A share of the elements, or a function from the step to one; see `densities`.
Density = float | Callable[[jax.Array], Any]

_MOST = 2**31 - 1


class Draw(NamedTuple):
    """The numbers that a sparsifier is given beside the array.

    Attributes:
        step: int32: updates before this one, equal on all ranks.
        seed: uint32: different for each leaf and step, equal on all ranks.
        wanted: int32: k, the number of elements to select from all shards together.
        rank: int32: this rank's number, for random numbers that differ by rank.
        over: Sums and concatenations over the shards of the tensor.
        alone: Whether the threshold is computed from this array alone; False if it is one
            threshold for all leaves.
        param: The parameter of the array, flat, for a sparsifier that reads it.

    Example:
        >>> draw = sparsejax.sparsifiers.Draw(
        ...     step=jnp.int32(0), seed=jnp.uint32(7), wanted=jnp.int32(2))
        >>> x = jnp.array([0.1, -3.0, 0.2, 2.0])
        >>> indices, _ = sparsejax.sparsifiers.TopK(0.5).select(x, (), draw, 2)[:2]
    """

    step: jax.Array
    seed: jax.Array
    wanted: jax.Array
    rank: jax.Array | int = 0
    over: magnitudes.Shards = magnitudes.WHOLE
    alone: bool = True
    param: jax.Array | None = None

    @property
    def of_shard(self) -> jax.Array:
        """How many of `wanted` are of this shard, where all shards send equally many."""
        return -(-self.wanted // self.over.count)


@dataclasses.dataclass(frozen=True)
class Sparsifier:
    """A rule that selects which part of an array is sent.

    Attributes:
        density: The share of elements to send: a number, a `Warmup` or a `Schedule`.

    Example:
        >>> kinds = [sparsejax.sparsifiers.TopK(0.01), sparsejax.sparsifiers.DGC(0.01)]
        >>> all(isinstance(kind, sparsejax.sparsifiers.Sparsifier) for kind in kinds)
        True
    """

    density: Density = 0.01

    #: Whether `update` has to be given the parameters, for `Draw.param`.
    reads_params = False

    def __post_init__(self):
        arguments.check_density("density", self.density)

    def init(self, size: int, dtype: Any) -> Any:
        """Returns the first state for a vector of `size` elements: arrays, by rank."""
        del size, dtype
        return ()

    def wanted(self, size: int, step: jax.Array) -> jax.Array:
        """Returns k, the number of elements of `size` to send in this step: at least 1."""
        if not callable(self.density):
            return jnp.int32(max(1, min(math.ceil(self.density * size), _MOST)))
        share = jnp.asarray(self.density(step), jnp.float32)
        most = float(min(size, _MOST // 2))
        return jnp.clip(jnp.ceil(share * size), 1.0, most).astype(jnp.int32)


class Selector(Sparsifier, abc.ABC):
    """A sparsifier that selects elements and sends their values unchanged."""

    #: Whether all ranks select the same elements, so that no indices need to travel.
    shared: bool = False

    @property
    def room(self) -> float:
        """The capacity as a multiple of k."""
        return 1.0

    def capacity(self, size: int) -> int:
        """Returns how many selected elements fit, of an array of `size`."""
        share: Any = getattr(self.density, "largest", self.density)
        return max(1, min(size, math.ceil(self.room * math.ceil(share * size))))

    def expected(self, size: int) -> int:
        """Returns how many elements of `size` are sent after any warm-up, for forecasts."""
        share: Any = getattr(self.density, "density", None)
        if share is None:
            share = getattr(self.density, "largest", self.density)
        return min(self.capacity(size), math.ceil(share * size))

    def scale(self, size: int, draw: Draw) -> Any:
        """Returns the factor on sent values that makes them unbiased without a memory."""
        del size, draw
        return 1.0

    @abc.abstractmethod
    def select(
        self, x: jax.Array, state: Any, draw: Draw, capacity: int
    ) -> tuple[jax.Array, Any]:
        """Selects elements of x [size], the accumulated gradient.

        Returns:
            The indices of the selected elements, int32 [capacity], each at most once and
            padded with `size`; and the next state.
        """

    def select_all(
        self,
        arrays: Sequence[jax.Array],
        states: Sequence[Any],
        draws: Sequence[Draw],
        capacities: Sequence[int],
    ) -> tuple[list[jax.Array], list[Any]]:
        """Selects elements of several arrays of one group; see `units.selections`.

        Returns:
            What `select` returns for each: the lists of indices, and of states.
        """
        each = zip(arrays, states, draws, capacities, strict=True)
        places, after = zip(*(self.select(*one) for one in each), strict=True)
        return list(places), list(after)


class ByMagnitude(Selector):
    """A sparsifier that selects all elements from a threshold on: NaN, but never zero."""

    @property
    def correction(self) -> Correction | None:
        """The correction of thresholds that are estimates; None if they are not."""
        return None

    @abc.abstractmethod
    def level(self, x: jax.Array, state: Any, draw: Draw) -> tuple[jax.Array, Any]:
        """Returns the threshold, as a key of at least 1, and the next state."""

    def after(self, state: Any, count: jax.Array, draw: Draw) -> Any:
        """Returns the next state, given how many elements of all shards were selected."""
        del count, draw
        return state

    def levels(
        self, arrays: Sequence[jax.Array], states: Sequence[Any], draws: Sequence[Draw]
    ) -> tuple[list[jax.Array], list[Any]]:
        """Returns the thresholds of several arrays, and the next states; see `level`."""
        each = zip(arrays, states, draws, strict=True)
        levels, after = zip(*(self.level(*one) for one in each), strict=True)
        return list(levels), list(after)

    def limit(self, draw: Draw, capacity: int) -> jax.Array | int:
        """Returns how many of the elements from a threshold on are selected at most."""
        del draw
        return capacity

    def cut(
        self, x: jax.Array, level: jax.Array, limit: jax.Array, draw: Draw
    ) -> jax.Array:
        """Selects k elements of x, where more are above the threshold, as packed bits."""
        del level
        return magnitudes.largest(x, limit, draw.seed)

    def take_all(
        self,
        arrays: Sequence[jax.Array],
        levels: Sequence[jax.Array],
        draws: Sequence[Draw],
        capacities: Sequence[int],
    ) -> tuple[list[jax.Array], jax.Array]:
        """Selects the elements of each array from its threshold on, as many as fit.

        Returns:
            Their indices, and int32 [arrays], how many there are from the threshold on.
        """
        together = Arrays(arrays)
        selected = together.at_least(levels)
        places = self._fit(together, levels, selected, draws, capacities)
        return places, selected.counts

    def _fit(self, together, levels, selected, draws, capacities):
        """The indices of what is selected, and of no more than fit."""
        limits = [self.limit(*pair) for pair in zip(draws, capacities, strict=True)]
        pairs = zip(limits, together.arrays, strict=True)
        if not all(isinstance(limit, int) and limit >= x.size for limit, x in pairs):
            limits, levels = jnp.stack([jnp.int32(n) for n in limits]), jnp.stack(levels)
            wanted = jnp.stack([draw.wanted for draw in draws])
            seeds = jnp.stack([draw.seed for draw in draws])

            def cut(x, i):
                draw = draws[0]._replace(seed=seeds[i], wanted=wanted[i])
                return self.cut(x, levels[i], limits[i], draw)

            selected = together.fit(selected, limits, cut)
        return together.indices(selected, capacities)

    def settled(self, x: jax.Array, level: jax.Array, draw: Draw) -> jax.Array:
        """Returns a threshold, corrected if it is an estimate."""
        if self.correction is None:
            return level
        together, wanted = Arrays([x]), draw.wanted[None]
        selected = together.at_least([level])
        return self.correction(together, [level], selected, wanted, draw.over)[1][0]

    def select(self, x, state, draw, capacity):
        (places,), (state,) = self.select_all([x], [state], [draw], [capacity])
        return places, state

    def select_all(self, arrays, states, draws, capacities):
        levels, states = self.levels(arrays, states, draws)
        shards = draws[0].over
        if self.correction is None:
            places, counts = self.take_all(arrays, levels, draws, capacities)
        else:
            # Selecting counts, too, so most steps need no other read of the arrays.
            together, wanted = Arrays(arrays), jnp.stack([draw.wanted for draw in draws])
            selected = together.at_least(levels)
            selected, levels = self.correction(together, levels, selected, wanted, shards)
            places = self._fit(together, list(levels), selected, draws, capacities)
            counts = selected.counts
        counts = shards.add(counts)
        each = zip(states, counts, draws, strict=True)
        return places, [self.after(*one) for one in each]


class Rounding(Sparsifier, abc.ABC):
    """A sparsifier that sends every element, rounded to a few bits."""

    def shrink(self, size: int) -> float:
        """Returns the factor on rounded values where rounding errors are fed back.

        Unbiased rounding may take away more than there was; fed back unscaled, the
        residual would grow without bound.
        """
        del size
        return 1.0

    @abc.abstractmethod
    def rounded(self, x: jax.Array, draw: Draw) -> jax.Array:
        """Returns the rounded array that is sent instead of x [size]."""
