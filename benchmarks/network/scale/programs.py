"""How large programs are as ranks grow, and how long they take to trace and to lower.

    python -m benchmarks.network.scale.programs

Each scheme is traced and lowered for 4 to 1,024 ranks of a described mesh: no device is
there, and nothing is compiled or run. What is counted is what JAX hands to XLA: operations
of StableHLO, which are equations of the program but for those of inner functions that it
shares, and the size of its text, in which a permutation names each pair of ranks.

The column `a rank` is how many operations each rank more has brought, from 16 ranks to the
most: nearly 0 where they are flat or grow with the logarithm.

    python -m benchmarks.network.scale.programs --ranks --compile 4 16 64 256

compiles for so many simulated CPU devices, and counts for no others: a record of its own
has the time that XLA took, that of all processors, and the instructions it made. For 64
ranks a scheme takes up to a quarter of a minute, for 256 up to a whole one and 2 GB.
"""

import dataclasses
import os
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, PartitionSpec as P

from benchmarks.harness import settings, table
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.settings import option
from benchmarks.harness.table import Column
from sparsejax import schemes
from sparsejax.schemes.base import Scheme
from sparsejax.units.dense import Dense
from sparsejax.wire.collectives import Wire


AXIS = "data"
NUMBERS = 1 << 26
MATRIX = (1, 1 << 13, 1 << 13)
DENSITY = 0.01

SCHEMES: dict[str, Scheme] = {
    "all-reduce": schemes.AllReduce(),
    "zen": schemes.Zen(),
    "zen, bytes": schemes.Zen("bytes"),
    "hierarchical": schemes.HierarchicalCentralization(),
    "agsparse": schemes.AGSparse(),
    "agsparse, ring": schemes.AGSparse("ring"),
    "agsparse, doubling": schemes.AGSparse("doubling"),
    "agsparse, bruck": schemes.AGSparse("bruck"),
    "sparcml": schemes.SparCML(),
    "sparcml, split": schemes.SparCML("ssar_split_all_gather"),
    "omnireduce": schemes.OmniReduce(),
    "sparseps": schemes.SparsePS(),
    "sparseps, broadcast": schemes.SparsePS("broadcast"),
    "gtopk": schemes.GTopk(DENSITY),
    "spardl": schemes.SparDL(DENSITY),
    "spardl, 4 teams": schemes.SparDL(DENSITY, teams=4),
    "ok-topk": schemes.OkTopk(DENSITY),
    "ok-topk, rotated": schemes.OkTopk(DENSITY, split="rotated"),
    "powersgd": schemes.PowerSGD(4),
}
RANKS = (4, 16, 64, 256, 1024)


def described(ranks: int, platform: str = "cpu") -> AbstractMesh:
    """A mesh of one axis over devices of a platform, none of which is there."""
    device = AbstractDevice(device_kind=platform, num_cores=None, platform=platform)
    return AbstractMesh((ranks,), (AXIS,), (AxisType.Auto,), abstract_device=device)


class Size(NamedTuple):
    """How large a program is, and how long it took to make.

    Attributes:
        equations: Of its jaxpr, inner ones counted wherever they are.
        operations: Of StableHLO.
        text: Bytes of its StableHLO as text.
        traced: Seconds to the jaxpr.
        lowered: Seconds from there to StableHLO.
    """

    equations: int
    operations: int
    text: int
    traced: float
    lowered: float


def step(scheme: Scheme, mesh: Mesh | AbstractMesh, shape: tuple[int, ...] | None = None):
    """The step of a scheme over a mesh, jitted, and the array that it takes."""
    if shape is None:
        shape = MATRIX if scheme.unit == "leaf" else (NUMBERS,)

    def run(x):
        x, wire = x[0], Wire(AXIS)
        state: Any = scheme.init(jax.ShapeDtypeStruct(x.shape, x.dtype), wire)
        reduced = scheme(Dense(x), state, wire)
        left = reduced.total if reduced.left is None else reduced.left
        return reduced.total, left[None], reduced.traffic

    specs = (P(), P(AXIS), P())
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=P(AXIS), out_specs=specs, check_vma=False
    )
    return jax.jit(mapped), jax.ShapeDtypeStruct((mesh.size, *shape), jnp.float32)


def size_of(
    scheme: Scheme, ranks: int, platform: str, shape: tuple[int, ...] | None = None
) -> Size:
    """Traces and lowers a scheme for described devices."""
    program, like = step(scheme, described(ranks, platform), shape)
    start = time.perf_counter()
    traced = program.trace(like)
    middle = time.perf_counter()
    lowered = traced.lower(lowering_platforms=(platform,))
    end = time.perf_counter()
    module: Any = lowered.compiler_ir("stablehlo")
    text = len(str(module))
    equations = _equations(traced.jaxpr.jaxpr)
    return Size(equations, _operations(module), text, middle - start, end - middle)


def _equations(jaxpr) -> int:
    return len(jaxpr.eqns) + sum(map(_equations, _inner(jaxpr)))


def _inner(jaxpr):
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                one = getattr(one, "jaxpr", one)
                if hasattr(one, "eqns"):
                    yield one


def _operations(module) -> int:
    count = 0

    def visit(operation):
        nonlocal count
        count += operation.name.startswith("stablehlo.")
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return count


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Counts operations of programs for many ranks, with no device."""

    PROGRAM = "benchmarks.network.scale.programs"
    ranks: tuple[int, ...] = option(RANKS, "numbers of ranks")
    platforms: tuple[str, ...] = option(("cpu", "cuda"), "for which programs are lowered")
    schemes: tuple[str, ...] = option(tuple(SCHEMES), "schemes", choices=tuple(SCHEMES))
    compile: tuple[int, ...] = option((), "ranks for which to compile on CPU devices, too")


class Compiled(NamedTuple):
    """What XLA makes of a program, and how long it takes.

    Attributes:
        seconds: That passed.
        processor: Seconds of all processors, which others on the machine change less.
        instructions: Of the optimized program, those of fusions among them.
    """

    seconds: float
    processor: float
    instructions: int


def compiled(scheme: Scheme, ranks: int, shape: tuple[int, ...] | None = None) -> Compiled:
    """Compiles a scheme for so many CPU devices, which must be there."""
    devices = jax.devices("cpu")[:ranks]
    mesh = jax.make_mesh((ranks,), (AXIS,), (AxisType.Auto,), devices=devices)
    program, like = step(scheme, mesh, shape)
    lowered = program.lower(like)
    start, busy = time.perf_counter(), time.process_time()
    done = lowered.compile()
    end, after = time.perf_counter(), time.process_time()
    text = done.as_text() or ""
    instructions = sum(" = " in line for line in text.splitlines())
    return Compiled(end - start, after - busy, instructions)


def main(argv: list[str] | None = None) -> int:
    given = Settings.parse(argv)
    if given.compile:
        jax.config.update("jax_num_cpu_devices", max(given.compile))
        compile_all(given)
    if given.ranks:
        count_all(given)
    return 0


def compile_all(given: Settings) -> None:
    """Compiles each scheme for each number of ranks, and records it."""
    record = Recorder("programs-compiled", given.command(), ("scheme", "ranks"))
    for name in given.schemes:
        for ranks in given.compile:
            jax.clear_caches()
            found = compiled(SCHEMES[name], ranks)
            record.add(scheme=name, ranks=ranks, **found._asdict())
            record.write()
    lines = []
    for name in given.schemes:
        line: dict = {"scheme": name}
        for row in record.rows:
            if row["scheme"] == name:
                for field in Compiled._fields:
                    line[f"{field} {row['ranks']}"] = row[field]
        lines.append(line)
    columns = [Column("scheme", "scheme")]
    for n in given.compile:
        columns += [
            Column(f"{n:,} ranks: s", f"seconds {n}", ".2f"),
            Column("processor s", f"processor {n}", ".2f"),
            Column("instructions", f"instructions {n}", ",d"),
        ]
    table.show(lines, columns, "compiled for CPUs")
    say(f"\nwritten: {record.write()}")


def count_all(given: Settings) -> None:
    """Counts the operations of each scheme for each number of ranks, and records them."""
    record = Recorder("programs", given.command(), ("scheme", "platform", "ranks"))
    for platform in given.platforms:
        rows = []
        for name in given.schemes:
            for ranks in given.ranks:
                # What was traced for other ranks is kept by shape.
                jax.clear_caches()
                found = size_of(SCHEMES[name], ranks, platform)
                row = {"scheme": name, "platform": platform, "ranks": ranks}
                row |= found._asdict()
                rows.append(row)
                record.rows.append(row)
            record.write()
        lines = [_line([row for row in rows if row["scheme"] == n]) for n in given.schemes]
        table.show(lines, _columns(given.ranks), f"operations, {platform}")
    say(f"\nwritten: {record.write()}")


def growth(rows: list[dict]) -> float:
    """Operations that each rank more brings, from 16 ranks, or the fewest, to the most."""
    of = {row["ranks"]: row["operations"] for row in rows}
    least, most = max(min(of), min(16, max(of))), max(of)
    least = least if least in of else min(of)
    return (of[most] - of[least]) / max(most - least, 1)


def _line(rows: list[dict]) -> dict:
    line = {"scheme": rows[0]["scheme"], "growth": growth(rows)}
    for row in rows:
        line[f"ops {row['ranks']}"] = row["operations"]
    last = rows[-1]
    line |= {"text": last["text"], "traced": last["traced"], "lowered": last["lowered"]}
    return line


def _columns(ranks):
    return [
        Column("scheme", "scheme"),
        *(Column(f"{n:,} ranks", f"ops {n}", ",d") for n in ranks),
        Column("a rank", "growth", ".2f"),
        Column("text kB", "text", ",.0f", 1e-3),
        Column("trace s", "traced", ".2f"),
        Column("lower s", "lowered", ".2f"),
    ]


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
