"""What a chunked exchange costs a rank on its processor, in copies of the parameters.

    python -m benchmarks.training.chunked [--millions 10] [--repeats 15]

Programs of one rank take turns with a copy, which reads and writes all parameters once.
Sides:

    copy       the parameters, each read and written
    select     the largest entries of each block, and their codes
    pack       these as the words of a message
    unpack     one message, as indices and values
    add        one message, unpacked and added up
    round      all of it, as `update` does it on one rank, residual included, and the
               parameters moved
    owners     the same by way of owners

A ratio is the median over samples, each against the copy beside it. Nothing is sent. Writes
benchmarks/results/chunked-*.jsonl.
"""

import dataclasses
import statistics
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import sparsejax
from benchmarks.harness import settings, timing
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.settings import option
from sparsejax.chunked.aggregate import Aggregate
from sparsejax.chunked.message import RankMessage
from sparsejax.wire.value_codes import code_of


NAME = "chunked"
SIDE = 1024  # of each matrix, of a million numbers
SIDES = ("copy", "select", "pack", "unpack", "add", "round", "owners")
KEYS = ("side", "millions")


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Times a chunked exchange on one rank."""

    PROGRAM = "benchmarks.training.chunked"
    millions: int = option(10, "parameters, in millions")
    repeats: int = option(15, "samples of each side")
    sides: tuple[str, ...] = option(SIDES, "what is timed", choices=SIDES)


def parameters(millions: int) -> list[jax.Array]:
    """Matrices of normal numbers."""
    rng = np.random.default_rng(0)
    draw = lambda: rng.standard_normal((SIDE, SIDE), np.float32)
    return [jnp.asarray(draw()) for _ in range(millions)]


def phases(leaves: list[jax.Array]) -> dict:
    """The programs of a message, each with what it is given."""
    message = RankMessage.of([x.shape for x in leaves], 64, 4096, code_of("2bit"))
    select, pack = jax.jit(message.select), jax.jit(message.pack)
    unpack = jax.jit(message.unpack)
    sizes = tuple(cut.size for cut in message.cuts)
    added = Aggregate(message.unpack, sizes, 1, True, True)
    add = jax.jit(lambda words: added(words[None], None, None))
    copy = jax.jit(lambda leaves: [-x for x in leaves])
    coded, _ = select(leaves)
    words = pack(coded)
    return {
        "copy": lambda: copy(leaves),
        "select": lambda: select(leaves),
        "pack": lambda: pack(coded),
        "unpack": lambda: unpack(words),
        "add": lambda: add(words),
    }


def exchange(leaves: list[jax.Array], via: str):
    """Rounds of one rank, each from the state of the last."""
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    tx = sparsejax.chunked_sync(decay=0.95, via=via)
    state = sparsejax.init(tx, leaves, mesh)
    specs = sparsejax.state_specs(state)

    def update(params, state, moved):
        updates, state = tx.update(moved, state, params)
        return optax.apply_updates(params, updates), state

    of_rank = P(), specs, P()
    mapped = jax.shard_map(
        update, mesh=mesh, in_specs=of_rank, out_specs=of_rank[:2], check_vma=False
    )
    run = jax.jit(mapped, donate_argnums=(0, 1))
    held = [jax.tree.map(jnp.copy, leaves), state]

    def once():
        held[:] = run(*held, leaves)
        return held

    return once


def main(argv: list[str] | None = None) -> None:
    settings = Settings.parse(argv)
    record = Recorder(NAME, settings.command(), KEYS)
    leaves = parameters(settings.millions)
    sides = phases(leaves)
    for name, via in (("round", "all_gather"), ("owners", "owners")):
        if name in settings.sides:
            sides[name] = exchange(leaves, via)
    sides = {name: sides[name] for name in ("copy", *settings.sides)}
    times = timing.alternate(sides, settings.repeats)
    ratio = timing.ratios(times, "copy")
    for name, taken in times.items():
        each = [a / b for a, b in zip(taken, times["copy"], strict=True)]
        record.add(
            side=name,
            millions=settings.millions,
            milliseconds=1e3 * statistics.median(taken),
            copies=ratio[name],
            spread=[float(x) for x in np.quantile(each, [0.1, 0.9])],
        )
    timing.show(times, ratio, "copies")
    say(f"\nwritten: {record.write()}")


if __name__ == "__main__":
    main(sys.argv[1:])
