"""How sparse leaves are taken to be: a number, numbers by pattern, or what was measured."""

import dataclasses
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from sparsejax.advise.planner import LeafProfile, load_of
from sparsejax.errors import ArgumentError, RuleError
from sparsejax.schemes.forecast import Load, independent


DENSITY = 0.01  # where none is given

Density = float | Mapping[str, float] | Sequence[Mapping[str, LeafProfile]]


@dataclasses.dataclass(frozen=True)
class Densities:
    """What is known of how sparse leaves are.

    Attributes:
        ranks: How many ranks there are.
        by_pattern: Densities by regular expressions; the last one matches all.
        profiles: What was measured, a step each.
        told: The same in words.
    """

    ranks: int
    by_pattern: tuple[tuple[str, float], ...]
    profiles: tuple[Mapping[str, LeafProfile], ...]
    told: str

    def check(self, paths: Sequence[str]) -> None:
        """Raises where a pattern matches no leaf."""
        for pattern, _ in self.by_pattern:
            if pattern and not any(re.search(pattern, path) for path in paths):
                raise RuleError(
                    f"the density of {pattern!r} matches no leaf. The leaves are: "
                    + ", ".join(repr(path) for path in paths)
                    + "."
                )

    def load(self, path: str, units: int, shape: tuple[int, ...], dtype: Any) -> Load:
        """What there is to add up of one leaf."""
        if any(path in seen for seen in self.profiles):
            return load_of(self.profiles, path, units, shape, dtype, self.ranks)
        share = next(share for p, share in self.by_pattern if re.search(p, path))
        counts = independent(self.ranks, units, share)
        width = math.prod(shape)
        return Load(self.ranks, units, width, str(jnp.dtype(dtype)), counts)


def densities(density: Density | None, ranks: int) -> Densities:
    """Reads what `explain` was given."""
    profiles: tuple[Mapping[str, LeafProfile], ...] = ()
    by_pattern: dict[str, Any] = {"": DENSITY}
    if density is None:
        told = f"density taken to be {DENSITY:.0%}, sets independent and even"
    elif isinstance(density, Mapping):
        rest = density.get("", DENSITY)
        by_pattern = {k: v for k, v in density.items() if k} | {"": rest}
        told = f"densities given, else {rest:.3g}; sets independent and even"
    elif isinstance(density, numbers.Real) or getattr(density, "ndim", None) == 0:
        by_pattern = {"": float(density)}  # type: ignore[arg-type]
        told = f"density given as {by_pattern['']:.3g}, sets independent and even"
    elif isinstance(density, Sequence) and density and _are_profiles(density):
        profiles = tuple(density)
        told = f"densities measured in {len(density)} steps"
    else:
        raise ArgumentError(
            "density must be a number, numbers by pattern, or a list of results of "
            f"sparsejax.profile, got {density!r}."
        )
    for pattern, share in by_pattern.items():
        where = f" for {pattern!r}" if pattern else ""
        if not isinstance(share, numbers.Real) or not 0 <= float(share) <= 1:
            raise ArgumentError(f"density must lie in [0, 1], got {share!r}{where}.")
        try:
            re.compile(pattern)
        except re.error as error:
            raise RuleError(f"{pattern!r} is not a regular expression: {error}.") from None
    pairs = tuple((pattern, float(share)) for pattern, share in by_pattern.items())
    return Densities(ranks, pairs, profiles, told)


def _are_profiles(density):
    return all(
        isinstance(one, Mapping) and all(isinstance(x, LeafProfile) for x in one.values())
        for one in density
    )
