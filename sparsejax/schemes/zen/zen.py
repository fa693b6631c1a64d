"""Zen: the better of the two optima of Theorem 1, chosen by the number of ranks.

On the wire: the messages of `HierarchicalCentralization`, `BalancedParallelism` or
`AGSparse`; each becomes an all-reduce where it does not pay. The paper's equations (1) and
(2) compare the first two by the density of sums. For two ranks the answer needs no
measurement: hierarchy sends one set, and owners (g + 1) / 2 sets, where g >= 1 is the
growth of the sum over both.

By default the number of ranks decides, so only one scheme is compiled:

    2       Hierarchical Centralization: the ranks swap their sets
    more    Balanced Parallelism: each unit has an owner

Hierarchy saves at most one part in n + 1, and each of its hops processes the whole array,
which owners process once. On 4, 8 and 16 hosts at 100 and 250 Mbit/s it took longer in all
measurements, by the clock and by the bytes and the work of one host
(benchmarks/network/README.md).

The theorem counts only bytes. With owners the push must arrive before the pull can begin;
a gather of all entries is one round, and for few ranks sends little more. With
`optimum="fastest"` three and four ranks choose between both in each step, by bytes, where a
round counts as the bytes that are sent in its time (`ladder.ROUND`). Both are compiled.
Their bytes follow from the number of entries of this step, on which one pmax agrees, and
from the growth of sums in the last step (`growth`), so all ranks take the same branch. In a
first step sums are assumed to be no fuller than one rank's array, which favours owners.

`optimum="bytes"` is for networks so slow that only bytes count. It chooses in the same way
between the theorem's two optima, for any number of ranks. It takes owners in a first step,
and where partial sums could send more than an all-reduce if this step's sets did not
overlap. So it never sends more than an all-reduce and the agreed numbers.

"balanced" and "hierarchical" name one of the two.

Listed rows (`RowGrads`) of three and four ranks are gathered in one round, also by default,
if the lists of all ranks together have a capacity of no more rows than the tables have.
With K rows on each rank and U in the sum the gather sends (n - 1) K rows, and owners send
(n - 1) / n (K + U). On four ranks that is 0.8 times as much if no two ranks have read the
same rows, and twice as much if all have read the same. For the demo's language model it is
0.8 times, since messages are padded once (benchmarks/network/README.md).
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


# Up to this many ranks one gather of all entries may save more time than it costs bytes.
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

    def __call__(self, x, state, wire, mean=False):
        n = wire.ranks
        if n == 1 or x.size == 0:
            return base.nothing_to_send(x, state, wire)
        base.check_units(x)
        wire = wire.narrowed(self.wire_dtype)
        base.check_state(self, state, ZenState)

        if self._choice(n) == "hierarchical":
            done = self._hierarchical(n)(x, state.curve, wire)
            total = wire.mean_of(done.total, mean)
            return done._replace(total=total, state=ZenState(done.state, state.tables))
        layout = self.ownership.over(x.shape[0], n, state.tables)
        balanced = self._balanced.push_pull.over(x, wire, layout, mean)
        if not balanced.plan.may_pay:
            return base.sum_densely(x, state, wire, mean)
        # All schemes use these flags of the non-zero units.
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
            return wire.mean_of(total, mean), next_state(traffic), traffic

        def by_hierarchy(x):
            done = self._hierarchical(n)(Dense(x.dense(), flags), state.curve, wire)
            scalars = done.traffic.scalars + known.sent
            traffic = done.traffic._replace(scalars=scalars)
            total = wire.mean_of(done.total, mean)
            return total, ZenState(done.state, state.tables), traffic

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

    def rows(self, tables, wire, mean=False):
        """Sums listed rows by owners, or by one gather or swap: see `for_rows`."""
        listed = sum(table.capacity for table in tables)
        height = sum(table.shape[0] for table in tables)
        scheme = self.for_rows(wire.ranks, listed, height)
        asked = base.mean_asked(scheme.rows, mean)
        done = scheme.rows(tables, wire, **asked)
        if done is None or asked or not mean:
            return done
        means = [dataclasses.replace(x, rows=wire.mean_of(x.rows)) for x in done.totals]
        return done._replace(totals=means)

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
        return min(balanced, hierarchy.forecast(load), key=lambda forecast: forecast.bytes)

    def candidates(self, ranks: int) -> tuple[type[base.Scheme], ...]:
        """Returns the schemes that it chooses from on `ranks` ranks; all are compiled."""
        return {
            "balanced": (BalancedParallelism,),
            "hierarchical": (HierarchicalCentralization,),
            "fastest": (AGSparse, BalancedParallelism),
            "bytes": (BalancedParallelism, HierarchicalCentralization),
        }[self._choice(ranks)]

    def _choice(self, ranks):
        """Returns the optimum; "fastest" and "bytes" are then a choice at run time."""
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
        # Between two ranks the branch of a size has one message, and a further round costs
        # little, so sizes are closer together, which pads less.
        ratio = 2**0.5 if ranks == 2 else 2.0
        return HierarchicalCentralization(wire_dtype=self.wire_dtype, ratio=ratio)


def _in_order(done):
    total, state, traffic = done
    return total, None, state, traffic
