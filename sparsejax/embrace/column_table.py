"""A table that is sharded by columns over the ranks."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sparsejax import arguments, axes
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError, StateError
from sparsejax.jobs import agreement
from sparsejax.placement import specs
from sparsejax.placement.flow import flow_of
from sparsejax.placement.setup import TIMEOUT, Setup
from sparsejax.state import tree
from sparsejax.state.sharded import Sharded
from sparsejax.wire.collectives import Wire


# The initializer of flax.linen.Embed: rows of about length 1.
DEFAULT_INIT = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("ids", "rows"), meta_fields=("shape",)
)
@dataclasses.dataclass(frozen=True, eq=False)
class Unsent:
    """The gradient of this rank's loss by rows of all columns, not yet sent.

    Attributes:
        ids: int32 [n, room], the ids that each rank has read, equal on all ranks; an id out
            of range is padding.
        rows: [room, columns], the gradients of this rank's rows, with the columns of all
            ranks one after another.
        shape: The shape of this rank's columns.
    """

    ids: jax.Array
    rows: jax.Array
    shape: tuple[int, int]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("value", "weight", "tap"),
    meta_fields=("dim", "axis_name"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class ColumnTable(Sharded):
    """A table [rows, dim] that is sharded by columns over the ranks.

    It is a parameter of a model: a node with one array in the tree of parameters. Gradients
    of the tree and states of optimizers have such nodes in the same places. They mark what
    is sharded: `sparsejax.state_specs(params)` returns the specs for `shard_map`,
    `sparsejax.data_parallel` needs none, and synchronizations send nothing for it.

    If dim is not a multiple of the number of ranks, the array is padded with columns of
    zeros, which have no gradient. Apart from that a table does not depend on the ranks:
    `ColumnTable.of(table.whole(), mesh, axis_name)` is the table on another mesh.

    `sparsejax.column_lookup(..., traffic=True)` returns its traffic. `explain` and
    `metrics` are about synchronizations, and do not list it.

    The optimizer must treat each element separately, as SGD, Adam and Adagrad do, with or
    without `sparsejax.lazy`. One that keeps a number for each row, such as
    `sparsejax.rows.rowwise_adagrad`, or computes a norm or a mean over columns, as LAMB,
    LARS and `optax.clip_by_global_norm` do, would use only the columns of one rank. Where a
    state is made, the program of an update is searched for such reductions, and they are
    refused by name. One inside a loop is not found. Give tables another optimizer by
    `optax.partition`, and clip by `optax.clip`.

    Attributes:
        value: [rows, columns], the columns of all ranks one after another; inside
            `shard_map` those of this rank.
        dim: The number of columns of the table, without padding.
        axis_name: The mesh axis of the ranks, or a tuple of axes.
        weight: Inside a loss: float32 [], the factor of this rank's gradient; None for 1. A
            rank of weight 0 reads no rows, and gets zeros.
        tap: Inside a loss whose gradient stays on the ranks: the array of whole rows with
            respect to which it is differentiated in place of the columns; see
            `sparsejax.embrace.vertical`.

    Example:
        >>> users = sparsejax.ColumnTable.create(jax.random.key(0), 10_000, 64, mesh)
        >>> params = {"users": users, "kernel": jnp.zeros((64, 1))}
        >>> def loss_fn(params, batch):
        ...     vectors = sparsejax.column_lookup(params["users"], batch["users"])
        ...     return jnp.mean((vectors @ params["kernel"] - batch["y"]) ** 2)
        >>> rows = sparsejax.lazy(optax.adam(1e-3), exact=False)
        >>> tx = optax.chain(sparsejax.zen_sync(), rows)
        >>> trainer = sparsejax.data_parallel(loss_fn, tx, mesh)
        >>> batch = {"users": jnp.arange(16), "y": jnp.ones((16, 1))}
        >>> state, loss = trainer.step(trainer.init(params), batch)

    References:
        Li et al., EmbRace: Accelerating Sparse Communication for Distributed Training of
        NLP Neural Networks, ICPP 2022, section 4.1
    """

    value: Any
    dim: int
    axis_name: AxisName = "data"
    weight: Any = None
    tap: Any = None

    @classmethod
    def create(
        cls,
        key: jax.Array,
        rows: int,
        dim: int,
        mesh: Mesh,
        axis_name: AxisName | None = None,
        *,
        init: Callable[..., jax.Array] = DEFAULT_INIT,
        dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> "ColumnTable":
        """Makes a new table; each device makes its own columns.

        Args:
            key: A PRNG key. The values do not depend on the number of ranks.
            rows: The number of rows.
            dim: The number of columns, at least one for each rank.
            mesh: The mesh.
            axis_name: The mesh axis of the ranks, where the mesh has several axes.
            init: A function from a key, a shape and a dtype to values.
            dtype: The dtype of the values.

        Returns:
            The table.

        Raises:
            ArgumentError: `rows`, `dim` or `dtype` is out of range, or there are fewer
                columns than ranks.
            AxisError: The mesh does not have the axis, or has several and none is named.
            JobError: The processes of the mesh give different keys, shapes or dtypes.
        """
        call = "sparsejax.ColumnTable.create"
        job = Setup(call, mesh, TIMEOUT, key)
        with job.made_ready():
            arguments.check_whole("rows", rows, 1)
            arguments.check_whole("dim", dim, 1)
            arguments.check_dtype("dtype", dtype)
            axis_name = specs.data_axis(mesh, axis_name, call)
            ranks = specs.ranks_of(mesh, axis_name)
            _check_dim(f"a table {[rows, dim]}", dim, ranks)
            padded = width(dim, ranks) * ranks

            def make(key):
                return _filled_up(init(key, (rows, dim), dtype), padded)

            if job.is_shared:
                job.say_mesh(mesh, axis_name)
                shape = f"{jnp.dtype(dtype)}{[rows, dim]}"
                by = f"of hash {flow_of(jax.make_jaxpr(make)(key))}"
                said = {"the table": shape, "its key": _shown(key), "its init": by}
                job.say("table", said)

        there = NamedSharding(mesh, PartitionSpec(None, axis_name))
        return cls(jax.jit(make, out_shardings=there)(key), dim, axis_name)

    @classmethod
    def of(
        cls, values: Any, mesh: Mesh, axis_name: AxisName | None = None
    ) -> "ColumnTable":
        """Makes the table of given values.

        Args:
            values: [rows, dim], equal on all processes.
            mesh: The mesh.
            axis_name: The mesh axis of the ranks, where the mesh has several axes.

        Returns:
            The table.

        Raises:
            ArgumentError: The values are not floating-point [rows, dim], are on devices of
                other processes, or have fewer columns than there are ranks.
            AxisError: The mesh does not have the axis, or has several and none is named.
            JobError: The processes of the mesh give different values: they compare hashes.
        """
        job = Setup("sparsejax.ColumnTable.of", mesh, TIMEOUT, values)
        with job.made_ready():
            axis_name = specs.data_axis(mesh, axis_name, "sparsejax.ColumnTable.of")
            ranks = specs.ranks_of(mesh, axis_name)
            values = cls._values(values, ranks)
            if job.is_shared:
                job.say_mesh(mesh, axis_name)
                name = f"{values.dtype}{[*values.shape]} of hash {agreement.hashed(values)}"
                job.say("table", {"the table": name})
        dim = values.shape[1]
        padded = _filled_up(values, width(dim, ranks) * ranks, np)
        there = NamedSharding(mesh, PartitionSpec(None, axis_name))
        value = jax.make_array_from_callback(padded.shape, there, lambda at: padded[at])
        return cls(value, dim, axis_name)

    @staticmethod
    def _values(values, ranks):
        """Returns the numbers of a table on the host; raises unless they can be one."""
        shape, dtype = np.shape(values), jnp.result_type(values)
        if len(shape) != 2 or not jnp.issubdtype(dtype, jnp.floating):
            raise ArgumentError(
                "ColumnTable.of takes floating numbers of shape [rows, dim], got "
                f"{dtype}{list(shape)}."
            )
        is_elsewhere = isinstance(values, jax.Array) and not (
            values.is_fully_addressable or values.is_fully_replicated
        )
        if is_elsewhere:
            raise ArgumentError(
                f"ColumnTable.of was given {dtype}{list(shape)} with columns on devices of "
                "other processes. Restore it from a checkpoint onto devices of one, or "
                "gather it with jax.experimental.multihost_utils.process_allgather, and "
                "give the numbers."
            )
        _check_dim(f"a table {list(shape)}", shape[1], ranks)
        return np.asarray(values, dtype)

    def whole(self) -> jax.Array:
        """Returns the table [rows, dim], outside of `shard_map`.

        It is replicated, so each process can read it, and each device has room for it. Of
        several processes all call this.
        """
        whole = axes.unsharded(self.value)
        is_concrete = isinstance(whole, jax.Array) and not isinstance(whole, Tracer)
        if is_concrete and isinstance(whole.sharding, NamedSharding):
            # With Auto axes it is still sharded.
            there = NamedSharding(whole.sharding.mesh, PartitionSpec())
            whole = jax.device_put(whole, there)
        return whole if np.shape(whole)[1] == self.dim else whole[:, : self.dim]

    def specs(self, path: str = "") -> "ColumnTable":
        """Returns the PartitionSpecs of the table, or of an optimizer's state of it."""
        names = axes.axis_names(self.axis_name)
        is_inside = set(names) <= set(axes.manual_axes())
        ranks = Wire(self.axis_name).ranks if is_inside else 1

        def one(x):
            shape = np.shape(x)
            # Outside of shard_map the number of ranks is unknown: any padding is accepted.
            fits = len(shape) == 2 and (
                shape[1] == width(self.dim, ranks) if is_inside else shape[1] >= self.dim
            )
            if fits:
                return PartitionSpec(None, self.axis_name)
            if len(shape) >= 2 or jnp.issubdtype(jnp.result_type(x), jnp.floating):
                place = f" at {path!r}" if path else ""
                raise StateError(
                    f"the optimizer keeps{place} an array {list(shape)} of a ColumnTable "
                    f"with dim={self.dim}, computed from the columns that a rank holds, as "
                    "rowwise_adagrad and adafactor do: it would be another one than that "
                    "of the whole table. Use an optimizer that looks at each number alone, "
                    "such as optax.adagrad or optax.adam: optax.partition gives others to "
                    "other leaves."
                )
            return PartitionSpec()  # numbers of steps, replicated

        return jax.tree.map(one, self)

    @property
    def is_sent(self) -> bool:
        """Whether this gradient was already sent to the ranks that hold the columns."""
        return not isinstance(self.value, Unsent)

    def with_weight(self, weight: jax.Array) -> "ColumnTable":
        """Returns the table with a factor of this rank's gradient; 0 excludes the rank."""
        return dataclasses.replace(self, weight=weight)

    def columns_on(self, ranks: int, name: str) -> jax.Array:
        """Returns this rank's columns inside `shard_map`; raises if their number is wrong.

        Args:
            ranks: The number of ranks.
            name: The table's name, for the message.
        """
        _check_dim(name, self.dim, ranks)
        shape, wanted = np.shape(self.value), width(self.dim, ranks)
        if len(shape) == 2 and shape[1] == wanted:
            return self.value
        if len(shape) == 2 and shape[1] == wanted * ranks:
            raise ArgumentError(
                f"{name} was given to each rank whole: pass it to jax.shard_map with its "
                "specs in in_specs and out_specs, sparsejax.state_specs(params)."
            )
        raise StateError(
            f"{name} has {list(shape)} on this rank, and a {ranks}th of {self.dim} columns "
            f"are {wanted}: it was made for another number of ranks. "
            "sparsejax.ColumnTable.of(table.whole(), mesh, axis_name) gives it to those of "
            "a mesh, and sparsejax.resized(state, like=sparsejax.init(tx, params, mesh)) "
            "an optimizer's state."
        )

    def check_ranks(self, path: str, ranks: int) -> None:
        """Raises if the table cannot be sharded over a number of ranks.

        Args:
            path: The table's path, for the message.
            ranks: The number of ranks.
        """
        name = f"the table {path!r} {self._name()}"
        _check_dim(name, self.dim, ranks)
        wanted = width(self.dim, ranks) * ranks
        if np.shape(self.value)[1:] != (wanted,):
            raise StateError(
                f"{name} has {np.shape(self.value)[1]} columns, filled up for another "
                f"number of ranks, and {ranks} ranks need {wanted}: "
                "sparsejax.ColumnTable.of(table.whole(), mesh, axis_name) gives it to the "
                "ranks of a mesh."
            )

    def for_ranks(self, ranks: int) -> "ColumnTable":
        """Returns the shapes and dtypes of the table for `ranks` ranks."""
        columns = width(self.dim, ranks) * ranks
        one = lambda x: jax.ShapeDtypeStruct((x.shape[0], columns), x.dtype)
        return jax.tree.map(one, self)

    def fitted(self, x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Returns an array of the table's state, with the padding for other ranks.

        Args:
            x: [rows, columns], the columns of all ranks.
            shape: The shape for the other ranks.
        """
        if x.ndim < 2 or x.shape == tuple(shape):
            return x
        return _filled_up(x[:, : self.dim], shape[1], np)

    def _name(self):
        return f"[{np.shape(self.value)[0] if np.shape(self.value) else '?'}, {self.dim}]"


def width(dim: int, ranks: int) -> int:
    """Returns the number of columns that a rank holds, including padding."""
    return -(-dim // ranks)


def _shown(key):
    """Returns the type and the numbers of a key as text."""
    is_typed = jnp.issubdtype(jnp.result_type(key), jax.dtypes.prng_key)
    data = jax.random.key_data(key) if is_typed else key
    numbers = np.asarray(tree.here(data)).tolist()
    return f"{jnp.result_type(key)} {numbers}"


def _filled_up(x, columns, xp: Any = jnp):
    return xp.pad(x, ((0, 0), (0, columns - x.shape[1])))


def _check_dim(name, dim, ranks):
    if dim < ranks:
        raise ArgumentError(
            f"{name} has {dim} columns, which cannot be divided among {ranks} ranks: "
            "make dim at least as large, shard it over a smaller mesh axis, or keep the "
            "table whole on each rank (an array, and sparsejax.lookup)."
        )
