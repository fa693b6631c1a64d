"""Differentiates a loss; gradients of tables that it reads by rows are `RowGrads`."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sparsejax.axes import as_varying, axis_names, manual_axes, mesh_of, varying_axes
from sparsejax.errors import ArgumentError, DenseGradientWarning
from sparsejax.rows import reading, replay
from sparsejax.rows.replay import ProgramTable, Reader
from sparsejax.state import tree
from sparsejax.state.parameters import ranks_of
from sparsejax.units.row_grads import RowGrads


# The number of elements from which on a dense gradient of a table causes a warning.
_WARNED_FROM = 65_536


def value_and_grad(
    loss_fn: Callable[..., Any], *, has_aux: bool = False, read: Reader | None = None
) -> Callable[..., tuple[Any, Any]]:
    """Makes `jax.value_and_grad` of the first argument, with `RowGrads` for tables.

    The model needs no change. `table[ids]`, `jnp.take`, `table.at[ids].get`, slices along
    the first axis and flax's `Embed` are found in the traced program, also in scans,
    branches, `remat`, `vmap` and `jit`, and through casts and scales. All lookups of one
    table make one `RowGrads`. Its ids repeat where rows were read twice.

    The gradient of a leaf is `RowGrads` if the leaf has at least two axes, gradients flow
    to it through such reads only, and they read fewer rows than it has, counted with
    repeats. Any other leaf has the gradient of `jax.grad`. For ids out of range the mode of
    the lookup decides: `table[ids]` reads the nearest row, and drops its gradient.

    If a table of 65,536 elements or more is read by rows and used otherwise too, as tied
    output weights are, its gradient is dense, and a `DenseGradientWarning` names the leaf
    and the line once. Uses without a gradient, such as metrics or after `stop_gradient`, do
    not count. An operation that JAX 0.10 to 0.12 does not have makes a gradient dense, but
    never wrong.

    Under `jax.shard_map` the rows are those that this rank has read. `jax.grad` differs
    there: with `check_vma` it sums the gradient of replicated parameters over the ranks.
    Rows are typed as varying over a mesh axis if the ids or rows vary over it.
    `sparsejax.local(params)` makes the gradients of all leaves local.

    Args:
        loss_fn: The loss, as for `jax.value_and_grad`: `loss_fn(params, ...)` returns a
            scalar, or with has_aux `(scalar, aux)`. It is traced as by `jax.jit`, even
            outside `jit`. All arguments but the first may have any type.
        has_aux: Whether the loss returns auxiliary outputs.
        read: The reader of an exact `sparsejax.lazy`, `tx.reader(params, state)`, whose
            rows may have missed steps. Give it to `tx.update`, too. Under `jit` it reads
            rows of tables that are sharded by rows without gathering the tables.

    Returns:
        A function of the arguments of `loss_fn` that returns the value, or `(value, aux)`,
        and the gradients, a tree like the first argument.

    Raises:
        ArgumentError: A table that is given to `sparsejax.lookup` is used densely too.

    Example:
        >>> tables = {"users": jnp.ones((100, 2))}
        >>> loss = lambda tables: tables["users"][jnp.array([3, 5])].sum()
        >>> value, grads = sparsejax.value_and_grad(loss)(tables)
        >>> grads["users"].ids.tolist(), grads["users"].rows.shape
        ([3, 5], (2, 2))

    See Also:
        `sparsejax.per_replica`: local gradients under `jit` on meshes with Auto axes.
        `sparsejax.embrace.value_and_grad`: for `embrace_sync`, which delays rows.
    """
    if not callable(loss_fn):
        raise ArgumentError(f"value_and_grad: loss_fn must be a function, got {loss_fn!r}.")
    warned: set[str] = set()

    @functools.wraps(loss_fn)
    def evaluate(params, *args, **kwargs):
        paths, leaves, structure = tree.flatten(params, "value_and_grad")
        outputs = _Outputs(has_aux)
        program = jax.make_jaxpr(lambda p: outputs.arrays(loss_fn(p, *args, **kwargs)))(
            params
        )
        tables = {at: leaf for at, leaf in enumerate(leaves) if _may_be_table(leaf)}
        wanted = [at < outputs.differentiated for at in range(len(program.jaxpr.outvars))]
        found = reading.read(program, tables, wanted)
        _check_dense_gradients(found, paths, leaves, warned)
        sites = found.plan.sites
        by_rows = {site.leaf for site in sites}

        def run(dense, deltas):
            inputs = [
                ProgramTable(leaf, paths[at], read) if at in by_rows else dense[at]
                for at, leaf in enumerate(leaves)
            ]
            made, lookups = replay.run(program, found.plan, inputs, iter(deltas))
            value, aux = outputs.restored(list(map(replay.whole, made)))
            return value, (aux, lookups)

        dense = {at: leaf for at, leaf in enumerate(leaves) if at not in by_rows}
        if read is not None:
            whole = read.whole([paths[at] for at in dense])
            # The reader may return replicated parameters where these leaves are local.
            pairs = zip(dense, whole, strict=True)
            dense = {at: _typed_as(leaves[at], x) for at, x in pairs}
        deltas = [replay.zeros(site) for site in sites]
        differentiate = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)
        (value, (aux, lookups)), (grads, rows) = differentiate(dense, deltas)
        places = list(zip(sites, lookups, rows, strict=True))
        for at in by_rows:
            own = [place for place in places if place[0].leaf == at]
            grads[at] = _row_grads(own, leaves[at].shape)
            if read is not None:
                looked_up = [lookup for _, lookup, _ in own]
                grads[at] = read.listed(paths[at], looked_up, grads[at])
        grads = jax.tree.unflatten(structure, [grads[at] for at in range(len(leaves))])
        return ((value, aux) if has_aux else value), grads

    return evaluate


class _Outputs:
    """Converts the outputs of a loss function to a list of arrays, and back.

    Args:
        has_aux: Whether the function returns (loss, aux).
    """

    def __init__(self, has_aux: bool):
        self.has_aux = has_aux
        self.differentiated = 0  # the number of leading arrays that are the loss

    def arrays(self, returned):
        """Returns the arrays; keeps other leaves, such as strings and Python numbers."""
        pair = isinstance(returned, (tuple, list)) and len(returned) == 2
        if self.has_aux and not pair:
            raise ArgumentError(
                "value_and_grad: with has_aux=True loss_fn must return (loss, aux), got "
                f"{type(returned).__name__}. Leave has_aux out if there is no aux."
            )
        loss, aux = returned if self.has_aux else (returned, None)
        loss, self._loss = jax.tree.flatten(loss)
        aux, self._aux = jax.tree.flatten(aux)
        self._others = [None if hasattr(x, "dtype") else (x,) for x in aux]
        self.differentiated = len(loss)
        pairs = zip(aux, self._others, strict=True)
        return [*loss, *[x for x, other in pairs if other is None]]

    def restored(self, arrays):
        """Returns the loss and the auxiliary outputs."""
        loss, rest = arrays[: self.differentiated], iter(arrays[self.differentiated :])
        aux = [other[0] if other else next(rest) for other in self._others]
        return jax.tree.unflatten(self._loss, loss), jax.tree.unflatten(self._aux, aux)


def _typed_as(leaf, x):
    """Returns an array with the type of a parameter: its varying axes, or its sharding."""
    mesh = mesh_of(leaf)
    if mesh is not None and not manual_axes() and AxisType.Explicit in mesh.axis_types:
        return jax.reshard(x, jax.typeof(leaf).sharding)
    return as_varying(x, varying_axes(leaf))


def _may_be_table(leaf):
    dtype = getattr(leaf, "dtype", None)
    floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    return floating and leaf.ndim >= 2 and 0 < leaf.size and leaf.shape[0] < 2**31 - 1


def _check_dense_gradients(found, paths, leaves, warned):
    """Warns of tables with a dense gradient; raises if one is given to `lookup`."""
    for at, place in found.spoiled.items():
        path, leaf = paths[at], leaves[at]
        if at in found.marked:
            raise ArgumentError(
                f"{found.marked[at]} reads rows of {path!r}, but the loss also uses all of "
                f"it: {place}. Its gradient would be dense. Leave that out, put "
                "jax.lax.stop_gradient around the table there, or, where a dense gradient "
                "is meant, read an array with jnp.take."
            )
        if leaf.ndim == 2 and leaf.size >= _WARNED_FROM and path not in warned:
            warned.add(path)
            warnings.warn(
                f"the loss reads {path!r} {list(leaf.shape)} by rows, but its gradient is "
                f"dense, because the loss also uses all of it: {place}. Put "
                "jax.lax.stop_gradient around the table there if no gradient is to flow, "
                "and keep tied weights and penalties separate from a table to train it "
                "by rows.",
                DenseGradientWarning,
                stacklevel=3,
            )


def _row_grads(places, shape):
    """Makes the gradient of a table from its places: sites, lookups, gradients of rows."""
    if places[0][0].sharding is not None:
        return _typed_row_grads(places, shape)
    varying = frozenset().union(*(site.varying for site, _, _ in places))
    all_ids, all_rows = [], []
    for site, lookup, rows in places:
        row = range(-len(site.axes), 0)
        rows = jnp.moveaxis(rows, site.axes, row).reshape(-1, *shape[1:])
        # Over these axes all ranks have read the same rows, and have the sum of their
        # gradients: only the first rank lists it.
        same = varying - site.varying
        ids = as_varying(lookup.ids.reshape(-1), varying)
        if same:
            first = [lax.axis_index(axis) == 0 for axis in sorted(same)]
            kept = functools.reduce(jnp.logical_and, first)
            ids = jnp.where(as_varying(kept, varying), ids, shape[0])
        all_ids.append(ids)
        all_rows.append(as_varying(rows, varying))
    return RowGrads.marked(
        jnp.concatenate(all_ids), jnp.concatenate(all_rows), tuple(shape)
    )


def _typed_row_grads(places, shape):
    """Does as `_row_grads` on an explicit mesh: concatenates the rows of all devices.

    If there are several sites, each device has its rows of the first, then of the second.
    All sites are resharded like one that is sharded over most mesh axes.
    """
    mesh = places[0][0].sharding.mesh
    every = [site.ids_spec[site.batch] for site, _, _ in places]
    over = max(every, key=lambda part: len(axis_names(part)))
    count = ranks_of(mesh, over)
    all_ids, all_rows = [], []
    for (site, lookup, rows), own in zip(places, every, strict=True):
        rows = jnp.moveaxis(rows, site.axes, range(-len(site.axes), 0))
        # The sharded axis becomes the first, so that rows of one device are contiguous.
        ids = jnp.moveaxis(lookup.ids, site.batch, 0).reshape(-1)
        rows = jnp.moveaxis(rows, site.batch, 0).reshape(-1, *shape[1:])
        if own != over:
            free = -len(ids) % count
            ids = jnp.pad(ids, (0, free), constant_values=shape[0])
            rows = jnp.pad(rows, ((0, free), *((0, 0) for _ in shape[1:])))
            ids = jax.reshard(ids, NamedSharding(mesh, PartitionSpec(over)))
            rows = jax.reshard(rows, NamedSharding(mesh, PartitionSpec(over)))
        all_ids.append(ids.reshape(count, -1))
        all_rows.append(rows.reshape(count, -1, *shape[1:]))
    ids = jnp.concatenate(all_ids, axis=1).reshape(-1)
    rows = jnp.concatenate(all_rows, axis=1).reshape(-1, *shape[1:])
    return RowGrads.marked(ids, rows, tuple(shape))
