"""The paper's analysis of sparse gradients, repeated on the demo's language model.

    python -m benchmarks.papers.zen_analysis [--steps 300] [--ranks 128] [--out DIRECTORY]

Trains, records which rows of the two embedding tables have gradients, and prints the
figures that Zen (figures 2, 3, 8 and 15, sections 3.1 and 3.2) reports of its models beside
those of this one.
Writes benchmarks/results/zen-*: a PNG and a CSV for each figure, and all numbers as JSON
lines.
"""

import dataclasses
import pathlib

import numpy as np

from benchmarks.data import index_sets
from benchmarks.harness import settings, table
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.settings import option
from benchmarks.harness.table import Column
from benchmarks.papers import zen_figures, zen_strawmen
from benchmarks.papers.formulas import design_space, measures
from examples.data import docstrings
from sparsejax.units.ownership import StripedHash
from sparsejax.wire import index_codes


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Repeats Zen's analysis of sparse gradients on the demo's language model."""

    PROGRAM = "benchmarks.papers.zen_analysis"
    steps: int = option(300, "steps to train")
    ranks: int = option(128, "ranks whose sets are compared")
    out: str | None = option(None, "a folder, instead of benchmarks/results")

    def __post_init__(self):
        super().__post_init__()
        if self.steps < 1 or self.ranks < 2:
            raise ValueError("it takes at least one step and two ranks")


TRAINING_RANKS = 16
WIDTH = index_sets.WIDTH
BLOCK = 256  # elements in OmniReduce's tensor blocks
SERVERS = 16  # of figure 15
DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9, 0.95, 0.99)
SHORT = {"input_embedding": "input", "output_embedding": "output"}
SCHEMES = {
    "all-reduce": design_space.all_reduce,
    "AGsparse": design_space.ag_sparse,
    "SparCML": design_space.sparcml,
    "OmniReduce": design_space.omnireduce,
    "sparse PS": design_space.sparse_ps,
    "sparse PS, broadcast": design_space.sparse_ps_broadcast,
    "Balanced Parallelism": design_space.balanced_parallelism,
    "Balanced Parallelism without index": design_space.balanced_parallelism_without_index,
    "Zen": design_space.zen,
}


def doublings(most: int) -> list[int]:
    return [1 << k for k in range(1, most.bit_length()) if 1 << k <= most]


def figure2(record: Recorder, sets: dict[str, np.ndarray]) -> dict:
    """Overlap of pairs, and how density grows with the number of ranks."""
    say("\nFigure 2: overlap of pairs, and densification (one rank is 1)")
    by_set = {}
    for name, flags in sets.items():
        overlaps = measures.overlap_ratios(flags)
        counts = doublings(len(flags))
        ratios = measures.densification(flags, counts)
        by_set[name] = {
            "density": float(measures.density(flags).mean()),
            "overlaps": overlaps,
            "counts": counts,
            "densification": ratios.tolist(),
        }
        say(
            f"  {name:18} density {by_set[name]['density']:6.2%}  overlap "
            f"{overlaps.mean():.2f} (from {overlaps.min():.2f} to {overlaps.max():.2f})  "
            f"densification {ratios[-1]:.1f} over {counts[-1]} ranks"
        )
        record.add(
            part="figure 2",
            sets=name,
            **by_set[name]
            | {"overlaps": np.percentile(overlaps, range(0, 101, 5)).tolist()},
        )
    say("  paper: overlap varies widely and is well above 0.05; densification is below n")
    return by_set


def figure3(record: Recorder, sets: dict[str, np.ndarray]) -> dict:
    """The places of non-zeros, words being ordered by frequency."""
    say("\nFigure 3: share of non-zeros in the first of 8 ranges, and skewness ratio")
    by_set = {}
    for name, flags in sets.items():
        shares = np.mean([measures.partition_shares(x, 8) for x in flags], axis=0)
        counts = doublings(128)
        skew = [np.mean([measures.skewness_ratio(x, k) for x in flags]) for k in counts]
        by_set[name] = {
            "shares": shares.tolist(),
            "counts": counts,
            "skewness": [float(ratio) for ratio in skew],
        }
        say(f"  {name:18} first range {shares[0]:.0%}, skewness {skew[-1]:.0f} of 128")
        record.add(part="figure 3", sets=name, **by_set[name])
    say("  paper: over 60% in the first of 8; skewness over 70 of 128 for its LSTM")
    return by_set


def scheme_bytes(sets: np.ndarray, unit: str) -> dict[str, float]:
    """The time of every scheme, relative to all-reduce.

    By element, as in the paper, each number of a row is an entry with an index of its own
    and is hashed by itself; by row, a row is one entry.
    """
    sent = {}
    if unit == "element":
        flags = np.repeat(sets, WIDTH, axis=1)
        options = {"value_bytes": 4}
        block = BLOCK
    else:
        flags, options, block = sets, {"value_bytes": 4 * WIDTH}, BLOCK // WIDTH
    for name, scheme in SCHEMES.items():
        if name == "OmniReduce":
            sent[name] = scheme(flags, block, **options).link_bytes
        else:
            sent[name] = scheme(flags, **options).link_bytes
    return {name: bytes / sent["all-reduce"] for name, bytes in sent.items()}


def figure8(record: Recorder, sets: dict[str, np.ndarray]) -> dict:
    """Every scheme's time by number of ranks, in bytes of the busiest link."""
    by_unit = {}
    for name, flags in sets.items():
        for unit in ("element", "row"):
            counts = doublings(len(flags))
            columns = [scheme_bytes(flags[:n], unit) for n in counts]
            times = {scheme: [c[scheme] for c in columns] for scheme in SCHEMES}
            by_unit[name, unit] = {"counts": counts, "times": times}
            record.add(part="figure 8", sets=name, unit=unit, counts=counts, times=times)
            lines = [
                {"": scheme} | dict(zip(counts, t, strict=True))
                for scheme, t in times.items()
            ]
            columns = [Column("ranks", lambda line: line[""])]
            columns += [Column(str(n), lambda line, n=n: line[n], ".3f") for n in counts]
            title = f"Figure 8: time relative to all-reduce, {name}, units are {unit}s"
            table.show(lines, columns, title)
        # (n - 1) sets at 8 bytes an element, against 2 (n - 1) / n of all at 4.
        worse = int(1 / flags.mean()) + 1
        last = {k: v[-1] for k, v in by_unit[name, "element"]["times"].items()}
        doubled = last["Balanced Parallelism"] / last["Balanced Parallelism without index"]
        say(
            f"  AGsparse is worse than all-reduce from about {worse} ranks (paper: 40); "
            f"COO makes Balanced Parallelism {doubled:.2f} times as long (paper: 2)"
        )
        say(
            f"  on {counts[-1]} ranks, relative to all-reduce: Balanced Parallelism "
            f"{last['Balanced Parallelism'] - 1:+.0%} (paper, NMT on 128: -36%), "
            f"OmniReduce {last['OmniReduce'] - 1:+.0%} (paper: marginal), "
            f"Zen {last['Zen'] - 1:+.0%}"
        )
        record.add(part="figure 8", sets=name, ag_sparse_worse_from=worse)
    return by_unit


def figure15(record: Recorder, sets: np.ndarray) -> dict:
    """Bytes of what 16 servers send back, by density, relative to the dense tensor."""
    size = sets.shape[1] * WIDTH
    rng = np.random.default_rng(0)
    owners = measures.assignment(StripedHash(), size, SERVERS)
    width = StripedHash().over(size, SERVERS).width
    unions = [sets[:n].any(axis=0) for n in (1, *doublings(len(sets)))]
    cases = [("model", np.repeat(union, WIDTH)) for union in unions]
    for density in DENSITIES:
        cases.append(("random", rng.random(size) < density))
    rows = []
    for kind, flags in cases:
        density = float(flags.mean())
        part = measures.part_counts(flags[None], owners, SERVERS)[0]
        blocks = np.pad(flags, (0, -size % BLOCK)).reshape(-1, BLOCK).any(axis=1).mean()
        # 4 bytes a message say how many entries it has.
        bits = [code.needed_bits(part, width) for code in index_codes.CODES.values()]
        ours = 32 * SERVERS + float(np.sum(np.min(np.array(bits), axis=0)))
        rows.append(
            {
                "sets": kind,
                "density": density,
                "COO": 2 * density,
                "bitmap of the whole range": density + SERVERS / 32,
                "tensor blocks": float(blocks) * (BLOCK + 1) / BLOCK,
                "hash bitmap": density + 1 / 32,
                "ours, cheapest code": density + ours / 32 / size,
            }
        )
    rows.sort(key=lambda row: (row["sets"], row["density"]))
    names = list(rows[0])[1:]
    columns = [Column("", "sets"), *(Column(name, name, ".4f") for name in names)]
    table.show(
        rows, columns, "Figure 15(a): bytes relative to the dense tensor, 16 servers"
    )
    for row in rows:
        record.add(part="figure 15", **row)
    high = next(row for row in rows if row["sets"] == "random" and row["density"] > 0.945)
    say(
        f"  at 95% the hash bitmap takes {high['hash bitmap']:.3f} of dense "
        "(paper: below 1); COO and the whole-range bitmap reach 1 at 50% (paper: 50%)"
    )
    return {"rows": rows, "names": names[1:]}


def main(argv: list[str] | None = None) -> None:
    settings = Settings.parse(argv)
    training = min(TRAINING_RANKS, settings.ranks)
    index_sets.mesh(training)  # Before anything starts JAX.
    folder = pathlib.Path(settings.out) if settings.out else None
    record = Recorder("zen", settings.command(), folder=folder)
    corpus = docstrings.load()
    say(f"{len(corpus.words):,} words, {len(corpus.tokens):,} tokens, {training} ranks")
    trained = index_sets.train(corpus, settings.steps, training)
    record.add(part="training", ranks=training, sha256=corpus.sha256, losses=trained.losses)
    sets = {}
    for windows in (16, 64):
        of_tables, full = index_sets.many_ranks(
            trained.params, corpus, settings.ranks, windows
        )
        sets |= {f"{SHORT[name]}, {windows} windows": of_tables[name] for name in SHORT}
        say(f"{full:.2%} of the numbers of rows with a gradient are not zero")
        record.add(part="sets", windows=windows, numbers_not_zero=full)
    reading = index_sets.in_order(
        trained.params, corpus, min(settings.steps, 100), training
    )
    drawn = {
        "overlap": figure2(record, sets),
        "skew": figure3(record, sets),
        "schemes": figure8(record, {n: s for n, s in sets.items() if "input" in n}),
        "formats": figure15(record, sets["input, 64 windows"]),
    }
    one = "input_embedding"
    zen_strawmen.imbalances(
        record,
        {
            "as trained, windows at random": (trained.steps, trained.sets[one]),
            "text read from front to back": (np.arange(len(reading[one])), reading[one]),
        },
    )
    zen_strawmen.losses(record)
    zen_figures.draw(drawn, folder)
    say(f"\nwritten: {record.write()} and the figures beside it")


if __name__ == "__main__":
    main()
