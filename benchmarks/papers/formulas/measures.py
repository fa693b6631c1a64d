"""Measures of sets of non-zero units: density, overlap, skew, and balance.

The measures by which sparse gradients are described (Zen, section 2.1 and Definition 8),
for sets that were recorded from a model or drawn. A set is an array of booleans, one for
each unit: an element, or a row of a table. Several ranks' sets are an array [ranks, units];
`nonzero_sets` makes it from gradients. All is computed by NumPy, in integers as far as it
goes, and nothing here runs inside `jit`.

Empty sets have values too, so that a rank without gradients breaks no report. An empty set
overlaps with nothing (0), has no share in any part (0), and its densification, skewness and
imbalance are 1, as if it were spread evenly.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from sparsejax import arguments
from sparsejax.errors import ArgumentError
from sparsejax.units.ownership import Ownership


def nonzero_sets(gradients: jax.Array | np.ndarray) -> np.ndarray:
    """Takes the non-zero units of gradients.

    A unit is non-zero when any of its numbers is, NaN included, whatever they add up to.

    Args:
        gradients: [ranks, units, ...]; a unit is what lies behind the first two axes.

    Returns:
        Booleans [ranks, units].
    """
    x = np.asarray(gradients)
    if x.ndim < 2:
        raise ArgumentError(f"gradients must be [ranks, units, ...], got shape {x.shape}.")
    return np.asarray((x != 0).any(axis=tuple(range(2, x.ndim))))


def density(sets: ArrayLike) -> np.ndarray:
    """The share of units that a set has (Zen, 2.1), for each set of [..., units]."""
    return checked(sets, (1, 2)).mean(axis=-1)


def overlap_ratio(a: ArrayLike, b: ArrayLike) -> float:
    """The overlap ratio of two sets (Definition 3).

    The number of units in both, over the number in the smaller; 0 if one is empty.
    """
    a, b = checked(a, (1,)), checked(b, (1,))
    if a.shape != b.shape:
        raise ArgumentError(
            f"b must have as many units as a, got {b.size} and not {a.size}."
        )
    smaller = min(a.sum(), b.sum())
    return float((a & b).sum() / smaller) if smaller else 0.0


def overlap_ratios(sets: ArrayLike, pairs: int | None = None, seed: int = 0) -> np.ndarray:
    """The overlap ratio (Definition 3) of every pair of ranks, or of some.

    Args:
        sets: Booleans [ranks, units].
        pairs: How many pairs to draw, without repeats; all of them if None or too few.
        seed: For the draw.

    Returns:
        Floats [pairs], in the order (0, 1), (0, 2), ..., (1, 2), ...
    """
    sets = checked(sets)
    first, second = np.triu_indices(len(sets), k=1)
    if pairs is not None and pairs < len(first):
        arguments.check_at_least("pairs", pairs, 1)
        drawn = np.random.default_rng(seed).choice(len(first), pairs, replace=False)
        drawn = np.sort(drawn)
        first, second = first[drawn], second[drawn]
    # Exact: every sum is below 2**53.
    numbers = sets.astype(np.float64 if sets.shape[1] >= 1 << 24 else np.float32)
    both = (numbers @ numbers.T)[first, second].astype(np.float64)
    counts = sets.sum(axis=1)
    smaller = np.minimum(counts[first], counts[second])
    return np.divide(both, smaller, out=np.zeros_like(both), where=smaller > 0)


def densification(sets: ArrayLike, counts: Sequence[int] | None = None) -> np.ndarray:
    """The densification ratio of sums over k ranks (Definition 4).

    The mean size of the union of k consecutive ranks, over the mean size of one of those
    ranks' sets. It lies between 1, all sets the same, and k, no two of them overlap. Groups
    do not share ranks, and ranks that fill no group are left out; 1 if all sets are empty.

    Args:
        sets: Booleans [ranks, units].
        counts: Each k; 2, 4, 8, ... up to the number of ranks if None.

    Returns:
        Floats [len(counts)].
    """
    sets = checked(sets)
    ranks = len(sets)
    if counts is None:
        counts = [1 << k for k in range(1, ranks.bit_length()) if 1 << k <= ranks]
    ratios = []
    for k in counts:
        if not 1 <= k <= ranks:
            raise ArgumentError(f"counts must lie between 1 and {ranks} ranks, got {k}.")
        used = sets[: ranks // k * k]
        union = np.asarray(used.reshape(-1, k, sets.shape[1]).any(axis=1))
        ones = used.sum() / len(used)
        ratios.append(union.sum() / len(union) / ones if ones else 1.0)
    return np.array(ratios, np.float64)


def partition_shares(units: ArrayLike, parts: int) -> np.ndarray:
    """The shares of a set's units that lie in each of `parts` equal ranges.

    Args:
        units: Booleans [units].
        parts: How many ranges of consecutive units.

    Returns:
        Floats [parts] that add up to 1; zeros for an empty set.
    """
    units = checked(units, (1,))
    counts = _range_counts(units, parts)
    return counts / max(int(units.sum()), 1)


def skewness_ratio(units: ArrayLike, parts: int) -> float:
    """The skewness ratio of a set over equal ranges (Definition 5).

    The density of the densest range over that of all units: between 1, all ranges alike,
    and `parts`, all non-zeros in one; 1 for an empty set.

    Args:
        units: Booleans [units].
        parts: How many ranges of consecutive units; their lengths differ by one at most.
    """
    units = checked(units, (1,))
    counts = _range_counts(units, parts)
    lengths = np.diff(_range_edges(units.size, parts))
    return float((counts / lengths).max() / units.mean()) if counts.any() else 1.0


def push_imbalance(
    sets: ArrayLike, owners: ArrayLike | Ownership, parts: int | None = None
) -> float:
    """The imbalance ratio of the push (Definition 8).

    The largest share of a rank's set that goes to one part, times the number of parts: 1 if
    all parts get the same of every rank. Empty sets do not count; 1 if all are empty.

    Args:
        sets: Booleans [ranks, units].
        owners: Integers [units], the part of every unit; or an `Ownership`.
        parts: How many parts there are; as many as ranks if None.
    """
    sets = checked(sets)
    parts = len(sets) if parts is None else parts
    counts = part_counts(sets, _owners(owners, sets.shape[1], parts), parts)
    sizes = counts.sum(axis=1)
    some = sizes > 0
    return float((parts * counts[some].max(axis=1) / sizes[some]).max(initial=1.0))


def pull_imbalance(
    sets: ArrayLike, owners: ArrayLike | Ownership, parts: int | None = None
) -> float:
    """The imbalance ratio of the pull (Definition 8): that of the union of all sets.

    Args:
        sets: Booleans [ranks, units].
        owners: Integers [units], the part of every unit; or an `Ownership`.
        parts: How many parts there are; as many as ranks if None.
    """
    sets = checked(sets)
    parts = len(sets) if parts is None else parts
    return push_imbalance(sets.any(axis=0, keepdims=True), owners, parts)


def part_counts(sets: ArrayLike, owners: np.ndarray, parts: int) -> np.ndarray:
    """The number of units of each set in each part, as int64 [ranks, parts]."""
    rows = [np.bincount(owners[row], minlength=parts) for row in checked(sets)]
    return np.stack(rows).astype(np.int64)


def checked(sets: ArrayLike, axes: tuple[int, ...] = (2,)) -> np.ndarray:
    """Raises unless these are sets, of at least one unit.

    Args:
        sets: Booleans [ranks, units], or [units].
        axes: How many axes they may have.
    """
    flags = np.asarray(sets)
    shape = "[ranks, units]" if 2 in axes else "[units]"
    if flags.dtype != bool:
        raise ArgumentError(
            f"sets must be booleans, got {flags.dtype}. Of gradients, nonzero_sets makes "
            "them."
        )
    if flags.ndim not in axes or 0 in flags.shape:
        raise ArgumentError(f"sets must be {shape}, none of them 0, got {flags.shape}.")
    return flags


@functools.lru_cache(maxsize=64)
def assignment(ownership: Ownership, size: int, parts: int) -> np.ndarray:
    """The part to which an `Ownership` gives each of `size` units, as int32 [size]."""
    layout = ownership.over(size, parts)
    owners = np.array(layout.assign(jnp.arange(size, dtype=jnp.int32))[0])
    owners.setflags(write=False)  # It is cached.
    return owners


def equal_ranges(size: int, parts: int) -> np.ndarray:
    """Parts that are ranges of consecutive units, as equal as can be, as int32 [size]."""
    return np.repeat(
        np.arange(parts, dtype=np.int32), np.diff(_range_edges(size, parts, empty=True))
    )


def _range_edges(size: int, parts: int, empty: bool = False) -> np.ndarray:
    """The ends of ranges, from 0 on, int64 [parts + 1]."""
    if parts < 1 or (parts > size and not empty):
        raise ArgumentError(f"parts must lie between 1 and {size} units, got {parts}.")
    return np.arange(parts + 1, dtype=np.int64) * size // parts


def _range_counts(units: np.ndarray, parts: int) -> np.ndarray:
    before = np.concatenate([[0], np.cumsum(units)])
    return np.diff(before[_range_edges(units.size, parts)])


def _owners(owners: ArrayLike | Ownership, size: int, parts: int) -> np.ndarray:
    """The part of each unit, checked."""
    if isinstance(owners, Ownership):
        return assignment(owners, size, parts)
    owners = np.asarray(owners)
    if owners.shape != (size,) or not np.issubdtype(owners.dtype, np.integer):
        raise ArgumentError(
            f"owners must be {size} integers, got {owners.dtype} {owners.shape}."
        )
    if owners.min() < 0 or owners.max() >= parts:
        wrong = owners.min() if owners.min() < 0 else owners.max()
        raise ArgumentError(f"owners must lie between 0 and {parts - 1}, got {wrong}.")
    return owners
