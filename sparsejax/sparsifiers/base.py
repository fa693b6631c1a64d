"""The contract of a sparsifier.

A sparsifier is a frozen dataclass that selects the elements of an array that are sent in
this step. It is called with the accumulated gradient, which is the gradient plus the
residual, in float32 or wider. The selected elements are sent as a `SparseTensor`; the
others are the next residual (`transforms.feedback`), so

    accumulated gradient == sent + residual

and nothing is lost. A `Selector` returns the indices of the selected elements.
`ByMagnitude` is a selector that computes a threshold, from which the indices follow; if the
threshold is an estimate, `estimate.ByEstimate` corrects it. `Rounding` returns another
array, with all elements in a few bits each.

The number of selected elements may vary from step to step, but the capacity does not. If
more elements reach a threshold than fit, the largest are selected. Of equal elements
consecutive ones are selected, from a start that changes from step to step: in the order of
indices the last ones would never be sent.

Thresholds are keys (`units.selection.magnitudes`). Random numbers are a hash of the step,
so ranks agree on them without a message.
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
from sparsejax.units.selection.selections import Arrays


# A share of the elements, or a function of the step that returns one; see `densities`.
Density = float | Callable[[jax.Array], Any]

_MOST = 2**31 - 1


class Draw(NamedTuple):
    """The inputs of a sparsifier besides the array.

    Attributes:
        step: int32 [], the number of updates before this one, equal on all ranks.
        seed: uint32 [], a seed that differs by leaf and step, equal on all ranks.
        wanted: int32 [], k, the number of elements to select from all shards together.
        rank: int32 [], the number of this rank, for random numbers that differ by rank.
        over: Sums and concatenations over the shards of the array.
        alone: Whether the threshold is computed from this array alone; False if it is one
            threshold for all leaves.
        param: The parameter of the array, flat, for a sparsifier that reads it; else None.

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
        """The share of `wanted` for one shard, where all shards send equally many."""
        return -(-self.wanted // self.over.count)


@dataclasses.dataclass(frozen=True)
class Sparsifier:
    """A rule that selects which part of an array is sent.

    It is given the accumulated gradient x, the gradient plus the residual, and k, the
    number of elements to send. What it does not send is the next residual. A `Selector`
    selects elements and sends their values. A `Rounding` sends all elements in few bits.
    For a new sparsifier, derive from one of these.

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
        """Returns the first state for an array of `size`, which differs by rank."""
        del size, dtype
        return ()

    def wanted(self, size: int, step: jax.Array) -> jax.Array:
        """Returns k, the number of elements of `size` to send in a step: at least 1."""
        if not callable(self.density):
            return jnp.int32(max(1, min(math.ceil(self.density * size), _MOST)))
        share = jnp.asarray(self.density(step), jnp.float32)
        most = float(min(size, _MOST // 2))
        return jnp.clip(jnp.ceil(share * size), 1.0, most).astype(jnp.int32)


class Selector(Sparsifier, abc.ABC):
    """A sparsifier that selects elements and sends their values unchanged.

    A subclass defines `select`.

    Attributes:
        density: The share of elements to send, k of the size: a number, a `Warmup` or a
            `Schedule`.

    Example:
        >>> base = sparsejax.sparsifiers.base
        >>> isinstance(sparsejax.sparsifiers.RandomK(0.01), base.Selector)
        True
    """

    #: Whether all ranks select the same elements, so that no indices need to travel.
    shared: bool = False

    @property
    def room(self) -> float:
        """The capacity as a multiple of k."""
        return 1.0

    def capacity(self, size: int) -> int:
        """Returns the capacity for selected elements, of an array of `size`."""
        share: Any = getattr(self.density, "largest", self.density)
        return max(1, min(size, math.ceil(self.room * math.ceil(share * size))))

    def expected(self, size: int) -> int:
        """Returns the elements of `size` that are sent after any warm-up, for forecasts."""
        share: Any = getattr(self.density, "density", None)
        if share is None:
            share = getattr(self.density, "largest", self.density)
        return min(self.capacity(size), math.ceil(share * size))

    def scale(self, size: int, draw: Draw) -> Any:
        """Returns the factor that makes sent values unbiased, without a memory."""
        del size, draw
        return 1.0

    @abc.abstractmethod
    def select(
        self, x: jax.Array, state: Any, draw: Draw, capacity: int
    ) -> tuple[jax.Array, Any]:
        """Selects elements of an array.

        Args:
            x: [size], the accumulated gradient: the gradient plus the residual, in float32
                or wider.
            state: The state of the sparsifier for this array.
            draw: The step, a seed and k.
            capacity: The largest number of indices, known when traced; k is not.

        Returns:
            The indices of the selected elements, int32 [capacity], in any order, distinct
            and padded with `size`; and the next state. Unless all ranks select the same
            elements, a zero is never selected, and a NaN is selected like the largest.
        """

    def select_all(
        self,
        arrays: Sequence[jax.Array],
        states: Sequence[Any],
        draws: Sequence[Draw],
        capacities: Sequence[int],
    ) -> tuple[list[jax.Array], list[Any]]:
        """Selects elements of several arrays of equal dtype; see `units.selection`.

        Args:
            arrays: The arrays.
            states: The state for each array.
            draws: The `Draw` for each array.
            capacities: The capacity for each array.

        Returns:
            What `select` returns for each array, as a list of indices and a list of states.
        """
        each = zip(arrays, states, draws, capacities, strict=True)
        places, after = zip(*(self.select(*one) for one in each), strict=True)
        return list(places), list(after)


class ByMagnitude(Selector):
    """A sparsifier that selects the elements whose magnitude reaches a threshold.

    A subclass defines `level`, which computes the threshold. A NaN is always selected, a
    zero never.

    Attributes:
        density: The share of elements to send, k of the size: a number, a `Warmup` or a
            `Schedule`.

    Example:
        >>> base = sparsejax.sparsifiers.base
        >>> isinstance(sparsejax.sparsifiers.TopK(0.01), base.ByMagnitude)
        True
    """

    @abc.abstractmethod
    def level(self, x: jax.Array, state: Any, draw: Draw) -> tuple[jax.Array, Any]:
        """Computes the threshold of an array.

        Args:
            x: [size], the accumulated gradient: the gradient plus the residual, in float32
                or wider.
            state: The state of the sparsifier for this array.
            draw: The step, a seed and k.

        Returns:
            The threshold as a key (`units.selection.magnitudes`) of at least 1; and the
            next state.
        """

    def after(self, state: Any, count: jax.Array, draw: Draw) -> Any:
        """Returns the next state, after elements were selected.

        Args:
            state: The state that `level` returned.
            count: int32 [], the number of elements of all shards that reach the threshold.
            draw: The step, a seed and k.
        """
        del count, draw
        return state

    def levels(
        self, arrays: Sequence[jax.Array], states: Sequence[Any], draws: Sequence[Draw]
    ) -> tuple[list[jax.Array], list[Any]]:
        """Computes the thresholds of several arrays.

        Args:
            arrays: The arrays.
            states: The state for each array.
            draws: The `Draw` for each array.

        Returns:
            What `level` returns for each array, as a list of thresholds and a list of
            states.
        """
        each = zip(arrays, states, draws, strict=True)
        levels, after = zip(*(self.level(*one) for one in each), strict=True)
        return list(levels), list(after)

    def limit(self, draw: Draw, capacity: int) -> jax.Array | int:
        """Returns the largest number of elements to select that reach the threshold.

        Args:
            draw: The step, a seed and k.
            capacity: The largest number of indices.
        """
        del draw
        return capacity

    def cut(
        self, x: jax.Array, level: jax.Array, limit: jax.Array, draw: Draw
    ) -> jax.Array:
        """Selects `limit` elements, if more reach the threshold.

        Args:
            x: [size], the accumulated gradient: the gradient plus the residual, in float32
                or wider.
            level: The threshold, as a key.
            limit: The number of elements to select.
            draw: The step, a seed and k.

        Returns:
            The selected elements as packed bits.
        """
        del level
        return magnitudes.largest(x, limit, draw.seed)

    def take_all(
        self,
        arrays: Sequence[jax.Array],
        levels: Sequence[jax.Array],
        draws: Sequence[Draw],
        capacities: Sequence[int],
    ) -> tuple[list[jax.Array], jax.Array]:
        """Selects the elements of several arrays that reach their thresholds.

        Args:
            arrays: The arrays.
            levels: The threshold of each array, as keys.
            draws: The `Draw` for each array.
            capacities: The capacity for each array.

        Returns:
            The indices for each array, at most as many as its capacity; and int32 [arrays],
            the number of elements that reach each threshold.
        """
        together = Arrays(arrays)
        selected = together.at_least(levels)
        places = self._fit(together, levels, selected, draws, capacities)
        return places, selected.counts

    def _fit(self, together, levels, selected, draws, capacities):
        """Returns the indices of the selected elements, reduced to those that fit."""
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
        """Returns a threshold, corrected if it is an estimate.

        Args:
            x: [size], the accumulated gradient: the gradient plus the residual, in float32
                or wider.
            level: The threshold, as a key.
            draw: The step, a seed and k.
        """
        del x, draw
        return level

    def select(self, x, state, draw, capacity):
        (places,), (state,) = self.select_all([x], [state], [draw], [capacity])
        return places, state

    def select_all(self, arrays, states, draws, capacities):
        levels, states = self.levels(arrays, states, draws)
        places, counts = self._take_settled(arrays, levels, draws, capacities)
        each = zip(states, draws[0].over.add(counts), draws, strict=True)
        return places, [self.after(*one) for one in each]

    def _take_settled(self, arrays, levels, draws, capacities):
        """Does as `take_all`, after thresholds that are estimates have been corrected."""
        return self.take_all(arrays, levels, draws, capacities)


class Rounding(Sparsifier, abc.ABC):
    """A sparsifier that sends every element, rounded to few bits.

    A subclass defines `rounded`.

    Attributes:
        density: Not used by most: all elements are sent.

    Example:
        >>> isinstance(sparsejax.sparsifiers.Sign(), sparsejax.sparsifiers.base.Rounding)
        True
    """

    def shrink(self, size: int) -> float:
        """Returns the factor of rounded values if rounding errors go into a residual.

        Unbiased rounding may overshoot: without the factor the residual would grow without
        bound.
        """
        del size
        return 1.0

    @abc.abstractmethod
    def rounded(self, x: jax.Array, draw: Draw) -> jax.Array:
        """Returns the rounded array, which is sent in place of the accumulated gradient.

        Args:
            x: [size], the accumulated gradient: the gradient plus the residual, in float32
                or wider.
            draw: The step, a seed and k.
        """
