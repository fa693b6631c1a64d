"""The densities of gradients in a forecast: given, measured, or assumed.

Without information a gradient is assumed to be dense: that of a kernel is, and with a low
density any scheme would look fast. There is one exception, which a forecast states wherever
it is used: a step is assumed to look up few rows of a table of embeddings.
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
from sparsejax.units.indices import MOST_NUMBERED


TABLE = 0.01  # the assumed share of a table's rows that a rank's batch looks up
_TABLE = re.compile("embed|table", re.IGNORECASE)
_TALL = 4  # lower bound of the rows of a table divided by its columns
# Without such a name a leaf may be a table if it has at least _ROWS rows, and _VERY_TALL
# rows for each column, which kernels of layers seldom have.
_ROWS, _VERY_TALL = 5_000, 16

Measured = Mapping[str, LeafProfile]
Density = float | Mapping[str, float] | Measured | Sequence[Measured]


class NonzeroShares(NamedTuple):
    """The shares of a leaf's units that are non-zero.

    Attributes:
        sums: The share on one rank, and in the sums over 2, 4, ... and all ranks.
        source: "given", "measured", "assumed" for a table, "uniform" for ids that are drawn
            uniformly, "dense", "unknown" for a dense leaf of the shape of a table,
            "selected" by a sparsifier, or "moved" in a round of local steps.
        skewness: The skewness on one rank, as in `Load`.
        sum_skewness: The skewness of the sum.
    """

    sums: tuple[float, ...]
    source: str
    skewness: float = 1.0
    sum_skewness: float = 1.0

    def after(self, steps: int) -> "NonzeroShares":
        """Returns the shares of the sum of `steps` gradients, if they are independent.

        Similar gradients overlap more than by chance, and their sum has smaller shares.
        """
        if steps == 1:
            return self
        return self._replace(sums=tuple(_any_of(share, steps) for share in self.sums))

    def by_rows(self, width: int) -> "NonzeroShares":
        """Returns the shares of non-zero rows, from shares of independent elements."""
        return self.after(width)

    def at_most(self, share: float, ranks: int) -> "NonzeroShares":
        """Returns the shares after a sparsifier that selects at most `share`."""
        if self.sums[0] <= share:
            return self
        return NonzeroShares(independent(ranks, 1, share), "selected")


def _any_of(share, times):
    return 1.0 if share >= 1 else -math.expm1(times * math.log1p(-share))


@dataclasses.dataclass(frozen=True)
class Densities:
    """The densities of gradients that a forecast assumes.

    Attributes:
        ranks: The number of ranks.
        by_pattern: Densities by regular expressions, of which the first that matches is
            used.
        profiles: Measured densities, one mapping for each step.
    """

    ranks: int
    by_pattern: tuple[tuple[str, float], ...]
    profiles: tuple[Measured, ...]

    def check(self, paths: Sequence[str]) -> None:
        """Raises if a pattern matches no leaf."""
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
        """Returns the shares of one leaf that has `units` units of this shape."""
        if any(path in profile for profile in self.profiles):
            units = self._measured_units(path, leaf, units, shape)
            load = load_of(self.profiles, path, leaf, units, shape, self.ranks)
            sums = tuple(count / max(units, 1) for count in load.counts)
            return NonzeroShares(sums, "measured", load.skewness, load.sum_skewness)
        given = [share for p, share in self.by_pattern if re.search(p, path)]
        if given:
            return self._independent(given[0], "given")
        if is_table(path, leaf):
            return self._independent(TABLE, "assumed")
        return self._independent(1.0, "unknown" if may_be_table(leaf) else "dense")

    def shares_of_rows(self, path: str, leaf: Any, ids: int) -> NonzeroShares:
        """Returns the shares of a table's rows of which each rank lists `ids` ids.

        Without a given density, each id is assumed to be drawn uniformly from all rows.
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
        """Returns the number of units in the profiles, which may count rows.

        A profile counts the rows of a table also if its exchange has elements as units.
        """
        _, unit = ByRules(schemes.Zen()).decide([path], [leaf])[0]
        if shape or unit == "element":
            return units
        most = max(np.max(p[path].counts) for p in self.profiles if path in p)
        return leaf.shape[0] if most <= leaf.shape[0] else units

    def _independent(self, share, source):
        return NonzeroShares(tuple(independent(self.ranks, 1, share)), source)


@dataclasses.dataclass(frozen=True)
class IdCounts:
    """The numbers of ids of rows that a rank lists in a step.

    Attributes:
        by_pattern: The numbers by regular expressions, of which the first that matches is
            used.
    """

    by_pattern: tuple[tuple[str, int], ...] = ()

    def check(self, leaves: Mapping[str, Any]) -> None:
        """Raises if a pattern matches no path of a leaf that can be read by rows."""
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
        """Returns the number of ids that a rank lists of a leaf; 0 for a dense gradient."""
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
        if number > MOST_NUMBERED:
            raise ArgumentError(
                f"ids of {pattern!r}: a rank lists at most {MOST_NUMBERED:,}, got "
                f"{number:,}."
            )
    return IdCounts(tuple(ids.items()))


def is_table(path: str, leaf: Any) -> bool:
    """Whether the path and shape of a leaf are those of a table of embeddings."""
    if len(leaf.shape) != 2 or not _TABLE.search(path):
        return False
    return leaf.shape[0] >= _TALL * leaf.shape[1]


def may_be_table(leaf: Any) -> bool:
    """Whether a leaf has the shape of a table, whatever its path."""
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
        # The empty pattern matches every path, so it is last.
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
