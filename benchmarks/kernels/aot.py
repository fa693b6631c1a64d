"""Compiles the kernels and a whole exchange for an H200, with no GPU and no driver.

    make aot

XLA compiles for a device that is only described, if JAX's CUDA plugin is installed. For
each operation and backend, and on four devices for `zen_sync` and for a whole step of a
table by rows, it prints the time, the memory for temporaries, and the kernels in the
program. Kernels of Triton are PTX in a program, which has not been assembled yet: that is
done here. `make aot` runs it on JAX 0.10, 0.11 and 0.12; on all but one with `--launches`,
which leaves out what launches no kernel of ours. It fails where

* something does not compile or assemble,
* a backend that was named, or that "auto" takes, is not in the program, or is where it
  should not be,
* a kernel adds integers by an atomic operation on floats, or floats by one on integers,
* temporaries exceed their ceiling, so many bytes an element,
* a small step on sixteen devices takes more launches, waits or temporaries than
  `benchmarks.device.ceilings` has (from JAX 0.11 on),
* less than `SHARE` of the bytes that a kernel of messages moves must be moved, as reckoned
  from what it reads and writes (`h200.shares`),
* a kernel keeps registers in memory, or one of Triton needs so many that fewer than half
  of the threads of a processor run, or more shared memory than a launch may have,
* jax-triton compiles a kernel otherwise than `pallas_kernels.triton.ptx` does, by which
  kernels are launched on JAX 0.12, and tested,
* a control passes, which cannot be compiled.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from unittest import mock


os.environ.setdefault("JAX_PLATFORMS", "cpu")  # The plugin must not look for a driver.
# Where jax-triton leaves the PTX of what it compiles.
os.environ["JAX_TRITON_DUMP_DIR"] = tempfile.mkdtemp(prefix="sparsejax-aot-")
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_gpu_fail_ptx_compilation_on_register_spilling=true",
    ]
)

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import pallas_kernels as kernels
import sparsejax
from benchmarks.device import ceilings
from benchmarks.device.loads import RANKS
from benchmarks.harness.record import Recorder, say
from benchmarks.kernels import h200, launched, lowered
from benchmarks.kernels.assembler import REGISTERS, assembled
from pallas_kernels import backends
from pallas_kernels.pallas import launch
from pallas_kernels.triton.launch import by_ptx


DUMP = pathlib.Path(os.environ["JAX_TRITON_DUMP_DIR"])
# Of Triton, by the names of their functions.
KERNELS = {
    f"{name}_kernel"
    for name in (
        "encode",
        "decode",
        "partition",
        "partition_dense",
        "threshold_hash",
        "clear_message",
        "count_rows",
        "sum_rows",
        "rank_words",
        "pack_message",
        "unpack_message",
        "unpack_bitmaps",
    )
}


def program_of(function, arguments, where: Mesh):
    """The program for these devices."""
    like = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(where, P()))
        for shape, dtype in arguments
    ]
    with jax.set_mesh(where):
        return compiled(jax.jit(function).lower(*like))


def compiled(program):
    """The program; raises where a kernel of Pallas has a wrong atomic operation."""
    wrong = [one for one in lowered.in_pallas(program) if one.is_wrong]
    if wrong:
        raise TypeError(f"atomic operations on another type: {wrong}")
    option = "xla_gpu_fail_ptx_compilation_on_register_spilling"
    return program.compile(compiler_options={option: True})


def asking(backend: str):
    """Takes kernels of a backend, for a GPU that is not here."""
    return kernels.use_kernels(backend, compile_only=True)


def launches(program) -> int:
    """The number of our kernels that a program launches."""
    text = program.as_text()
    ours = r'custom_call_target="(?:[^"]*triton[^"]*|thunky\.inline_module)"'
    return len(re.findall(ours, text))


def check(record: Recorder, name: str, backend: str, build, ceiling: int) -> list[str]:
    """Compiles, prints a line, and returns what is wrong."""
    start = time.perf_counter()
    try:
        program = build()
    except Exception as error:
        return [f"{name} by {backend} does not compile: {str(error)[:300]}"]
    seconds = time.perf_counter() - start
    temporary = program.memory_analysis().temp_size_in_bytes
    ours = launches(program)
    say(f"{name:28} {backend:10} {seconds:7.1f} {temporary / 1e6:10.1f} {ours:8}")
    record.add(
        name=name, backend=backend, seconds=seconds, temporary=temporary, kernels=ours
    )
    wrong = []
    if (ours > 0) != (backend != "reference"):
        wrong.append(f"{name} by {backend} has {ours} kernels of ours.")
    if temporary > ceiling:
        wrong.append(f"{name} by {backend}: {temporary:,} bytes, ceiling {ceiling:,}.")
    return wrong


def assemble(record: Recorder) -> list[str]:
    """Assembles every kernel of Triton that was compiled, and returns what is wrong."""
    say(f"\n{'assembled':28} registers  spilled bytes")
    wrong, seen = [], set()
    for path in sorted(DUMP.rglob("*.ptx")):
        for kernel in assembled(path):
            seen.add(kernel.name)
            say(f"{kernel.name:28} {kernel.registers:9} {kernel.spilled:14}")
            record.add(part="assembled", **dataclasses.asdict(kernel))
            if kernel.spilled or kernel.registers > REGISTERS:
                wrong.append(f"{kernel}: no spills and {REGISTERS} registers are allowed.")
        atomics = lowered.in_text(path.stem, path.with_suffix(".ttir").read_text())
        wrong += [f"atomic operation on another type: {x}" for x in atomics if x.is_wrong]
    missing = KERNELS - seen
    return wrong + ([f"no PTX of {sorted(missing)} was found."] if missing else [])


# Of the bytes that a kernel moves, those that must be moved.
SHARE = 0.7


def share_of_bytes(record: Recorder) -> list[str]:
    """States what messages must move over what their kernels move; what is too little."""
    say(f"\n{'must be moved, of what is':42} full  half")
    wrong = []
    full, half = h200.shares(1.0), h200.shares(0.5)
    for name in full:
        say(f"{name:42} {full[name]:4.2f} {half[name]:5.2f}")
        record.add(part="share of bytes", name=name, full=full[name], half=half[name])
        if min(full[name], half[name]) < SHARE:
            wrong.append(f"{name} moves too much: {half[name]:.2f} of it must be moved.")
    return wrong


def exchange(backend: str):
    """A step of `zen_sync` on four devices, 4M numbers one by one, checking on."""
    where = h200.mesh(4)
    tx = sparsejax.zen_sync("data")
    state = tx.init({"kernel": jnp.zeros(1 << 22, jnp.float32)})
    everywhere = NamedSharding(where, P())
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), state
    )
    x = jax.ShapeDtypeStruct(
        (4, 1 << 22), jnp.float32, sharding=NamedSharding(where, P("data"))
    )
    step = jax.shard_map(
        lambda x, state: tx.update({"kernel": x[0]}, state),
        mesh=where,
        in_specs=(P("data"), P()),
        out_specs=P(),
    )
    with jax.set_mesh(where), asking(backend):
        return compiled(jax.jit(step).lower(x, like))


ROWS, WIDTH, READ = 10_000_000, 16, 4_096  # of a table, and how many a device reads


def step_by_rows():
    """A whole step of a table of 640 MB: the loss, the sum of rows, the lazy optimizer.

    The lists behind the gradient are a quarter as long, or, where rows do not fit, as long:
    one program has both. The optimizer moves and decays rows that are not read, too.
    """
    where = h200.mesh(4)
    lazy = sparsejax.lazy(optax.adamw(1e-3))
    tx = optax.chain(sparsejax.zen_sync("data"), lazy)
    everywhere = NamedSharding(where, P())
    placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)
    params = {
        "embedding": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
        "kernel": jax.ShapeDtypeStruct((WIDTH, 8), jnp.float32),
    }
    params, state = jax.tree.map(placed, (params, jax.eval_shape(tx.init, params)))
    ids = jax.ShapeDtypeStruct(
        (4, READ), jnp.int32, sharding=NamedSharding(where, P("data"))
    )

    def loss(params, ids):
        return jnp.mean(jnp.tanh(params["embedding"][ids] @ params["kernel"]) ** 2)

    def step(params, state, ids):
        local = sparsejax.local(params)
        read = lazy.reader(local, state)
        _, grads = sparsejax.value_and_grad(loss, read=read)(local, ids[0])

        def update(grads, params, state):
            updates, state = tx.update(grads, state, params, read=read)
            return sparsejax.apply_updates(params, updates), state

        return sparsejax.rows.within_capacity(
            update, grads, params, state, capacity=READ // 4
        )

    mapped = jax.shard_map(
        step, mesh=where, in_specs=(P(), P(), P("data")), out_specs=(P(), P())
    )
    with jax.set_mesh(where), asking("reference"):
        return compiled(jax.jit(mapped, donate_argnums=(0, 1)).lower(params, state, ids))


def whole_tables(name: str, program) -> list[str]:
    """What a step by rows makes of a table's height beside table and state, if anything.

    What it returns has to lie where it was given, and nothing of that height is copied.
    """
    memory, text = program.memory_analysis(), program.as_text()
    wrong = []
    if memory.alias_size_in_bytes < 0.999 * memory.output_size_in_bytes:
        wrong.append(
            f"{name}: {memory.output_size_in_bytes:,} bytes are returned, and only "
            f"{memory.alias_size_in_bytes:,} of them in place."
        )
    copied = re.findall(rf"= (\w+\[{ROWS}[^ ]*) copy(?:-start)?\(", text)
    return wrong + [f"{name}: {shape} is copied." for shape in copied]


def by_auto(where: Mesh) -> list[str]:
    """With "auto", where Triton was fastest: its kernel, but under `vmap` the reference."""
    wrong = []
    compact = functools.partial(kernels.compact, capacity=1000)
    with mock.patch.object(backends, "_winner", return_value="triton"), asking("auto"):
        for name, function, shape, has in (
            ("compact by auto", compact, (1 << 16,), True),
            ("compact by auto, vmap", jax.vmap(compact), (2, 1 << 16), False),
        ):
            ours = launches(program_of(function, [(shape, jnp.float32)], where))
            say(f"{name:28} {'auto':10} {'':7} {'':10} {ours:8}")
            wrong += [] if (ours > 0) == has else [f"{name} has {ours} kernels of ours."]
    return wrong


def control(where: Mesh) -> list[str]:
    """A kernel with an operation that no GPU has must not compile."""

    def kernel(x_ref, y_ref):
        y_ref[jnp.arange(128)] = jnp.sort(x_ref[jnp.arange(128)])

    def run(x):
        like = [jax.ShapeDtypeStruct((128,), jnp.float32)]
        return launch.launch(kernel, 1, (x,), like)

    try:
        program_of(run, [((128,), jnp.float32)], where)
    except Exception as error:
        say(f"{'control':28} refused, as it must be: {str(error).splitlines()[0][:60]}")
        return []
    return ["The control compiled: this run proves nothing."]


def control_of_ptx() -> list[str]:
    """PTX with an instruction that there is not must not be assembled."""
    path = DUMP / "control.broken"
    path.write_text(
        ".version 8.0\n.target sm_90\n.address_size 64\n"
        ".visible .entry control() { bogus.u32 %r1; ret; }\n"
    )
    try:
        assembled(path)
    except subprocess.CalledProcessError:
        say(f"{'control of PTX':28} refused, as it must be")
        return []
    return ["The control of PTX was assembled: this run proves nothing."]


def main(*given: str) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.kernels.aot")
    parser.add_argument("--launches", action="store_true", help="our kernels alone")
    with launched.recorded() as launches:
        return run(launches, all_=not parser.parse_args(given).launches)


def run(launches: list, all_: bool) -> int:
    """Compiles, and lists what is wrong.

    Args:
        launches: What is launched in Triton, as it is recorded.
        all_: Whether what launches no kernel of ours is compiled, too.
    """
    warnings.simplefilter("ignore", DeprecationWarning)
    record = Recorder("aot", "make aot")
    try:
        where = h200.mesh(1)
    except Exception as error:
        say(
            "JAX's CUDA plugin is needed to compile for a GPU; `make aot` installs it: "
            f"{error}"
        )
        return 1
    say(f"\n{'compiled for an H200':28} {'backend':10} seconds  temp (MB)  kernels")
    wrong = control(where) + control_of_ptx()
    named = {}
    for backend in backends.BACKENDS:
        try:
            with asking(backend):
                named[backend] = h200.HAS[backend]
        except kernels.BackendError as error:
            wrong.append(f"{backend} was not compiled: {error}")
    compiled_by = [b for b in named if all_ or b != "reference"]
    say(f"backends: {', '.join(named)}")
    for name, (function, arguments, ceiling) in h200.operations().items():
        for backend in (b for b in compiled_by if name in named[b]):

            def build(function=function, arguments=arguments, backend=backend):
                with asking(backend):
                    run = functools.partial(function, backend=backend)
                    return program_of(run, arguments, where)

            wrong += check(record, name, backend, build, ceiling)
    for backend in compiled_by:
        wrong += check(
            record,
            "zen_sync, 4 devices",
            backend,
            functools.partial(exchange, backend),
            20 * 4 * (1 << 22),
        )
    # A number for each row of the table is 40 MB; all lists of all devices are 1 MB.
    if all_:
        name, build = "a step by rows", functools.cache(step_by_rows)
        failed = check(record, name, "reference", build, 4 * ROWS)
        wrong += failed or whole_tables(name, build())
    if jax.__version_info__ >= (0, 11):  # XLA of 0.10 takes more memory for all of them
        wrong += ceilings.check(record, h200.mesh(RANKS), compiled_by)
    if "triton" in named:
        wrong += by_auto(where)
        if by_ptx():
            launched.write(launches, DUMP)
        else:
            wrong += launched.differing(launches, DUMP)
        wrong += assemble(record) + launched.too_large(launches) + share_of_bytes(record)
    for line in wrong:
        say(f"WRONG: {line}")
    say(f"written: {record.write()}")
    shutil.rmtree(DUMP)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
