"""How long the first step takes to compile: one table, and a transformer block.

    python -m benchmarks.training.first_step [--repeats N]

Prints, for four simulated devices, the seconds to trace and compile a train step with a
dense sum and with sparse ones, sides alternating, and writes
benchmarks/results/first_step-*.jsonl. The table is 4,000 rows of 64. The block is an
embedding of 1,000 words, attention with four heads, a network of two layers and an output
layer, 22 leaves of 0.46 million numbers in all, by flax.
"""

import dataclasses
import sys
import time

import jax


RANKS = 4
jax.config.update("jax_num_cpu_devices", RANKS)

import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

import sparsejax  # noqa: E402
from benchmarks.harness import settings, table  # noqa: E402
from benchmarks.harness.record import Recorder, say  # noqa: E402
from benchmarks.harness.settings import option  # noqa: E402
from benchmarks.harness.table import Column  # noqa: E402
from sparsejax import schemes  # noqa: E402


WORDS, WIDTH, LENGTH, BATCH = 1000, 128, 16, 16


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Measures how long the first step takes to compile."""

    PROGRAM = "benchmarks.training.first_step"
    repeats: int = option(3, "how often each step is compiled")


class Block(nn.Module):
    """A transformer block between an embedding and an output layer."""

    @nn.compact
    def __call__(self, words):
        x = nn.Embed(WORDS, WIDTH)(words)
        x = x + nn.SelfAttention(num_heads=4)(nn.LayerNorm()(x))
        hidden = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return nn.Dense(WORDS)(x + nn.Dense(WIDTH)(hidden))


def of_table():
    """One table and a loss that looks up some of its rows."""

    def loss(params, batch):
        return jnp.mean(jnp.square(params["embedding"][batch].sum(-1)))

    return {"embedding": jnp.zeros((4000, 64))}, loss, np.zeros(512, np.int32)


def of_block():
    """A block and the loss of the next word."""
    model = Block()

    def loss(params, words):
        logits = jnp.asarray(model.apply({"params": params}, words[:, :-1]))
        each = optax.softmax_cross_entropy_with_integer_labels(logits, words[:, 1:])
        return each.mean()

    words = np.zeros((BATCH, LENGTH), np.int32)
    return model.init(jax.random.key(0), words)["params"], loss, words


# The model; and of each side the transformation, and what its time is to be at most, as a
# multiple of the dense one and seconds more.
CASES = {
    "table": (
        of_table,
        {
            "dense": ([sparsejax.dense_sync()], None),
            "all to all": ([sparsejax.sync(schemes.AGSparse())], None),
            "zen": ([sparsejax.zen_sync()], (3, 2)),
        },
    ),
    "block": (
        of_block,
        {
            "dense": ([sparsejax.dense_sync()], None),
            "zen": ([sparsejax.zen_sync()], None),
            "dgc, dense": ([sparsejax.dgc(0.01), sparsejax.dense_sync()], None),
            "dgc, zen": ([sparsejax.dgc(0.01), sparsejax.zen_sync()], (5, 0)),
        },
    ),
}


def seconds_to_compile(model, parts) -> float:
    """Traces and compiles a step that nothing has compiled before."""
    params, loss, batch = model
    mesh = Mesh(np.array(jax.devices()), ("data",))
    tx = optax.chain(*parts, optax.sgd(0.1, momentum=0.9))
    trainer = sparsejax.data_parallel(loss, tx, mesh)
    state = trainer.init(params)
    jax.clear_caches()
    start = time.perf_counter()
    trainer.compiled(state).lower(state, batch).compile()
    return time.perf_counter() - start


def main(argv: list[str] | None = None) -> None:
    settings = Settings.parse(argv)
    jax.jit(lambda x: x + 1).lower(1.0).compile()  # what only the first one pays
    record = Recorder("first_step", settings.command(), ("model", "sum"))
    for name, (make, sides) in CASES.items():
        model = make()
        taken = {side: [] for side in sides}
        for _ in range(settings.repeats):
            for side, (parts, _) in sides.items():
                taken[side].append(seconds_to_compile(model, parts))
        dense = float(np.median(taken["dense"]))
        for side, (_, most) in sides.items():
            seconds = float(np.median(taken[side]))
            record.add(
                model=name,
                sum=side,
                median=seconds,
                ratio=seconds / dense,
                to_reach=None if most is None else most[0] * dense + most[1],
                seconds=taken[side],
            )
    columns = [
        Column("model", "model"),
        Column("sum", "sum"),
        Column("s", "median", ".2f"),
        Column("x dense", "ratio", ".2f"),
        Column("to reach, s", "to_reach", ".2f"),
    ]
    title = f"Seconds to trace and compile a step, on {RANKS} simulated devices"
    table.show(record.rows, columns, title)
    say(f"\nwritten: {record.write()}")


if __name__ == "__main__":
    main(sys.argv[1:])
