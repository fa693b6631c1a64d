"""The gradient of a table that was read by rows, as ids and rows.

Unlike the entries of a `SparseTensor`, which a sparsifier selects by their values, these
are the rows that a loss has read. A row whose gradient happens to be zero is listed, too,
and an optimizer takes its step for it.

Ids are leaves of a tree of gradients, as the indices of a `SparseTensor` are. The gradient
keeps a reference to the ids that it was made with (`Origin`), by which `check` finds ids
that a transformation has changed.
"""

import dataclasses
import functools
import math
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.reference.ordered import add_repeated
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError, LeafError
from sparsejax.units.indices import Origin, check_in_range, check_numbered, in_range


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("ids", "rows"),
    meta_fields=("shape", "origin"),
)
@dataclasses.dataclass(frozen=True)
class RowGrads:
    """A gradient of a table by rows: ids and the gradients of these rows.

    Attributes:
        ids: Integers [capacity], the row of the table that each gradient belongs to.
            `shape[0]` marks an unused place. Ids may repeat, and their rows are summed.
            Other ids out of range are dropped.
        rows: [capacity, ...], the gradients of these rows.
        shape: The shape of the table.
        origin: The ids that the gradient was made with, by which `check` finds changed ids.

    Example:
        >>> rows = sparsejax.RowGrads(jnp.array([2, 0, 2]), jnp.ones((3, 2)), shape=(4, 2))
        >>> rows.to_dense().tolist()
        [[1.0, 1.0], [0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]

    See Also:
        `sparsejax.SparseTensor`: entries of an array, as sparsifiers select them.
    """

    ids: jax.Array
    rows: jax.Array
    shape: tuple[int, ...]
    origin: Origin = dataclasses.field(default_factory=Origin, repr=False, compare=False)

    @classmethod
    def marked(cls, ids: jax.Array, rows: jax.Array, shape: tuple[int, ...]) -> "RowGrads":
        """Makes a gradient whose ids `check` recognizes.

        Args:
            ids: See `RowGrads`.
            rows: See `RowGrads`.
            shape: See `RowGrads`.
        """
        return cls(ids, rows, shape, Origin(ids))

    @property
    def size(self) -> int:
        """The number of elements of the table."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """The number of axes of the table."""
        return len(self.shape)

    @property
    def capacity(self) -> int:
        """The number of rows that it has room for."""
        return self.ids.shape[0]

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the rows."""
        return self.rows.dtype

    @property
    def bare(self) -> "RowGrads":
        """The gradient as plain `RowGrads`, without what its reader has computed."""
        return self

    def check(self, name: str = "RowGrads") -> None:
        """Raises if shapes or dtypes do not fit, or if the ids were changed.

        Under checkify it checks the values of the ids, too.
        """
        shape = self.shape
        if not isinstance(shape, tuple) or not all(isinstance(n, int) for n in shape):
            raise ArgumentError(
                f"{name}: shape must be a tuple of Python ints, because it decides what is "
                f"compiled, got {shape!r}."
            )
        if len(shape) < 2:
            raise ArgumentError(
                f"{name}: a table has at least two axes, got the shape {list(shape)}. "
                "Entries of an array of one axis are a sparsejax.SparseTensor."
            )
        if self.origin.is_changed(self.ids):
            raise ArgumentError(
                f"{name}: the ids of these RowGrads were changed since they were made: "
                "optax.scale, set_to_zero, and all that computes with every array of the "
                "gradients, change them, too. Put it in front of the gradients, as a "
                "factor of the loss, or into sparsejax.lazy, which works on rows. Ids that "
                "were only copied, as by jax.device_put, are known again by "
                "sparsejax.RowGrads.marked(ids, rows, shape)."
            )
        is_integer = jnp.issubdtype(self.ids.dtype, jnp.integer)
        if self.ids.ndim != 1 or not is_integer:
            hint = (
                " A transformation that computes with every array of the gradients, as "
                "optax.clip, makes floats of them: put it into sparsejax.lazy, which works "
                "on rows."
            )
            raise ArgumentError(
                f"{name}: ids must be integers of shape [capacity], got "
                f"{self.ids.dtype}{list(self.ids.shape)}.{'' if is_integer else hint}"
            )
        wanted = (self.capacity, *shape[1:])
        if self.rows.shape != wanted:
            raise ArgumentError(
                f"{name}: rows of shape {list(self.rows.shape)} do not fit {self.capacity} "
                f"ids into a table of shape {list(shape)}; they must have shape "
                f"{list(wanted)}."
            )
        check_numbered(name, shape[0])
        check_in_range(self.ids, shape[0], f"{name}: ids", "a place without a row")

    def to_dense(self) -> jax.Array:
        """Returns the whole gradient, with rows of equal ids summed."""
        return add_repeated(jnp.zeros(self.shape, self.dtype), self.kept(), self.rows)

    def added_to(self, table: jax.Array, name: str = "RowGrads") -> jax.Array:
        """Returns a table with these rows added to its own, in its dtype.

        `table + rows` is the same, so `optax.apply_updates` and `nnx.Optimizer` add them.

        Args:
            table: An array of the shape of the table.
            name: The name of the rows, for the error if they do not fit.
        """
        self.check(name)
        if self.shape != jnp.shape(table):
            raise ArgumentError(
                f"{name} has rows of a table of shape {list(self.shape)}, and the "
                f"parameter has shape {list(jnp.shape(table))}: give it the parameters "
                "whose gradients these are."
            )
        return self._scattered(jnp.asarray(table))

    def __radd__(self, table: jax.Array) -> jax.Array:
        return self.added_to(table)

    # NumPy would otherwise add it to each element of an array.
    __array_ufunc__ = None

    def _scattered(self, table):
        return add_repeated(table, self.kept(), self.rows)

    def kept(self) -> jax.Array:
        """Returns the ids, with `shape[0]` for all that are out of range."""
        return in_range(self.ids, self.shape[0])


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("ids", "rows"),
    meta_fields=("shape", "origin", "sharding"),
)
@dataclasses.dataclass(frozen=True)
class ShardedRowGrads(RowGrads):
    """Rows of a table that is sharded by rows, each listed by the device that holds it.

    The arrays are global arrays, outside of `shard_map`: the lists of all devices,
    concatenated. Ids are those of the whole table, as in any `RowGrads`.

    Attributes:
        sharding: The sharding of the table, along its first axis alone.
    """

    sharding: Any = None

    @classmethod
    def of_shard(
        cls, own: RowGrads, shape: tuple[int, ...], sharding: NamedSharding
    ) -> "ShardedRowGrads":
        """Makes this device's part from rows of its shard, inside `shard_map`.

        Args:
            own: Rows of the shard, whose ids count from its first row.
            shape: The shape of the table.
            sharding: The sharding of the table.
        """
        ids = own.kept()
        start = cls._start(own.shape[0], sharding)
        ids = jnp.where(ids < own.shape[0], ids + start, shape[0])
        return cls(ids, own.rows, shape, Origin(ids), sharding)

    @property
    def over(self) -> AxisName:
        """The mesh axes over which the rows are sharded."""
        return self.sharding.spec[0]

    @property
    def specs(self) -> "ShardedRowGrads":
        """The PartitionSpecs of the lists."""
        spec = PartitionSpec(self.over)
        return dataclasses.replace(self, ids=spec, rows=spec)

    @property
    def table_spec(self) -> PartitionSpec:
        """The PartitionSpec of the table, and of arrays with a row for each of its rows."""
        return PartitionSpec(self.over)

    def on_shard(self) -> RowGrads:
        """Returns this device's rows, inside `shard_map`, with ids within its shard."""
        height = self.sharding.shard_shape(self.shape)[0]
        ids = self.kept() - self._start(height, self.sharding)
        ids = jnp.where((ids >= 0) & (ids < height), ids, height)
        return RowGrads.marked(ids, self.rows, (height, *self.shape[1:]))

    def by_shard(self, function: Any, *tables: jax.Array) -> jax.Array:
        """Applies a function to the shards of tables, with the rows of each shard.

        Args:
            function: A function of the `RowGrads` of a shard and of the shards of the
                tables, which returns a shard.
            *tables: Arrays with a row for each row of the table, sharded as it is.

        Returns:
            The global array of the results.
        """
        inside = lambda own, *shards: function(own.on_shard(), *shards)
        specs = self.specs, *[self.table_spec for _ in tables]
        mapped = jax.shard_map(
            inside,
            mesh=self.sharding.mesh,
            in_specs=specs,
            out_specs=self.table_spec,
            check_vma=False,
        )
        return mapped(self, *tables)

    def to_dense(self) -> jax.Array:
        """Returns the dense gradient, sharded as the table is."""
        return self.by_shard(lambda own: own.to_dense())

    def _scattered(self, table):
        return self.by_shard(lambda own, shard: own.added_to(shard), table)

    @staticmethod
    def _start(height, sharding):
        """Returns the number of the first row of this device's shard."""
        return jax.lax.axis_index(sharding.spec[0]) * height


class ReadBy:
    """The reader of some rows; all compare equal, so comparisons of trees ignore it."""

    def __eq__(self, other):
        return isinstance(other, ReadBy)

    def __hash__(self):
        return hash(ReadBy)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("ids", "rows", "reading"),
    meta_fields=("shape", "origin", "by"),
)
@dataclasses.dataclass(frozen=True)
class ReadRowGrads(RowGrads):
    """Rows of a gradient, with what its reader has computed to read them.

    A transformation of it returns `RowGrads`, since `reading` is of these rows alone.

    Attributes:
        reading: What the reader has computed.
        by: The reader.
    """

    reading: Any = None
    by: ReadBy = dataclasses.field(default_factory=ReadBy, repr=False, compare=False)

    @classmethod
    def of(cls, grads: RowGrads, reading: Any, by: ReadBy) -> "ReadRowGrads":
        """Makes a gradient with what its reader has computed."""
        return cls(grads.ids, grads.rows, grads.shape, grads.origin, reading, by)

    @property
    def bare(self) -> RowGrads:
        """The gradient as plain `RowGrads`, without what its reader has computed."""
        return RowGrads(self.ids, self.rows, self.shape, self.origin)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("ids", "rows", "late"),
    meta_fields=("shape", "origin"),
)
@dataclasses.dataclass(frozen=True)
class LateRowGrads(RowGrads):
    """Rows of this step's gradient, and delayed rows of the last step's gradient.

    Rows that no rank reads in the next step can be delayed: `sparsejax.embrace_sync` sends
    them while nothing waits for them. An optimizer must update them as it would have in
    their own step, so it has to know which rows these are. `sparsejax.lazy` does.

    Attributes:
        late: The delayed rows of the last step. None of them was updated in that step, and
            the loss of this step has read none of them.
    """

    late: Any = None

    @classmethod
    def of(cls, now: RowGrads, late: RowGrads) -> "LateRowGrads":
        """Makes a gradient from the rows of this step and those of the last step."""
        return cls(now.ids, now.rows, now.shape, now.origin, late)

    @property
    def now(self) -> RowGrads:
        """The rows of this step's gradient."""
        return RowGrads(self.ids, self.rows, self.shape, self.origin)

    def check(self, name: str = "RowGrads") -> None:
        """Raises: a caller that takes these as plain rows would lose the late ones."""
        self._refuse(name)

    def to_dense(self) -> jax.Array:
        """Raises, as `check` does."""
        self._refuse("a gradient of rows")

    def kept(self) -> jax.Array:
        """Raises, as `check` does."""
        self._refuse("a gradient of rows")

    def _refuse(self, name: str) -> NoReturn:
        raise LeafError(
            f"{name}: these {type(self).__name__} of a table {list(self.shape)} have rows "
            "of the last step among them, which embrace_sync(vertical=True) has held back, "
            "and only sparsejax.lazy applies them as of their own step. Put it around the "
            "optimizer, directly after it: optax.chain(sparsejax.embrace_sync(), "
            "sparsejax.lazy(optax.adam(1e-3))); or take embrace_sync(vertical=False)."
        )


def is_row_grads(leaf: Any) -> bool:
    """Returns whether a leaf of a tree of gradients is `RowGrads`."""
    return isinstance(leaf, RowGrads)
