"""An array as entries in the order of their units, which schemes take as dense arrays.

A sparsified gradient is a `SparseTensor` with entries in any order. For an exchange they
are sorted by unit once: flags mark the units that are present, their values are
consecutive, and the place of a unit's value is the number of present units below it. So no
dense array of zeros has to be filled and searched before anything is sent. If a scheme sums
in a dense array, `dense` makes it.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import rank_select
from pallas_kernels.reference.ordered import add_repeated
from pallas_kernels.types import as_varying, varying_axes
from sparsejax.branches import hidden
from sparsejax.units import bits
from sparsejax.units.sparse_tensor import CodedValues, SparseTensor
from sparsejax.units.units import Places, Source, wide


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("stored", "flags", "index", "coded"),
    meta_fields=("shared", "parts"),
)
@dataclasses.dataclass(frozen=True)
class Entries:
    """The entries of one or more arrays, end to end, in the order of their units.

    Attributes:
        stored: [capacity, ...], the values of the present units, by ascending unit.
        flags: Booleans [units], which units are present.
        index: The flags as packed bits with counts, for searches.
        shared: Whether the flags are the same on all ranks.
        coded: The values in a code, if those of all arrays are in one code.
        parts: The number of units of each array.
    """

    stored: jax.Array
    flags: jax.Array
    index: rank_select.RankIndex
    shared: bool = False
    coded: CodedValues | None = None
    parts: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dense array, [units, ...]."""
        return (*self.flags.shape, *self.stored.shape[1:])

    @property
    def size(self) -> int:
        """The number of numbers of the dense array."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the values."""
        return self.stored.dtype

    @property
    def capacity(self) -> int:
        """The largest number of units that may be present."""
        return self.stored.shape[0]

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes over which the values vary."""
        return varying_axes(self.stored)

    def present(self) -> jax.Array:
        """Returns booleans [units], which units are present."""
        return self.flags

    def place(self, units: jax.Array) -> jax.Array:
        """Returns the places of units in `stored`; any place for an absent unit."""
        inside = jnp.clip(units, 0, max(self.flags.size - 1, 0))
        return rank_select.rank_of(self.index, inside)

    def dense(self) -> jax.Array:
        """Returns the dense array, [units, ...]."""
        return self.with_values(self.stored)

    def with_values(self, values: jax.Array) -> jax.Array:
        """Returns the dense array of other values, [capacity, ...], at these units."""
        units, real = bits.listed(self.index, self.capacity)
        units = bits.unique_places(units, real, self.flags.size)
        zeros = jnp.zeros(self.shape, values.dtype)
        return zeros.at[units].set(values, mode="drop", unique_indices=True)

    def source(
        self, dtype: jax.typing.DTypeLike | None = None, units: Places | None = None
    ) -> Source:
        """Returns the source of the values of slots for an exchange."""

        def place(part, slots):
            return self.place(slots if units is None else units(part, slots))

        return Source(self.stored, dtype, place)


def of_tensors(tensors: Sequence[SparseTensor]) -> Entries:
    """Makes the entries of arrays, end to end; values of equal units are added up."""
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + tensor.units)
    kept = [tensor.kept() for tensor in tensors]
    kinds = [(tensor.units, tensor.capacity) for tensor in tensors]
    data = lambda: kept[0][0] if kept[0].size else jnp.int32(0)
    begins = hidden(np.array(starts[:-1], np.int32), kinds, data)
    moved = [
        jnp.where(units < tensor.units, units + start, starts[-1])
        for tensor, units, start in zip(tensors, kept, begins, strict=True)
    ]
    units = jnp.concatenate(moved)
    values = jnp.concatenate([tensor.values for tensor in tensors])
    if not units.size:
        # One unused entry, so that gathers from it have a place to read. It is typed as
        # varying like the entries, or an exchange would take it as equal on all ranks.
        over = varying_axes(units) | varying_axes(values)
        units = as_varying(jnp.full(1, starts[-1], jnp.int32), over)
        values = as_varying(jnp.zeros((1, *values.shape[1:]), values.dtype), over)
    flags = jnp.zeros(starts[-1], bool).at[units].set(True, mode="drop")
    shared = all(tensor.shared for tensor in tensors)
    index = bits.rank_index(bits.pack_all(flags), lanes=max(units.size, 1))
    places = rank_select.rank_of(index, units)
    places = jnp.where(units < flags.size, places, units.size)
    distinct = all(tensor.distinct for tensor in tensors)
    zeros = jnp.zeros(values.shape, wide(values.dtype))
    ordered = add_repeated(zeros, places, values, distinct)
    of_each = tuple(tensor.units for tensor in tensors)
    stored = ordered.astype(values.dtype)
    return Entries(stored, flags, index, shared, _coded(tensors, places), of_each)


def _coded(tensors, places):
    """Returns the codes at their places; None unless all are distinct and in one code."""
    each = [tensor.coded for tensor in tensors if tensor.distinct and tensor.coded]
    if len(each) < len(tensors) or len({one.code for one in each}) != 1:
        return None
    codes = jnp.concatenate([one.codes for one in each])
    codes = jnp.zeros_like(codes).at[places].set(codes, mode="drop", unique_indices=False)
    table = jnp.concatenate([one.table for one in each])
    return CodedValues(codes, table, each[0].code)
