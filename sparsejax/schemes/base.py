"""The contract of a scheme.

A scheme is a frozen dataclass, so that it is hashable and static under `jit`. It is called
inside `jax.shard_map` (or under `jax.vmap` with an axis name) with this rank's numbers, and
returns their sum over the ranks, the same on every rank bit for bit:

    psum(x) == total + psum(residual)

A lossless scheme has no residual. `x` is a unit a row: [units] where the units are single
numbers, [units, width] where they are rows of a table. An index costs a unit, not a number.
"""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax import wire
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError
from sparsejax.schemes.forecast import Forecast, Load
from sparsejax.units import entries
from sparsejax.wire.messages import Sent


class Stage(NamedTuple):
    """One stage of an exchange, as float32 scalars equal on all ranks.

    Attributes:
        wire: Bytes that one rank sent, padding included.
        payload: Bytes that the entries needed in the code they travelled in.
        rounds: How many messages followed one another.
        imbalance: Entries of the fullest part over those of the mean part (Zen,
            definition 8); 1 where nothing is partitioned.
    """

    wire: jax.Array
    payload: jax.Array
    rounds: jax.Array
    imbalance: jax.Array


class Traffic(NamedTuple):
    """What one rank sent.

    Bytes are float32: exact to 16 MiB, seven digits beyond. Payload is that of the rank
    with most entries, taken as evenly spread over the parts.

    Attributes:
        push: Getting the values to where they are added up.
        pull: Getting the sums back to all ranks.
        scalars: Bytes of the few numbers on which all ranks agree first.
        dense: Bytes that an all-reduce sends.
        density_before: Share of non-zero units of the rank that has most.
        density_after: Share of units that are non-zero in the sum.
        inside: Bytes sent inside a host, where a scheme has two levels; not in `wire`.
    """

    push: Stage
    pull: Stage
    scalars: jax.Array
    dense: jax.Array
    density_before: jax.Array
    density_after: jax.Array
    inside: jax.Array

    @property
    def wire(self) -> jax.Array:
        """All bytes that one rank sent."""
        return self.push.wire + self.pull.wire + self.scalars

    @property
    def payload(self) -> jax.Array:
        """All bytes that were needed."""
        return self.push.payload + self.pull.payload


class Reduced(NamedTuple):
    """What a scheme returns.

    Attributes:
        total: The sum over the ranks, in x's shape and dtype.
        residual: What this rank keeps for next time, or None.
        state: The scheme's next state.
        traffic: What was sent for it.
    """

    total: jax.Array
    residual: jax.Array | None
    state: Any
    traffic: Traffic


class Scheme(abc.ABC):
    """A way to add up one array over all ranks."""

    #: Whether the total is the sum, now or with what is kept back.
    lossless: bool = True

    #: Whether x may be `entries.Entries`, of which no dense array is made first.
    takes_entries: bool = False

    #: Whether it chooses what it sends, so that units are elements, and x is not sparse.
    selects: bool = False

    @property
    def keeps_residual(self) -> bool:
        """Whether `residual` is an array; then `sync` keeps it for the next x."""
        return False

    @property
    def needs_ranks(self) -> bool:
        """Whether `init` needs to know how many ranks there are."""
        return False

    def check_size(self, name: str, size: int) -> None:
        """Raises where the scheme makes no sense for an array of so many elements."""
        del name, size

    def init(self, like: Any, ranks: Any) -> Any:
        """The first state for units like `like` on so many ranks: an int."""
        del like, ranks
        return ()

    @abc.abstractmethod
    def __call__(
        self,
        x: Any,
        state: Any,
        axis_name: AxisName,
        *,
        present: jax.Array | None = None,
    ) -> Reduced:
        """Adds up x over the axis.

        Args:
            x: [units] or [units, width], floating; see `takes_entries`.
            state: The scheme's state.
            axis_name: The axis, or axes, to add up over.
            present: Booleans [units], if the caller knows: all other units are zero.
        """

    def forecast(self, load: Load) -> Forecast:
        """What one rank would send for such a load; see `sparsejax.forecast`."""
        raise NotImplementedError(f"{type(self).__name__} has no forecast.")


Number = jax.Array | float

# Less than 2**31, by the slots that belong to no unit and the entries of a tile.
MOST_UNITS = 2**31 - 2**24


def stage(
    wire: Number = 0.0, payload: Number = 0.0, rounds: Number = 0.0, imbalance: Number = 1.0
) -> Stage:
    """A stage from numbers of any kind."""
    return Stage(*(jnp.asarray(x, jnp.float32) for x in (wire, payload, rounds, imbalance)))


def stage_of(sent: Sent, imbalance: Number = 1.0) -> Stage:
    """A stage from what `exchange.transmit` reports."""
    return stage(sent.wire, sent.payload, sent.rounds, imbalance)


def add_stages(a: Stage, b: Stage) -> Stage:
    """Two stages that followed one another."""
    return Stage(
        a.wire + b.wire,
        a.payload + b.payload,
        a.rounds + b.rounds,
        jnp.maximum(a.imbalance, b.imbalance),
    )


def add_traffic(a: Traffic, b: Traffic) -> Traffic:
    """Two exchanges that followed one another; densities of the fuller one."""
    return Traffic(
        add_stages(a.push, b.push),
        add_stages(a.pull, b.pull),
        a.scalars + b.scalars,
        a.dense + b.dense,
        jnp.maximum(a.density_before, b.density_before),
        jnp.maximum(a.density_after, b.density_after),
        a.inside + b.inside,
    )


def check_wire_dtype(wire_dtype: Any) -> None:
    """Raises unless numbers can travel in this dtype; None is that of the array."""
    if wire_dtype is None:
        return
    try:
        dtype = jnp.dtype(wire_dtype)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise ArgumentError(
            "wire_dtype must be a floating dtype of at least 16 bits, such as "
            f"jnp.bfloat16, got {wire_dtype!r}."
        )


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises unless an argument is one of the words that it may be."""
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise ArgumentError(f"{name} must be one of {known}, got {value!r}.")


def check_units(x: entries.Units) -> None:
    """Raises if the units are too many to be numbered by int32."""
    if x.shape[0] > MOST_UNITS:
        raise ArgumentError(
            f"an array of {x.shape[0]:,} units is too large: units are numbered by int32, "
            f"which leaves room for {MOST_UNITS:,}. Use rows as units (a rule "
            "{path: 'row'}), or shard the array over a second mesh axis."
        )


def sum_densely(
    x: entries.Units,
    state: Any,
    axis_name: AxisName,
    wire_dtype: jax.typing.DTypeLike | None = None,
) -> Reduced:
    """The sum by an all-reduce, zeros and all."""
    total, sent = wire.all_reduce(entries.dense(x), axis_name, wire_dtype)
    half = stage(sent / 2, sent / 2, 1)
    return Reduced(total, None, state, traffic(half, half, dense=sent))


def sum_of_shared(
    x: entries.Entries,
    state: Any,
    axis_name: AxisName,
    wire_dtype: jax.typing.DTypeLike | None = None,
) -> Reduced:
    """The sum of entries whose units are the same on all ranks: that of their values."""
    values, sent = wire.all_reduce(x.values, axis_name, wire_dtype)
    narrow = wire.travelling(x.dtype, wire_dtype)
    dense = wire.all_reduce_cost(x.size, x.dtype, narrow, wire.ranks(axis_name))
    half = stage(sent / 2, sent / 2, 1)
    share = jnp.mean(x.flags.astype(jnp.float32))
    numbers = {"dense": dense, "before": share, "after": share}
    return Reduced(x.with_values(values), None, state, traffic(half, half, **numbers))


def nothing_to_send(x: entries.Units, state: Any, axis_name: AxisName) -> Reduced:
    """The sum where there is one rank, or where x is empty."""
    total, sent = wire.psum(entries.dense(x), axis_name)
    dense = jnp.float32(sent)
    return Reduced(total, None, state, traffic(stage(), stage(), dense=dense))


def traffic(
    push: Stage,
    pull: Stage,
    *,
    scalars: Number = 0.0,
    dense: Number = 0.0,
    before: Number = 1.0,
    after: Number = 1.0,
    inside: Number = 0.0,
) -> Traffic:
    """A Traffic from two stages and numbers of any kind."""
    numbers = (jnp.asarray(x, jnp.float32) for x in (scalars, dense, before, after, inside))
    return Traffic(push, pull, *numbers)
