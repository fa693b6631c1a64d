"""The largest arrays that fit, exchanged for real: more bytes than int32 can count.

    python -m benchmarks.training.largest
    python -m benchmarks.training.largest --schemes zen --cases rows --log2 31

What a program is for arrays of as many numbers as int32 can number is tested by evaluating
it abstractly; here it runs, over float32 on two simulated devices, with as many numbers as
fit. Each rank has two thousand numbers or rows that are not zero, the first and the last
among them, and some of them on both. Each case is a process of its own, which says how much
memory it had at most, or needs if it is more than there is: such a case is not run. The sum
is right where it has the right numbers at these places, as many that are not zero, and the
same bits on both ranks. Writes benchmarks/results/largest-*.jsonl.
"""

import dataclasses
import hashlib
import json
import math
import os
import pathlib
import resource
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import sparsejax
from benchmarks.faults import verdicts
from benchmarks.harness import settings
from benchmarks.harness.record import Recorder
from benchmarks.harness.settings import VARIABLE, option
from benchmarks.harness.table import Column
from benchmarks.network import schemes
from benchmarks.network.jax_side import AXIS


RANKS = 2
SETS = 2000  # numbers or rows of a rank
WIDTH = 16  # numbers in a row
KINDS = ("numbers", "rows")
SCHEMES = {name: scheme for name, scheme in schemes.SCHEMES.items() if scheme is not None}


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Exchanges arrays that are as large as they may be."""

    PROGRAM = "benchmarks.training.largest"
    schemes: tuple[str, ...] = option(tuple(SCHEMES), choices=tuple(SCHEMES))
    cases: tuple[str, ...] = option(KINDS, choices=KINDS)
    log2: int = option(29, "of how many numbers there are, and a few more")
    spare: int = option(2 << 30, "bytes of memory that are left to others")
    scheme: str = option("", hidden=True)
    case: str = option("", hidden=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        numbers = 2**self.log2
        return (numbers + 5,) if self.case == "numbers" else (numbers // WIDTH + 5, WIDTH)


def main(argv: list[str] | None = None) -> int:
    if VARIABLE in os.environ:
        print(json.dumps(exchanged(Settings.from_environment())))
        return 0
    settings = Settings.parse(argv)
    record = Recorder("largest", settings.command(), ("scheme", "case", "shape"))
    rows = (
        (f"{scheme}, {case}", run(dataclasses.replace(settings, scheme=scheme, case=case)))
        for case in settings.cases
        for scheme in settings.schemes
    )
    return verdicts.judge(record, rows, COLUMNS, f"Large arrays of {RANKS} ranks")


def run(settings: Settings) -> dict:
    """A row: one case, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", settings.PROGRAM],
        env=os.environ | settings.environment(),
        capture_output=True,
        text=True,
    )
    row = {"scheme": settings.scheme, "case": settings.case, "shape": settings.shape}
    if done.returncode:
        return row | {"wrong": f"status {done.returncode}: {done.stderr[-400:]}"}
    return row | json.loads(done.stdout.splitlines()[-1])


def drawn(settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """The units of each rank that are not zero, and their values."""
    rng = np.random.default_rng(0)
    units = settings.shape[0]
    places = rng.integers(0, units, (RANKS, SETS), np.int64)
    places[:, :3] = 0, units - 1, units // 2
    places[1, 3:100] = places[0, 3:100]
    # Of a unit that a rank draws again it has the same value.
    values = (places + np.arange(RANKS)[:, None]) % 99 + 1
    return places.astype(np.int32), values.astype(np.float32)


def exchanged(settings: Settings) -> dict:
    """Exchanges one case in this process, and says what is wrong, and the memory."""
    jax.config.update("jax_num_cpu_devices", RANKS)
    mesh = Mesh(np.array(jax.devices()), (AXIS,), axis_types=(AxisType.Auto,))
    shape, (places, values) = settings.shape, drawn(settings)
    tx = sparsejax.sync(SCHEMES[settings.scheme], AXIS, reduce="sum")
    leaf = "embedding" if len(shape) == 2 else "numbers"
    state = sparsejax.init(tx, {leaf: jax.ShapeDtypeStruct(shape, jnp.float32)}, mesh)
    specs = sparsejax.state_specs(state)

    def mapped(function, into, *specs, donate=()):
        found = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=into)
        return jax.jit(found, donate_argnums=donate)

    def filled(places, values):
        values = values[0].reshape(-1, *[1] * (len(shape) - 1)).astype(jnp.float32)
        return jnp.zeros((1, *shape), jnp.float32).at[0, places[0]].set(values)

    def step(x, state):
        total, state = tx.update({leaf: x[0]}, state)
        return jax.tree.leaves(total)[0], state

    fill = mapped(filled, P(AXIS), P(AXIS), P(AXIS))
    exchange = mapped(step, (P(), specs), P(AXIS), specs, donate=0)
    like = jax.eval_shape(fill, places, values)
    program = exchange.lower(like, state).compile()
    sizes: Any = program.memory_analysis()
    needed = RANKS * (sizes.argument_size_in_bytes + sizes.temp_size_in_bytes)
    if needed + settings.spare > free():
        return {"needed": needed, "wrong": ""}
    start = time.perf_counter()
    total, _ = jax.block_until_ready(program(fill(places, values), state))
    seconds = time.perf_counter() - start
    wrong = "; ".join(wrong_with(total, places, values))
    most = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {"needed": needed, "memory": most, "seconds": seconds}
    return found | {"units": len(np.unique(places)), "wrong": wrong}


def wrong_with(total: jax.Array, places: np.ndarray, values: np.ndarray) -> list[str]:
    """What is wrong with a sum.

    Args:
        total: The sum, on all ranks.
        places: The units of each rank.
        values: Their values.
    """
    expected: dict[int, float] = {}
    for rank in range(RANKS):
        for place, value in dict(zip(places[rank], values[rank], strict=True)).items():
            expected[place] = expected.get(place, 0.0) + value
    wrong = []
    read = np.fromiter(expected, np.int32)
    there = np.asarray(jax.jit(lambda x: x[read])(total), np.float32)
    if not (there.reshape(len(read), -1).T == [*expected.values()]).all():
        wrong.append("other sums")
    count = jax.jit(lambda x: jnp.count_nonzero(x.reshape(len(x), -1).any(1)))(total)
    if int(count) != len(expected):
        wrong.append(f"{int(count)} units are not zero, and not {len(expected)}")
    shards: list[Any] = [np.asarray(one.data) for one in total.addressable_shards]
    digests = {hashlib.sha256(shard).digest() for shard in shards}
    if len(digests) > 1:
        wrong.append("replicas differ")
    return wrong


def free() -> int:
    """Bytes of memory that processes may still have."""
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("MemAvailable")]
    return 1024 * int(line.split()[1])


COLUMNS = [
    Column("scheme", "scheme"),
    Column("array", "case"),
    Column("numbers", lambda row: math.prod(row["shape"]), ",d"),
    Column("GB a rank", lambda row: 4 * math.prod(row["shape"]), ".1f", 1e-9),
    Column("needs, GB", "needed", ".1f", 1e-9),
    Column("had at most, GB", "memory", ".1f", 1e-9),
    Column("s", "seconds", ".1f"),
    Column("", "wrong"),
]


if __name__ == "__main__":
    sys.exit(main())
