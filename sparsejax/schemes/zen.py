"""Zen: the better of the two optima of Theorem 1.

On the wire: what `HierarchicalCentralization` or `BalancedParallelism` puts there; either
becomes an all-reduce where it does not pay. The paper's equations (1) and (2) compare the
two by how full sums get. Between two ranks the answer needs no measurement: with g the
growth over both, one swap of a whole set against (g + 1) / 2 of it, and g is at least 1.

By default the number of ranks decides: two swap their sets, more have owners. Where sets do
not overlap at all hierarchy saves most, one part in n + 1 but for padding, and each of its
hops goes over the whole array, where owners go over it once. On 4, 8 and 16 hosts at 100
and 250 Mbit/s hierarchy took longer on everything measured, by the clock and by the bytes
and the work of one host (benchmarks/README.md), and one program compiles faster than two.

`optimum="bytes"` is for networks so slow that only bytes count. Both are compiled, and the
bytes that each would send are reckoned in the message sizes and index codes that each would
use: from how sums grew in the step before (`growth`), and from how many entries there are
now, on which one pmax agrees. All ranks reckon from the same, so all take the same branch,
and nothing is compiled again. It is balanced in a first step, of which nothing is known,
and where partial sums could send more than an all-reduce, should this step's sets not
overlap at all: so no more is ever sent than by an all-reduce and the agreed numbers.
Balanced Parallelism sees only one rank's share and the total's; what it takes the sums
between to be is corrected as soon as the other is tried.

"balanced" and "hierarchical" name one of the two: it is what a plan does.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import bits, wire
from sparsejax._compat import as_varying, varying_axes
from sparsejax.errors import ArgumentError
from sparsejax.forecast import above_mean, merged
from sparsejax.ownership import Ownership, StripedHash
from sparsejax.schemes import base, doubling, growth, owners
from sparsejax.schemes.balanced_parallelism import BalancedParallelism
from sparsejax.schemes.hierarchical_centralization import HierarchicalCentralization


class ZenState(NamedTuple):
    """State of `Zen`.

    Attributes:
        curve: How full sums got in the last step; see `growth`.
        tables: What the ownership needs.
    """

    curve: jax.Array
    tables: Any


@dataclasses.dataclass(frozen=True)
class Zen(base.Scheme):
    """Chooses between Balanced Parallelism and Hierarchical Centralization.

    Attributes:
        optimum: "balanced"; "hierarchical"; "auto": the latter for two ranks, else the
            former; or "bytes": whichever sends fewer bytes, step by step.
        ownership: Who owns which unit, for Balanced Parallelism.
        wire_dtype: The dtype of the values while they travel; that of x if None.
    """

    optimum: str = "auto"
    ownership: Ownership = StripedHash()
    wire_dtype: jax.typing.DTypeLike | None = None

    def __post_init__(self):
        base.check_choice(
            "optimum", self.optimum, ("auto", "balanced", "hierarchical", "bytes")
        )
        base.check_wire_dtype(self.wire_dtype)
        if self.optimum in ("auto", "bytes") and not self.ownership.balanced:
            raise ArgumentError(
                f"{self.ownership!r} does not balance parts, and optimum={self.optimum!r} "
                "reckons with parts that are: use a hash, or optimum='balanced'."
            )

    @property
    def needs_ranks(self):
        return self._balanced.needs_ranks

    def init(self, like, ranks):
        return ZenState(growth.unknown(), self._balanced.init(like, ranks))

    def __call__(self, x, state, axis_name, *, present=None):
        n = wire.ranks(axis_name)
        if n == 1 or x.size == 0:
            return base.nothing_to_send(x, state, axis_name)
        state = state if isinstance(state, ZenState) else self.init(x, n)

        if self._choice(n) == "hierarchical":
            done = self._hierarchical(n)(x, state.curve, axis_name, present=present)
            return done._replace(state=ZenState(done.state, state.tables))
        layout = self.ownership.over(x.shape[0], n, state.tables)
        balanced = owners.owners(x, axis_name, layout, self._balanced.options)
        if not balanced.may_pay(x):
            return base.sum_densely(x, state, axis_name, self.wire_dtype)
        # Both schemes take from here which units are there.
        flags = bits.nonzero_units(x) if present is None else present
        known = balanced.agree(flags)

        def by_owners(x):
            total, traffic = balanced(x, known)
            ends = traffic.density_before, traffic.density_after
            ends = wire.same_elsewhere(jnp.stack(ends), axis_name)
            curve = growth.stretched(state.curve, n, *ends)
            tables = self.ownership.after(state.tables, total)
            return total, ZenState(curve, tables), traffic

        def by_hierarchy(x):
            done = self._hierarchical(n)(x, state.curve, axis_name, present=flags)
            scalars = done.traffic.scalars + known.sent
            traffic = done.traffic._replace(scalars=scalars)
            return done.total, ZenState(done.state, state.tables), traffic

        if self._choice(n) == "balanced":
            return base.Reduced(*_in_order(by_owners(x)))
        axes = varying_axes(x) - varying_axes(lax.axis_index(axis_name))
        typed = lambda side: lambda x: _typed(side(x), axes)
        done = lax.cond(
            self._prefers_hierarchy(x, balanced, known.most, state, axis_name),
            typed(by_hierarchy),
            typed(by_owners),
            x,
        )
        return base.Reduced(*_in_order(done))

    def _prefers_hierarchy(self, x, balanced, most, state, axis_name):
        """Whether, by the last step, Hierarchical Centralization sends fewer bytes."""
        n, units = wire.ranks(axis_name), x.shape[0]
        hops = doubling.hops(n)
        # What was seen, grown or shrunk as one rank's entries have since.
        curve = state.curve[: hops + 1]
        now = most.astype(jnp.float32)
        scale = now / jnp.maximum(curve[0], 1e-12)
        counts = jnp.round(jnp.minimum(curve * scale, units)).astype(jnp.int32)
        each = counts[jnp.array([0, hops])].astype(jnp.float32) / n
        # The fullest of n parts of each of n ranks, and of n parts of the sum.
        over = jnp.array([above_mean(n * n), above_mean(n)], jnp.float32)
        fullest = jnp.ceil(each + over * jnp.sqrt(each)).astype(jnp.int32)
        fullest = jnp.minimum(fullest, balanced.layout.width)
        bytes_balanced = balanced.expected_bytes(x, fullest[0], fullest[1])
        hierarchical = self._hierarchical(n)
        bytes_hierarchical = hierarchical.expected_bytes(x, axis_name, counts)
        # However little sets overlap: else what is new could send more than an all-reduce.
        sums = jnp.array(merged(n), jnp.float32)
        disjoint = jnp.minimum(now * sums, units).astype(jnp.int32)
        most_bytes = hierarchical.expected_bytes(x, axis_name, disjoint)
        dense = wire.all_reduce_cost(
            x.size, x.dtype, wire.travelling(x.dtype, self.wire_dtype), n
        )
        known = (curve[0] > 0) & (most_bytes < dense)
        return known & (bytes_hierarchical < bytes_balanced)

    def forecast(self, load):
        balanced, hierarchical = (
            scheme.forecast(load)
            for scheme in (self._balanced, self._hierarchical(load.ranks))
        )
        choice = self._choice(load.ranks)
        if choice == "bytes":
            return min(balanced, hierarchical, key=lambda told: told.bytes)
        return balanced if choice == "balanced" else hierarchical

    def _choice(self, ranks):
        """One of the two, or "bytes" where it is made when the program runs."""
        if ranks == 2 and self.optimum != "balanced":
            return "hierarchical"
        return "balanced" if self.optimum == "auto" else self.optimum

    @property
    def _balanced(self):
        return BalancedParallelism(ownership=self.ownership, wire_dtype=self.wire_dtype)

    def _hierarchical(self, ranks):
        # Between two ranks a message size is a branch with one message, and a further round
        # costs little: sizes closer together pad less.
        ratio = 2**0.5 if ranks == 2 else 2.0
        return HierarchicalCentralization(wire_dtype=self.wire_dtype, ratio=ratio)


def _in_order(done):
    total, state, traffic = done
    return total, None, state, traffic


def _typed(results, axes):
    """Both sides of a branch with one type: only the total may differ over other axes."""
    total, state, traffic = results
    return as_varying(total, axes), state, as_varying(traffic, axes)
