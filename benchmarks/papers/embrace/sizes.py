"""EmbRace's table 3 on our text, and what partitions of a table send.

    python -m benchmarks.papers.embrace sizes --ranks 8 16

Counted from the ids of batches, without training. Of a rank's gradients of tables, the mean
over ranks and steps:

    original  a row for each id that is read
    merged    a row for each different id
    prior     those of them that the next batch of any rank reads again: what EmbRace's
              vertical schedule sends before the next forward pass (algorithm 1)

Then what a rank sends and is sent for its rows and for their gradients, where a table is
partitioned by columns, by rows in equal ranges, and by rows that a hash deals out, most
frequent first as usual: the mean of all ranks, how much more the busiest has, and how much
more all have where messages are as long as the longest, as XLA's collectives have them.
"""

import dataclasses
import itertools
import statistics

import numpy as np

from benchmarks.harness import figure, settings, table
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.settings import option
from benchmarks.harness.table import Column
from benchmarks.papers.embrace.tasks import Batch, Task, distinct, language, translation


NAME = "embrace-sizes"
# EmbRace, table 3, in MB: original, coalesced, prioritized.
PAPER = {
    "LM": (8.7, 6.9, 2.6),
    "GNMT-8": (26.0, 12.2, 5.8),
    "Transformer": (35.2, 16.6, 8.9),
    "BERT-base": (36.0, 5.5, 3.2),
}
WORDS, WIDTH = 20_000, 128
# Batches of a worker as the paper has them: 128 windows, 128 sentences, 5,120 words.
MODELS = {
    "language": lambda: language(WORDS, windows=128),
    "language, 16 windows": lambda: language(WORDS, windows=16),
    "translation": lambda: translation(WORDS, WIDTH, sentences=128),
    "translation, 512 sentences": lambda: translation(WORDS, WIDTH, sentences=512),
}


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Counts rows of gradients, and what partitions of tables send."""

    PROGRAM = "benchmarks.papers.embrace sizes"
    ranks: tuple[int, ...] = option((8, 16), "numbers of ranks")
    steps: int = option(20, "batches that are counted")
    models: tuple[str, ...] = option(tuple(MODELS), choices=tuple(MODELS))


def sizes(task: Task, batches: list[Batch], ranks: int) -> dict[str, float]:
    """The mean rows of a rank's gradient, of all tables: original, merged and prior."""
    count = {"original": 0.0, "merged": 0.0, "prior": 0.0}
    reads = [distinct(task, batch, ranks) for batch in batches]
    for batch, now, then in zip(batches, reads, reads[1:], strict=False):
        ids = task.ids(batch)
        for name in ids:
            count["original"] += np.size(ids[name]) / ranks
            again = np.unique(np.concatenate([own[name] for own in then]))
            for own in now:
                count["merged"] += len(own[name]) / ranks
                count["prior"] += np.isin(own[name], again).sum() / ranks
    return {key: value / (len(batches) - 1) for key, value in count.items()}


def parts_by_rows(ids: np.ndarray, rows: int, ranks: int, how: str) -> np.ndarray:
    """How many of the ids each owner has."""
    if how == "ranges":
        owners = ids // -(-rows // ranks)
    else:
        # An integer's bits stirred, as SplitMix64 does.
        x = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        owners = (x ^ (x >> np.uint64(31))) % np.uint64(ranks)
    return np.bincount(owners.astype(np.int64), minlength=ranks)


def balance(
    reads: list[dict[str, np.ndarray]], shapes: dict[str, tuple[int, int]], how: str
) -> dict[str, float]:
    """What ranks send and are sent in a step, in numbers of tables, ids left out.

    Args:
        reads: The different rows of each table that each rank reads.
        shapes: Rows and numbers of a row of each table.
        how: "columns", "ranges" or "hash".

    Returns:
        The mean of all ranks; the busiest over that; and the mean where all messages are
        as long as the longest, over that.
    """
    n = len(reads)
    sent = np.zeros((n, n))  # [owner, reader]: numbers of vectors, and back of gradients
    for name, (rows, dim) in shapes.items():
        for reader, own in enumerate(reads):
            if how == "columns":
                # Of uneven columns the first ranks have one more.
                columns = np.full(n, dim // n) + (np.arange(n) < dim % n)
                sent[:, reader] += columns * len(own[name])
            else:
                sent[:, reader] += dim * parts_by_rows(own[name], rows, n, how)
    np.fill_diagonal(sent, 0)
    # An owner sends vectors and is sent gradients, a reader the other way round.
    each = sent.sum(0) + sent.sum(1)
    padded = sent.max() * 2 * (n - 1)
    mean = float(each.mean())
    return {"mean": mean, "busiest": each.max() / mean, "padded": padded / mean}


def main(argv: list[str] | None = None) -> int:
    settings = Settings.parse(argv)
    record = Recorder(NAME, settings.command())
    for model in settings.models:
        task = MODELS[model]()
        shapes = {k: x.shape for k, x in task.init()["tables"].items()}
        (dim,) = {shape[1] for shape in shapes.values()}
        for ranks in settings.ranks:
            batches = [*itertools.islice(task.batches(ranks), settings.steps + 1)]
            row = {"model": model, "ranks": ranks, "dim": dim}
            counted = sizes(task, batches, ranks)
            record.add(**row, part="sizes", **counted)
            for how in ("columns", "ranges", "hash"):
                each = [
                    balance(distinct(task, batch, ranks), shapes, how)
                    for batch in batches[:-1]
                ]
                means = {k: statistics.fmean(one[k] for one in each) for k in each[0]}
                record.add(**row, part="balance", how=how, **means)
    of = lambda part: [row for row in record.rows if row["part"] == part]
    paper = [
        {"model": f"{name} (paper)", "original": a, "merged": b, "prior": c}
        for name, (a, b, c) in PAPER.items()
    ]
    here = [row | _megabytes(row) for row in of("sizes")]
    table.show([*here, *paper], SIZES, "Gradients of tables, MB a rank (EmbRace, table 3)")
    table.show(of("balance"), BALANCE, "What a rank sends and is sent for rows")
    say(f"\nwritten: {record.write()} and .csv")
    figure.save(NAME, [_line(row) for row in here + paper])
    figure.save(NAME, [_line_of_balance(row) for row in of("balance")], part="balance")
    return 0


def _megabytes(row):
    bytes_of = 4 * row["dim"] * 1e-6
    return {key: row[key] * bytes_of for key in ("original", "merged", "prior")}


def _line(row):
    shares = {"merged_share": _share(row, "merged"), "prior_share": _share(row, "prior")}
    keys = ("model", "ranks", "original", "merged", "prior")
    return {key: row.get(key) for key in keys} | shares


def _line_of_balance(row):
    return {key: row[key] for key in ("model", "ranks", "how", "mean", "busiest", "padded")}


def _share(row, key):
    whole = {"merged": "original", "prior": "merged"}[key]
    return row[key] / row[whole]


SIZES = [
    Column("model", "model"),
    Column("ranks", "ranks", "d"),
    Column("original", "original", ".2f"),
    Column("merged", "merged", ".2f"),
    Column("prior", "prior", ".2f"),
    Column("merged/original", lambda row: _share(row, "merged"), ".1%"),
    Column("prior/merged", lambda row: _share(row, "prior"), ".1%"),
]
BALANCE = [
    Column("model", "model"),
    Column("ranks", "ranks", "d"),
    Column("partition", "how"),
    Column("mean, MB", "mean", ".3f", 4e-6),
    Column("busiest / mean", "busiest", ".3f"),
    Column("padded / mean", "padded", ".3f"),
]
