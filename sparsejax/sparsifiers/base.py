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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax import axes, errors
from sparsejax.axes import AxisName, as_varying, varying_axes
from sparsejax.sparsifiers.densities import Density as Density
from sparsejax.units import magnitudes
from sparsejax.wire.collectives import Wire


_MOST = 2**31 - 1


class Draw(NamedTuple):
    """The numbers that a sparsifier is given beside the array.

    Attributes:
        step: int32: updates before this one, equal on all ranks.
        seed: uint32: different for each leaf and step, equal on all ranks.
        wanted: int32: k, the number of elements to select from all shards together.
        rank: int32: this rank's number, for random numbers that differ by rank.
        model_axis: The mesh axis over which the tensor is sharded, or None.
        alone: Whether the threshold is computed from this array alone; False if it is one
            threshold for all leaves.
    """

    step: jax.Array
    seed: jax.Array
    wanted: jax.Array
    rank: jax.Array | int = 0
    model_axis: AxisName | None = None
    alone: bool = True

    @property
    def shards(self) -> int:
        """The number of shards of the tensor."""
        return 1 if self.model_axis is None else Wire(self.model_axis).ranks

    @property
    def over(self) -> magnitudes.Shards:
        """Sums and concatenations over the shards of the tensor."""
        if self.model_axis is None:
            return magnitudes.WHOLE
        wire = Wire(self.model_axis)
        return magnitudes.Shards(
            add=lambda x: wire.psum(wire.per_rank(x))[0],
            join=lambda x: wire.all_gather(wire.per_rank(x))[0].reshape(-1),
        )


@dataclasses.dataclass(frozen=True)
class Sparsifier:
    """A way to send less than a whole array.

    Attributes:
        density: The share of elements to send: a number, a `Warmup` or a `Schedule`.
    """

    density: Density = 0.01

    def __post_init__(self):
        errors.check_density("density", self.density)

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


class Correction(NamedTuple):
    """How an estimated threshold is corrected until it selects about k elements.

    Attributes:
        fewest: The least accepted count, as a multiple of k.
        most: The largest accepted count, as a multiple of k.
        lower: The factor on a threshold that selects too few.
        higher: The factor on a threshold that selects too many.
        rounds: The largest number of corrections; each reads the array once.
    """

    fewest: float
    most: float
    lower: float
    higher: float
    rounds: int

    def __call__(
        self, x: jax.Array, level: jax.Array, count: jax.Array, draw: Draw
    ) -> jax.Array:
        """Corrects a threshold that selects `count` elements of all shards."""
        shards = draw.over
        counted = lambda t: shards.add(magnitudes.count(x, magnitudes.key_of(t, x.dtype)))
        few, many = self.fewest * draw.wanted, self.most * draw.wanted

        def rejected(state):
            turn, _, count = state
            return (turn < self.rounds) & ((count < few) | (count > many))

        def corrected(state):
            turn, t, count = state
            t = t * jnp.where(count > many, self.higher, self.lower)
            return turn + 1, t, counted(t)

        start = magnitudes.magnitude_of(level, x.dtype)
        over = varying_axes(start) | varying_axes(count)
        start = as_varying((jnp.int32(0), start, count), over)
        turns, t, count = magnitudes.rare_loop(rejected, corrected, start)
        level = jnp.where(turns > 0, magnitudes.key_of(t, x.dtype), level)
        # Where no threshold is accepted, as with elements that are all equal, select all
        # non-zeros, and so as many of the largest as fit. Else they would never be sent.
        return jnp.where(count < few, jnp.ones_like(level), level)


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

    def take(
        self, x: jax.Array, level: jax.Array, draw: Draw, capacity: int
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the indices of the elements from a threshold on, and their count."""
        words, count = magnitudes.at_least(x, level)
        words = magnitudes.fit(x, words, count, capacity, draw.seed)
        return magnitudes.indices(words, x.size, capacity), count

    def settled(self, x: jax.Array, level: jax.Array, draw: Draw) -> jax.Array:
        """Returns a threshold, corrected if it is an estimate."""
        if self.correction is None:
            return level
        count = draw.over.add(magnitudes.count(x, level))
        return self.correction(x, level, count, draw)

    def select(self, x, state, draw, capacity):
        level, state = self.level(x, state, draw)
        if self.correction is None:
            places, count = self.take(x, level, draw, capacity)
            return places, self.after(state, draw.over.add(count), draw)
        # Selecting counts, too, so most steps need no other read of the array.
        words, count = magnitudes.at_least(x, level)
        right = self.correction(x, level, draw.over.add(count), draw)
        again = lambda: magnitudes.at_least(x, right)
        words, count = axes.cond(right != level, again, lambda: (words, count))
        words = magnitudes.fit(x, words, count, capacity, draw.seed)
        places = magnitudes.indices(words, x.size, capacity)
        return places, self.after(state, draw.over.add(count), draw)


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
