"""A step under plain `jit`, beside the same one inside a `shard_map` of one's own.

    python -m benchmarks.training.in_jit [--models language decoder] [--repeats N]

Eight simulated devices train the demo's language model by `zen_sync`, and a decoder by
`dgc` and `zen_sync`, with Adam. Three sides take turns:

    shard_map       parameters replicated, a `shard_map` over 8 ranks
    jit, 8          the same under `jit`, on a mesh (replica=8,)
    jit, 4 x 2      the mesh is (replica=4, fsdp=2), parameters are sharded over fsdp

All train from the same parameters on the same batches, and their losses must agree, but
for those of `dgc` on 4 x 2, where ranks and shards differ, and so what is selected. Prints
the time of a step, and that to trace and compile it, as multiples of those of `shard_map`:
at most 1.05 and 1.15 are to be reached. Processor time to compile depends less on what
else the machine does. Writes benchmarks/results/in-jit-*.jsonl. Nothing is sent.
"""

import dataclasses
import itertools
import statistics
import sys
import time

import jax


RANKS = 8
jax.config.update("jax_num_cpu_devices", RANKS)

import numpy as np  # noqa: E402
import optax  # noqa: E402

import sparsejax  # noqa: E402
from benchmarks.harness import settings, table, timing  # noqa: E402
from benchmarks.harness.record import Recorder, say  # noqa: E402
from benchmarks.harness.settings import option  # noqa: E402
from benchmarks.harness.table import Column  # noqa: E402
from benchmarks.training.explicit_models import Decoder  # noqa: E402
from benchmarks.training.in_jit_steps import TABLES, Model, Run  # noqa: E402
from examples.data import docstrings  # noqa: E402


BATCHES, AGREE = 4, 1e-3
STEP, COMPILE = 1.05, 1.15  # to reach
DENSITY = 0.01
# The sizes of the mesh, and whether the step is one under plain `jit`.
SIDES = {
    "shard_map": ({"replica": RANKS}, False),
    "jit, 8": ({"replica": RANKS}, True),
    "jit, 4 x 2": ({"replica": 4, "fsdp": 2}, True),
}
MODELS = ("language", "decoder")


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Measures a step under plain jit beside one inside shard_map."""

    PROGRAM = "benchmarks.training.in_jit"
    models: tuple[str, ...] = option(MODELS, "what is trained", choices=MODELS)
    width: int = option(64, "of the language model's tables")
    repeats: int = option(15, "samples of a step of each side")
    compilations: int = option(5, "compilations of each side")


def transformation(name: str, in_jit: bool) -> optax.GradientTransformation:
    """The optimizer of a model."""
    options = {"reduce": "sum" if in_jit else "mean"}
    if name == "language":
        parts = [sparsejax.zen_sync("replica", rules=TABLES, **options)]
    else:
        parts = [sparsejax.dgc(DENSITY, axis_name="replica")]
        parts.append(sparsejax.zen_sync("replica", **options))
    return optax.chain(*parts, optax.adam(1e-3))


def measure(record: Recorder, name: str, settings: Settings) -> None:
    """Compiles and runs the sides of a model in turn."""
    corpus = docstrings.load()
    model = Model.of_decoder(Decoder())
    if name == "language":
        model = Model.of_language(len(corpus.words), settings.width)
    batches = list(itertools.islice(model.batches(corpus.tokens, RANKS), BATCHES))
    runs = {}
    for side, (sizes, in_jit) in SIDES.items():
        mesh = jax.make_mesh((*sizes.values(),), (*sizes,))
        tx = transformation(name, in_jit)
        runs[side] = Run(model, tx, mesh, batches, in_jit=in_jit)
    compiled, work = ({side: [] for side in SIDES} for _ in range(2))
    for _ in range(settings.compilations):
        for side, run in runs.items():
            jax.clear_caches()
            start, used = time.perf_counter(), time.process_time()
            run.compile()
            compiled[side].append(time.perf_counter() - start)
            work[side].append(time.process_time() - used)
    losses = {side: [float(run()) for _ in range(BATCHES)] for side, run in runs.items()}
    for side, found in losses.items():
        say(f"  {name}, {side}: losses {' '.join(f'{loss:.4f}' for loss in found)}")
        if name == "decoder" and len(SIDES[side][0]) > 1:
            continue  # it selects other numbers
        difference = np.abs(np.subtract(found, losses["shard_map"])).max()
        if not difference <= AGREE:
            raise SystemExit(f"{name}: losses of {side} differ by {difference:.1e}")
    times = timing.alternate(runs, settings.repeats)
    ratios = {"step": timing.ratios(times, "shard_map")}
    ratios["compile"] = timing.ratios(compiled, "shard_map")
    ratios["work"] = timing.ratios(work, "shard_map")
    for side, run in runs.items():
        record.add(
            model=name,
            side=side,
            step=statistics.median(times[side]),
            step_ratio=ratios["step"][side],
            compile=statistics.median(compiled[side]),
            compile_ratio=ratios["compile"][side],
            compile_cpu=statistics.median(work[side]),
            compile_cpu_ratio=ratios["work"][side],
            to_reach=None if side == "shard_map" else [STEP, COMPILE],
            wire=float(sparsejax.metrics(run.state)["sync/wire_bytes"]),
            loss=losses[side][-1],
            seconds=times[side],
            seconds_to_compile=compiled[side],
            cpu_seconds_to_compile=work[side],
        )


def main(argv: list[str] | None = None) -> None:
    settings = Settings.parse(argv)
    record = Recorder("in-jit", settings.command(), ("model", "side"))
    for name in settings.models:
        measure(record, name, settings)
    spread = lambda field: lambda row: timing.spread(row[field])
    columns = [
        Column("model", "model"),
        Column("side", "side"),
        Column("a step", spread("seconds")),
        Column("x shard_map", "step_ratio", ".2f"),
        Column("to compile", spread("seconds_to_compile")),
        Column("x shard_map", "compile_ratio", ".2f"),
        Column("cpu s", "compile_cpu", ".1f"),
        Column("x shard_map", "compile_cpu_ratio", ".2f"),
        Column("KB sent", "wire", ".0f", 1e-3),
        Column("loss", "loss", ".4f"),
    ]
    table.show(record.rows, columns, f"Steps on {RANKS} simulated devices")
    say(f"\nwritten: {record.write()}")


if __name__ == "__main__":
    main(sys.argv[1:])
