"""What each way of exchanging a table sends: EmbRace's table 2, and what that leaves out.

The table counts rows of numbers, a M bytes of a table of M (`cost_tables`). What a program
sends is more, in three ways, each exact here for the payload of the ways that are built:

    ids       a row travels with its number, 4 bytes, or its number was gathered before
    own part  a rank that is a server, too, sends itself nothing: (n - 1)/n of the table's
    sums      a replica has whole tables, so it is sent the sum's rows, those that any rank
              has read, where a server of Parallax sends a worker those that it reads next

Beyond it are message sizes, which come in steps, and of servers that own ranges of rows
the fullest part, as many times the mean one as words are skewed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.papers.formulas import cost_tables
from benchmarks.papers.formulas.cost_model import Cost
from sparsejax import arguments
from sparsejax.advise.explain.columns import hybrid_cost


@dataclass(frozen=True)
class Reads:
    """What ranks read of one table in a step.

    Attributes:
        ranks: n, of as many nodes.
        rows: Rows of the table.
        dim: Numbers of a row.
        distinct: m, different rows that the rank reads which reads most.
        union: u, different rows that any rank reads.
        number_bytes: Bytes of a number.
        id_bytes: Bytes of a row's number; 0 for the paper's formulas.
    """

    ranks: int
    rows: int
    dim: int
    distinct: float
    union: float
    number_bytes: float = 4.0
    id_bytes: float = 4.0

    def __post_init__(self):
        arguments.check_at_least("ranks", self.ranks, 1)
        arguments.check_at_least("rows", self.rows, 1)
        arguments.check_at_least("dim", self.dim, 1)
        arguments.check_positive("number_bytes", self.number_bytes)
        arguments.check_at_least("id_bytes", self.id_bytes, 0)
        arguments.check_between("distinct", self.distinct, 0, self.rows)
        most = min(self.rows, self.ranks * self.distinct)
        arguments.check_between("union", self.union, self.distinct, most)

    @property
    def size(self) -> float:
        """M, bytes of the table."""
        return self.rows * self.row_bytes

    @property
    def row_bytes(self) -> float:
        """Bytes of a row's numbers."""
        return self.dim * self.number_bytes

    @property
    def density(self) -> float:
        """a, the share of the table that a rank's gradient holds."""
        return self.distinct / self.rows


def hybrid(reads: Reads) -> Cost:
    """Columns on ranks, as `explain` forecasts them: `hybrid_cost`."""
    return Cost(*hybrid_cost(reads.ranks, reads.distinct, reads.row_bytes, reads.id_bytes))


def all_reduce(reads: Reads) -> Cost:
    """The dense gradient: table 2's AllReduce, to the byte."""
    n = reads.ranks
    return Cost(2 * (n - 1), 2 * (n - 1) / n * reads.size)


def all_gather(reads: Reads) -> Cost:
    """All merged rows to all: table 2's AllGather, (n - 1) m rows, each with its id."""
    n = reads.ranks
    entry = reads.row_bytes + reads.id_bytes
    return Cost(n - 1, (n - 1) * reads.distinct * entry)


def owners(reads: Reads) -> Cost:
    """Rows to owners and their sums to all: Zen's rows, and servers that are workers.

    (n - 1)/n (m + u) rows, each with its id, where owners have equal parts. Table 2's PS
    has 2 m rows for n servers: a worker pulls what it reads, and a server sends to itself.
    """
    n = reads.ranks
    entry = reads.row_bytes + reads.id_bytes
    return Cost(2 * (n - 1), (n - 1) / n * (reads.distinct + reads.union) * entry)


def servers(reads: Reads, skewness: float = 1.0) -> Cost:
    """Tables on servers, and workers that pull the rows they read: Parallax's as published.

    2 (n - 1)/n m rows with their ids, at the server of the fullest part s times as many:
    `skewness` is s. It is what columns send where s is 1, and is not built here.
    """
    n = reads.ranks
    arguments.check_between("skewness", skewness, 1, n)
    entry = reads.row_bytes + reads.id_bytes
    return Cost(2 * (n - 1), skewness * 2 * (n - 1) / n * reads.distinct * entry)


#: What is sent here, and the row of the paper's table 2, by way.
WAYS: dict[str, tuple[Callable[[Reads], Cost], Callable[[Reads], Cost]]] = {
    "all-reduce": (
        all_reduce,
        lambda reads: cost_tables.embrace_all_reduce(reads.size, reads.ranks),
    ),
    "all-gather": (
        all_gather,
        lambda reads: cost_tables.embrace_all_gather(
            reads.size, reads.density, reads.ranks
        ),
    ),
    "parallax": (
        owners,
        lambda reads: cost_tables.embrace_ps(
            reads.size, reads.density, reads.ranks, reads.ranks
        ),
    ),
    "zen rows": (
        owners,
        lambda reads: cost_tables.embrace_ps(
            reads.size, reads.density, reads.ranks, reads.ranks
        ),
    ),
    "hybrid": (
        hybrid,
        lambda reads: cost_tables.embrace_all_to_all(
            reads.size, reads.density, reads.ranks
        ),
    ),
}
