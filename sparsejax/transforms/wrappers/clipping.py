"""Clips each rank's gradient separately, before the exchange. Nothing is sent for it."""

import jax.numpy as jnp
import optax

from sparsejax import arguments, axes
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError
from sparsejax.state import sharded, tree
from sparsejax.transforms import checks, select
from sparsejax.transforms.described import described
from sparsejax.transforms.entry import Entry
from sparsejax.units import merging
from sparsejax.units.row_grads import is_row_grads
from sparsejax.units.units import wide
from sparsejax.wire.collectives import Wire


@described
def clip_by_rank(
    norm: float,
    axis_name: AxisName | None = None,
    *,
    model_axis: AxisName | None = None,
) -> optax.GradientTransformation:
    """Clips each rank's gradient before anything is sent, at a norm over all leaves.

    With g the gradient of a rank, all leaves together, and n the number of ranks:

        g = g min(1, norm / (sqrt(n) |g|))

    So the norm of a sum of gradients that point in independent directions is at most about
    `norm`.

    Args:
        norm: The norm; smaller clips more.
        axis_name: The mesh axis of the ranks; the only manual one if None.
        model_axis: The mesh axis over which tensors are sharded, if any.

    Returns:
        An `optax.GradientTransformation`, to be chained before a sparsifier or a
        synchronization.

    Example:
        >>> clip, top = sparsejax.transforms.clip_by_rank(1.0), sparsejax.dgc(0.01)
        >>> tx = optax.chain(clip, top, sparsejax.zen_sync(), optax.sgd(0.1))
    """
    arguments.check_positive("norm", norm)
    name = "sparsejax.transforms.clip_by_rank"

    def init(params):
        del params
        return optax.EmptyState()

    entry = Entry(name, axis_name, sums=False, model_axis=model_axis)

    def update(updates, state, params=None, *, entered=None, **extra):
        if entry.outside(updates, state, params):
            return entry.run(update, updates, state, params)
        del params, extra
        wire = Wire.over(axis_name, f"update of {name}")
        sharded.refuse(
            updates,
            name,
            "and its gradient holds those of all ranks already: leave it out with "
            "optax.masked, or scale the loss.",
        )
        paths, leaves, structure = tree.flatten(updates, name, rows=True)
        for path, leaf, over in zip(paths, leaves, _shards(entered, leaves), strict=True):
            if is_row_grads(leaf) and over:
                raise ArgumentError(
                    f"{name}: devices along {over[0]!r} list rows of {path!r} of their "
                    "own, and equal ones add up before they have a norm. Clip after the "
                    "synchronization, or shard the batch over the axis of the ranks alone."
                )
        # Rows that are listed twice are summed before the norm is taken.
        leaves = [merging.merge(leaf) if is_row_grads(leaf) else leaf for leaf in leaves]
        checks.check_model_axis(model_axis, wire)
        for path, leaf in zip(paths, leaves, strict=True):
            select.require_local(path, tree.numbers(leaf), wire)
        arrays = [tree.numbers(leaf) for leaf in leaves]
        shards = _shards(entered, leaves, model_axis)
        over = list(map(axes.varying_axes, arrays))
        if tree.knows_shards() and entered is None:
            # The chain is checked for updates under `jit`: a dry run with known shardings.
            ranks = frozenset(axes.axis_names(wire.axis))
            shards = [tuple(sorted(names - ranks)) for names in over]
        elif entered is None:
            select.check_shards(over, model_axis, "clip_norm")
        if not leaves:
            return updates, state
        # All leaves in the widest dtype, so that one number scales them all.
        widest = max([wide(x.dtype) for x in arrays], key=lambda dtype: dtype.itemsize)
        numbers = [x.astype(widest) for x in arrays]
        # Numbers that are not finite are left out of the norm: it would be NaN, and so
        # would all clipped numbers.
        finite = [jnp.where(jnp.isfinite(x), x, 0) for x in numbers]
        most = norm * wire.ranks**-0.5
        first, then = _scales(most, map(_squares, finite, shards))
        clipped = [
            tree.with_numbers(leaf, (x * first * then).astype(leaf.dtype))
            for x, leaf in zip(numbers, leaves, strict=True)
        ]
        return structure.unflatten(clipped), state

    return tree.transformation(init, update)


def _shards(entered, leaves, model_axis=None):
    """Returns the axes over which each leaf is sharded; `model_axis` inside `shard_map`."""
    return [model_axis] * len(leaves) if entered is None else entered.axes


def _unit(dtype):
    """Returns a power of two: squares of the largest numbers times it do not overflow."""
    return 2.0 ** (-3 * jnp.finfo(dtype).maxexp // 4)


def _squares(x, model_axis):
    """Returns the sums of squares of a leaf, and of the leaf times `_unit`, over shards.

    A replicated leaf counts once.
    """
    small = x * _unit(x.dtype)
    squares = jnp.stack([jnp.sum(x * x), jnp.sum(small * small)])
    if not model_axis:
        return squares
    shards = Wire(model_axis)
    names = frozenset(axes.axis_names(model_axis))
    if axes.is_checking(model_axis) and not names & axes.varying_axes(squares):
        return squares
    return shards.psum(shards.per_rank(squares))[0]


def _scales(most, squares):
    """Returns two factors that bring a norm down to `most`, from `_squares` of leaves.

    The squares of float32 overflow from 2e19 on: the norm is then that of the numbers times
    the first factor. The product of the factors may be subnormal.
    """
    square, small = sum(squares, jnp.zeros(2, jnp.float32))
    overflows = jnp.isinf(square)
    first = jnp.where(overflows, _unit(square.dtype), 1)
    square = jnp.where(overflows, small, square)
    # The derivative of a root at 0 is infinite, also where the root is not used.
    norm = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
    return first, most / jnp.maximum(norm, most * first)
