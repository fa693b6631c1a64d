"""Ok-Topk's table 1 and SparDL's table I: their formulas, and the bytes that are sent.

    python -m benchmarks.papers.top_k.table --ranks 8 14

On simulated devices, which have no network: bytes and messages alone. Every system runs
`--warm` steps first, and is then counted over 64 more, so that thresholds that are found
anew and regions that are bounded anew are in the mean. Prints, for each number of ranks,

    words   of 4 bytes, over k: the paper's formula (the worst, where it has a range); with
            the paper's format, a 32-bit index and a value an entry; with index codes, and
            the share of the formula that these need
    rounds  messages that wait for one another, the paper's and those here: without those
            of a few numbers, on which ranks agree, and one for a collective of XLA's

Writes benchmarks/results/choosing-table-*.jsonl.
"""

import dataclasses

import jax


MOST = 16  # ranks
jax.config.update("jax_num_cpu_devices", MOST)

import numpy as np  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

import sparsejax  # noqa: E402
from benchmarks.harness import settings, table  # noqa: E402
from benchmarks.harness.record import Recorder, say  # noqa: E402
from benchmarks.harness.settings import option  # noqa: E402
from benchmarks.harness.table import Column  # noqa: E402
from benchmarks.network.jax_side import AXIS  # noqa: E402
from benchmarks.papers.top_k import systems  # noqa: E402


COUNTED = 64  # steps: twice the thresholds' period, once that of the regions


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Counts words and messages of systems that choose what they send."""

    PROGRAM = "benchmarks.papers.top_k.table"
    ranks: tuple[int, ...] = option((8, 14), f"numbers of ranks, up to {MOST}")
    size: int = option(1 << 20, "numbers of the gradient")
    density: float = option(0.01, "share of them that is sent")
    warm: int = option(64, "steps before any counts")
    only: tuple[str, ...] = option((), "systems to count; all if none")

    def __post_init__(self):
        super().__post_init__()
        if not self.ranks or not 2 <= min(self.ranks) <= max(self.ranks) <= MOST:
            raise ValueError(f"--ranks must lie in 2 to {MOST}, got {self.ranks}")


def main(argv: list[str] | None = None) -> None:
    settings = Settings.parse(argv)
    record = Recorder("choosing-table", settings.command(), ("ranks", "name"))
    for ranks in settings.ranks:
        rows = counted(ranks, settings)
        show(rows)
        record.rows += rows
    say(f"\nwritten: {record.write()}")


def counted(ranks: int, settings: Settings) -> list[dict]:
    """A row for each system."""
    devices = np.array(jax.devices()[:ranks])
    mesh = Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))
    by_rank = [systems.gradients(settings.size, rank) for rank in range(ranks)]
    by_step = [np.stack(gradients) for gradients in zip(*by_rank, strict=True)]
    k = round(settings.size * settings.density)
    rows = []
    for name, tx in systems.transformations(settings.density, ranks).items():
        if tx is None or (settings.only and name not in settings.only):
            continue
        system = systems.side(name, tx, settings.size, mesh)
        system.load(*by_step)
        for _ in range(settings.warm):
            system.run()
        sent, rounds = [], []
        for _ in range(COUNTED):
            system.run()
            metrics = sparsejax.metrics(system.state)
            sent.append(float(metrics["sync/w/wire_bytes"]))
            rounds.append(float(metrics["sync/w/rounds"]))
        paper = systems.paper(name, k, settings.size, ranks)
        row = dict(ranks=ranks, name=name, k=k, size=settings.size)
        row |= dict(words=float(np.mean(sent)) / 4, rounds=float(np.mean(rounds)))
        rows.append(row | dict(paper_words=paper.bytes / 4, paper_rounds=paper.rounds))
        say(f"  {ranks} ranks, {name}: counted")
    return rows


def show(rows: list[dict]) -> None:
    """Prints a line for each system, its two formats side by side."""
    if not rows:
        return
    words = {row["name"]: row["words"] for row in rows}
    k, ranks, size = rows[0]["k"], rows[0]["ranks"], rows[0]["size"]
    columns = [
        Column("", "name"),
        Column("paper", "paper_words", ".2f", 1 / k),
        Column("32-bit", lambda row: words.get(row["name"] + "*"), ".2f", 1 / k),
        Column("codes", "words", ".2f", 1 / k),
        Column("ratio", lambda row: row["words"] / row["paper_words"], ".2f"),
        Column("rounds, paper", "paper_rounds", ".0f"),
        Column("here", "rounds", ".1f"),
    ]
    coded = [row for row in rows if not row["name"].endswith("*")]
    table.show(coded, columns, f"{ranks} ranks, {k:,} of {size:,} numbers; words over k")


if __name__ == "__main__":
    main()
