"""How long the first step takes to compile: small models, and models of many leaves.

    python -m benchmarks.training.first_step [--models table ...] [--repeats N]

Prints, for four simulated devices, the seconds that `trainer.init` takes, and those to
trace and compile a train step, with a dense sum and with sparse ones, sides alternating,
and writes benchmarks/results/first_step-*.jsonl.

    table        4,000 rows of 64
    block        an embedding of 1,000 words, attention with four heads, a network of two
                 layers and an output layer: 22 leaves of 0.46 million numbers, by flax
    transformer  16 layers behind an embedding of 8,192 words: 195 leaves of 4.3 million
                 numbers, in plain JAX
    dlrm         26 tables of 50 to 200,000 rows of 16, and two layers

The last two are trained by every system. Each is to take at most three times as long as the
dense sum.
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
LAYERS, LABELS = 16, 512
TABLES = [int(n) for n in np.geomspace(50, 200_000, 26)]


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Measures how long the first step takes to compile."""

    PROGRAM = "benchmarks.training.first_step"
    models: tuple[str, ...] = option(
        ("table", "block", "transformer", "dlrm"), "which models"
    )
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


def of_transformer(embrace=False):
    """A decoder of many leaves and the loss of a label for each word."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)
    zeros, ones = (lambda n, x=x: np.full(n, x, np.float32) for x in (0, 1))
    params = {"embedding": draw(8192, WIDTH), "position": draw(LENGTH, WIDTH)}
    for at in range(LAYERS):
        square = {name: draw(WIDTH, WIDTH) for name in "qkvo"}
        params[f"layer {at}"] = square | {
            "up": draw(WIDTH, 4 * WIDTH),
            "down": draw(4 * WIDTH, WIDTH),
            "up bias": zeros(4 * WIDTH),
            "down bias": zeros(WIDTH),
            "scale 1": ones(WIDTH),
            "shift 1": zeros(WIDTH),
            "scale 2": ones(WIDTH),
            "shift 2": zeros(WIDTH),
        }
    params["head"] = draw(WIDTH, LABELS)

    def normed(x, scale, shift):
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale + shift

    def loss(params, batch):
        words, labels = batch
        table = params["embedding"]
        x = sparsejax.column_lookup(table, words) if embrace else table[words]
        x = x + params["position"]
        for at in range(LAYERS):
            w = params[f"layer {at}"]
            z = normed(x, w["scale 1"], w["shift 1"])
            scores = jnp.einsum("bqd,bkd->bqk", z @ w["q"], z @ w["k"]) / np.sqrt(WIDTH)
            x = x + jax.nn.softmax(scores) @ (z @ w["v"]) @ w["o"]
            z = normed(x, w["scale 2"], w["shift 2"])
            x = x + jax.nn.gelu(z @ w["up"] + w["up bias"]) @ w["down"] + w["down bias"]
        logits = x @ params["head"]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return each.mean()

    if embrace:
        params["embedding"] = sparsejax.ColumnTable.of(params["embedding"], mesh())
    words = np.zeros((BATCH, LENGTH), np.int32)
    return params, loss, (words, words)


def of_dlrm(embrace=False):
    """Many tables of all sizes, and a click of each example."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
    tables = {f"table {at}": draw(n, 16) for at, n in enumerate(TABLES)}
    if embrace:
        tables = {k: sparsejax.ColumnTable.of(x, mesh()) for k, x in tables.items()}
    params = {"tables": tables, "w": draw(16 * len(TABLES), 64), "head": draw(64, 1)}

    def loss(params, batch):
        ids, clicks = batch
        each = {f"table {at}": ids[:, at] for at in range(len(TABLES))}
        if embrace:
            read = sparsejax.column_lookup(params["tables"], each)
        else:
            read = {k: params["tables"][k][i] for k, i in each.items()}
        x = jnp.concatenate([read[name] for name in each], axis=1)
        logits = (jax.nn.relu(x @ params["w"]) @ params["head"])[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, clicks).mean()

    ids = np.stack([rng.integers(0, n, 4 * BATCH) for n in TABLES], 1).astype(np.int32)
    return params, loss, (ids, np.zeros(4 * BATCH, np.float32))


def mesh():
    return Mesh(np.array(jax.devices()), ("data",))


def adam():
    return optax.adam(1e-3)


MOST = (3, 0)
DRAGONN = sparsejax.sparsify(sparsejax.sparsifiers.Dragonn(0.01))
# Every system; EmbRace's tables are by columns.
SYSTEMS = {
    "dense": ([sparsejax.dense_sync(), adam()], None),
    "zen": ([sparsejax.zen_sync(), adam()], MOST),
    "zen, rows": ([sparsejax.zen_sync(), sparsejax.lazy(adam())], MOST),
    "dgc, zen": ([sparsejax.dgc(0.01), sparsejax.zen_sync(), adam()], MOST),
    "dragonn, zen": ([DRAGONN, sparsejax.zen_sync(), adam()], MOST),
    "ok-topk": ([sparsejax.ok_topk_sync(0.01), adam()], MOST),
    "spardl": ([sparsejax.spardl_sync(0.01), adam()], MOST),
    "embrace": ([sparsejax.embrace_sync(), sparsejax.lazy(adam())], MOST),
}
SGD = optax.sgd(0.1, momentum=0.9)
# The model; and of each side the transformation, and what its time is to be at most, as a
# multiple of the dense one and seconds more.
CASES = {
    "table": (
        of_table,
        {
            "dense": ([sparsejax.dense_sync(), SGD], None),
            "all to all": ([sparsejax.sync(schemes.AGSparse()), SGD], None),
            "zen": ([sparsejax.zen_sync(), SGD], (3, 2)),
        },
    ),
    "block": (
        of_block,
        {
            "dense": ([sparsejax.dense_sync(), SGD], None),
            "zen": ([sparsejax.zen_sync(), SGD], None),
            "dgc, dense": ([sparsejax.dgc(0.01), sparsejax.dense_sync(), SGD], None),
            "dgc, zen": ([sparsejax.dgc(0.01), sparsejax.zen_sync(), SGD], (5, 0)),
        },
    ),
    "transformer": (of_transformer, SYSTEMS),
    "dlrm": (of_dlrm, SYSTEMS),
}


def seconds_to_start(model, parts, is_ahead) -> tuple[float, float]:
    """Makes a first state; then traces and compiles a step that nothing compiled before.

    Args:
        model: Its parameters, its loss and a batch.
        parts: The transformations of the chain.
        is_ahead: Whether a step is given the next batch, too.
    """
    params, loss, batch = model
    trainer = sparsejax.data_parallel(loss, optax.chain(*parts), mesh())
    jax.clear_caches()
    start = time.perf_counter()
    state = jax.block_until_ready(trainer.init(params))
    made = time.perf_counter()
    batches = [batch, batch] if is_ahead else [batch]
    trainer.compiled(state, has_next=is_ahead).lower(state, *batches).compile()
    return made - start, time.perf_counter() - made


def main(argv: list[str] | None = None) -> None:
    settings = Settings.parse(argv)
    jax.jit(lambda x: x + 1).lower(1.0).compile()  # what only the first one pays
    record = Recorder("first_step", settings.command(), ("model", "sum"))
    for name in settings.models:
        make, sides = CASES[name]
        model = make()
        models = {side: make(True) if side == "embrace" else model for side in sides}
        init, taken = ({side: [] for side in sides} for _ in range(2))
        for _ in range(settings.repeats):
            for side, (parts, _) in sides.items():
                made, compiled = seconds_to_start(models[side], parts, side == "embrace")
                init[side].append(made)
                taken[side].append(compiled)
        dense = float(np.median(taken["dense"]))
        for side, (_, most) in sides.items():
            seconds = float(np.median(taken[side]))
            record.add(
                model=name,
                sum=side,
                init=float(np.median(init[side])),
                median=seconds,
                ratio=seconds / dense,
                to_reach=None if most is None else most[0] * dense + most[1],
                seconds=taken[side],
            )
    columns = [
        Column("model", "model"),
        Column("sum", "sum"),
        Column("init, s", "init", ".2f"),
        Column("s", "median", ".2f"),
        Column("x dense", "ratio", ".2f"),
        Column("to reach, s", "to_reach", ".2f"),
    ]
    title = f"Seconds to trace and compile a step, on {RANKS} simulated devices"
    table.show(record.rows, columns, title)
    say(f"\nwritten: {record.write()}")


if __name__ == "__main__":
    main(sys.argv[1:])
