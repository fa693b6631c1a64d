"""Times of functions of one process, taken in turn."""

import statistics
import time

import jax

from benchmarks.harness.record import say


def alternate(sides: dict, repeats: int, sample: float = 0.1) -> dict[str, list[float]]:
    """Times functions in turn, so that noise affects all equally.

    A sample is as many calls as take about `sample` seconds, so that an interruption has
    the same weight for a short function as for a long one. On a GPU the calls of a sample
    are queued: the time of a launch would hide that of a short function.

    Args:
        sides: The functions, by name.
        repeats: The number of samples of each.
        sample: The seconds of a sample.

    Returns:
        For each function the seconds of a call in each sample.
    """
    queued = jax.default_backend() == "gpu"

    def take(run, calls):
        start, result = time.perf_counter(), None
        for _ in range(calls):
            result = run()
            if not queued:
                jax.block_until_ready(result)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls

    calls = {}
    for name, run in sides.items():
        jax.block_until_ready(run())
        calls[name] = max(1, round(sample / take(run, 3)))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            times[name].append(take(run, calls[name]))
    return times


def spread(times: list[float]) -> str:
    """Formats the median and the range of times in milliseconds."""
    low, middle, high = min(times), statistics.median(times), max(times)
    return f"{1e3 * middle:.2f} ms ({1e3 * low:.2f} to {1e3 * high:.2f})"


def ratios(times: dict[str, list[float]], side: str) -> dict[str, float]:
    """Returns for each function the median ratio of its times to those of `side`.

    Ratios are taken sample by sample.
    """
    return {
        name: statistics.median(a / b for a, b in zip(taken, times[side], strict=True))
        for name, taken in times.items()
    }


def show(times: dict[str, list[float]], ratio: dict[str, float], what: str) -> None:
    """Prints a line for each function: its times, and a ratio."""
    for name, taken in times.items():
        say(f"  {name:28} {spread(taken):34} {ratio[name]:6.2f} {what}")
