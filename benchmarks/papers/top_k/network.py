"""Bytes and times of systems that choose what they send, on a network of a given rate.

    python -m benchmarks.papers.top_k.network --hosts 14 --rates 250mbit 25mbit

Every host is a network namespace whose link `tc` limits, and one process of a
`jax.distributed` job. All have dense gradients of `--size` numbers, three of them in turn,
and send `--density` of the accumulated gradient; all is checked first: ranks have the same
bytes, and the sum of the gradients is the sum of the updates and the residuals, to 1e-6.
Then each runs `--warm` steps, since residuals grow at first, and thresholds with them.
Prints, for each rate,

    step      ms from the last rank's start to the last one's end; the mean of all, those
              included that find thresholds anew
    work      the same where the link has no limit: choosing, packing, adding, and the time
              that processes which share cores wait for one another
    network   step less work
    floor     bytes of the busiest link at the link's rate
    MB        that one rank sent, by the library's count and by the interface's; what the
              paper's formula says for 8 bytes an entry; and the library's over the formula
    chosen    numbers in the total, over k
    lost      numbers whose sums disagree

A name with a star sends 32-bit indices, as the papers do; the others choose their code.
"""

import dataclasses
import statistics
import sys
import tempfile

from benchmarks.harness import settings, sides, table
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.settings import option
from benchmarks.harness.table import Column
from benchmarks.papers.top_k.systems import paper
from benchmarks.testbed import network, ranks


NO_LIMIT = "100gbit"


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Runs systems that choose what they send on a network of a given rate."""

    PROGRAM = "benchmarks.papers.top_k.network"
    hosts: tuple[int, ...] = option((14,), "numbers of hosts")
    rates: tuple[str, ...] = option(("250mbit", "25mbit"), "of each link, each way")
    size: int = option(1 << 22, "numbers of the gradient")
    density: float = option(0.01, "share of them that is sent")
    warm: int = option(60, "steps before any is timed")
    rounds: int = option(11, "samples of each side")
    only: tuple[str, ...] = option((), "systems to run, with psum; all if none")
    timeout: float = option(3600.0, "seconds for each number of hosts")
    name: str = option("choosing-network", "of the file that is written")

    def __post_init__(self):
        super().__post_init__()
        for rate in self.rates:
            network.bits_per_second(rate)


def main(argv: list[str] | None = None) -> int:
    settings = Settings.parse(argv)
    record = Recorder(settings.name, settings.command(), ("hosts", "scheme"))
    well = True
    for hosts in settings.hosts:
        rows = _measured(hosts, settings)
        well = bool(rows) and _show(rows, settings) and well
        record.rows += rows
    say(f"\nwritten: {record.write()}")
    return 0 if well else 1


def _measured(hosts: int, settings: Settings) -> list[dict]:
    """A row for each rate and system; none if a rank failed."""
    say(f"\n{hosts} hosts")
    with network.hosts(hosts, NO_LIMIT) as net, tempfile.TemporaryDirectory() as cache:
        reported = ranks.run(
            "benchmarks.papers.top_k.rank",
            settings,
            hosts,
            net,
            settings.timeout,
            cache=cache,
        )
    rows = [sides.together(hosts, of_ranks) for of_ranks in reported or []]
    k = settings.size * settings.density
    work = {row["scheme"]: _mean(row) for row in rows if row["rate"] == NO_LIMIT}
    for row in rows:
        formula = paper(row["scheme"], round(k), settings.size, hosts).bytes
        chosen = row.get("density_after", 1) * settings.size / k
        row |= {"work": work[row["scheme"]], "formula": formula, "chosen": chosen}
    return rows


def _show(rows: list[dict], settings: Settings) -> bool:
    """Prints the rows; returns whether nothing was lost and byte counts agree."""
    for rate in settings.rates:
        of_rate = [row for row in rows if row["rate"] == rate]
        about = f"{rate}, {settings.density:.2%} of {settings.size:,} numbers"
        table.show(of_rate, COLUMNS, f"{rows[0]['hosts']} hosts, {about}")
    disagreeing = [row for row in rows if _disagree(row)]
    for row in disagreeing:
        say(f"BYTES DISAGREE: {row['scheme']}: {row['wire']:.0f}, link {row['sent']:.0f}")
    return not disagreeing and not any(row["wrong"] for row in rows)


def _mean(row):
    return statistics.fmean(row["seconds"])


COLUMNS = [
    Column("", "scheme"),
    Column("step", _mean, ".1f", 1e3),
    Column("work", "work", ".1f", 1e3),
    Column("network", lambda row: _mean(row) - row["work"], ".1f", 1e3),
    Column("floor", "network", ".1f", 1e3),
    Column("MB", "wire", ".3f", 1e-6),
    Column("link", "sent", ".3f", 1e-6),
    Column("paper", "formula", ".3f", 1e-6),
    Column("ratio", lambda row: row["wire"] / row["formula"], ".2f"),
    Column("chosen", "chosen", ".2f"),
    Column("lost", "wrong", "d"),
]


def _disagree(row):
    # A count of single steps, against the mean of all: the number of entries varies.
    if row["sent"] is None:
        return False
    off = row["sent"] - row["wire"]
    hosts, near = row["hosts"], 0.15 * row["wire"] + sides.OTHER * row["hosts"]
    # Where ranks fold, the count is of the way of an entry, and no rank sends all of it.
    folded = row["scheme"].rstrip("*") in ("topk_dsa", "gtopk") and hosts & (hosts - 1)
    return off > near if folded else abs(off) > near


if __name__ == "__main__":
    sys.exit(main())
