"""What owners hold of sums, and how it changes ranks.

The blocks of some leaves are divided among the ranks, in order, as many to each. Of the sum
of a block its owner alone holds back what it has not sent. So for another number of ranks
no number changes: blocks change owners.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sparsejax.errors import StateError
from sparsejax.state.per_rank import PerRank


@jax.tree_util.register_pytree_with_keys_class
class ByOwner(PerRank):
    """Blocks that are divided among the ranks.

    Each array is [ranks, shards, blocks of an owner, numbers of a block]. The blocks of all
    owners, one after another, are those of the leaves, and zeros after the last. Where a
    further mesh axis shards the leaves, each shard has blocks of its own.
    """

    is_divided = True

    def resized(
        self, fresh: "ByOwner", whole: Callable[..., np.ndarray], path: str
    ) -> "ByOwner":
        """The same blocks, divided among other ranks: see `resizing.resized`.

        Args:
            fresh: That of a fresh state for the other ranks.
            whole: From a path and an array to NumPy's.
            path: Where it is in the state.
        """

        def one(x, y):
            x = whole(path, x)
            ranks, shards, share, length = y.shape
            if (x.shape[1], x.shape[3]) != (shards, length):
                raise StateError(
                    f"the owners of the state hold at {path!r} blocks of {x.shape[3]} "
                    f"numbers of {x.shape[1]} shards, those of `like` blocks of {length} "
                    f"of {shards}: only the number of ranks may be another."
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
