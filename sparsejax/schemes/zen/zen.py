"""Zen: the better of the two optima of Theorem 1, settled by the number of ranks.

On the wire: what `HierarchicalCentralization`, `BalancedParallelism` or `AGSparse` puts
there; each becomes an all-reduce where it does not pay. The paper's equations (1) and (2)
compare the first two by how full sums get. Between two ranks the answer needs no
measurement: with g the growth over both, one swap of a whole set against (g + 1) / 2 of it,
and g is at least 1.

By default the number of ranks decides, so a program has one scheme to compile:

    2       Hierarchical Centralization: they swap their sets
    more    Balanced Parallelism: they have owners

Where sets do not overlap at all hierarchy saves most, one part in n + 1 but for padding,
and each of its hops goes over the whole array, where owners go over it once. On 4, 8 and 16
hosts at 100 and 250 Mbit/s hierarchy took longer on everything measured, by the clock and
by the bytes and the work of one host (benchmarks/network/README.md).

The theorem counts bytes alone. With owners what is pushed has to arrive before anything
can be pulled, and ranks agree once more in between; to send everything to all is one round.
Few ranks send little more that way: n - 1 sets, where owners send up to as much, and half
of it where all sets are the same. `optimum="fastest"` lets three and four ranks do what
sends fewer bytes, a round counted as the bytes that it takes the time of (`ladder.ROUND`).
Both are compiled, and bytes are computed in the message sizes and index codes that each
would use: from how many entries there are now, on which one pmax agrees, and from how sums
grew in the step before (`growth`). All ranks compute with these, so all take the same
branch, and nothing is compiled again. In a first step, of which nothing is known, sums are
taken to be no fuller than one rank's array: then owners have most to win.

`optimum="bytes"` is for networks so slow that only bytes count: in the same way it chooses
between the theorem's two optima, for any number of ranks. There are owners in a first step,
and where partial sums could send more than an all-reduce, should this step's sets not
overlap at all: so no more is ever sent than by an all-reduce and the agreed numbers.
Balanced Parallelism sees only one rank's share and the total's; what it takes the sums
between to be is corrected as soon as the other is tried.

"balanced" and "hierarchical" name one of the two.

Listed rows (`RowGrads`) of three and four ranks go to all in one round, by default too,
where lists of all ranks have room for no more rows than the tables have. With K rows on
each rank and U in the sum these are (n - 1) K rows, where owners send (n - 1) / n (K + U).
Of four ranks that is 0.8 times as much where no two have read the same rows, and twice as
much where all have. For the demo's language model it is 0.8 times, since messages are
padded once (benchmarks/network/README.md).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax import arguments, branches
from sparsejax.errors import ArgumentError
from sparsejax.schemes import base
from sparsejax.schemes.ag_sparse import AGSparse
from sparsejax.schemes.owners.pieces import SparseScheme
from sparsejax.schemes.zen import growth
from sparsejax.schemes.zen.balanced import BalancedParallelism
from sparsejax.schemes.zen.choice import Choice
from sparsejax.schemes.zen.hierarchical import HierarchicalCentralization
from sparsejax.units.dense import Dense
from sparsejax.units.ownership import Ownership, StripedHash
from sparsejax.wire import ladder


# Up to this many ranks one round of everything to all may be worth more than its bytes.
_FEW = 4


class ZenState(NamedTuple):
    """The state of `Zen`.

    Attributes:
        curve: How full partial sums were in the last step, where something is chosen by it;
            see `schemes.zen.growth`.
        tables: The state of the ownership.

    Example:
        >>> like = jax.ShapeDtypeStruct((1000,), jnp.float32)
        >>> state = sparsejax.schemes.Zen("balanced").init(like, None)
        >>> isinstance(state, sparsejax.schemes.ZenState)
        True
    """

    curve: jax.Array
    tables: Any


@dataclasses.dataclass(frozen=True)
class Zen(SparseScheme):
    """Sums sparse arrays exactly, by the better of Zen's two optima.

    By default the number of ranks decides. Two ranks swap their entries
    (`HierarchicalCentralization`). More ranks have owners of units (`BalancedParallelism`).
    Listed rows (`RowGrads`) of three or four ranks are sent to all in one round, unless all
    lists together are longer than the tables. Where entries would not save bytes, it is an
    all-reduce.

    Attributes:
        optimum: "auto": by the number of ranks. "fastest": as "auto", but three and four
            ranks choose step by step between owners and one round. "bytes": the one of the
            two optima that sends fewer bytes, step by step. "balanced" or "hierarchical":
            always that one.
        ownership: Which rank owns which unit, for Balanced Parallelism.
        wire_dtype: The dtype of the values on the wire; that of x if None.

    Example:
        >>> send = sparsejax.sync(sparsejax.schemes.Zen("bytes"))
        >>> tx = optax.chain(send, optax.adam(1e-3))

    References:
        Wang et al., Zen: Empowering Distributed Training with Sparsity-driven Data
        Synchronization, OSDI 2025

    See Also:
        `sparsejax.schemes.BalancedParallelism`: the optimum with owners.
        `sparsejax.schemes.HierarchicalCentralization`: the optimum with partners.
    """

    optimum: str = "auto"
    ownership: Ownership = StripedHash()
    wire_dtype: jax.typing.DTypeLike | None = None

    def __post_init__(self):
        arguments.check_one_of(
            "optimum",
            self.optimum,
            ("auto", "balanced", "hierarchical", "fastest", "bytes"),
        )
        arguments.check_dtype("wire_dtype", self.wire_dtype)
        if self.optimum in ("auto", "fastest", "bytes") and not self.ownership.balanced:
            raise ArgumentError(
                f"{self.ownership!r} does not balance parts, and optimum={self.optimum!r} "
                "assumes parts that are: use a hash, or optimum='balanced'."
            )

    def init(self, like, wire):
        return ZenState(growth.unknown(), self._balanced.init(like, wire))

    def __call__(self, x, state, wire):
        n = wire.ranks
        if n == 1 or x.size == 0:
            return base.nothing_to_send(x, state, wire)
        base.check_units(x)
        wire = wire.narrowed(self.wire_dtype)
        base.check_state(self, state, ZenState)

        if self._choice(n) == "hierarchical":
            done = self._hierarchical(n)(x, state.curve, wire)
            return done._replace(state=ZenState(done.state, state.tables))
        layout = self.ownership.over(x.shape[0], n, state.tables)
        balanced = self._balanced.push_pull.over(x, wire, layout)
        if not balanced.plan.may_pay:
            return base.sum_densely(x, state, wire)
        # All schemes take from here which units are there.
        flags = x.present()
        known = balanced.count(x, flags)

        def next_state(traffic):
            curve = state.curve
            if self._choice(n) != "balanced":
                ends = traffic.density_before, traffic.density_after
                ends = wire.same_elsewhere(jnp.stack(ends))
                curve = growth.stretched(curve, n, *ends)
            return ZenState(curve, state.tables)

        def by_owners(x):
            total, traffic = balanced(x, known)
            return total, next_state(traffic), traffic

        def by_one_round(x):
            total, traffic = self._gathered.add_up(x, flags, known.most, known.sent, wire)
            return total, next_state(traffic), traffic

        def by_hierarchy(x):
            done = self._hierarchical(n)(Dense(x.dense(), flags), state.curve, wire)
            scalars = done.traffic.scalars + known.sent
            traffic = done.traffic._replace(scalars=scalars)
            return done.total, ZenState(done.state, state.tables), traffic

        if self._choice(n) == "balanced":
            total, traffic = balanced(x, known)
            return base.Reduced(total, None, next_state(traffic), traffic)
        choice = Choice(x, wire, balanced, known.most, state.curve)
        if self._choice(n) == "fastest":
            prefers = choice.prefers_one_round(self._gathered)
            done = branches.cond(prefers, by_one_round, by_owners, x)
        else:
            prefers = choice.prefers_hierarchy(self._hierarchical(n))
            done = branches.cond(prefers, by_hierarchy, by_owners, x)
        return base.Reduced(*_in_order(done))

    def rows(self, tables, wire):
        """Listed rows by their owners; to all in one round where that is settled."""
        listed = sum(table.capacity for table in tables)
        height = sum(table.shape[0] for table in tables)
        return self.for_rows(wire.ranks, listed, height).rows(tables, wire)

    def for_rows(self, ranks: int, listed: int, height: int) -> base.Scheme:
        """Returns the scheme by which lists of rows are sent.

        Args:
            ranks: The number of ranks.
            listed: The number of ids in the lists of a rank.
            height: The number of rows of the tables.
        """
        if self._choice(ranks) == "hierarchical":
            return self._hierarchical(ranks)
        few = ranks <= _FEW and self.optimum in ("auto", "fastest")
        return self._gathered if few and ranks * listed <= height else self._balanced

    def forecast(self, load):
        if load.listed:
            return self.for_rows(load.ranks, load.room or 0, load.units).forecast(load)
        choice, hierarchy = self._choice(load.ranks), self._hierarchical(load.ranks)
        if choice == "hierarchical":
            return hierarchy.forecast(load)
        balanced = self._balanced.forecast(load)
        if choice == "balanced":
            return balanced
        if choice == "fastest":
            gathered = self._gathered.forecast(load)
            return gathered if gathered.bytes < balanced.bytes + ladder.ROUND else balanced
        return min(balanced, hierarchy.forecast(load), key=lambda told: told.bytes)

    def candidates(self, ranks: int) -> tuple[type[base.Scheme], ...]:
        """Returns the schemes that it chooses from on `ranks` ranks; all are compiled."""
        return {
            "balanced": (BalancedParallelism,),
            "hierarchical": (HierarchicalCentralization,),
            "fastest": (AGSparse, BalancedParallelism),
            "bytes": (BalancedParallelism, HierarchicalCentralization),
        }[self._choice(ranks)]

    def _choice(self, ranks):
        """The choice; "fastest" and "bytes" are settled when the program runs."""
        if ranks == 2 and self.optimum != "balanced":
            return "hierarchical"
        if self.optimum == "auto" or (self.optimum == "fastest" and ranks > _FEW):
            return "balanced"
        return self.optimum

    @property
    def _balanced(self):
        return BalancedParallelism(ownership=self.ownership, wire_dtype=self.wire_dtype)

    @property
    def _gathered(self):
        return AGSparse(code="auto", wire_dtype=self.wire_dtype)

    def _hierarchical(self, ranks):
        # Between two ranks a message size is a branch with one message, and a further round
        # costs little: sizes closer together pad less.
        ratio = 2**0.5 if ranks == 2 else 2.0
        return HierarchicalCentralization(wire_dtype=self.wire_dtype, ratio=ratio)


def _in_order(done):
    total, state, traffic = done
    return total, None, state, traffic
