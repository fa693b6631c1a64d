"""A sparse array with a fixed capacity of entries.

An index refers to a unit. If `values` has one axis, the units are the elements of the array
in row-major order; if it has more, they are the rows of its leading axis. Unused entries
have the index `units`, one past the last. Entries may have equal indices, and their values
add up.

Indices are leaves of a tree of gradients, so a transformation that computes with every
leaf, such as `optax.scale`, would compute with them. A tensor that a sparsifier made keeps
a reference to its indices, by which the synchronization that sums it finds whether they
were changed (`Origin`).

Other indices out of range, negative ones too, are an error. Compiled code cannot raise, so
they are dropped there; under `jax.experimental.checkify` they are reported. Indices may be
integers of any dtype. Indices of 64 bits are compared in full if `jax_enable_x64` is set;
otherwise JAX itself keeps only their low 32 bits when they are passed to a program.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels.operations.bitmap import bitmap_decode
from pallas_kernels.reference.ordered import add_repeated
from sparsejax.errors import ArgumentError
from sparsejax.units import bits
from sparsejax.units.indices import Origin, check_in_range, check_numbered, in_range


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "table"),
    meta_fields=("code", "origin"),
)
@dataclasses.dataclass(frozen=True)
class CodedValues:
    """Values in a code of few bits, with the tables that decode them.

    Attributes:
        codes: Unsigned integers [capacity], one for each value.
        table: float32 [arrays, numbers], the table of each array.
        code: The name of the code; see `wire.value_codes`.
        origin: The decoded values, by which changed values are found.
    """

    codes: jax.Array
    table: jax.Array
    code: str
    origin: Origin = dataclasses.field(default_factory=Origin, repr=False, compare=False)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("indices", "values", "coded"),
    meta_fields=("shape", "shared", "origin", "distinct"),
)
@dataclasses.dataclass(frozen=True)
class SparseTensor:
    """An array of a given shape as entries (index, value).

    Attributes:
        indices: Integers [capacity]. `units` marks an unused entry.
        values: [capacity] for elements, [capacity, ...] for rows of the leading axis.
        shape: The shape of the array.
        shared: Whether all ranks have the same indices in the same order, none of them
            twice. Then only values are sent.
        origin: The indices that the sparsifier made, by which `check` finds changed ones.
        distinct: Whether indices are distinct, except those of unused entries. Then summing
            needs no sort on GPUs.
        coded: The values in few bits, where a sparsifier has rounded them. A scheme that
            sends a rank's own entries may send these.

    Example:
        >>> x = sparsejax.SparseTensor(jnp.array([3, 0]), jnp.array([1.5, 2.5]), shape=(5,))
        >>> x.to_dense().tolist()
        [2.5, 0.0, 0.0, 1.5, 0.0]

    See Also:
        `sparsejax.RowGrads`: rows of a table, as `value_and_grad` returns them.
    """

    indices: jax.Array
    values: jax.Array
    shape: tuple[int, ...]
    shared: bool = False
    origin: Origin = dataclasses.field(default_factory=Origin, repr=False, compare=False)
    distinct: bool = dataclasses.field(default=False, repr=False)
    coded: CodedValues | None = dataclasses.field(default=None, repr=False)

    @property
    def units(self) -> int:
        """The number of units: of elements, or of rows."""
        return math.prod(self.shape) if self.values.ndim == 1 else self.shape[0]

    @property
    def size(self) -> int:
        """The number of elements of the array."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """The number of axes of the array."""
        return len(self.shape)

    @property
    def capacity(self) -> int:
        """The number of entries that it has room for."""
        return self.indices.shape[0]

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the values."""
        return self.values.dtype

    def check(self, name: str = "SparseTensor") -> None:
        """Raises if shapes or dtypes do not fit; checks the indices under checkify."""
        if not isinstance(self.shape, tuple) or not all(
            isinstance(length, int) for length in self.shape
        ):
            raise ArgumentError(
                f"{name}: shape must be a tuple of Python ints, because it decides what is "
                f"compiled, got {self.shape!r}."
            )
        if self.indices.ndim != 1 or not jnp.issubdtype(self.indices.dtype, jnp.integer):
            raise ArgumentError(
                f"{name}: indices must be integers of shape [capacity], got "
                f"{self.indices.dtype}{list(self.indices.shape)}."
            )
        row = self.values.shape[1:]
        if self.values.shape[:1] != self.indices.shape or (row and row != self.shape[1:]):
            raise ArgumentError(
                f"{name}: values of shape {list(self.values.shape)} do not fit "
                f"{self.capacity} indices into an array of shape {list(self.shape)}; they "
                f"must have shape [{self.capacity}] or "
                f"{[self.capacity, *self.shape[1:]]}."
            )
        check_numbered(name, self.units)
        meaning = "an entry that is not used"
        check_in_range(self.indices, self.units, f"{name}: indices", meaning)

    def present(self) -> jax.Array:
        """Returns which units have an entry: booleans [units]."""
        flags = jnp.zeros(self.units, bool)
        return flags.at[self.kept()].set(True, mode="drop")

    def to_units(self, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
        """Returns the array with one unit along its first axis: [units] or [units, ...]."""
        values = self.values.astype(dtype or self.dtype)
        zeros = jnp.zeros((self.units, *values.shape[1:]), values.dtype)
        return add_repeated(zeros, self.kept(), values, self.distinct)

    def to_dense(self) -> jax.Array:
        """Returns the array, with entries of equal indices summed."""
        return self.to_units().reshape(self.shape)

    def kept(self) -> jax.Array:
        """Returns the indices, with `units` for all that are out of range."""
        return in_range(self.indices, self.units)


def from_units(
    x: jax.Array, capacity: int, shape: tuple[int, ...]
) -> tuple[SparseTensor, jax.Array]:
    """Returns the non-zero units of x [units, ...], ascending, and their number.

    The number may exceed the capacity; then the last units are not in the tensor.
    """
    words = bits.pack_all(bits.nonzero_units(x))
    # `bitmap_decode` needs a capacity of at least one.
    found, count = bitmap_decode(words, max(int(capacity), 1))
    indices = jnp.minimum(found[:capacity], x.shape[0])
    values = x.at[indices].get(mode="fill", fill_value=0)
    return SparseTensor(indices, values, tuple(shape), distinct=True), count
