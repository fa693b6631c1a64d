"""A bucket: leaves that are exchanged as one array of units."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.rank_select import unsigned
from sparsejax.axes import as_varying
from sparsejax.branches import hidden
from sparsejax.errors import NeedsRanks
from sparsejax.schemes.base import LossyScheme, Scheme
from sparsejax.state import tree
from sparsejax.units import bits
from sparsejax.units.dense import Dense
from sparsejax.units.entries import of_tensors
from sparsejax.units.indices import comparable
from sparsejax.units.units import Units


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves that are exchanged as one array of units.

    Attributes:
        name: A name for metrics: the path of the only leaf, or of the first and how many
            more there are.
        scheme: The scheme by which they are summed.
        leaves: Their places in the flattened tree.
        paths: Their paths.
        units: The number of units of each of them.
        shape: The shape of one unit: () for an element, the leaf's shape for a leaf.
    """

    name: str
    scheme: Scheme
    leaves: tuple[int, ...]
    paths: tuple[str, ...]
    units: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def is_lossy(self) -> bool:
        """Whether its scheme is lossy: it may leave a part of the sum out."""
        return isinstance(self.scheme, LossyScheme)

    @property
    def is_by_rows(self) -> bool:
        """Whether its units are rows."""
        return bool(self.shape) and self.scheme.unit is None

    def like(self, dtype: Any) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype of the concatenated array."""
        return jax.ShapeDtypeStruct((sum(self.units), *self.shape), dtype)

    def first_state(self) -> Any:
        """Returns the shapes of its scheme's first state; may raise `NeedsRanks`."""
        return jax.eval_shape(lambda: self.scheme.init(self.like(jnp.float32), None))

    @property
    def needs_ranks(self) -> bool:
        """Whether the scheme's state depends on the ranks, and so on the units."""
        try:
            self.first_state()
        except NeedsRanks:
            return True
        return False

    def without(self, places: Collection[int]) -> "Bucket":
        """Returns the bucket of the leaves at other places than these; it may be empty."""
        members = zip(self.leaves, self.paths, self.units, strict=True)
        kept = [member for member in members if member[0] not in places]
        return self._of(kept)

    def _of(self, members):
        leaves, paths, units = zip(*members, strict=True) if members else ((), (), ())
        return dataclasses.replace(self, leaves=leaves, paths=paths, units=units)

    def split(self, leaves: Sequence[Any]) -> list["Bucket"]:
        """Splits it into the leaves that are given as entries and the dense ones.

        As one bucket they would be packed as one dense array.
        """
        members = list(zip(self.leaves, self.paths, self.units, strict=True))
        kinds = [
            [m for m in members if tree.is_sparse(leaves[m[0]]) is kind]
            for kind in (True, False)
        ]
        return [self._of(kind) for kind in kinds if kind]

    def pack(
        self,
        leaves: Sequence[Any],
        flags: jax.Array | None = None,
        as_elements: bool = True,
    ) -> Units:
        """Packs the bucket's leaves as units: as entries, if all of them are entries.

        Args:
            leaves: The leaves of the tree.
            flags: bool[units]: which units are non-zero, if the caller knows.
            as_elements: Whether entries that are elements are packed as elements even if
                the unit of the bucket is a row.
        """
        members = [leaves[i] for i in self.leaves]
        shapes = [self.shape, *([()] if as_elements else [])]
        if all(tree.is_sparse(leaf) for leaf in members) and any(
            all(leaf.values.shape[1:] == shape for leaf in members) for shape in shapes
        ):
            return of_tensors(members)
        arrays = [
            tree.to_dense(leaves[i]).reshape(count, *self.shape)
            for i, count in zip(self.leaves, self.units, strict=True)
        ]
        return Dense(arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays), flags)

    def unpack(self, x: jax.Array, like: Sequence[Any]) -> dict[int, jax.Array]:
        """Splits x, [units, *shape], into leaves, by their places, shaped as `like`."""
        x = x.reshape(sum(self.units), *self.shape)
        parts = zip(self.leaves, split(x, self.units), strict=True)
        return {i: part.reshape(like[i].shape) for i, part in parts}

    def flags(self, leaves: Sequence[Any], ids: Mapping[str, Any]) -> jax.Array | None:
        """Returns bool[units]: which are non-zero; None without ids for the bucket.

        Args:
            leaves: The leaves of the tree.
            ids: The rows that this rank's batch has read, by path.
        """
        if not self.is_by_rows or not any(path in ids for path in self.paths):
            return None
        flags = []
        for path, i, count in zip(self.paths, self.leaves, self.units, strict=True):
            # An accumulated gradient has rows of earlier batches, too: it is searched.
            if path in ids and not tree.is_sparse(leaves[i]):
                rows = comparable(jnp.asarray(ids[path])).reshape(-1)
                rows = jnp.where(rows < 0, rows + count, rows)
                mark = jnp.zeros(count, bool).at[rows].set(True, mode="drop")
                flags.append(as_varying(mark, tree.axes_of(leaves[i])))
            else:
                dense = tree.to_dense(leaves[i]).reshape(count, *self.shape)
                flags.append(bits.nonzero_units(dense))
        return jnp.concatenate(flags)


def split(x: jax.Array, lengths: Sequence[int]) -> list[jax.Array]:
    """Splits x [n, ...], of a floating dtype, into parts of these lengths.

    Where each starts is `hidden`: XLA fuses a part into what uses it, such as the
    optimizer's step of a leaf.
    """
    if len(lengths) == 1:  # and may be longer than int32 can number
        return [x[: lengths[0]]]
    ends = np.cumsum(lengths, dtype=np.int32)
    starts = ends - np.asarray(lengths, np.int32)
    data = lambda: unsigned(x.ravel()[0]) if x.size else jnp.int32(0)
    pairs = zip(hidden(starts, lengths, data), lengths, strict=True)
    return [
        lax.dynamic_slice_in_dim(x, at, length, allow_negative_indices=False)
        if isinstance(at, jax.Array)
        else x[at : at + length]
        for at, length in pairs
    ]
