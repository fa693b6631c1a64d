"""The sharding of the sum of one gradient, by dimensions.

A dimension of a parameter is sharded over some mesh axes, the first of which makes the
largest pieces. For its gradient, these axes are of three kinds, in this order:

    kept    the gradient is sharded over them already, and not summed over them
    fast    the gradient is unreduced over them, and they are not the ranks': it is
            reduce-scattered over them first
    ranks   each rank needs only one piece of the sum
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sparsejax.axes import axis_names
from sparsejax.wire.collectives import Wire


@dataclasses.dataclass(frozen=True)
class ShardSum:
    """The sharding of the sum of a gradient; called, it sums over the fast axes.

    Attributes:
        spec: The PartitionSpec of the parameter.
        ranks: The axes of the ranks.
        fast: The further axes over which the gradient is unreduced.
    """

    spec: PartitionSpec
    ranks: tuple[str, ...]
    fast: frozenset[str] = frozenset()

    @property
    def parts(self) -> list[tuple[str, ...]]:
        """The mesh axes that shard each dimension."""
        return [axis_names(part or ()) for part in self.spec.partitions]

    @property
    def given(self) -> tuple:
        """The parts of the gradient's spec before any sum."""
        summed = {*self.ranks, *self.fast}
        return self._without(summed)

    @property
    def own(self) -> tuple:
        """The parts of the spec of what a rank exchanges: without the ranks' axes."""
        return self._without({*self.ranks})

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which the array that a rank exchanges is sharded."""
        return tuple(name for part in self.parts for name in part if name not in self.ranks)

    @property
    def scatter(self) -> int | None:
        """The dimension along which each rank needs one piece; None if it needs all."""
        found = [i for i, part in enumerate(self.parts) if {*part} & {*self.ranks}]
        return found[0] if found else None

    @property
    def wrong(self) -> str:
        """Why the sum cannot have the spec, for a message; empty if it can."""
        rank = lambda name: 2 if name in self.ranks else 1 if name in self.fast else 0
        for part in self.parts:
            order = tuple(sorted(part, key=rank))
            if order != part:
                return (
                    f"it is sharded over {part}, and its gradient is summed over the last "
                    f"of {order}, which scatters it to pieces of pieces alone. Shard it "
                    f"over {order}."
                )
        over = [name for part in self.parts for name in part if name in self.ranks]
        in_one = self.scatter is None or {*self.parts[self.scatter]} >= {*over}
        if over and (tuple(over) != self.ranks or not in_one):
            return (
                f"it is sharded {self.spec}, and its gradient is summed over "
                f"{self.ranks}, of which each rank needs one piece. Shard one dimension "
                f"over all of {self.ranks}, in this order, or none."
            )
        return ""

    def _without(self, names):
        left = (tuple(name for name in part if name not in names) for part in self.parts)
        return tuple(part or None for part in left)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, float]:
        """Sums over the fast axes, inside `shard_map`.

        Returns:
            This device's shard of the sum, and the bytes that it sent.
        """
        left, bytes_ = set(self.fast), 0.0
        for at, part in enumerate(self.parts):
            over = tuple(name for name in part if name in self.fast)
            if not over:
                continue
            left -= {*over}
            wire = Wire(over)
            size = x.shape[at] // wire.ranks
            shape = *x.shape[:at], wire.ranks, size, *x.shape[at + 1 :]
            pieces = jnp.moveaxis(x.reshape(shape), at, 0)
            total, sent = wire.reduce_scatter(pieces)
            x, bytes_ = total.astype(x.dtype), bytes_ + sent
        if left:
            x, sent = Wire(tuple(sorted(left))).all_reduce(x)
            bytes_ += sent
        return x, bytes_
