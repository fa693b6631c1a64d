"""Residuals of sums, which owners keep, and their transfer to another number of ranks.

The blocks of some leaves are divided among the ranks, in order, the same number to each.
Only the owner of a block keeps the residual of its sum. So for another number of ranks no
value changes: blocks only change owners.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sparsejax.axes import AxisName
from sparsejax.errors import StateError
from sparsejax.state.per_rank import PerRank


# Ends messages about leaves that are sharded otherwise than before.
SAME_SHARDS = (
    "Owners hold back sums of the blocks of each shard, so only the number of ranks may "
    "change: shard the parameters as before, over axes of the same sizes, or continue from "
    "the parameters and the optimizer's state, without what owners hold back."
)


@jax.tree_util.register_pytree_with_keys_class
class ByOwner(PerRank):
    """Arrays of blocks that are divided among the ranks.

    Each array is [ranks, shards, blocks of an owner, elements of a block]. The blocks of
    all owners, concatenated, are those of the leaves, padded with zeros. If a further mesh
    axis shards the leaves, each shard has its own blocks.

    Attributes:
        shapes: The shapes of the leaves in `paths`, of one shard. They determine which
            element of a leaf is in which block.
    """

    is_divided = True

    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...] = ()  # of states pickled without this attribute

    def __init__(
        self,
        value: Any,
        axis_name: AxisName,
        paths: tuple[str, ...],
        shapes: tuple[tuple[int, ...], ...],
        ranks: Any = None,
    ):
        super().__init__(value, axis_name, paths, ranks=ranks)
        self.shapes = shapes

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Flattens for JAX: arrays are children, the rest is part of the structure."""
        children, _ = super().tree_flatten_with_keys()
        return children, (self.axis_name, self.paths, self.shapes)

    @classmethod
    def tree_unflatten(cls, rest, children):
        """Unflattens for JAX."""
        value, ranks = children
        axis_name, paths, shapes = rest
        return cls(value, axis_name, paths, shapes, ranks)

    def resized(
        self, fresh: "ByOwner", whole: Callable[..., np.ndarray], path: str
    ) -> "ByOwner":
        """Returns the same blocks, divided among other ranks: see `resizing.resized`.

        Args:
            fresh: The node of a new state for the other ranks.
            whole: A function from a path and a `jax.Array` to the whole NumPy array.
            path: The path of the node in the state.
        """
        was, now = ([list(shape) for shape in node.shapes] for node in (self, fresh))
        if was != now:
            raise StateError(
                f"the owners of the state hold at {path!r} blocks of shards of the shapes "
                f"{was}, those of `like` of {now}. {SAME_SHARDS}"
            )

        def one(x, y):
            x = whole(path, x)
            ranks, shards, share, length = y.shape
            if (x.shape[1], x.shape[3]) != (shards, length):
                raise StateError(
                    f"the owners of the state hold at {path!r} blocks of {x.shape[3]} "
                    f"numbers of {x.shape[1]} shards, those of `like` blocks of {length} "
                    f"of {shards}. {SAME_SHARDS}"
                )
            blocks = x.swapaxes(0, 1).reshape(shards, -1, length)
            most = ranks * share
            room = max(0, most - blocks.shape[1])
            width: Any = ((0, 0), (0, room), (0, 0))
            blocks = np.pad(blocks[:, :most], width)
            blocks = blocks.reshape(shards, ranks, share, length).swapaxes(0, 1)
            blocks = blocks.astype(y.dtype)
            return jax.make_array_from_callback(
                blocks.shape, y.sharding, lambda at: blocks[at]
            )

        value: Any = jax.tree.map(one, self.value, fresh.value)
        return fresh.with_value(value)
