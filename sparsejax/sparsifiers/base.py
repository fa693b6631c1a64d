"""The contract of a sparsifier.

A sparsifier is a frozen dataclass that says which elements of an array go now; the rest
waits. It is called with what is due, in float32 or wider: the gradient and what waited.
What it selects goes out as a `SparseTensor`, what it does not is kept (`memory`), so

    x == kept + residual

and nothing is lost. `Selecting` returns places, `ByMagnitude` a least magnitude, from which
places follow; `Rounding` returns another array, each number of few bits.

How many are selected may vary, the room for them not. What does not fit waits. Of too many
over a threshold the largest go, and of equal ones a run whose start changes from step to
step: an order of the indices would let the last ones wait for ever.

Random numbers come from a hash of the step, so ranks agree on them without a message.
"""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import pallas_kernels
from sparsejax import errors, wire
from sparsejax.axes import AxisName, as_varying, varying_axes
from sparsejax.units import bits, magnitudes


_MOST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Warmup:
    """A density that falls exponentially from `start` to `density` in so many steps.

    Room is made for the largest density, so a large start costs memory and time until the
    end. `warmup_steps` of `sparsejax.sync` sends densely instead.
    """

    density: float
    steps: int
    start: float = 0.25

    def __post_init__(self):
        errors.check_density("density", self.density)
        errors.check_density("start", self.start)
        errors.check_whole("steps", self.steps, 1)

    @property
    def largest(self) -> float:
        """The largest density."""
        return max(self.density, self.start)

    def __call__(self, step: jax.Array) -> jax.Array:
        """The density of a step."""
        done = jnp.minimum(step / self.steps, 1.0)
        return self.start * (self.density / self.start) ** done


Density = float | Callable[[jax.Array], Any]


class Draw(NamedTuple):
    """What a sparsifier knows beside the array.

    Attributes:
        step: int32: updates before this one, equal on all ranks.
        seed: uint32: another for each leaf and step, equal on all ranks.
        wanted: int32: how many elements are to go, of all shards together.
        rank: int32: this rank's number, for what ranks are to draw apart.
        model_axis: The mesh axis over which the tensor is sharded, or None.
        alone: Whether the level is found from this array alone, not from all leaves.
    """

    step: jax.Array
    seed: jax.Array
    wanted: jax.Array
    rank: jax.Array | int = 0
    model_axis: AxisName | None = None
    alone: bool = True

    @property
    def shards(self) -> int:
        """How many shards the tensor has."""
        return 1 if self.model_axis is None else wire.ranks(self.model_axis)

    @property
    def total(self) -> Callable:
        """Adds up a number over the shards of the tensor."""
        if self.model_axis is None:
            return magnitudes.itself
        axis = self.model_axis
        return lambda x: wire.psum(wire.per_rank(x, axis), axis)[0]

    @property
    def gathered(self) -> Callable:
        """Puts vectors of the shards of the tensor together."""
        if self.model_axis is None:
            return magnitudes.itself
        axis = self.model_axis
        return lambda x: wire.all_gather(wire.per_rank(x, axis), axis)[0].reshape(-1)


@dataclasses.dataclass(frozen=True)
class Sparsifier:
    """A way to send less of an array than there is.

    Attributes:
        density: The share of elements to send: a number, or a function from the step with
            an attribute `largest`, such as `Warmup`.
    """

    density: Density = 0.01

    def __post_init__(self):
        errors.check_density("density", self.density)

    def init(self, size: int, dtype: Any) -> Any:
        """The first state for a vector of so many elements, each an array by rank."""
        del size, dtype
        return ()

    def wanted(self, size: int, step: jax.Array) -> jax.Array:
        """How many of so many elements are to go in this step: int32, at least 1."""
        if not callable(self.density):
            return jnp.int32(max(1, min(math.ceil(self.density * size), _MOST)))
        share = jnp.asarray(self.density(step), jnp.float32)
        most = float(min(size, _MOST // 2))
        return jnp.clip(jnp.ceil(share * size), 1.0, most).astype(jnp.int32)


class Selecting(Sparsifier, abc.ABC):
    """A sparsifier that selects elements, whose values go as they are."""

    #: Whether all ranks select the same, so that no indices need to travel.
    shared: bool = False

    @property
    def room(self) -> float:
        """How many there is room for, in multiples of how many are wanted."""
        return 1.0

    def capacity(self, size: int) -> int:
        """Room for the selected of so many elements."""
        share: Any = getattr(self.density, "largest", self.density)
        return max(1, min(size, math.ceil(self.room * math.ceil(share * size))))

    def expected(self, size: int) -> int:
        """How many of so many elements go in the long run, for estimates."""
        share: Any = getattr(self.density, "density", None)
        if share is None:
            share = getattr(self.density, "largest", self.density)
        return min(self.capacity(size), math.ceil(share * size))

    def scale(self, size: int, draw: Draw) -> Any:
        """By what to multiply, without a memory, for the right mean; 1 if by nothing."""
        del size, draw
        return 1.0

    @abc.abstractmethod
    def select(
        self, x: jax.Array, state: Any, draw: Draw, capacity: int
    ) -> tuple[jax.Array, Any]:
        """Places int32 [capacity] in x [size], none twice, `size` where there is none."""


class Correction(NamedTuple):
    """How a level is moved until about as many as wanted are as large.

    Attributes:
        fewest: In multiples of how many are wanted.
        most: The same.
        lower: By what a magnitude is multiplied where there are too few.
        higher: By what where there are too many.
        rounds: How often at most; each reads the array once.
    """

    fewest: float
    most: float
    lower: float
    higher: float
    rounds: int

    def __call__(
        self, x: jax.Array, level: jax.Array, count: jax.Array, draw: Draw
    ) -> jax.Array:
        """The level, corrected; `count` of all shards are as large as it says."""
        counted = lambda t: draw.total(magnitudes.count(x, magnitudes.key_of(t, x.dtype)))
        few, many = self.fewest * draw.wanted, self.most * draw.wanted

        def off(state):
            turn, _, count = state
            return (turn < self.rounds) & ((count < few) | (count > many))

        def moved(state):
            turn, t, count = state
            t = t * jnp.where(count > many, self.higher, self.lower)
            return turn + 1, t, counted(t)

        start = magnitudes.magnitude_of(level, x.dtype)
        axes = varying_axes(start) | varying_axes(count)
        first = as_varying((jnp.int32(0), start, count), axes)
        turns, t, count = magnitudes.loop(off, moved, first)
        level = jnp.where(turns > 0, magnitudes.key_of(t, x.dtype), level)
        # Where no guess fits, as with numbers that are all the same, all but zeros would
        # go, and so as many of the largest as there is room for. Else they would wait for
        # ever.
        return jnp.where(count < few, jnp.ones_like(level), level)


class ByMagnitude(Selecting):
    """A sparsifier that selects all from some magnitude on, NaN included, zero never."""

    @property
    def correction(self) -> Correction | None:
        """How a level is corrected that lets through too few or too many, if it is."""
        return None

    @abc.abstractmethod
    def level(self, x: jax.Array, state: Any, draw: Draw) -> tuple[jax.Array, Any]:
        """The key of the least magnitude (`magnitudes`), at least 1."""

    def after(self, state: Any, count: jax.Array, draw: Draw) -> Any:
        """The next state, once so many elements of all shards are known to be as large."""
        del count, draw
        return state

    def take(
        self, x: jax.Array, level: jax.Array, draw: Draw, capacity: int
    ) -> tuple[jax.Array, jax.Array]:
        """Places of the elements from a level on, and how many there are."""
        words, count = _from(x, level)
        words = fitted(x, words, count, draw, capacity)
        return places(words, x.size, capacity), count

    def settled(self, x: jax.Array, level: jax.Array, draw: Draw) -> jax.Array:
        """A level, corrected where it lets through too few or too many."""
        if self.correction is None:
            return level
        count = draw.total(magnitudes.count(x, level))
        return self.correction(x, level, count, draw)

    def select(self, x, state, draw, capacity):
        level, state = self.level(x, state, draw)
        if self.correction is None:
            found, count = self.take(x, level, draw, capacity)
            return found, self.after(state, draw.total(count), draw)
        # The read that selects tells how many there are; seldom another is needed.
        words, count = _from(x, level)
        right = self.correction(x, level, draw.total(count), draw)
        axes = varying_axes(words) | varying_axes(right)
        again = lambda: as_varying(_from(x, right), axes)
        same = lambda: as_varying((words, count), axes)
        words, count = lax.cond(right != level, again, same)
        words = fitted(x, words, count, draw, capacity)
        return places(words, x.size, capacity), self.after(state, draw.total(count), draw)


class Rounding(Sparsifier, abc.ABC):
    """A sparsifier that sends every number, rounded to a few bits."""

    def shrink(self, size: int) -> float:
        """By what to multiply where what rounding takes is remembered.

        Rounding that is right in the mean may take more than there was; fed back, that
        would grow without end.
        """
        del size
        return 1.0

    @abc.abstractmethod
    def rounded(self, x: jax.Array, draw: Draw) -> jax.Array:
        """What goes instead of x [size]."""


def fitted(
    x: jax.Array, words: jax.Array, count: jax.Array, draw: Draw, capacity: int
) -> jax.Array:
    """The packed bits of `count` that were selected, or of the largest that fit."""
    if capacity >= x.size:
        return words
    axes = varying_axes(words)

    def fewer():
        found = magnitudes.largest(x, jnp.int32(capacity), draw.seed)
        return as_varying(found, axes)

    return lax.cond(count > capacity, fewer, lambda: words)


def _from(x, level):
    """The packed bits of what is as large as a level says, and how many there are."""
    words = bits.pack_all(magnitudes.keys(x) >= level)
    return words, bits.members(words)


def as_dtype(level: jax.Array, dtype: Any, other: Any) -> jax.Array:
    """A level among numbers of one dtype as one among numbers of another."""
    if jnp.dtype(dtype) == jnp.dtype(other):
        return level
    return magnitudes.key_of(magnitudes.magnitude_of(level, dtype).astype(other), other)


def places(words: jax.Array, size: int, capacity: int) -> jax.Array:
    """The places of the set bits, `size` where there are no more."""
    found, _ = pallas_kernels.bitmap_decode(words, capacity)
    return jnp.minimum(found, size)
