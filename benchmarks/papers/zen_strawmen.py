"""Zen's strawmen: owners by sorted thresholds (3.1), and a hash memory that loses (3.2)."""

import numpy as np

from benchmarks.data.index_sets import WIDTH
from benchmarks.harness.record import Recorder, say
from benchmarks.papers.formulas import measures
from sparsejax.units.ownership import StripedHash


def thresholds(union: np.ndarray, parts: int) -> np.ndarray:
    """The part of each unit, where the sorted union is cut into equal pieces (3.1)."""
    units = np.flatnonzero(union)
    edges = units[np.arange(1, parts) * len(units) // parts]
    return np.searchsorted(edges, np.arange(len(union)), side="right")


def imbalances(record: Recorder, runs: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
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
    """The share lost by hashing into a memory without a way out (3.2, Algorithm 3)."""
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
