"""The contract of a scheme: see `Scheme`.

A scheme is hashable, and static under `jit`. One that sends every entry returns no `left`.
The first axis of a dense array is that of units: it is [units] of single numbers, or
[units, width] of rows of a table. An index is sent for each unit, not for each number.
"""

import abc
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax import errors
from sparsejax.errors import ArgumentError
from sparsejax.schemes.forecast import Forecast, Load
from sparsejax.units.row_grads import RowGrads
from sparsejax.units.units import Units
from sparsejax.wire.collectives import Sent, Wire


class Stage(NamedTuple):
    """The traffic of one stage of an exchange, as float32 scalars equal on all ranks.

    Attributes:
        wire: Bytes that one rank sent, padding included.
        payload: Bytes that the entries needed in their index code, without padding.
        rounds: The number of messages that followed one another.
        imbalance: The entries of the fullest part, divided by those of the mean part (Zen,
            definition 8); 1 where nothing is divided among ranks.

    Example:
        >>> stage = sparsejax.schemes.Stage(
        ...     wire=128.0, payload=96.0, rounds=1, imbalance=1.1)
        >>> stage.wire / stage.payload  # what padding costs
        1.3333333333333333
    """

    wire: jax.Array
    payload: jax.Array
    rounds: jax.Array
    imbalance: jax.Array


class Traffic(NamedTuple):
    """The traffic of one exchange: bytes that one rank sent, and densities.

    Bytes are float32: exact up to 16 MiB, and to seven digits beyond. The payload is that
    of the rank with the most entries, as if they were spread evenly over the parts.

    Attributes:
        push: The stage that sends entries to where they are summed.
        pull: The stage that sends the sums to all ranks.
        scalars: Bytes of the few numbers on which all ranks agree first.
        dense: Bytes that an all-reduce would send.
        density_before: The share of non-zero units on the rank that has most.
        density_after: The share of non-zero units in the sum.
        inside: Bytes sent inside a host, where a scheme has two levels. They are not in
            `wire`.

    Example:
        >>> import inspect
        >>> names = [*inspect.signature(sparsejax.schemes.Traffic).parameters]
        >>> names[:3]
        ['push', 'pull', 'scalars']
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
        """All bytes that the entries needed, without padding."""
        return self.push.payload + self.pull.payload

    def as_one(self) -> jax.Array:
        """Returns all numbers as one array, float32 [numbers]; see `of_one`."""
        return jnp.stack(jax.tree.leaves(self))

    @classmethod
    def of_one(cls, numbers: jax.Array) -> "Traffic":
        """Inverts `as_one`, for numbers along the last axis."""
        each = [numbers[..., i] for i in range(numbers.shape[-1])]
        size = len(Stage._fields)
        push, pull, rest = each[:size], each[size : 2 * size], each[2 * size :]
        return cls(Stage(*push), Stage(*pull), *rest)


class Reduced(NamedTuple):
    """The result of a scheme: the sum or the mean, and what was left out of the sum.

    Attributes:
        total: The sum over the ranks, or their mean, in x's shape and dtype.
        left: What this rank left out of the total, or None where nothing is left out.
        state: The scheme's next state.
        traffic: The traffic of this sum.

    Example:
        >>> class Psum(sparsejax.schemes.AllReduce):
        ...     def __call__(self, x, state, wire):
        ...         return super().__call__(x, state, wire)._replace(left=None)
        >>> tx = sparsejax.sync(Psum())
    """

    total: jax.Array
    left: jax.Array | None
    state: Any
    traffic: Traffic


class SummedRows(NamedTuple):
    """The sums of listed rows over the ranks, the same on every rank bit for bit.

    Attributes:
        totals: For each table rows of distinct ids: all that any rank listed, no others.
        traffic: The traffic of all sums.
    """

    totals: list[RowGrads]
    traffic: Traffic


class Scheme(abc.ABC):
    """A way to sum one array over all ranks.

    It is a frozen dataclass. It is called inside `jax.shard_map` with this rank's array,
    and returns the sum, the same bits on all ranks. A scheme may leave something out on
    each rank, so that

        psum(x) == total + psum(left)

    A subclass defines `__call__`, and `forecast` where it is to be forecast.

    Example:
        >>> tx = sparsejax.sync(sparsejax.schemes.Zen())
    """

    #: The dtype in which values travel, where a scheme has such an argument.
    wire_dtype: jax.typing.DTypeLike | None = None

    #: Whether it sends arrays whole, zeros too. Large leaves are then sent one by one.
    is_dense: bool = False
    #: The unit that it needs: "element", or "leaf" for leaves whole; any, if None.
    unit: str | None = None

    def init(self, like: jax.ShapeDtypeStruct, wire: Wire | None) -> Any:
        """Returns the first state.

        Args:
            like: The shape and the dtype of the array: [units] or [units, width].
            wire: The ranks, or None where they are not known. A scheme whose state depends
                on them then raises `errors.NeedsRanks`.
        """
        del like, wire
        return ()

    @abc.abstractmethod
    def __call__(self, x: Units, state: Any, wire: Wire) -> Reduced:
        """Sums an array over the ranks.

        It may have an argument `mean=False`: whether the sum is divided by the number of
        ranks. The sums of a scheme without it are divided afterwards.

        Args:
            x: This rank's units; `x.dense()` is [units], or [units, width] of rows.
            state: The state of the scheme.
            wire: The ranks, and the dtype in which values travel.

        Returns:
            The sum, what was left out of it, the next state, and the traffic.
        """

    def rows(self, tables: Sequence[RowGrads], wire: Wire) -> SummedRows | None:
        """Sums the rows that ranks list.

        Time and memory do not grow with the tables. All listed rows are sent, rows of zeros
        too. Ids out of range are not. Several tables are exchanged together. The state of
        the scheme is that of its arrays, and rows do not change it. It may take `mean`.

        Args:
            tables: This rank's rows of each table, all of one width and dtype. Ids may
                repeat.
            wire: The ranks, and the dtype in which values travel.

        Returns:
            The sums; or None from a scheme that sends no lists of rows, and is given whole
            tables.
        """
        del tables, wire
        return None

    def scatter(self, x: Units, count: int, wire: Wire) -> tuple[jax.Array, Traffic]:
        """Returns this rank's piece of the sum: a reduce-scatter.

        It is for parameters that are sharded over the ranks, of whose gradient a rank needs
        one piece.

        Args:
            x: [units, ...], a piece for each of the ranks, all of the same length, a
                multiple of 32 units.
            count: The number of units of a piece that are used, from its front.
            wire: The ranks, and the dtype in which values travel.

        Returns:
            The piece, [count, ...], and the traffic.
        """
        return scatter_densely(x, count, wire)

    def scatter_rows(self, tables: Sequence[RowGrads], wire: Wire) -> SummedRows | None:
        """Returns this rank's piece of the sums of listed rows: a reduce-scatter.

        Args:
            tables: As for `rows`. The ranks divide the rows of each table.
            wire: The ranks, and the dtype in which values travel.

        Returns:
            Rows of distinct, ascending ids for each table. Ids count from the first row of
            the piece. None from a scheme that is given whole tables.
        """
        del tables, wire
        return None

    def forecast(self, load: Load) -> Forecast:
        """Forecasts what one rank would send for a load; see `schemes.forecast`.

        Args:
            load: An array to sum; or listed rows, where a scheme without `rows` forecasts a
                dense sum of the tables.
        """
        if load.listed:
            return load.all_reduce(self.wire_dtype)
        raise NotImplementedError(f"{type(self).__name__} has no forecast.")


class LossyScheme(Scheme):
    """A scheme that may leave something out, which the memory adds to the next gradient.

    It is given the accumulated gradient: the gradient plus the residual.

    Example:
        >>> isinstance(sparsejax.schemes.OkTopk(0.01), sparsejax.schemes.base.LossyScheme)
        True
    """

    #: Whether an element is sent whole or not at all, so that its momentum may be masked.
    selects: bool = True

    def suits(self, shape: tuple[int, ...]) -> bool:
        """Returns whether the scheme sums leaves of a shape; others are summed densely."""
        del shape
        return True

    def check_size(self, name: str, size: int) -> None:
        """Raises if nothing of so small a leaf would be sent."""
        del name, size


def mean_asked(method: Callable, mean: bool) -> dict[str, bool]:
    """Returns the argument that asks a method of a scheme for a mean, if it has one."""
    # A decorated method is what it was made, not what it wraps.
    own = inspect.signature(method, follow_wrapped=False).parameters.get("mean")
    return {"mean": True} if mean and own is not None and own.default is False else {}


Number = jax.Array | float

# Less than 2**31, by the slots that belong to no unit.
MOST_UNITS = 2**31 - 2**24


def stage(
    wire: Number = 0.0, payload: Number = 0.0, rounds: Number = 0.0, imbalance: Number = 1.0
) -> Stage:
    """Makes a stage from Python or JAX numbers, as float32."""
    return Stage(*(jnp.asarray(x, jnp.float32) for x in (wire, payload, rounds, imbalance)))


def stage_of(sent: Sent, imbalance: Number = 1.0) -> Stage:
    """Makes a stage from the report of `messages.transmit`."""
    return stage(sent.wire, sent.payload, sent.rounds, imbalance)


def add_stages(a: Stage, b: Stage) -> Stage:
    """Adds up two stages that followed one another; the larger imbalance is kept."""
    return Stage(
        a.wire + b.wire,
        a.payload + b.payload,
        a.rounds + b.rounds,
        jnp.maximum(a.imbalance, b.imbalance),
    )


def add_traffic(a: Traffic, b: Traffic) -> Traffic:
    """Adds up two exchanges that followed one another; the larger densities are kept."""
    return Traffic(
        add_stages(a.push, b.push),
        add_stages(a.pull, b.pull),
        a.scalars + b.scalars,
        a.dense + b.dense,
        jnp.maximum(a.density_before, b.density_before),
        jnp.maximum(a.density_after, b.density_after),
        a.inside + b.inside,
    )


def check_units(x: Units | jax.Array) -> None:
    """Raises if the units are too many to be numbered by int32."""
    if x.shape[0] > MOST_UNITS:
        raise ArgumentError(
            f"an array of {x.shape[0]:,} units is too large: units are numbered by int32, "
            f"which leaves room for {MOST_UNITS:,}. Use rows as units (a rule "
            "{path: 'row'}), sum it densely (the rule 'dense'), or shard the array over a "
            "second mesh axis."
        )


def check_state(scheme: Scheme, state: Any, kind: type) -> None:
    """Raises if a state is not one that the scheme has made."""
    if not isinstance(state, kind):
        raise errors.wrong_state(type(scheme).__name__, kind.__name__, state)


def known_ranks(scheme: Scheme, wire: Wire | None) -> Wire:
    """Returns the wire, for an `init` that depends on the ranks; raises if it is None."""
    if wire is None:
        what = f"what {type(scheme).__name__} remembers depends on the ranks"
        raise errors.needs_ranks(what)
    return wire


def sum_densely(x: Units, state: Any, wire: Wire, mean: bool = False) -> Reduced:
    """Sums, or averages, the dense array by an all-reduce."""
    total, sent = wire.all_reduce(x.dense())
    half = stage(sent / 2, sent / 2, 1)
    return Reduced(wire.mean_of(total, mean), None, state, traffic(half, half, dense=sent))


def scatter_densely(x: Units, count: int, wire: Wire) -> tuple[jax.Array, Traffic]:
    """Returns this rank's piece of the sum, by a reduce-scatter of the dense array."""
    if wire.ranks == 1:
        done = nothing_to_send(x, (), wire)
        return done.total[:count], done.traffic
    dense = x.dense().astype(wire.travelling(x.dtype))
    pieces = dense.reshape(wire.ranks, x.shape[0] // wire.ranks, *x.shape[1:])
    total, sent = wire.reduce_scatter(pieces[:, :count])
    return total.astype(x.dtype), traffic(stage(sent, sent, 1), stage(), dense=sent)


def sum_of_shared(x: Any, state: Any, wire: Wire) -> Reduced:
    """Sums entries whose units are the same on all ranks, by an all-reduce of values."""
    values, sent = wire.all_reduce(x.stored)
    dense = wire.dense_bytes(x.size, x.dtype)
    half = stage(sent / 2, sent / 2, 1)
    share = jnp.mean(x.flags.astype(jnp.float32))
    numbers = {"dense": dense, "before": share, "after": share}
    return Reduced(x.with_values(values), None, state, traffic(half, half, **numbers))


def nothing_to_send(x: Units, state: Any, wire: Wire) -> Reduced:
    """Returns the sum if there is one rank, or if x is empty."""
    total, sent = wire.psum(x.dense())
    return Reduced(total, None, state, traffic(stage(), stage(), dense=sent))


def no_traffic() -> jax.Array:
    """Returns the traffic before the first exchange: zeros, in the form of `as_one`."""
    numbers = len(Traffic._fields) - 2 + 2 * len(Stage._fields)
    return jnp.zeros(numbers, jnp.float32)


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
    """Makes a `Traffic` from two stages and Python or JAX numbers."""
    numbers = (jnp.asarray(x, jnp.float32) for x in (scalars, dense, before, after, inside))
    return Traffic(push, pull, *numbers)
