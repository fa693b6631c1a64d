"""Balanced Parallelism: each unit is summed by one rank, and ranks own equal shares.

Zen, definition 6 and section 3. `owners` describes the messages: entries to the owners of
their units, and the sums from owners to all ranks. Balance keeps padding small: with a hash
the fullest part is barely fuller than the mean, so all messages nearly fill the rung that
the fullest one needs.

Each component is an argument: the ownership of units (`sparsejax.units.ownership`), the
index codes of both directions, and how the sums return. "Zen with COO" is
`push_code="coo32", pull_code="coo32"`. `ownership.MurmurHash(memory=0.02)` finds the owners
of up to 2% of the units by the paper's Algorithm 1, as the paper's system does, in the
kernel of `pallas_kernels` where there is one; see `owners.push_pull`.
"""

import dataclasses

import jax

from sparsejax import arguments
from sparsejax.errors import ArgumentError
from sparsejax.schemes import base
from sparsejax.schemes.baselines.pulls import RecursiveDoubling, Spread
from sparsejax.schemes.owners import forecast as owners_forecast, rows as owned_rows
from sparsejax.schemes.owners.pieces import SparseScheme
from sparsejax.schemes.owners.pulls import Gather, Pull, Whole
from sparsejax.schemes.owners.push_pull import PushPull
from sparsejax.units.ownership import Ownership, StripedHash
from sparsejax.wire import index_codes, ladder
from sparsejax.wire.ladder import Message


_PULLS = {
    "gather": Gather(),
    "spread": Spread(),
    "doubling": RecursiveDoubling(),
    "dense": Whole(),
}


@dataclasses.dataclass(frozen=True)
class BalancedParallelism(SparseScheme):
    """Sums each unit on one rank, its owner, and sends the sums to all ranks.

    A hash distributes units over the ranks, so that all owners have about as many entries.
    Each rank pushes its entries to their owners, and pulls the sums from them. Where that
    would not save bytes, it is an all-reduce.

    Attributes:
        ownership: Which rank owns which unit.
        push_code: How indices are sent to the owners: "coo32", "coo16", "coo8", "bitmap",
            or "auto" for the cheapest at each message size.
        pull_code: How indices are sent back; as `push_code`.
        ratio: The ratio of successive message sizes. A larger one compiles faster, and pads
            more or takes more rounds.
        wire_dtype: The dtype of the values on the wire; that of x if None. Sums are taken
            in float32 or wider.
        pull: How the sums come back: "gather", "spread", "doubling" or "dense", or a `Pull`
            of `schemes.owners.pulls`.
        push_capacity: The number of entries of the longest message to an owner, where it is
            known (`sparsejax.make_plan`). Further entries are sent in further rounds.
        pull_capacity: The number of entries of the longest message back; as
            `push_capacity`.

    Example:
        >>> tx = sparsejax.sync(sparsejax.schemes.BalancedParallelism(ratio=1.5))

    References:
        Wang et al., Zen: Empowering Distributed Training with Sparsity-driven Data
        Synchronization, OSDI 2025, section 3

    See Also:
        `sparsejax.schemes.Zen`: chooses between this and the others.
        `sparsejax.schemes.HierarchicalCentralization`: partners exchange partial sums.
    """

    ownership: Ownership = StripedHash()
    push_code: str = "auto"
    pull_code: str = "auto"
    ratio: float = 2.0
    wire_dtype: jax.typing.DTypeLike | None = None
    pull: str | Pull = "gather"
    push_capacity: int | None = None
    pull_capacity: int | None = None

    def __post_init__(self):
        index_codes.parse(self.push_code)
        if self.ownership.memory is not None and self.push_code not in ("auto", "coo32"):
            raise ArgumentError(
                f"push_code={self.push_code!r} is for slots that ascend, and those of "
                f"{self.ownership!r} lie in the order of their hashes: use 'coo32'."
            )
        index_codes.parse(self.pull_code)
        ladder.check_ratio(self.ratio)
        arguments.check_dtype("wire_dtype", self.wire_dtype)
        if not isinstance(self.pull, Pull):
            arguments.check_one_of("pull", self.pull, tuple(_PULLS))
        ladder.check_capacity("push_capacity", self.push_capacity)
        ladder.check_capacity("pull_capacity", self.pull_capacity)

    def init(self, like, wire):
        ranks = 1
        if self.ownership.needs_tables:
            ranks = base.known_ranks(self, wire).ranks
        return self.ownership.tables(like.shape[0], ranks)

    def __call__(self, x, state, wire, mean=False):
        n = wire.ranks
        if n == 1 or x.size == 0:
            return base.nothing_to_send(x, state, wire)
        base.check_units(x)
        layout = self.ownership.over(x.shape[0], n, state)
        total, traffic = self.push_pull(x, wire, layout, mean)
        return base.Reduced(total, None, state, traffic)

    def rows(self, tables, wire, mean=False):
        """Sums listed rows by owners; returns None if the ownership needs tables."""
        if self.ownership.needs_tables:
            return None
        wire = wire.narrowed(self.wire_dtype)
        return owned_rows.add_up(tables, wire, self.ownership, mean)

    def forecast(self, load):
        if not load.listed:
            return owners_forecast.forecast(load, self.ownership, self.push_pull)
        if self.ownership.needs_tables:
            return super().forecast(load)
        return owners_forecast.of_rows(load, self.ownership, self.wire_dtype)

    @property
    def push_pull(self) -> PushPull:
        """The push and pull by which owners sum an array."""
        return PushPull(
            Message(self.push_code, self.ratio, self.push_capacity),
            Message(self.pull_code, self.ratio, self.pull_capacity),
            self.pull if isinstance(self.pull, Pull) else _PULLS[self.pull],
            self.wire_dtype,
        )
