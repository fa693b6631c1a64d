"""How sparse a gradient is taken to be: given, measured, or the least that is known.

Where nothing is known a gradient is dense: a kernel's is, and calling it sparse would make
any scheme look good. One guess is made, and said wherever it is used: a table of embeddings
is looked up by few rows a step.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from sparsejax import arguments, schemes
from sparsejax.advise.profile import LeafProfile, load_of
from sparsejax.errors import ArgumentError, RuleError
from sparsejax.schemes.forecast import independent
from sparsejax.transforms.buckets import ByRules


TABLE = 0.01  # the guess for a table: the share of its rows that a rank's batch looks up
_TABLE = re.compile("embed|table", re.IGNORECASE)
_TALL = 4  # a table has at least this many rows a column
# Without such a name a leaf may be a table if it has that many rows, and at least that
# many a column: kernels of layers do not.
_ROWS, _VERY_TALL = 10_000, 16

Measured = Mapping[str, LeafProfile]
Density = float | Mapping[str, float] | Measured | Sequence[Measured]


class NonzeroShares(NamedTuple):
    """The shares of a leaf's units that are not zero.

    Attributes:
        sums: Of one rank, and of sums over 2, 4, ... and all ranks.
        source: "given", "measured", "assumed" for the guess of a table, "uniform" for ids
            drawn uniformly, "dense", "unknown" where a dense leaf has the shape of a
            table, "selected" by a sparsifier, or "moved" in a round of local steps.
        skewness: Of one rank, as in `Load`.
        sum_skewness: Of the sum.
    """

    sums: tuple[float, ...]
    source: str
    skewness: float = 1.0
    sum_skewness: float = 1.0

    def after(self, steps: int) -> "NonzeroShares":
        """The shares of as many steps' gradients added up, were each drawn by itself.

        Steps that resemble one another overlap more than by chance, and then their sum has
        fewer.
        """
        if steps == 1:
            return self
        return self._replace(sums=tuple(_any_of(share, steps) for share in self.sums))

    def by_rows(self, width: int) -> "NonzeroShares":
        """The shares of rows with anything in them, where these are shares of elements."""
        return self.after(width)

    def at_most(self, share: float, ranks: int) -> "NonzeroShares":
        """These where they are no larger than what a sparsifier selects; else that."""
        if self.sums[0] <= share:
            return self
        return NonzeroShares(independent(ranks, 1, share), "selected")


def _any_of(share, times):
    return 1.0 if share >= 1 else -math.expm1(times * math.log1p(-share))


@dataclasses.dataclass(frozen=True)
class Densities:
    """The densities that gradients are taken to have.

    Attributes:
        ranks: How many ranks there are.
        by_pattern: Densities by regular expressions; the first that matches holds.
        profiles: Measured densities, a step each.
    """

    ranks: int
    by_pattern: tuple[tuple[str, float], ...]
    profiles: tuple[Measured, ...]

    def check(self, paths: Sequence[str]) -> None:
        """Raises where a pattern matches no leaf."""
        for pattern, _ in self.by_pattern:
            if pattern and not any(re.search(pattern, path) for path in paths):
                raise RuleError(
                    f"the density of {pattern!r} matches no leaf. The leaves are: "
                    + ", ".join(repr(path) for path in paths)
                    + "."
                )

    def shares(
        self, path: str, leaf: Any, units: int, shape: tuple[int, ...]
    ) -> NonzeroShares:
        """The shares of one leaf, of `units` units of this shape."""
        if any(path in profile for profile in self.profiles):
            units = self._measured_units(path, leaf, units, shape)
            load = load_of(self.profiles, path, units, shape, leaf.dtype, self.ranks)
            sums = tuple(count / max(units, 1) for count in load.counts)
            return NonzeroShares(sums, "measured", load.skewness, load.sum_skewness)
        given = [share for p, share in self.by_pattern if re.search(p, path)]
        if given:
            return self._independent(given[0], "given")
        if is_table(path, leaf):
            return self._independent(TABLE, "assumed")
        return self._independent(1.0, "unknown" if may_be_table(leaf) else "dense")

    def shares_of_rows(self, path: str, leaf: Any, ids: int) -> NonzeroShares:
        """The shares of a table's rows that are among `ids` ids of each rank.

        Where nothing else is known, as if each id were drawn uniformly from all rows.
        """
        height = leaf.shape[0]
        shares = self.shares(path, leaf, height, tuple(leaf.shape[1:]))
        if shares.source in ("assumed", "dense", "unknown"):
            share = -math.expm1(ids * math.log1p(-1 / height)) if height > 1 else 1.0
            return self._independent(share, "uniform")
        if shares.sums[0] * height > ids * (1 + 1e-9):
            raise ArgumentError(
                f"the density of leaf {path!r} is {shares.sums[0]:.3g}, which is "
                f"{shares.sums[0] * height:,.0f} of {height:,} rows, and a rank lists "
                f"{ids:,} ids in a step: the density of rows is at most ids / rows."
            )
        return shares

    def _measured_units(self, path, leaf, units, shape):
        """How many units the profiles saw: rows of a table that here goes by elements."""
        _, unit = ByRules(schemes.Zen()).decide([path], [leaf])[0]
        if shape or unit == "element":
            return units
        most = max(np.max(p[path].counts) for p in self.profiles if path in p)
        return leaf.shape[0] if most <= leaf.shape[0] else units

    def _independent(self, share, source):
        return NonzeroShares(tuple(independent(self.ranks, 1, share)), source)


@dataclasses.dataclass(frozen=True)
class IdCounts:
    """How many ids of rows a rank lists in a step, by regular expressions.

    Attributes:
        by_pattern: The first that matches holds.
    """

    by_pattern: tuple[tuple[str, int], ...] = ()

    def check(self, leaves: Mapping[str, Any]) -> None:
        """Raises where a pattern matches no leaf, by paths, that can be read by rows."""
        tables = [path for path, leaf in leaves.items() if _is_table(leaf)]
        for pattern, _ in self.by_pattern:
            if pattern and not any(re.search(pattern, path) for path in tables):
                raise RuleError(
                    f"the ids of {pattern!r} match no leaf of two axes or more, which a "
                    "loss can read by rows. Those are: "
                    + (", ".join(map(repr, tables)) or "none")
                    + "."
                )

    def of(self, path: str, leaf: Any) -> int:
        """How many ids a rank lists of a leaf; 0 where its gradient is an array."""
        found = (n for pattern, n in self.by_pattern if re.search(pattern, path))
        return next(found, 0) if _is_table(leaf) else 0


def _is_table(leaf):
    return len(leaf.shape) >= 2 and leaf.size > 0


NONE = IdCounts()


def listed(ids: Mapping[str, int] | None) -> IdCounts:
    """Reads the `ids` argument of `explain`."""
    if ids is None:
        return NONE
    if not isinstance(ids, Mapping):
        raise ArgumentError(
            "ids must be {pattern of paths: how many ids a rank lists in a step}, such as "
            f"{{'embedding': 8192}}, got {ids!r}."
        )
    for pattern, number in ids.items():
        arguments.check_regular(pattern)
        arguments.check_whole(f"ids of {pattern!r}", number, 1)
    return IdCounts(tuple(ids.items()))


def is_table(path: str, leaf: Any) -> bool:
    """Whether a leaf is taken for a table whose rows are looked up, by name and shape."""
    if len(leaf.shape) != 2 or not _TABLE.search(path):
        return False
    return leaf.shape[0] >= _TALL * leaf.shape[1]


def may_be_table(leaf: Any) -> bool:
    """Whether a leaf whose name does not say so has the shape of a table."""
    if len(leaf.shape) != 2:
        return False
    return leaf.shape[0] >= max(_ROWS, _VERY_TALL * leaf.shape[1])


def densities(density: Density | None, ranks: int) -> Densities:
    """Reads the `density` argument of `explain`."""
    by_pattern: dict[str, Any] = {}
    profiles: tuple[Measured, ...] = ()
    if density is None:
        pass
    elif arguments.is_number(density) or getattr(density, "ndim", None) == 0:
        by_pattern = {"": float(density)}  # type: ignore[arg-type]
        arguments.check_between("density", by_pattern[""], 0, 1)
    elif _is_profile(density):
        profiles = (_read(density),)
    elif isinstance(density, Mapping):
        for pattern, share in density.items():
            _check_pattern(pattern, share)
        # The empty pattern matches all, so it comes last.
        by_pattern = {k: v for k, v in density.items() if k}
        by_pattern |= {"": density[""]} if "" in density else {}
    elif isinstance(density, Sequence) and density and all(map(_is_profile, density)):
        profiles = tuple(_read(step) for step in density)
    else:
        raise ArgumentError(
            "density must be a number, numbers by pattern, a result of sparsejax.profile "
            f"or a list of them, got {density!r}."
        )
    pairs = tuple((pattern, float(share)) for pattern, share in by_pattern.items())
    return Densities(ranks, pairs, profiles)


def _check_pattern(pattern, share):
    arguments.check_between(
        f"density of {pattern!r}" if pattern else "density", share, 0, 1
    )
    arguments.check_regular(pattern)


def _is_profile(density):
    if not isinstance(density, Mapping):
        return False
    return bool(density) and all(isinstance(x, LeafProfile) for x in density.values())


def _read(profile):
    return jax.tree.map(np.asarray, dict(profile))
