"""What it takes to add up sparse gradients over a real network, scheme by scheme.

    python -m benchmarks.communication --hosts 2 4 8 16 --rate 250mbit
    python -m benchmarks.communication --peers PYTHON    with torch, for its gloo

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

import argparse
import csv
import json
import os
import statistics
import sys
import tempfile

from benchmarks import communication_figures, sides, workloads
from benchmarks.record import Recorder, say
from benchmarks.testbed import host, job, network
from benchmarks.testbed.__main__ import hosts as testbed


# From five hosts on Zen is Balanced Parallelism, which can be named too: "balanced".
SCHEMES = "psum,zen,hierarchical,agsparse,sparcml,omnireduce,sparseps"
WORKLOADS = "lstm,deepfm,nmt,topk,language,translation,clicks"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.communication")
    add = parser.add_argument
    add("--hosts", type=int, nargs="+", default=[2, 4, 8, 16])
    add("--rate", default="250mbit", help="of each link, each way (%(default)s)")
    add("--more-rates", nargs="*", default=["100mbit", "1gbit"], help="for a few workloads")
    add("--more", default="lstm,deepfm", help="which, with commas (%(default)s)")
    add("--workloads", default=WORKLOADS, help="by their names, with commas (%(default)s)")
    add("--schemes", default=SCHEMES, help="by their names, with commas (%(default)s)")
    add("--rounds", type=int, default=3, help="samples of each side (%(default)s)")
    add("--peers", metavar="PYTHON", help="the Python of an environment with torch")
    add("--timeout", type=float, default=3600, help="seconds for each number of hosts")
    add("--name", default="communication", help="of the files that are written")
    add("--keep", action="store_true", help="what those files say of what is not measured")
    options = parser.parse_args(argv)
    for rate in (options.rate, *options.more_rates):
        network.bits_per_second(rate)
    unknown = set(options.workloads.split(",")) - set(workloads.all_workloads())
    if unknown:
        parser.error(
            f"there is no workload {sorted(unknown)[0]!r}; see benchmarks.workloads"
        )
    given = ["PYTHON" if one == options.peers else one for one in argv or sys.argv[1:]]
    record = Recorder(" ".join(["python -m benchmarks.communication", *given]))
    say(", ".join(f"{key} {value}" for key, value in record.head.items()))
    with tempfile.TemporaryDirectory() as cache:
        for hosts in options.hosts:
            if not _hosts(hosts, options, record, cache):
                return 1
    if options.keep:
        measured = {_group(row) for row in record.rows}
        record.keep(options.name, lambda row: _group(row) not in measured)
    path = record.write(options.name)
    _csv(record.rows, path.with_suffix(".csv"))
    say(f"\nwritten: {path} and .csv")
    if "psum" in options.schemes.split(","):
        for rate in {row["rate"] for row in record.rows}:
            picture = path.with_name(f"{path.stem}-{rate}.png")
            communication_figures.draw(record.rows, picture, rate)
    return 0


def _hosts(hosts: int, options, record: Recorder, cache: str) -> bool:
    """Runs all sides on so many hosts; whether all went well."""
    settings = {
        "workloads": options.workloads.split(","),
        "schemes": options.schemes.split(","),
        "rate": options.rate,
        "more": dict.fromkeys(options.more.split(","), options.more_rates),
        "rounds": options.rounds,
        "cache": cache,
    }
    rows = []
    say(f"\n{hosts} hosts")
    with testbed(hosts, options.rate) as net:
        programs = [(sys.executable, "benchmarks.communication_rank")]
        if options.peers:
            programs.append((options.peers, "benchmarks.peers_rank"))
        for python, module in programs:
            environment = {"COMMUNICATION": json.dumps(settings), "PYTHONPATH": os.getcwd()}
            command = [python, "-m", module]
            if net:
                net.set_rate(options.rate)
            done = job.run(command, hosts, net, options.timeout, environment=environment)
            if done.status:
                say(f"{module} failed: {done.why}")
                return False
            rows += [together(hosts, of_ranks) for of_ranks in zip(*done.rows, strict=True)]
    well = _table(rows)
    record.rows += rows
    return well


def together(hosts: int, of_ranks: tuple[dict, ...]) -> dict:
    """One row from the rows of all ranks."""
    first = of_ranks[0]
    samples = zip(*(row["spans"] for row in of_ranks), strict=True)
    seconds = [host.seconds_together(spans) / first["calls"] for spans in samples]
    row = {key: first[key] for key in ("workload", "shape", "density", "after", "rate")}
    row |= {"hosts": hosts, "scheme": first["scheme"], "calls": first["calls"]}
    row["wrong"] = max(row["wrong"] for row in of_ranks)
    row |= {"compile": first["compile"], "seconds": seconds, "wire": first["wire"]}
    row["cpu"] = statistics.fmean(statistics.median(row["cpu"]) for row in of_ranks)
    if first["sent"][0] is None:
        return row | {"sent": None, "busiest": None, "network": None}
    row["sent"] = statistics.fmean(statistics.median(row["sent"]) for row in of_ranks)
    both = [row[way] for row in of_ranks for way in ("sent", "received")]
    row["busiest"] = max(statistics.median(counts) for counts in both)
    row["network"] = 8 * row["busiest"] / network.bits_per_second(row["rate"])
    return row


def _table(rows: list[dict]) -> bool:
    """Prints the rows; whether nothing is wrong and all byte counts agree."""
    head = f"{'size':>10} {'count':>9} {'type':>6} {'side':15} {'time us':>10} {'algbw':>7}"
    head += (
        f" {'busbw':>7} {'#wrong':>6} {'net ms':>8} {'cpu ms':>7} {'wire':>7} {'link':>7}"
    )
    head += f" {'x psum':>7}"
    well, group = True, None
    for row in sorted(rows, key=lambda row: (_place(rows, row), row["scheme"] != "psum")):
        if group != (group := _group(row)):
            density = f"{row['density']:.2%} of the units, {row['after']:.2%} in the sum"
            say(f"\n{row['workload']} at {row['rate']}, {row['hosts']} hosts: {density}")
            say(head)
        count, time = _count(row), statistics.median(row["seconds"])
        algbw = 4 * count / time / 1e9
        psum = [r for r in rows if _group(r) == group and r["scheme"] == "psum"]
        gain = statistics.median(psum[0]["seconds"]) / time if psum else float("nan")
        factor = 2 * (row["hosts"] - 1) / row["hosts"]
        wire, link = (
            f"{row[key] / 1e6:7.3f}" if row[key] else "      -" for key in ("wire", "sent")
        )
        net = f"{1e3 * row['network']:8.1f}" if row["network"] else "       -"
        say(
            f"{4 * count:10} {count:9} {'float':>6} {row['scheme']:15} {1e6 * time:10.0f}"
            f" {algbw:7.3f} {algbw * factor:7.3f} {row['wrong']:6} {net}"
            f" {1e3 * row['cpu']:7.1f} {wire} {link} {gain:7.2f}"
        )
        if row["wrong"] or _disagree(row):
            well = False
    for row in filter(_disagree, rows):
        say(
            f"BYTES DISAGREE: {row['scheme']}, {row['workload']}, {row['hosts']} hosts: "
            f"{row['wire']:.0f} by the library, {row['sent']:.0f} on the link"
        )
    return well


def _disagree(row: dict) -> bool:
    if row["wire"] is None or row["sent"] is None:
        return False
    return abs(row["sent"] - row["wire"]) > 0.05 * row["wire"] + sides.OTHER * row["hosts"]


def _group(row):
    return row["workload"], row["rate"], row["hosts"]


def _place(rows, row):
    return [_group(other) for other in rows].index(_group(row))


def _count(row):
    units, width = (*row["shape"], 1)[:2]
    return units * width


def _csv(rows: list[dict], path) -> None:
    names = ["workload", "density", "after", "rate", "hosts", "scheme", "wrong"]
    names += [
        "median_s",
        "min_s",
        "max_s",
        "network_s",
        "cpu_s",
        "wire_bytes",
        "link_bytes",
    ]
    with path.open("w", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(names)
        for row in rows:
            taken = row["seconds"]
            writer.writerow(
                [row[name] for name in names[:7]]
                + [statistics.median(taken), min(taken), max(taken), row["network"]]
                + [row["cpu"], row["wire"], row["sent"]]
            )


if __name__ == "__main__":
    sys.exit(main())
