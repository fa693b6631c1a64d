"""Checks of the gradients that a sparsifier on a tree is given."""

from collections.abc import Mapping, Sequence
from typing import Any

from sparsejax import axes
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError
from sparsejax.schemes.base import MOST_UNITS
from sparsejax.wire.collectives import Wire


def require_local(path: str, leaf: Any, wire: Wire) -> None:
    """Raises if a gradient was already summed upstream of a sparsifier."""
    hint = (
        " A sparsifier stands before the synchronization: "
        "optax.chain(sparsejax.dgc(0.01), sparsejax.zen_sync(), ...)."
    )
    axes.require_local(path, leaf, wire.axis, hint)


def check_shards(
    over: Sequence[frozenset[str]], model_axis: AxisName | None, what: str
) -> None:
    """Raises if leaves share a number, are sharded differently, and `model_axis` is None.

    Args:
        over: The mesh axes over which each leaf is sharded, as far as types show.
        model_axis: The mesh axis over which the caller says that tensors are sharded.
        what: The option by which they share the number, for the message.
    """
    shards = sorted({tuple(sorted(axes)) for axes in over})
    if model_axis is None and len(shards) > 1:
        raise ArgumentError(
            f"some leaves vary over {shards[0]} and others over {shards[-1]}, and what all "
            f"have together ({what}) would differ from shard to shard: give the sparsifier "
            "model_axis, the axis over which they are sharded. Under jit, where it is not "
            f"taken, leave {what} out, or shard these leaves over the same axes."
        )


def check_sizes(sizes: Mapping[str, int], together: bool) -> None:
    """Raises if there are more elements to select from than int32 can number.

    Args:
        sizes: The number of elements of each leaf that is sparsified, by path.
        together: Whether all leaves share one threshold.
    """
    if together and sum(sizes.values()) > MOST_UNITS:
        raise ArgumentError(
            f"global_=True selects from all leaves, of {sum(sizes.values()):,} elements, "
            f"by one threshold: int32 numbers {MOST_UNITS:,}. Leave global_ out."
        )
    for path, size in sizes.items():
        if size > MOST_UNITS:
            raise ArgumentError(
                f"leaf {path!r} has {size:,} elements, and sparsifiers, which number them "
                f"by int32, take {MOST_UNITS:,}: shard it over a second mesh axis, split "
                f"it, or send it whole (compress=lambda path, leaf: path != {path!r})."
            )
