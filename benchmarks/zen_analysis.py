"""The paper's analysis of sparse gradients, repeated on the demo's language model.

    python -m benchmarks.zen_analysis [--steps 300] [--ranks 128] [--out DIRECTORY]

Trains, records which rows of the two embedding tables have gradients, and prints what Zen
(figures 2, 3, 8 and 15, sections 3.1 and 3.2) reports of its models beside what it is here.
Writes benchmarks/results/zen-*: a PNG and the CSV behind it for each figure, and all
numbers as JSON lines.
"""

import argparse
import json
import pathlib
import sys

import jax
import numpy as np

from benchmarks import index_sets, zen_figures
from benchmarks.record import RESULTS, Recorder, say
from examples import lm_corpus
from sparsejax.advise.papers import design_space, measures
from sparsejax.units.ownership import StripedHash
from sparsejax.wire import index_codes


TRAINING_RANKS = 16
WIDTH = index_sets.WIDTH
BLOCK = 256  # elements in OmniReduce's tensor blocks
SERVERS = 16  # of figure 15
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
    found = {}
    for name, flags in sets.items():
        overlaps = measures.overlap_ratios(flags)
        counts = doublings(len(flags))
        ratios = measures.densification(flags, counts)
        found[name] = {
            "density": float(measures.density(flags).mean()),
            "overlaps": overlaps,
            "counts": counts,
            "densification": ratios.tolist(),
        }
        say(
            f"  {name:18} density {found[name]['density']:6.2%}  overlap "
            f"{overlaps.mean():.2f} (from {overlaps.min():.2f} to {overlaps.max():.2f})  "
            f"densification {ratios[-1]:.1f} over {counts[-1]} ranks"
        )
        record.add(
            part="figure 2",
            sets=name,
            **found[name]
            | {"overlaps": np.percentile(overlaps, range(0, 101, 5)).tolist()},
        )
    say("  paper: overlap varies widely and is well above 0.05; densification is below n")
    return found


def figure3(record: Recorder, sets: dict[str, np.ndarray]) -> dict:
    """Where the non-zeros lie, words being ordered by frequency."""
    say("\nFigure 3: share of non-zeros in the first of 8 ranges, and skewness ratio")
    found = {}
    for name, flags in sets.items():
        shares = np.mean([measures.partition_shares(x, 8) for x in flags], axis=0)
        counts = doublings(128)
        skew = [np.mean([measures.skewness_ratio(x, k) for x in flags]) for k in counts]
        found[name] = {
            "shares": shares.tolist(),
            "counts": counts,
            "skewness": [float(ratio) for ratio in skew],
        }
        say(f"  {name:18} first range {shares[0]:.0%}, skewness {skew[-1]:.0f} of 128")
        record.add(part="figure 3", sets=name, **found[name])
    say("  paper: over 60% in the first of 8; skewness over 70 of 128 for its LSTM")
    return found


def scheme_bytes(sets: np.ndarray, unit: str) -> dict[str, float]:
    """The time of every scheme, relative to all-reduce.

    By element, as in the paper, each number of a row is an entry with an index of its own
    and is hashed by itself; by row, a row is one entry.
    """
    found = {}
    if unit == "element":
        flags = np.repeat(sets, WIDTH, axis=1)
        options = {"value_bytes": 4}
        block = BLOCK
    else:
        flags, options, block = sets, {"value_bytes": 4 * WIDTH}, BLOCK // WIDTH
    for name, scheme in SCHEMES.items():
        if name == "OmniReduce":
            found[name] = scheme(flags, block, **options).link_bytes
        else:
            found[name] = scheme(flags, **options).link_bytes
    return {name: bytes / found["all-reduce"] for name, bytes in found.items()}


def figure8(record: Recorder, sets: dict[str, np.ndarray]) -> dict:
    """Every scheme's time by number of ranks, in bytes of the busiest link."""
    found = {}
    for name, flags in sets.items():
        for unit in ("element", "row"):
            counts = doublings(len(flags))
            columns = [scheme_bytes(flags[:n], unit) for n in counts]
            times = {scheme: [c[scheme] for c in columns] for scheme in SCHEMES}
            found[name, unit] = {"counts": counts, "times": times}
            record.add(part="figure 8", sets=name, unit=unit, counts=counts, times=times)
            say(f"\nFigure 8: time relative to all-reduce, {name}, units are {unit}s")
            say(f"  {'ranks':36}" + "".join(f"{n:8}" for n in counts))
            for scheme, values in times.items():
                say(f"  {scheme:36}" + "".join(f"{value:8.3f}" for value in values))
        # (n - 1) sets at 8 bytes an element, against 2 (n - 1) / n of all at 4.
        worse = int(1 / flags.mean()) + 1
        last = {k: v[-1] for k, v in found[name, "element"]["times"].items()}
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
    return found


def figure15(record: Recorder, sets: np.ndarray) -> dict:
    """Bytes of what 16 servers send back, by density, relative to the dense tensor."""
    size = sets.shape[1] * WIDTH
    rng = np.random.default_rng(0)
    owners = measures.assignment(StripedHash(), size, SERVERS)
    width = StripedHash().over(size, SERVERS).width
    unions = [sets[:n].any(axis=0) for n in (1, *doublings(len(sets)))]
    cases = [("model", np.repeat(union, WIDTH)) for union in unions]
    for density in (
        0.001,
        0.003,
        0.01,
        0.03,
        0.1,
        0.2,
        0.3,
        0.4,
        0.5,
        0.7,
        0.9,
        0.95,
        0.99,
    ):
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
    say("\nFigure 15(a): bytes relative to the dense tensor, 16 servers")
    say("  " + "".join(f"{name:>27}" for name in names))
    for row in rows:
        record.add(part="figure 15", **row)
        say(f"  {row['sets']:7}" + "".join(f"{row[n]:27.4f}" for n in names)[7:])
    high = next(row for row in rows if row["sets"] == "random" and row["density"] > 0.945)
    say(
        f"  at 95% the hash bitmap takes {high['hash bitmap']:.3f} of dense "
        "(paper: below 1); COO and the whole-range bitmap reach 1 at 50% (paper: 50%)"
    )
    return {"rows": rows, "names": names[1:]}


def thresholds(union: np.ndarray, parts: int) -> np.ndarray:
    """The part of each unit, where the sorted union is cut into equal pieces (3.1)."""
    units = np.flatnonzero(union)
    edges = units[np.arange(1, parts) * len(units) // parts]
    return np.searchsorted(edges, np.arange(len(union)), side="right")


def strawman(record: Recorder, runs: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Imbalance of the push where thresholds are cut anew only every so many steps."""
    say("\nSection 3.1: imbalance by thresholds, over the steps after they were cut")
    say("  paper: the push between 1.4 and 5.1, cut every 1000 steps, 16 ranks")
    for name, (steps, sets) in runs.items():
        ranks, words = sets.shape[1:]
        for period in (1, 10, 100, 1000):
            ratios: dict[str, list[float]] = {"push": [], "pull": []}
            cut = None
            for step, flags in zip(steps, sets, strict=True):
                again = cut is None or step - cut >= period
                if again:
                    cut, owners = step, thresholds(flags.any(axis=0), ranks)
                if not again or period == 1:
                    ratios["push"].append(measures.push_imbalance(flags, owners))
                    ratios["pull"].append(measures.pull_imbalance(flags, owners))
            if ratios["push"]:
                when = "same step" if period == 1 else f"every {period} steps"
                _say_imbalance(name, when, ratios)
                record.add(part="strawman", sets=name, period=period, **ratios)
        some = sets[:: max(1, len(sets) // 8)]
        for unit, factor in (("row", 1), ("element", WIDTH)):
            owners = measures.assignment(StripedHash(), words * factor, ranks)
            wide = [np.repeat(flags, factor, axis=1) for flags in some]
            ratios = {
                "push": [measures.push_imbalance(flags, owners) for flags in wide],
                "pull": [measures.pull_imbalance(flags, owners) for flags in wide],
            }
            _say_imbalance(name, f"hashed by {unit}", ratios)
            record.add(part="strawman", sets=name, hashed_by=unit, **ratios)


def _say_imbalance(name: str, when: str, ratios: dict[str, list[float]]) -> None:
    spans = [f"{key} {min(x):.2f} to {max(x):.2f}" for key, x in ratios.items()]
    say(f"  {name:30} {when:18} " + "  ".join(f"{span:20}" for span in spans).rstrip())


def losses(record: Recorder) -> None:
    """What hashing into a memory without a way out loses (3.2, Algorithm 3)."""
    say("\nSection 3.2: entries lost where a tensor of 10% density is hashed into a memory")
    size = 4_000_000
    count = size // 10
    rng = np.random.default_rng(0)
    for memory in (0.25, 0.5, 1, 2, 4):
        slots = int(memory * size)
        kept = np.count_nonzero(np.bincount(rng.integers(0, slots, count), minlength=slots))
        lost = 1 - kept / count
        expected = 1 - slots / count * -np.expm1(-count / slots)
        note = {1: "   paper: 17.5%", 4: "   paper: 4.8%"}.get(memory, "")
        say(
            f"  memory {memory:4} of the tensor  {lost:6.2%} lost, "
            f"by theory {expected:6.2%}{note}"
        )
        record.add(part="loss", memory=memory, lost=lost, expected=float(expected))
    say("  The paper's pair is what a quarter of the tensor, and all of it, lose.")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zen_analysis")
    parser.add_argument("--steps", type=int, default=300, help="steps to train (300)")
    parser.add_argument(
        "--ranks", type=int, default=128, help="ranks whose sets are compared (128)"
    )
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="for the files")
    options = parser.parse_args(argv)
    if options.steps < 1 or options.ranks < 2:
        parser.error("it takes at least one step and two ranks")
    arguments = sys.argv[1:] if argv is None else argv
    training = min(TRAINING_RANKS, options.ranks)
    index_sets.mesh(training)  # Before anything starts JAX.
    record = Recorder(" ".join(["python -m benchmarks.zen_analysis", *arguments]))
    say(", ".join(f"{key} {value}" for key, value in record.head.items()))
    corpus = lm_corpus.load()
    say(f"{len(corpus.words):,} words, {len(corpus.tokens):,} tokens, {training} ranks")
    trained = index_sets.train(corpus, options.steps, training)
    record.add(part="training", ranks=training, sha256=corpus.sha256, losses=trained.losses)
    sets = {}
    for windows in (16, 64):
        found, full = index_sets.many_ranks(trained.params, corpus, options.ranks, windows)
        sets |= {f"{SHORT[name]}, {windows} windows": found[name] for name in SHORT}
        say(f"{full:.2%} of the numbers of rows with a gradient are not zero")
        record.add(part="sets", windows=windows, numbers_not_zero=full)
    reading = index_sets.in_order(trained.params, corpus, min(options.steps, 100), training)
    drawn = {
        "overlap": figure2(record, sets),
        "skew": figure3(record, sets),
        "schemes": figure8(record, {n: s for n, s in sets.items() if "input" in n}),
        "formats": figure15(record, sets["input, 64 windows"]),
    }
    one = "input_embedding"
    strawman(
        record,
        {
            "as trained, windows at random": (trained.steps, trained.sets[one]),
            "text read from front to back": (np.arange(len(reading[one])), reading[one]),
        },
    )
    losses(record)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"zen-jax{jax.__version__}.jsonl"
    lines = [json.dumps(row) for row in (record.head, *record.rows)]
    path.write_text("\n".join(lines) + "\n")
    zen_figures.draw(drawn, options.out)
    say(f"\nwritten: {path} and the figures beside it")


if __name__ == "__main__":
    main()
