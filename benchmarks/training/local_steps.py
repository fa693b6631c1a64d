"""Which loss local steps reach after the same tokens, and with how many bytes.

    python -m benchmarks.training.local_steps [--ranks N] [--every N] [--steps N]

The decoder of `examples.decoder_local_steps` on simulated ranks. The outer rate of each
method with local steps is chosen from `--rates` on a seed of its own, unless a single one
is given; then every method trains on the other seeds. Sides:

    data_parallel    AdamW on mean gradients, an exchange a step
    dgc              the same, of the largest hundredth of each gradient
    average          local steps alone: the mean of the ranks' parameters, by a plain rate
    diloco           the mean of what ranks have moved, by Nesterov momentum
    streaming        the same of a fifth in each step, in four bits, applied a step later
    sparse_loco      64 of each 4,096 numbers in two bits, divided by their senders
    wide             the same of 256 of each 4,096
    bins             `sparse_loco` with the authors' table of two bits
    ranks            the same as `sparse_loco`, divided by the ranks
    demo             in every step 32 cosine coefficients of each 4,096 numbers, and signs

The loss is that of the anchor on held-out text. Nothing is sent: bytes are those that the
metrics count. A run whose row is in the result file is not repeated.

Loss over the clock combines these losses with the seconds of a step that
`benchmarks.network.local_steps` has measured of the same number of hosts and steps in a
round. Writes benchmarks/results/local-steps-*.jsonl, .csv and .png, and
local-steps-clock-*.csv and .png.
"""

import dataclasses
import statistics
import sys

import jax


MOST_RANKS = 16
jax.config.update("jax_num_cpu_devices", MOST_RANKS)

import numpy as np  # noqa: E402

from benchmarks.harness import figure, settings, table  # noqa: E402
from benchmarks.harness.record import Recorder, say  # noqa: E402
from benchmarks.harness.settings import option  # noqa: E402
from benchmarks.harness.table import Column  # noqa: E402
from benchmarks.training import local_steps_clock as clock  # noqa: E402
from examples import decoder_local_steps as example  # noqa: E402


NAME, TUNED_ON = "local-steps", 100
RATES = (0.1, 0.2, 0.4, 0.7, 1.0)
RATES_OF_SIGNS = (3e-4, 1e-3, 3e-3)
# The method of each side, and options of its preset.
SIDES = {
    "data_parallel": ("data_parallel", {}),
    "dgc": ("dgc", {}),
    "average": ("diloco", {"momentum": 0.0}),
    "diloco": ("diloco", {}),
    "streaming": ("streaming_diloco", {}),
    "sparse_loco": ("sparse_loco", {}),
    "wide": ("sparse_loco", {"k": 256}),
    "bins": ("sparse_loco", {"values": "2bit-bins"}),
    "ranks": ("sparse_loco", {"over": "ranks"}),
    "demo": ("demo", {}),
}
KEYS = ("side", "ranks", "every", "steps", "seed", "tuning", "rate")


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Trains a decoder by methods with and without local steps."""

    PROGRAM = "benchmarks.training.local_steps"
    sides: tuple[str, ...] = option(tuple(SIDES), "what is trained", choices=tuple(SIDES))
    ranks: int = option(8, f"simulated ranks, at most {MOST_RANKS}")
    every: int = option(5, "steps in a round")
    steps: int = option(400, "of each run")
    seeds: tuple[int, ...] = option((0, 1, 2), "of the runs that are compared")
    rates: tuple[float, ...] = option(
        (), "of the outer optimizer to choose from; a single one is not tuned (by method)"
    )

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.ranks <= MOST_RANKS:
            raise ValueError(f"ranks must be 1 to {MOST_RANKS}, got {self.ranks}")


def run(
    record: Recorder, settings: Settings, side: str, seed: int, rate: float | None
) -> dict:
    """The row of a training run, which is not repeated if the file has it."""
    about = {"ranks": settings.ranks, "every": settings.every, "steps": settings.steps}
    key = {"side": side, **about, "seed": seed, "rate": rate}
    for row in record.all_rows():
        if key.items() <= row.items():
            return row
    method, options = SIDES[side]
    size = example.SIZES["small"]
    devices = jax.devices()[: settings.ranks]
    mesh = jax.make_mesh((settings.ranks,), ("data",), devices=devices)
    tx = example.transformation(method, settings.steps, settings.every, rate, **options)
    text = example.Text(size, seed)
    curve = example.train(tx, size, text, mesh, settings.steps, settings.every)
    record.add(
        **key,
        tuning=seed == TUNED_ON,
        loss=curve.losses[-1],
        bytes=curve.bytes[-1],
        **{name: getattr(curve, name) for name in ("tokens", "losses", "seconds")},
        sent=curve.bytes,
    )
    say(f"  {side}, seed {seed}, rate {rate}: loss {curve.losses[-1]:.4f}")
    record.write()
    return record.rows[-1]


def chosen(record: Recorder, settings: Settings, side: str) -> float | None:
    """The rate of a side, by the loss on a seed that is not compared."""
    if side in ("data_parallel", "dgc"):
        return None
    rates = settings.rates or (RATES_OF_SIGNS if side == "demo" else RATES)
    if len(rates) == 1:
        return rates[0]
    rows = [run(record, settings, side, TUNED_ON, rate) for rate in rates]
    return min(rows, key=lambda row: row["loss"])["rate"]


def together(rows: list[dict]) -> dict:
    """One row for all seeds of a side."""
    losses = [row["loss"] for row in rows]
    return rows[0] | {
        "mean": statistics.fmean(losses),
        "spread": f"{min(losses):.3f} to {max(losses):.3f}",
    }


def main(argv: list[str] | None = None) -> None:
    settings = Settings.parse(argv)
    record = Recorder(NAME, settings.command(), KEYS)
    compared = {side: [] for side in settings.sides}
    for side, own in compared.items():
        rate = chosen(record, settings, side)
        own += [run(record, settings, side, seed, rate) for seed in settings.seeds]
    rows = list(map(together, compared.values()))
    first = rows[0]
    for row in rows:
        row["times"] = row["mean"] / first["mean"]
    columns = [
        Column("side", "side"),
        Column("outer rate", "rate"),
        Column("loss", "mean", ".4f"),
        Column("seeds", "spread"),
        Column(f"x {first['side']}", "times", ".4f"),
        Column("MB of a rank", "bytes", ".2f", 1e-6),
    ]
    title = f"{settings.steps} steps, {settings.ranks} ranks, rounds of {settings.every}"
    table.show(rows, columns, title)
    say(f"\nwritten: {record.write()}")
    fields = "side", "ranks", "every", "steps", "tuning", "seed", "rate", "loss", "bytes"
    lines = [{name: row[name] for name in fields} for row in record.all_rows()]
    figure.save(NAME, lines, drawn(compared))
    clock.save(record.all_rows())


def drawn(compared: dict[str, list[dict]]):
    """The loss over tokens, and over bytes: the mean of all seeds."""
    made, axes = figure.panels(1, 2)
    for side, own in compared.items():
        losses = np.mean([row["losses"] for row in own], axis=0)
        axes[0, 0].plot(np.array(own[0]["tokens"]) / 1e3, losses, label=side)
        axes[0, 1].plot(own[0]["sent"], losses, label=side)
    axes[0, 0].set(xlabel="thousand tokens", ylabel="held-out loss")
    axes[0, 1].set(xlabel="bytes that a rank has sent", xscale="log")
    axes[0, 0].legend()
    return made


if __name__ == "__main__":
    main(sys.argv[1:])
