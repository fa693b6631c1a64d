"""Ok-Topk's table 1 and SparDL's table I: what the papers say is sent, and what is.

    python -m benchmarks.choosing_table --ranks 8 14

On simulated devices, which have no network: bytes and messages alone. Every system runs
`--warm` steps first, and is then counted over 64 more, so that thresholds that are found
anew and regions that are bounded anew are in the mean. Prints, for each number of ranks,

    words   of 4 bytes, over k: the paper's formula (the worst, where it has a range); with
            the paper's format, a 32-bit index and a value an entry; with index codes, and
            what share of the formula these need
    rounds  messages that wait for one another, the paper's and those here: without those
            of a few numbers, on which ranks agree, and one for a collective of XLA's

Writes benchmarks/results/choosing-table-*.jsonl.
"""

import argparse

import jax


MOST = 16  # ranks
jax.config.update("jax_num_cpu_devices", MOST)

import numpy as np  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

import sparsejax  # noqa: E402
from benchmarks import choosing_systems as systems  # noqa: E402
from benchmarks.jax_side import AXIS  # noqa: E402
from benchmarks.record import Recorder, say  # noqa: E402


NAME = "choosing-table"
COUNTED = 64  # steps: twice the thresholds' period, once that of the regions


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.choosing_table", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[8, 14], help=f"up to {MOST}")
    add("--size", type=int, default=1 << 20, help="numbers of the gradient (%(default)s)")
    add("--density", type=float, default=0.01, help="of it that is sent (%(default)s)")
    add("--warm", type=int, default=64, help="steps before any counts (%(default)s)")
    add("--only", nargs="+", default=[], help="of these systems")
    args = parser.parse_args()
    if not 2 <= min(args.ranks) <= max(args.ranks) <= MOST:
        parser.error(f"--ranks must lie in 2 to {MOST}, got {args.ranks}")
    words = f"--ranks {' '.join(map(str, args.ranks))} --size {args.size} "
    words += f"--density {args.density:g} --warm {args.warm}"
    words += " --only " + " ".join(map(repr, args.only)) if args.only else ""
    record = Recorder(f"python -m benchmarks.choosing_table {words}")
    for ranks in args.ranks:
        rows = counted(ranks, args)
        table(rows)
        record.rows += rows
    same = {(row["ranks"], row["name"]) for row in record.rows}
    record.keep(NAME, lambda row: (row["ranks"], row["name"]) not in same)
    say(f"\nwritten: {record.write(NAME)}")


def counted(ranks: int, args: argparse.Namespace) -> list[dict]:
    """A row for each system."""
    devices = np.array(jax.devices()[:ranks])
    mesh = Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))
    of_ranks = [systems.gradients(args.size, rank) for rank in range(ranks)]
    given = [np.stack(own) for own in zip(*of_ranks, strict=True)]
    k = round(args.size * args.density)
    rows = []
    for name, tx in systems.transformations(args.density, ranks).items():
        if tx is None or (args.only and name not in args.only):
            continue
        one = systems.side(name, tx, args.size, mesh)
        one.load(*given)
        for _ in range(args.warm):
            one.run()
        sent, rounds = [], []
        for _ in range(COUNTED):
            one.run()
            told = sparsejax.metrics(one.state)
            sent.append(float(told["sync/w/wire_bytes"]))
            rounds.append(float(told["sync/w/rounds"]))
        paper = systems.paper(name, k, args.size, ranks)
        row = dict(ranks=ranks, name=name, k=k, size=args.size)
        row |= dict(words=float(np.mean(sent)) / 4, rounds=float(np.mean(rounds)))
        rows.append(row | dict(paper_words=paper.bytes / 4, paper_rounds=paper.rounds))
        say(f"  {ranks} ranks, {name}: counted")
    return rows


def table(rows: list[dict]) -> None:
    """A line for each system, its two formats side by side."""
    if not rows:
        return
    of = {row["name"]: row for row in rows}
    k, ranks, size = rows[0]["k"], rows[0]["ranks"], rows[0]["size"]
    say(f"\n{ranks} ranks, {k:,} of {size:,} numbers; words over k")
    say(
        f"{'':16} {'paper':>7} {'32-bit':>7} {'codes':>7} {'ratio':>6}   rounds paper, here"
    )
    for name, row in of.items():
        if name.endswith("*"):
            continue
        plain = of.get(name + "*")
        wide = f"{plain['words'] / k:7.2f}" if plain else f"{'-':>7}"
        say(
            f"{name:16} {row['paper_words'] / k:7.2f} {wide} {row['words'] / k:7.2f} "
            f"{row['words'] / row['paper_words']:6.2f}   {row['paper_rounds']:11.0f} "
            f"{row['rounds']:5.1f}"
        )


if __name__ == "__main__":
    main()
