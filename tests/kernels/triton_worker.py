"""The Triton kernels in Triton's interpreter, held to `contract`.

    python -m tests.kernels.triton_worker [hold FILE ...]
    python -m tests.kernels.triton_worker FILE OLD NEW

By itself in a process: the interpreter checks no bounds, and what runs past an array's end
may take the process down. The second holds a kernel's file that has NEW instead of OLD, and
the process must fail. Arrays lie between canaries, which must live.

The interpreter runs programs one after another, so it cannot show a race.
"""

import contextlib
import os
import pathlib
import sys
import threading
from types import ModuleType


os.environ["TRITON_INTERPRET"] = "1"  # Before Triton is imported.

import importlib.util
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as kernels
from pallas_kernels import backends, rank_select, types
from sparsejax import schemes
from sparsejax.wire import Wire
from tests import helpers
from tests.kernels import contract, messages


FOLDER = pathlib.Path(kernels.__file__).parent / "triton"
CANARY, GUARD = 0x7B, 4096  # a byte, and how many on each side


class Guarded:
    """A NumPy array between canaries, as the kind of tensor that Triton takes."""

    def __init__(self, x):
        x = np.ascontiguousarray(x)
        self._all = np.full(x.nbytes + 2 * GUARD, CANARY, np.uint8)
        self.array = self._all[GUARD : GUARD + x.nbytes].view(x.dtype).reshape(x.shape)
        self.array[...] = x

    @property
    def dtype(self):
        return str(self.array.dtype)

    @property
    def shape(self):
        return self.array.shape

    def data_ptr(self):
        return self.array.ctypes.data

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def size(self):
        return self.array.shape

    def storage_offset(self):
        return 0

    # The interpreter copies its arguments to the CPU and back; they are there already.
    def cpu(self):
        return self

    def untyped_storage(self):
        return self

    def new_empty(self, *_, **__):
        return self

    def set_(self, *_):
        return self

    def copy_(self, _):
        return self

    def check(self, name):
        guards = np.concatenate([self._all[:GUARD], self._all[-GUARD:]])
        assert (guards == CANARY).all(), f"{name} wrote past the end of an array"


def interpreted(
    kernel,
    programs,
    operands,
    *,
    in_place=(),
    results=(),
    warps=4,
    zeroed=False,
    **sizes,
) -> list[np.ndarray]:
    """What a kernel leaves in place, and its results; arrays lie between canaries."""
    del warps
    assert programs <= 128, "the interpreter takes 14 ms a program"
    fill = 0 if zeroed else 0x5A5A5A5A
    reads = [Guarded(x) for x in operands]
    works = [Guarded(x) for x in in_place]
    fills = [Guarded(np.full(x.shape, 0, x.dtype) + x.dtype.type(fill)) for x in results]
    kernel[(programs,)](*reads, *works, *works, *fills, **sizes)
    for argument in (*reads, *works, *fills):
        argument.check(kernel.__name__)
    return [argument.array for argument in (*works, *fills)]


def launch(*given, **sizes) -> list[jax.Array]:
    """As `pallas_kernels.triton.launch`, in the interpreter."""
    return [jnp.asarray(array) for array in interpreted(*given, **sizes)]


# The interpreter has one program at a time, and devices of a CPU are threads.
ALONE = threading.Lock()


def launch_when_run(
    kernel, programs, operands, *, in_place=(), results=(), **sizes
) -> list:
    """The same in a program that JAX compiles."""
    first = len(operands)

    def run(*arrays):
        given, works = arrays[:first], arrays[first:]
        with ALONE:
            return interpreted(
                kernel, programs, given, in_place=works, results=results, **sizes
            )

    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in in_place]
    return jax.pure_callback(run, [*like, *results], *operands, *in_place)


def load(file, old="", new=""):
    """A file of kernels with one edit, as a module whose launches are interpreted."""
    path = FOLDER / file
    if old:
        source = path.read_text()
        assert source.count(old) == 1, f"{old!r} is not once in {file}"
        # Triton reads a kernel's source from its file.
        path = pathlib.Path(os.environ["MUTANTS"]) / f"mutant_{file}"
        path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.launch = launch
    if file == "messages.py":
        module.index = load("index_message.py")
        module.index_message = module.index.index_message
    return module


def with_helpers(file, helpers):
    """A file of kernels, with these helpers instead of its own."""
    module = load(file)
    own = {name for name in vars(helpers) if hasattr(module, name)} - {"tl", "triton"}
    for name in own:
        setattr(module, name, getattr(helpers, name))
    return module


def gradient(size, density):
    rng = np.random.default_rng(size)
    x = rng.standard_normal(size) * (rng.random(size) < density)
    x[[0, -1]] = 2.0, -3.0
    return x.astype(np.float32)


def check_bitmap(made):
    encode = lambda x, _: made.bitmap_encode(jnp.asarray(x))
    decode = lambda words, capacity, _: made.bitmap_decode(jnp.asarray(words), capacity)
    compact = lambda x, capacity, threshold=None: made.compact(
        jnp.asarray(x), capacity, threshold
    )
    for size in (1, 7, 2048, 2049, 8192, 8193, 20_001):
        for density in (0.0, 0.3, 1.0):
            x = gradient(size, density)
            if size > 7:
                x[3:6] = 1e-40, np.nan, -0.0
            for capacity in (size, 3):
                contract.check_bitmap(encode, decode, x, capacity)
                contract.check_compact(compact, x, capacity)
            contract.check_compact(compact, x, size, 0.5)


def check_partition(made):
    def run(indices, count, seeds, **sizes):
        return made.partition(
            jnp.asarray(indices), jnp.int32(count), jnp.asarray(seeds), **sizes
        )

    rng = np.random.default_rng(0)
    seeds = kernels.draw_seeds(4)
    kinds = {
        "sorted": np.arange(1025),
        "any": rng.choice(2**31 - 1, 1025, replace=False),
        "large": 2**24 + 1 + np.arange(1025),
    }
    memories = ((256, 32, 3), (32, 8, 3), (1, 1, 1), (0, 200, 0), (0, 16, 0))
    for indices in kinds.values():
        for count in (0, 1, 1024, 1025):
            for slots, serial, hashes in memories:
                contract.check_partition(
                    run,
                    indices.astype(np.int32),
                    count,
                    seeds,
                    parts=8,
                    slots=slots,
                    serial=serial,
                    hashes=hashes,
                )


def check_partition_dense(made):
    def run(x, seeds, threshold, **sizes):
        return made.partition_dense(
            jnp.asarray(x), jnp.asarray(seeds), threshold=threshold, **sizes
        )

    made._PROGRAMS = 2  # so that one goes over more than a block
    for size in (8, 8192, 8193, 26_000):
        for density in (0.0, 0.05, 0.6):
            x = gradient(size, density)
            x[3:6] = 1e-40, np.nan, -0.0
            for slots, serial, hashes in ((512, 64, 3), (32, 8, 2), (0, 300, 0)):
                for threshold in (None, 0.5):
                    contract.check_partition_dense(
                        run,
                        x,
                        kernels.draw_seeds(hashes + 1),
                        threshold=threshold,
                        parts=8,
                        slots=slots,
                        serial=serial,
                        hashes=hashes,
                    )


def check_threshold_hash(made):
    for size in (1, 7, 4096, 4097, 9000):
        for threshold in (0.0, 0.5, 9.0):
            for seed in kernels.draw_seeds(2):
                contract.check_threshold_hash(
                    lambda x, level, seed, slots: made.threshold_hash(
                        jnp.asarray(x), level, jnp.uint32(seed), slots
                    ),
                    gradient(size, 0.6),
                    threshold,
                    seed,
                    512,
                )


def check_coo_add(made):
    rng = np.random.default_rng(6)
    indices = rng.integers(-1, 3000, 2000).astype(np.int32)
    indices[:200] = 1000
    for shape in ((), (3,)):
        values = rng.standard_normal((2000, *shape)).astype(np.float32)
        for first in (0, 990, 2999):
            contract.check_coo_add(
                lambda i, v, size, first: made.coo_add(
                    jnp.asarray(i), jnp.asarray(v), jnp.int32(first), size=size
                ),
                indices,
                values,
                500,
                first,
            )


def on_arrays(function):
    """The function, given JAX's arrays for NumPy's."""
    as_jax = lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x

    def call(*operands, **sizes):
        return function(*map(as_jax, operands), **{k: as_jax(x) for k, x in sizes.items()})

    return call


def check_messages(made):
    def pack(slots, counts, array, numbers, *, units, **sizes):
        given = (units,) if isinstance(units, jax.Array) else ()
        units = None if given else units
        operands = slots, counts, numbers, array, *given
        return made.pack_message(*operands, units=units, **sizes)

    made._CLEARED = 128
    made._NUMBERS, made._COLUMNS = 64, 8  # so that small messages take several programs
    pack, unpack = on_arrays(pack), on_arrays(made.unpack_message)
    for name, case in messages.CASES.items():
        messages.check_pack(pack, case)
        # Where values go, the others say for each code of these.
        hows = ({},) if "mixed" in name else ({}, {"size": 100}, {"replaces": True})
        for how in hows:
            messages.check_unpack(unpack, case, **how)
    for name in ("coo8", "coo16", "rows of five halves", "one part"):
        messages.check_pieces(on_arrays(made.index_message), unpack, messages.CASES[name])
    # With rows of several words, the last not full, as long sets have them.
    for name in ("coo8", "coo16", "from a rank on", "mixed, bitmap"):
        rows = 1000 if name == "coo16" else 10  # of its 4,101 words, or of 33
        with mock.patch.object(rank_select, "AT_ONCE", rows):
            messages.check_pack(pack, messages.CASES[name])
            messages.check_unpack(unpack, messages.CASES[name])


@contextlib.contextmanager
def sent_by(run):
    """While a step is traced, computes messages by `run`; takes note of what is sent."""
    sent = []
    to_owners, to_all = Wire.all_to_all, Wire.all_gather

    def noting(send):
        def call(wire, x, **how):
            note = lambda rank, x: sent.append((int(rank), np.asarray(x).tobytes()))
            jax.debug.callback(note, wire.rank, x)
            return send(wire, x, **how)

        return call

    with (
        helpers.for_gpus(),
        mock.patch.object(backends, "run", run),
        mock.patch.object(kernels, "unpacks_in_kernels", return_value=True),
        mock.patch.object(Wire, "all_to_all", noting(to_owners)),
        mock.patch.object(Wire, "all_gather", noting(to_all)),
    ):
        yield sent


def check_exchange(made):
    """Zen on devices of a CPU sends by kernels what it sends by reference, and is exact."""
    original, launched = backends.run, set()
    kernels_of_messages = {"pack_message", "index_message", "unpack_message"}
    made.launch = made.index.launch = launch_when_run
    made._NUMBERS, made._COLUMNS, made._CLEARED = 64, 8, 256

    def by_kernels(operation, named, of, size, *operands):
        if operation not in kernels_of_messages:
            return original(operation, named, of, size, *operands)
        launched.add(operation)
        axes = frozenset().union(*map(types.varying_axes, operands))
        operands = types.without_types(operands, axes)
        result = getattr(made, operation)(*operands, **of["triton"].keywords)
        return types.as_varying(result, axes)

    ranks, size = 3, 3001
    for shape, density in (((), 0.01), ((), 0.1), ((3,), 0.03)):
        x = helpers.gradients(ranks, size, density, shape=shape, seed=5)
        seen = []
        for run in (original, by_kernels):
            with sent_by(run) as sent:
                step = lambda x: helpers.call(schemes.Zen(), x)
                done = helpers.ranked(step, ranks)(x)
                jax.effects_barrier()
            helpers.assert_same_on_all_ranks(done.total)
            np.testing.assert_array_equal(done.total[0], helpers.total(x))
            assert len(sent) >= 2 * ranks, "nothing was sent"
            seen.append((sorted(sent), jax.tree.map(float, done.traffic.push.wire[0])))
        assert seen[0] == seen[1], "kernels send something else"
    assert launched == kernels_of_messages


CHECKS = {
    "bitmap.py": check_bitmap,
    "words.py": lambda made: check_bitmap(with_helpers("bitmap.py", made)),
    "partition.py": check_partition,
    "partition_dense.py": check_partition_dense,
    "threshold_hash.py": check_threshold_hash,
    "coo_add.py": check_coo_add,
    "messages.py": check_messages,
    "exchange": check_exchange,
    "slots.py": lambda made: check_messages(with_helpers("messages.py", made)),
    "index_message.py": lambda made: check_messages(with_helpers("messages.py", made)),
}

FILES = {"exchange": "messages.py"}  # where a check has not the name of its file


def main(file="hold", *given):
    # jax-triton needs a GPU's jaxlib to be imported, and nothing here is launched by it.
    sys.modules.setdefault("jax_triton", ModuleType("jax_triton"))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 3)
    files, edited = (given or CHECKS, ()) if file == "hold" else ([file], given)
    for name in files:
        CHECKS[name](load(FILES.get(name, name), *edited))
        print(f"{name} holds", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
