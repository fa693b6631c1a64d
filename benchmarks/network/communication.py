"""Times of adding up sparse gradients over a real network, scheme by scheme.

    python -m benchmarks.network.communication --hosts 2 4 8 16 --rate 250mbit
    python -m benchmarks.network.communication --peers PYTHON    with torch, for its gloo

Every host is a network namespace whose link `tc` limits (`benchmarks.testbed`), and one
process of a `jax.distributed` job. Prints a table in the columns of nccl-tests and leaves
all samples, as JSON lines, and the table as CSV under benchmarks/results/.

    time      of a step, from the last rank's start to the last one's end; the median
    algbw     bytes of the array over time; busbw: times 2 (n-1)/n, as nccl-tests have it
    #wrong    numbers off the float64 sum by more than rounding, or not equal on all ranks
    net ms    bytes of the busiest link at the link's rate: no scheme can be faster
    cpu ms    processor time of one rank; all ranks share this machine's cores
    wire, link   MB that one rank sent by the library's count, and by the interface's
    x psum    how many times as fast as `lax.psum` in the same run; PyTorch's sides run by
              themselves right after it, where `gloo dense` shows how alike the two runs are

A row whose two byte counts differ by more than 5% and the messages' headers ends the run.
"""

import math
import statistics
import sys
import tempfile

from benchmarks.harness import figure, sides, table
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.table import Column
from benchmarks.network import figures
from benchmarks.network.measure import Settings
from benchmarks.testbed import network, ranks


KEYS = ("workload", "rate", "hosts")  # of a group of rows that are compared


def main(argv: list[str] | None = None) -> int:
    settings = Settings.parse(argv)
    record = Recorder(settings.name, settings.command(), KEYS)
    with tempfile.TemporaryDirectory() as cache:
        for hosts in settings.hosts:
            rows = _measured(hosts, settings, cache)
            record.rows += rows
            if not rows or not show(rows):
                return 1
    say(f"\nwritten: {record.write()} and .csv")
    rows = record.all_rows()
    figure.save(settings.name, [_line(row) for row in rows])
    if "psum" in settings.schemes:
        for rate in {row["rate"] for row in rows}:
            figure.save(settings.name, figure=figures.drawn(rows, rate), part=rate)
    return 0


def _measured(hosts: int, settings: Settings, cache: str) -> list[dict]:
    """A row for each workload, rate and side; none if a rank failed."""
    rows = []
    say(f"\n{hosts} hosts")
    with network.hosts(hosts, settings.rate) as net:
        programs = [(sys.executable, "benchmarks.network.schemes")]
        if settings.peers:
            programs.append((settings.peers, "benchmarks.network.peers"))
        for python, module in programs:
            if net:
                net.set_rate(settings.rate)
            reported = ranks.run(
                module, settings, hosts, net, settings.timeout, python, cache
            )
            if reported is None:
                return []
            rows += [sides.together(hosts, of_ranks) for of_ranks in reported]
    return rows


def show(rows: list[dict]) -> bool:
    """Prints the rows; returns whether nothing is wrong and all byte counts agree."""
    columns = [
        Column("size", lambda row: 4 * _count(row), "d"),
        Column("count", _count, "d"),
        Column("side", "scheme"),
        Column("time us", _time, ".0f", 1e6),
        Column("algbw", _algbw, ".3f"),
        Column("busbw", lambda row: _algbw(row) * 2 * (1 - 1 / row["hosts"]), ".3f"),
        Column("#wrong", "wrong", "d"),
        Column("net ms", "network", ".1f", 1e3),
        Column("cpu ms", "cpu", ".1f", 1e3),
        Column("wire", "wire", ".3f", 1e-6),
        Column("link", "sent", ".3f", 1e-6),
        Column("x psum", "gain", ".2f"),
    ]
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in KEYS), []).append(row)
    for (workload, rate, hosts), group in groups.items():
        psum = [_time(row) for row in group if row["scheme"] == "psum"]
        gains = [{"gain": psum[0] / _time(row) if psum else math.nan} for row in group]
        lines = [row | gain for row, gain in zip(group, gains, strict=True)]
        lines.sort(key=lambda row: row["scheme"] != "psum")
        density = (
            f"{group[0]['density']:.2%} of the units, {group[0]['after']:.2%} in the sum"
        )
        table.show(lines, columns, f"{workload} at {rate}, {hosts} hosts: {density}")
    disagreeing = [row for row in rows if _disagree(row)]
    for row in disagreeing:
        say(
            f"BYTES DISAGREE: {row['scheme']}, {row['workload']}, {row['hosts']} hosts: "
            f"{row['wire']:.0f} by the library, {row['sent']:.0f} on the link"
        )
    return not disagreeing and not any(row["wrong"] for row in rows)


def _disagree(row: dict) -> bool:
    if row["wire"] is None or row["sent"] is None:
        return False
    return abs(row["sent"] - row["wire"]) > 0.05 * row["wire"] + sides.OTHER * row["hosts"]


def _time(row):
    return statistics.median(row["seconds"])


def _count(row):
    units, width = (*row["shape"], 1)[:2]
    return units * width


def _algbw(row):
    return 4 * _count(row) / _time(row) / 1e9


def _line(row: dict) -> dict:
    """The row's line of the CSV file."""
    names = ("workload", "density", "after", "rate", "hosts", "scheme", "wrong")
    return {
        **{name: row[name] for name in names},
        "median_s": _time(row),
        "min_s": min(row["seconds"]),
        "max_s": max(row["seconds"]),
        "network_s": row["network"],
        "cpu_s": row["cpu"],
        "wire_bytes": row["wire"],
        "link_bytes": row["sent"],
    }


if __name__ == "__main__":
    sys.exit(main())
