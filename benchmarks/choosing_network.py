"""Systems that choose what they send, on a network of a given rate: bytes and time.

    python -m benchmarks.choosing_network --hosts 14 --rates 250mbit 25mbit

Every host is a network namespace whose link `tc` limits, and one process of a
`jax.distributed` job. All have dense gradients of `--size` numbers, three of them in turn,
and send `--density` of what is due; all is checked first: ranks have the same bytes, and
what was given is what was applied and is held, to 1e-6. Then each runs `--warm` steps,
since what waits grows at first, and thresholds with it. Prints, for each rate,

    step      ms from the last rank's start to the last one's end; the mean of all, those
              included that find thresholds anew
    work      the same where the link has no limit: choosing, packing, adding, and what
              processes that share cores wait for one another
    network   step less work
    floor     bytes of the busiest link at the link's rate
    MB        that one rank sent, by the library's count and by the interface's; what the
              paper's formula says for 8 bytes an entry; and the library's over the formula
    chosen    numbers in the total, over k

A name with a star sends 32-bit indices, as the papers do; the others choose their code.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile

from benchmarks import communication, sides
from benchmarks.choosing_systems import paper
from benchmarks.record import Recorder, say
from benchmarks.testbed import job, network
from benchmarks.testbed.__main__ import hosts as testbed


NO_LIMIT = "100gbit"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choosing_network")
    add = parser.add_argument
    add("--hosts", type=int, nargs="+", default=[14])
    add("--rates", nargs="+", default=["250mbit", "25mbit"], help="of each link, each way")
    add("--size", type=int, default=1 << 22, help="numbers of the gradient (%(default)s)")
    add("--density", type=float, default=0.01, help="of it that is sent (%(default)s)")
    add("--warm", type=int, default=60, help="steps before any is timed (%(default)s)")
    add("--rounds", type=int, default=11, help="samples of each side (%(default)s)")
    add("--only", nargs="+", default=[], help="of these systems, with psum")
    add("--timeout", type=float, default=3600, help="seconds for each number of hosts")
    add("--name", default="choosing-network", help="of the file that is written")
    options = parser.parse_args(argv)
    for rate in options.rates:
        network.bits_per_second(rate)
    words = " ".join(argv or sys.argv[1:])
    record = Recorder(f"python -m benchmarks.choosing_network {words}".rstrip())
    say(", ".join(f"{key} {value}" for key, value in record.head.items()))
    well = True
    for hosts in options.hosts:
        rows = _measured(hosts, options)
        well = well and bool(rows) and _table(rows, options)
        record.rows += rows
    measured = {(row["hosts"], row["scheme"]) for row in record.rows}
    record.keep(options.name, lambda row: (row["hosts"], row["scheme"]) not in measured)
    say(f"\nwritten: {record.write(options.name)}")
    return 0 if well else 1


def _measured(hosts: int, options) -> list[dict]:
    """A row for each rate and system; none if something failed."""
    settings = {
        "size": options.size,
        "density": options.density,
        "warm": options.warm,
        "rounds": options.rounds,
        "rates": [NO_LIMIT, *options.rates],
        "only": [*options.only, "psum"] if options.only else [],
    }
    say(f"\n{hosts} hosts")
    with (
        testbed(hosts, NO_LIMIT) as net,
        tempfile.TemporaryDirectory() as cache,
        tempfile.TemporaryDirectory() as held,
    ):
        settings["cache"] = cache
        environment = {
            "CHOOSING": json.dumps(settings),
            "CHOOSING_HELD": held,
            "PYTHONPATH": os.getcwd(),
        }
        command = [sys.executable, "-m", "benchmarks.choosing_rank"]
        done = job.run(command, hosts, net, options.timeout, environment=environment)
    if done.status:
        say(f"benchmarks.choosing_rank failed: {done.why}")
        return []
    return [_together(hosts, of_ranks) for of_ranks in zip(*done.rows, strict=True)]


def _together(hosts: int, of_ranks: tuple[dict, ...]) -> dict:
    """One row from the rows of all ranks."""
    first = of_ranks[0]
    shared = {"workload": "dense", "shape": [first["size"]], "density": 1.0, "after": 1.0}
    row = communication.together(hosts, tuple({**shared, **row} for row in of_ranks))
    told = ("density_before", "density_after", "rounds", "push_imbalance")
    return row | {key: first[key] for key in told if key in first}


def _table(rows: list[dict], options) -> bool:
    """Prints the rows; whether nothing was lost and byte counts agree."""
    k = options.size * options.density
    work = {r["scheme"]: _mean(r) for r in rows if r["rate"] == NO_LIMIT}
    well = True
    for rate in options.rates:
        of_rate = [row for row in rows if row["rate"] == rate]
        if not of_rate:
            continue
        hosts = of_rate[0]["hosts"]
        say(f"\n{hosts} hosts, {rate}, {options.density:.2%} of {options.size:,} numbers")
        say(
            f"{'':16} {'step':>8} {'work':>8} {'network':>8} {'floor':>8} {'MB':>7} "
            f"{'link':>7} {'paper':>7} {'ratio':>6} {'chosen':>6} {'lost':>5}"
        )
        for row in of_rate:
            name, step = row["scheme"], _mean(row)
            formula = paper(name, round(k), options.size, hosts).bytes
            chosen = row.get("density_after", 1) * options.size / k
            row["work"] = work[name]
            link = f"{row['sent'] / 1e6:7.3f}" if row["sent"] else "      -"
            floor = f"{1e3 * row['network']:8.1f}" if row["network"] else "       -"
            say(
                f"{name:16} {1e3 * step:8.1f} {1e3 * work[name]:8.1f} "
                f"{1e3 * (step - work[name]):8.1f} {floor} {row['wire'] / 1e6:7.3f} {link} "
                f"{formula / 1e6:7.3f} {row['wire'] / formula:6.2f} {chosen:6.2f} "
                f"{row['wrong']:5}"
            )
            well = well and not row["wrong"] and not _disagree(row)
    for row in filter(_disagree, rows):
        say(f"BYTES DISAGREE: {row['scheme']}: {row['wire']:.0f}, link {row['sent']:.0f}")
    return well


def _mean(row):
    return statistics.fmean(row["seconds"])


def _disagree(row):
    # A count of single steps, against the mean of all: what is chosen varies.
    if row["sent"] is None:
        return False
    off = row["sent"] - row["wire"]
    hosts, near = row["hosts"], 0.15 * row["wire"] + sides.OTHER * row["hosts"]
    # Where ranks fold, the count is of the way of an entry, and no rank sends all of it.
    folded = row["scheme"].rstrip("*") in ("topk_dsa", "gtopk") and hosts & (hosts - 1)
    return off > near if folded else abs(off) > near


if __name__ == "__main__":
    sys.exit(main())
