"""What a sum costs of which each rank needs one piece, where it trains a shard (ZeRO-1).

    python -m benchmarks.training.shards [--ranks N]

On N simulated devices of one mesh axis, under `jit`: the embedding table of the workload
`lstm`, 65,536 rows of 64 numbers of which a rank touches 1.13% by a Zipf law, summed by
`zen_sync`, then updated by Adam. Sides: the table replicated; sharded by rows over the
ranks, its rows in any order; the same with the most frequent rows first, as in a
vocabulary; and those stored striped (`sparsejax.rows.StripedRows`). For each the bytes that
a rank sends; the largest part over the mean one, of what one rank sends to all, and of what
each rank is sent by all; and the memory of the compiled step on a device. Sums are compared
with those in float64 first.

Then a whole step that reads such rows of the sharded table, trained by Adam: `jax.grad` of
the table that `sparsejax.local` gathers, against `sparsejax.value_and_grad` with `lazy`,
which reads and updates rows where their shards are: their temporary memory, and the time
of a step, sides alternating. Writes benchmarks/results/shards-*.jsonl.
"""

import dataclasses
import sys

import jax


RANKS = 16
jax.config.update("jax_num_cpu_devices", RANKS)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec as P  # noqa: E402

import sparsejax  # noqa: E402
from benchmarks.data import workloads  # noqa: E402
from benchmarks.harness import settings, table, timing  # noqa: E402
from benchmarks.harness.record import Recorder, say  # noqa: E402
from benchmarks.harness.settings import option  # noqa: E402
from benchmarks.harness.table import Column  # noqa: E402


ROWS, WIDTH, DENSITY = workloads.ROWS, workloads.WIDTH, 0.0113
SIDES = ("replicated", "sharded", "frequent first", "striped")
STEPS, READ = ("table gathered", "rows read"), 512  # rows that a rank reads, with repeats


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Measures sums of which each rank needs one piece."""

    PROGRAM = "benchmarks.training.shards"
    ranks: int = option(RANKS, "simulated devices, at most 16")
    repeats: int = option(9, "samples of a step")


def sets(side: str, ranks: int) -> np.ndarray:
    """The rows that each rank has, booleans [ranks, rows], in the order of the table."""
    if side in ("replicated", "sharded"):
        return workloads.zipf(ranks, ROWS, DENSITY)
    chances = workloads.zipf_chances(ROWS, DENSITY)
    found = np.random.default_rng(0).random((ranks, ROWS)) < chances
    if side == "frequent first":
        return found
    striped = sparsejax.rows.StripedRows(ROWS, ranks)
    return np.stack([striped.stored(jnp.asarray(one)) for one in found])


def measure(record: Recorder, side: str, ranks: int) -> None:
    """Sums and updates once, and reads what it took."""
    mesh = jax.make_mesh((ranks,), ("data",), devices=jax.devices()[:ranks])
    spec = P() if side == "replicated" else P("data", None)
    sync = sparsejax.zen_sync("data", reduce="sum")
    tx = optax.chain(sync, optax.adam(1e-3))
    rng = np.random.default_rng(1)
    flags = sets(side, ranks)
    x = np.where(flags[..., None], rng.standard_normal((*flags.shape, WIDTH)), 0)
    x = x.astype(np.float32)
    with jax.set_mesh(mesh):
        place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        params = {"embedding": place(np.zeros((ROWS, WIDTH), np.float32), spec)}
        state = tx.init(params)
        own = jax.shard_map(
            lambda x: x[0],
            in_specs=P("data"),
            out_specs=P(None, None, unreduced={"data"}),
            check_vma=False,
        )
        grads = {"embedding": jax.jit(own)(place(x, P("data")))}
        total, after = jax.jit(sync.update)(grads, sync.init(params), params)
        wanted = x.astype(np.float64).sum(0)
        np.testing.assert_allclose(total["embedding"], wanted, rtol=1e-5, atol=1e-5)

        def step(grads, params, state):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        stepped = jax.jit(step, donate_argnums=(1, 2))
        memory = stepped.lower(grads, params, state).compile().memory_analysis()
    found = {key: float(value) for key, value in sparsejax.metrics(after).items()}
    # A hash assigns the rows of a replicated table: contiguous pieces are not its.
    pieces = flags.reshape(ranks, ranks, -1).sum((0, 2))
    received = None if side == "replicated" else float(pieces.max() / pieces.mean())
    kept = memory.argument_size_in_bytes - ROWS * WIDTH * 4  # all but the gradient
    record.add(
        side=side,
        ranks=ranks,
        wire=found["sync/embedding/wire_bytes"],
        dense=found["sync/embedding/dense_bytes"],
        sent_unevenly=found["sync/embedding/push_imbalance"],
        received_unevenly=received,
        kept=kept,
        temporary=memory.temp_size_in_bytes,
    )


class TableStep:
    """A step that reads some rows of a table that is sharded over the ranks.

    Args:
        by_rows: Whether rows are read, and updated, where their shards are.
        ranks: How many ranks there are.
    """

    def __init__(self, by_rows: bool, ranks: int):
        self.mesh = jax.make_mesh((ranks,), ("data",), devices=jax.devices()[:ranks])
        lazy = sparsejax.lazy(optax.adam(1e-3))
        sync = sparsejax.zen_sync("data", reduce="sum")
        tx = optax.chain(sync, lazy if by_rows else optax.adam(1e-3))
        place = lambda x, spec: jax.device_put(x, NamedSharding(self.mesh, spec))
        rng = np.random.default_rng(2)
        chances = workloads.zipf_chances(ROWS, DENSITY)
        ids = rng.choice(ROWS, (ranks, READ), p=chances / chances.sum()).astype(np.int32)
        with jax.set_mesh(self.mesh):
            table = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
            params = {"embedding": place(table, P("data", None))}
            state, ids = sparsejax.init(tx, params), place(ids, P("data", None))

            def loss_fn(params, ids):
                out = P("data", None, None)
                return jnp.sum(params["embedding"].at[ids].get(out_sharding=out) ** 2)

            def step(params, state):
                read = lazy.reader(params, state) if by_rows else None
                grad = sparsejax.value_and_grad if by_rows else jax.value_and_grad
                extra = {"read": read} if by_rows else {}
                loss, grads = grad(loss_fn, **extra)(sparsejax.local(params, "data"), ids)
                updates, state = tx.update(grads, state, params, **extra)
                return sparsejax.apply_updates(params, updates), state, loss

            self.step = jax.jit(step, donate_argnums=(0, 1)).lower(params, state).compile()
        self.carry = params, state

    def __call__(self) -> jax.Array:
        *carry, loss = self.step(*self.carry)
        self.carry = tuple(carry)
        return loss

    def losses(self) -> list[float]:
        """Those of two steps."""
        return [float(self()) for _ in range(2)]


def measure_steps(record: Recorder, settings: Settings) -> None:
    """Times both ways to read and to update rows, and reads what they take."""
    ranks = settings.ranks
    sides = {side: TableStep(side == "rows read", ranks) for side in STEPS}
    for _ in range(3):
        found = [side.losses() for side in sides.values()]
        np.testing.assert_allclose(found[1], found[0], rtol=1e-4)
    times = timing.alternate(sides, settings.repeats)
    ratios = timing.ratios(times, STEPS[0])
    for name, side in sides.items():
        record.add(
            side=name,
            ranks=ranks,
            temporary=side.step.memory_analysis().temp_size_in_bytes,
            seconds=times[name],
            step_ratio=ratios[name],
        )


def main(argv: list[str] | None = None) -> None:
    settings = Settings.parse(argv)
    record = Recorder("shards", settings.command(), ("side",))
    for side in SIDES:
        measure(record, side, settings.ranks)
    whole = record.rows[0]
    for row in record.rows:
        row["of_replicated"] = row["wire"] / whole["wire"]
        row["memory"] = row["kept"] / whole["kept"]
    columns = [
        Column("table", "side"),
        Column("KB sent", "wire", ".1f", 1e-3),
        Column("of replicated", "of_replicated", ".3f"),
        Column("KB of a dense sum", "dense", ".1f", 1e-3),
        Column("largest part / mean, sent", "sent_unevenly", ".2f"),
        Column("received", "received_unevenly", ".2f"),
        Column("MB of parameters and Adam", "kept", ".2f", 1e-6),
        Column("of replicated", "memory", ".3f"),
        Column("MB temporary", "temporary", ".1f", 1e-6),
    ]
    title = f"The sum of lstm's table on {settings.ranks} simulated devices"
    table.show(record.rows, columns, title)
    sums = len(record.rows)
    measure_steps(record, settings)
    columns = [
        Column("step", "side"),
        Column("time", lambda row: timing.spread(row["seconds"])),
        Column("x gathered", "step_ratio", ".2f"),
        Column("MB temporary", "temporary", ".1f", 1e-6),
    ]
    table.show(record.rows[sums:], columns, "A step with that table, sharded")
    say(f"\nwritten: {record.write()}")


if __name__ == "__main__":
    main(sys.argv[1:])
