"""Gradients of column tables by rows, which are not sent, and the ids that a batch reads.

A loss is differentiated not with respect to a rank's columns but with respect to the
vectors that its lookups have received: the gradient of these goes to the `tap` of a
`ColumnTable`, which stands for a table of whole rows and is never allocated. So nothing is
sent in the backward pass, and each rank has the gradients of its own whole rows.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from sparsejax.axes import as_varying, varying_axes
from sparsejax.embrace.column_table import ColumnTable, Unsent
from sparsejax.errors import ArgumentError
from sparsejax.rows import reading, replay, value_and_grad as by_rows
from sparsejax.rows.reads import Ids
from sparsejax.rows.replay import Lookup, ProgramTable, Reader
from sparsejax.state import sharded, tree
from sparsejax.tracing import outputs
from sparsejax.units.merging import merged
from sparsejax.units.row_grads import RowGrads, is_row_grads
from sparsejax.wire.collectives import Wire


def value_and_grad(
    loss_fn: Callable[..., Any], *, has_aux: bool = False, read: Reader | None = None
) -> Callable[..., tuple[Any, Any]]:
    """Makes `sparsejax.value_and_grad` for `embrace_sync(vertical=True)`, which sends rows.

    Leaves have the gradients of `sparsejax.value_and_grad`, except for each `ColumnTable`.
    Its gradient contains the whole rows of this rank, and has not been sent.

    Args:
        loss_fn: See `sparsejax.value_and_grad`. It reads tables by `column_lookup`.
        has_aux: See `sparsejax.value_and_grad`.
        read: See `sparsejax.value_and_grad`.

    Returns:
        A function of the arguments of `loss_fn` that returns the value, or `(value, aux)`,
        and the gradients.

    Example:
        >>> table = sparsejax.ColumnTable.create(jax.random.key(0), 100, 8, mesh)
        >>> def loss_fn(params, ids):
        ...     return sparsejax.column_lookup(params["users"], ids).sum()
        >>> value_and_grad = sparsejax.embrace.value_and_grad(loss_fn)  # in a shard_map

    See Also:
        `sparsejax.value_and_grad`: for all other synchronizations.
        `sparsejax.per_replica`: local gradients under `jit` on meshes with Auto axes.
    """

    @functools.wraps(loss_fn)
    def evaluate(params, *args, **kwargs):
        given = _Tapped(params)
        reads = _Reads(given, read)
        evaluate = by_rows(loss_fn, has_aux=has_aux, read=reads)
        value, grads = evaluate(given.tree, *args, **kwargs)
        shards = sharded.apart(grads)
        nodes = []
        for at, path in enumerate(given.shards.paths):
            sites = (reads.sites.get(p[at], []) for p in (reads.taps, reads.tables))
            table = given.shards.nodes[at]
            nodes.append(_unsent(path, table, shards.nodes[at], *sites))
        return value, shards.together(shards.rest, nodes)

    return evaluate


def rows_read(
    loss_fn: Callable[..., Any], *, has_aux: bool = False
) -> Callable[..., dict[str, jax.Array]]:
    """Makes a function that finds the ids of the rows that a loss reads of `ColumnTable`s.

    Its result is the `next_ids` of `embrace_sync`. It computes only what the ids depend on,
    and sends nothing.

    Args:
        loss_fn: See `value_and_grad`.
        has_aux: See `value_and_grad`.

    Returns:
        A function of the arguments of `loss_fn` that returns a dict from paths of tables to
        ids.

    Example:
        >>> ids = sparsejax.embrace.rows_read(loss_fn)(params, next_batch)
        >>> updates, state = tx.update(grads, state, params, next_ids=ids)
    """

    def ids_of(params, args, kwargs):
        given = _Tapped(params)

        def loss(params):
            returned = loss_fn(params, *args, **kwargs)
            return jax.tree.leaves(returned[0] if has_aux else returned)

        program = jax.make_jaxpr(loss)(given.tree)
        taps = {at: given.leaves[at] for at in given.taps}
        found = reading.read(program, taps, [True] * len(program.jaxpr.outvars))
        reads = _Reads(given, None)
        looked_up = {site.leaf for site in found.plan.sites}
        inputs = [
            ProgramTable(leaf, given.paths[at], reads) if at in looked_up else leaf
            for at, leaf in enumerate(given.leaves)
        ]
        deltas = iter([replay.zeros(site) for site in found.plan.sites])
        _, lookups = replay.run(program, found.plan, inputs, deltas)
        lists: dict[int, list[jax.Array]] = {at: [] for at in given.taps}
        for site, lookup in zip(found.plan.sites, lookups, strict=True):
            lists[site.leaf].append(lookup.ids.reshape(-1))
        for at, path in zip(given.taps, given.shards.paths, strict=True):
            _require_lookup(path, bool(lists[at]))
        return [jnp.concatenate(lists[at]) for at in given.taps]

    def evaluate(params, *args, **kwargs):
        paths = sharded.apart(params).paths
        if not paths:
            return {}
        own, structure = jax.tree.flatten((params, args, kwargs))
        arrays = [at for at, x in enumerate(own) if hasattr(x, "dtype")]

        def run(*leaves):
            every = list(own)
            for at, leaf in zip(arrays, leaves, strict=True):
                every[at] = leaf
            return ids_of(*structure.unflatten(every))

        needed = _only_what_is_needed(run, [own[at] for at in arrays])
        return dict(zip(paths, needed, strict=True))

    return evaluate


def _only_what_is_needed(function, arrays):
    """Calls a function without the equations on which its results do not depend."""
    program, used = outputs.needed(jax.make_jaxpr(function)(*arrays))
    given = [x for x, is_used in zip(arrays, used, strict=True) if is_used]
    return core.jaxpr_as_fun(program)(*given)


class _Tapped:
    """Adds taps to the tables of parameters.

    Args:
        params: The parameters, inside `shard_map`.
    """

    def __init__(self, params: Any):
        self.shards = sharded.apart(params)
        self.widths = [self._width(*x) for x in zip(*self.shards[1:3], strict=True)]
        nodes, flags = [], []
        for table, width in zip(self.shards.nodes, self.widths, strict=True):
            tap = jnp.zeros((table.value.shape[0], width), table.value.dtype)
            types = varying_axes(table.value)
            tap = as_varying(Wire(table.axis_name).per_rank(tap), types)
            nodes.append(dataclasses.replace(table, tap=tap))
            no = jax.tree.map(lambda _: False, table)
            flags.append(dataclasses.replace(no, tap=True))
        self.tree = self.shards.together(self.shards.rest, nodes)
        self.paths, self.leaves, _ = tree.flatten(self.tree, "value_and_grad")
        rest = jax.tree.map(lambda _: False, self.shards.rest)
        every = jax.tree.leaves(self.shards.together(rest, flags))
        self.taps = [at for at, is_tap in enumerate(every) if is_tap]
        self.tables = [self._value_of(at, every) for at in range(len(nodes))]

    def _width(self, path, table):
        """Returns the number of columns of all ranks; raises if a rank has a wrong one."""
        if not isinstance(table, ColumnTable):
            raise ArgumentError(
                f"embrace: {path!r} is a {type(table).__name__}, and tables whose rows are "
                "scheduled are sparsejax.ColumnTable."
            )
        call = f"the gradient of the table {path!r}"
        ranks = Wire.over(table.axis_name, call).ranks
        return table.columns_on(ranks, f"the table {path!r}").shape[1] * ranks

    def _value_of(self, number, flags):
        """Returns the number of the leaf that is a table's columns."""
        weighted = self.shards.nodes[number].weight is not None
        return self.taps[number] - (2 if weighted else 1)


class _Reads:
    """A `Reader` of parameters with taps, which records the ids of all lookups.

    Args:
        given: The parameters.
        read: The reader of late rows, or None.
    """

    def __init__(self, given: _Tapped, read: Reader | None):
        self._leaves = dict(zip(given.paths, given.leaves, strict=True))
        self.taps = [given.paths[at] for at in given.taps]
        self.tables = [given.paths[at] for at in given.tables]
        self._read = read
        self.sites: dict[str, list[jax.Array]] = {}

    def rows(self, path: str, ids: Ids) -> tuple[jax.Array, Any]:
        leaf, read = self._leaves[path], ids.read
        if path in self.taps:  # its rows are zeros, and the tap itself is not allocated
            zeros = jnp.zeros((*read.shape, *leaf.shape[1:]), leaf.dtype)
            return as_varying(zeros, varying_axes(leaf) | varying_axes(read)), None
        if self._read is not None:
            return self._read.rows(path, ids)
        return jnp.take(leaf, read, axis=0, mode="clip"), None

    def listed(self, path: str, lookups: list[Lookup], grads: RowGrads) -> RowGrads:
        self.sites[path] = [lookup.ids for lookup in lookups]
        if self._read is not None and path not in (*self.taps, *self.tables):
            return self._read.listed(path, lookups, grads)
        return grads

    def whole(self, paths: Sequence[str]) -> list[jax.Array]:
        if self._read is None:
            return [self._leaves[path] for path in paths]
        known = [path for path in paths if path not in self.taps]
        found = dict(zip(known, self._read.whole(known), strict=True))
        return [found[path] if path in found else self._leaves[path] for path in paths]


def _unsent(path, table, grad, ids, ids_of_all):
    """Makes the gradient of a table, an `Unsent` with distinct ids.

    Args:
        path: The table's path.
        table: The table.
        grad: The gradient of the table with its tap.
        ids: For each lookup the ids that this rank reads, int32 [*turns, room].
        ids_of_all: For each lookup those that all ranks read, int32 [*turns, n * room].
    """
    _require_lookup(path, is_row_grads(grad.tap))
    wire, height = Wire(table.axis_name), table.value.shape[0]
    lists = [
        jnp.moveaxis(every.reshape(*own.shape[:-1], wire.ranks, own.shape[-1]), -2, 0)
        for own, every in zip(ids, ids_of_all, strict=True)
    ]
    # They were gathered, so they are equal on all ranks.
    every = jnp.concatenate([x.reshape(wire.ranks, -1) for x in lists], axis=1)
    every, rows = wire.assume_same(every), grad.tap.rows
    if len(ids) > 1 or ids[0].ndim > 1:
        # Several lookups may read the same rows: ids are made distinct.
        every = lax.map(lambda ids: merged(ids, height).ids, every)
        rows = merged(grad.tap.ids, height).sums(rows)
    made = Unsent(every, rows, tuple(table.value.shape))
    return ColumnTable(made, table.dim, table.axis_name)


def _require_lookup(path, is_there):
    if not is_there:
        raise ArgumentError(
            f"the loss does not read the table {path!r} by sparsejax.column_lookup, and "
            "embrace_sync(vertical=True) sends rows that were read so. Read it so, or "
            "leave it out of the parameters."
        )
