"""Looks up rows in tables that are sharded by columns, with one exchange for all tables.

On the wire, for all tables of a call together: an all_gather of this rank's distinct ids,
an all_to_all of columns of the rows that ranks read, and in the backward pass an all_to_all
of columns of their gradients. With a `capacity`, one pmax of a number precedes them.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

from pallas_kernels.reference.ordered import add_repeated
from sparsejax import arguments
from sparsejax.axes import as_varying, varying_axes
from sparsejax.embrace.column_table import ColumnTable
from sparsejax.embrace.exchange import TableLists
from sparsejax.errors import ArgumentError
from sparsejax.rows.lookup import marked
from sparsejax.schemes.base import Stage, Traffic
from sparsejax.state import tree
from sparsejax.units.indices import check_numbered
from sparsejax.units.merging import Merge, merged
from sparsejax.units.units import wide
from sparsejax.wire.collectives import Wire


MODES = ("fill", "clip", "wrap")
_NAME = "sparsejax.column_lookup"

# JAX attributes a lookup to the line of the model that calls it, as in `rows.lookup`.
source_info_util.register_exclusion(__file__)


def column_lookup(
    tables: Any,
    ids: Any,
    *,
    mode: str | None = None,
    fill_value: Any = None,
    capacity: Any = None,
    traffic: bool = False,
) -> Any:
    """Returns rows of tables that are sharded by columns, as `sparsejax.lookup` does.

    It runs inside `jax.shard_map`, as in the loss of `sparsejax.data_parallel`. Each rank
    gets whole vectors for its ids. The gradient of a rank's columns is the sum over the
    losses of all ranks: `sparsejax.zen_sync` and others divide it by the number of ranks,
    and send nothing for it. All ranks must call it together, like any collective.

    Under `sparsejax.value_and_grad` the gradient is `RowGrads` with the rows that any rank
    has read; an id that several ranks have read repeats. Under `jax.grad` it is dense, and
    it warns so once.

    Args:
        tables: A `ColumnTable`, or a tree of them, all of one dtype and over one axis.
        ids: Integers of any shape, or a tree of them like the tables. All ranks have ids of
            the same shape.
        mode: For ids out of range, as in `jnp.take`: "fill" (the default), "clip" or
            "wrap". An id that is filled affects only its own rank, and has no gradient.
        fill_value: The value of "fill"; NaN if None. Ids from -rows to -1 count from the
            end.
        capacity: The number of distinct ids of a table that a rank usually has: one number,
            or a tree of numbers. If those of all ranks fit, that many vectors are sent;
            otherwise, or if None, as many as there are ids.
        traffic: Whether to return the traffic, too.

    Returns:
        Vectors of the shape `[*ids.shape, dim]`, or a tree of them. With `traffic` a pair
        of these and a `Traffic`: its pull is that of ids and vectors, its push that of
        gradients, whether or not there is a backward pass, and its scalars are the bytes of
        the agreement on `capacity`.

    Raises:
        AxisError: The tables' axis is not a manual axis here.
        ArgumentError: Tables have several dtypes or axes, or fewer columns than ranks.
        StateError: A table was made for another number of ranks.

    Example:
        >>> create = functools.partial(sparsejax.ColumnTable.create, mesh=mesh)
        >>> tables = {  # of which each device holds a part of the columns
        ...     "users": create(jax.random.key(0), 1000, 16),
        ...     "items": create(jax.random.key(1), 500, 8),
        ... }
        >>> split = jax.NamedSharding(mesh, P("data"))
        >>> ids = jax.device_put({"users": jnp.arange(64), "items": jnp.arange(64)}, split)
        >>> vectors = jax.jit(jax.shard_map(  # both tables in one exchange
        ...     sparsejax.column_lookup, mesh=mesh,
        ...     in_specs=(sparsejax.state_specs(tables), P("data")), out_specs=P("data"),
        ... ))(tables, ids)

    See Also:
        `sparsejax.lookup`: rows of a table that each rank has whole.
    """
    reads, structure = _reads(tables, ids, capacity)
    arguments.check_one_of("mode", "fill" if mode is None else mode, MODES)
    call = f"{_NAME} of {reads[0].name}"
    wire = Wire.over(reads[0].table.axis_name, call)
    shards = [read.table.columns_on(wire.ranks, read.name) for read in reads]
    lists = [_IdList.of(read, mode or "fill", wire) for read in reads]
    rooms = [each.room for each in lists]
    short = [min(each.room, each.read.room or each.room) for each in lists]
    exchange = TableLists.of(wire, short, rooms)
    number, agreed = exchange.agreed([each.merge.found for each in lists])
    wanted, of_ids = exchange.gathered([each.wanted for each in lists], number)
    columns = [
        marked(shard, ids.reshape(-1), _NAME, mode="fill", fill_value=0).reshape(
            *ids.shape, shard.shape[1]
        )
        for shard, ids in zip(shards, wanted, strict=True)
    ]
    vectors, of_rows = exchange.exchanged(columns, number)
    pairs = zip(lists, vectors, strict=True)
    made = structure.unflatten([each.vectors(x, fill_value) for each, x in pairs])
    if not traffic:
        return made
    return made, _traffic(wire, lists, wanted, (agreed, of_ids, of_rows))


class _Read(NamedTuple):
    """A table, its name for errors, the ids that this rank reads, and the capacity."""

    name: str
    table: ColumnTable
    ids: jax.Array
    room: int | None

    @property
    def height(self):
        return self.table.value.shape[0]


def _reads(tables, ids, capacity):
    """Checks tables and ids; returns a `_Read` for each table, and their tree structure."""
    is_table = lambda node: isinstance(node, ColumnTable)
    pairs, structure = jax.tree_util.tree_flatten_with_path(tables, is_leaf=is_table)
    if not pairs or not all(is_table(table) for _, table in pairs):
        found = next((x for _, x in pairs if not is_table(x)), tables)
        raise ArgumentError(
            "column_lookup: tables must be a ColumnTable or a tree of them, got a "
            f"{type(found).__name__}. Rows of an array are read by sparsejax.lookup."
        )
    lists = _like_tables(structure, ids, "ids must be a tree")
    rooms = [capacity] * len(pairs)
    if capacity is not None and not arguments.is_int(capacity):
        wanted = "capacity must be a number, or a tree of numbers"
        rooms = _like_tables(structure, capacity, wanted)
    reads = []
    for (keys, table), own, room in zip(pairs, lists, rooms, strict=True):
        shape = [np.shape(table.value)[0], table.dim]
        name = f"the table {tree.named(keys)!r} {shape}" if keys else f"a table {shape}"
        own = jnp.asarray(own)
        if not jnp.issubdtype(own.dtype, jnp.integer):
            raise ArgumentError(
                f"column_lookup: ids of {name} must be integers, got "
                f"{own.dtype}{list(own.shape)}: ids.astype(jnp.int32), if they are whole."
            )
        if room is not None:
            arguments.check_whole(f"capacity of {name}", room, 1)
        reads.append(_Read(name, table, own, room))
    for what in ("dtype", "axis_name"):
        of = lambda table, what=what: getattr(
            table.value if what == "dtype" else table, what
        )
        (first, own), *others = ((read.name, of(read.table)) for read in reads)
        for name, other in others:
            if other != own:
                raise ArgumentError(
                    f"column_lookup: tables of one exchange have one {what}, and "
                    f"{first} has {own}, {name} {other}: look them up in two calls, or "
                    "make them equal."
                )
    return reads, structure


def _like_tables(structure, given, wanted):
    """Flattens a tree that has one entry for each table."""
    try:
        return structure.flatten_up_to(given)
    except ValueError as error:
        raise ArgumentError(f"column_lookup: {wanted} like the tables: {error}") from None


@dataclasses.dataclass(frozen=True)
class _IdList:
    """The ids that this rank reads of a table.

    Attributes:
        read: The table, and the ids as given.
        merge: The distinct ids, and the position of each id among them.
        wanted: int32 [room], the distinct ids, ascending, padded with the height.
        is_there: bool of the shape of the ids, whether each id is in range.
    """

    read: _Read
    merge: Merge
    wanted: jax.Array
    is_there: jax.Array

    @property
    def room(self):
        return self.wanted.shape[0]

    @classmethod
    def of(cls, read, mode, wire):
        height = read.height
        check_numbered(read.name, height)
        ids = _signed(wire.per_rank(read.ids.reshape(-1)), height, mode)
        if mode == "clip":
            ids = jnp.clip(ids, 0, height - 1)
        elif mode == "wrap":
            ids = ids % height
        else:
            ids = jnp.where(ids < 0, ids + height, ids)
        inside = (ids >= 0) & (ids < height)
        if read.table.weight is not None:
            # A rank of weight 0 reads no rows, so that no optimizer updates a row for it.
            ids = jnp.where(read.table.weight == 0, height, ids)
        merge = merged(ids, height)
        wanted = merge.ids[: min(ids.size, height)]
        return cls(read, merge, wanted, inside.reshape(read.ids.shape))

    def _tapped(self, distinct):
        """Returns the vectors unchanged; if there is a tap, their gradient goes to it."""
        if self.read.table.tap is None:
            return distinct
        tap = self.read.table.tap
        rows = marked(tap, self.wanted, _NAME, mode="fill", fill_value=0)
        types = varying_axes(rows) | varying_axes(distinct)
        return _instead(*as_varying((distinct, rows), types))

    def vectors(self, distinct, fill_value):
        """Returns the vectors of all ids, given those of distinct ids [room, columns]."""
        table, shape = self.read.table, self.read.ids.shape
        distinct = self._tapped(distinct)[:, : table.dim]
        if table.weight is not None:
            distinct = _weighted(distinct, table.weight)
        dtype = distinct.dtype
        # In a wider dtype, in which the gradients of equal ids are summed.
        types = varying_axes(distinct) | varying_axes(self.merge.places)
        wider = as_varying((distinct.astype(wide(dtype)), self.merge.places), types)
        found = _repeated(*wider).astype(dtype).reshape(*shape, table.dim)
        fill = jnp.asarray(jnp.nan if fill_value is None else fill_value, dtype)
        return jnp.where(self.is_there[..., None], found, fill)


def _signed(ids, height, mode):
    """Casts ids to a signed dtype of at least 32 bits, which can represent every row."""
    dtype = jnp.iinfo(ids.dtype)
    if dtype.bits < 32:
        return ids.astype(jnp.int32)
    if dtype.min < 0:
        return ids
    largest = ids.dtype.type(2**31 - 1)  # out of range: tables have fewer rows
    ids = ids % ids.dtype.type(height) if mode == "wrap" else jnp.minimum(ids, largest)
    return ids.astype(jnp.int32)


@jax.custom_jvp
def _instead(x, y):
    """Returns x; its gradient goes to y instead."""
    del y
    return x


_instead.defjvp(lambda primals, tangents: (primals[0], tangents[1]))


@jax.custom_vjp
def _repeated(rows, places):
    """Returns rows[places], 0 for places out of range; its gradients are ordered sums."""
    return rows.at[places].get(mode="fill", fill_value=0)


def _repeated_fwd(rows, places):
    return _repeated(rows, places), (rows[:, :0], places)


def _repeated_bwd(kept, g):
    none, places = kept
    zeros = jnp.zeros((len(none), g.shape[1]), g.dtype)
    return add_repeated(zeros, places, g), np.zeros(places.shape, jax.dtypes.float0)


_repeated.defvjp(_repeated_fwd, _repeated_bwd)


@jax.custom_vjp
def _weighted(x, weight):
    """Returns x; its gradient is multiplied by the weight."""
    del weight
    return x


def _weighted_fwd(x, weight):
    return x, weight


def _weighted_bwd(weight, g):
    return (g.astype(wide(g.dtype)) * weight).astype(g.dtype), jnp.zeros_like(weight)


_weighted.defvjp(_weighted_fwd, _weighted_bwd)


def _traffic(wire, lists, wanted, sent):
    """Returns the traffic of a lookup, including that of a backward pass."""
    agreed, of_ids, of_rows = (jnp.float32(x) for x in sent)
    reads, n = [x.read for x in lists], wire.ranks
    dtype = reads[0].table.value.dtype
    most, _ = wire.maximum(jnp.stack(wire.per_rank([x.merge.found for x in lists])))
    dims = jnp.asarray([read.table.dim for read in reads], jnp.float32)
    ids = (n - 1) * 4 * jnp.sum(most).astype(jnp.float32)
    rows = (n - 1) / n * dtype.itemsize * jnp.sum(most * dims)
    one = jnp.float32(1)
    push = Stage(of_rows, rows, one, one)
    pull = Stage(of_ids + of_rows, ids + rows, one * 2, one)
    height = jnp.float32(sum(read.height for read in reads))
    size = sum(read.height * read.table.dim for read in reads)
    read_by_any = [
        merged(ids.reshape(-1), read.height).found
        for ids, read in zip(wanted, reads, strict=True)
    ]
    return Traffic(
        push,
        pull,
        agreed,
        jnp.float32(wire.dense_bytes(size, dtype)),
        jnp.sum(most) / height,
        sum(read_by_any, jnp.int32(0)) / height,
        jnp.float32(0),
    )
