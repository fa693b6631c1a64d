"""What the Triton kernels of each file must do, wherever they are launched.

A check takes the module of a file of kernels, whose `launch` is an interpreter's or a
machine's, and holds it to `contract`: small sizes, so that launches are few, and those at
which something may go wrong.
"""

import contextlib
import functools
import importlib.util
import itertools
import pathlib
import threading
from collections.abc import Callable
from types import ModuleType
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as kernels
from pallas_kernels import backends, types
from pallas_kernels.reference import messages as in_reference
from sparsejax import schemes
from sparsejax.wire import Wire
from sparsejax.wire.at_once import unpacking
from tests import helpers
from tests.kernels import contract, messages


FOLDER = pathlib.Path(kernels.__file__).parent / "triton"


class Edit:
    """Something in a file that is replaced before it is loaded, for a mutant."""

    def __init__(self, old: str, new: str, folder: pathlib.Path):
        self._old, self._new, self._folder = old, new, folder

    def apply(self, path: pathlib.Path) -> pathlib.Path:
        """The path of the edited file: Triton reads a kernel's source from its file."""
        source = path.read_text()
        if source.count(self._old) != 1:
            raise LookupError(f"{self._old!r} is not once in {path.name}")
        edited = self._folder / f"mutant_{path.name}"
        edited.write_text(source.replace(self._old, self._new))
        return edited


def load(file: str, launched: Callable, edit: Edit | None = None) -> ModuleType:
    """A file of kernels as a module of its own, with another launch.

    Args:
        file: In `pallas_kernels/triton`.
        launched: As `pallas_kernels.triton.launch.launch`, from and to arrays of NumPy.
        edit: What is replaced in it.
    """
    path = FOLDER / file
    if edit is not None:
        path = edit.apply(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.launched, module.launch = launched, functools.partial(at_once, launched)
    if file == "messages.py":
        module.index = load("index_message.py", launched)
        module.index_message = module.index.index_message
        module.bitmap = load("bitmap.py", launched)
        module.unpack_bitmaps = module.bitmap.unpack_bitmaps
    return module


def at_once(launched: Callable, *given, **sizes) -> list[jax.Array]:
    """Launches, outside of `jax.jit`."""
    return [jnp.asarray(array) for array in launched(*given, **sizes)]


# Kernels are launched one at a time, and devices of a CPU are threads.
ALONE = threading.Lock()


def when_run(
    launched: Callable, kernel, programs, operands, *, in_place=(), results=(), **sizes
) -> list[jax.Array]:
    """The same in a program that JAX compiles."""
    first = len(operands)

    def run(*arrays):
        given, works = arrays[:first], arrays[first:]
        with ALONE:
            return launched(
                kernel, programs, given, in_place=works, results=results, **sizes
            )

    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in in_place]
    return jax.pure_callback(run, [*like, *results], *operands, *in_place)


def with_helpers(file, helpers):
    """A file of kernels, with these helpers instead of its own."""
    module = load(file, helpers.launched)
    own = {name for name in vars(helpers) if hasattr(module, name)} - {"tl", "triton"}
    for name in own:
        setattr(module, name, getattr(helpers, name))
    return module


def gradient(size, density):
    rng = np.random.default_rng(size)
    x = rng.standard_normal(size) * (rng.random(size) < density)
    x[[0, -1]] = 2.0, -3.0
    return x.astype(np.float32)


def check_bitmap(made, sizes=(1, 7, 2048, 2049, 8193)):
    encode = lambda x, _: made.bitmap_encode(jnp.asarray(x))
    decode = lambda words, capacity, _: made.bitmap_decode(
        jnp.asarray(words), capacity, 32 * len(words)
    )
    compact = lambda x, capacity: made.bitmap_decode(
        made.bitmap_encode(jnp.asarray(x)), capacity, x.size
    )
    for size in sizes:
        # All densities in less than a block, and in one and a bit.
        for density in (0.0, 0.3, 1.0) if size in (7, 2049) else (0.3,):
            x = gradient(size, density)
            if size > 7:
                x[3:6] = 1e-40, np.nan, -0.0
            for capacity in (size, 3):
                contract.check_bitmap(encode, decode, x, capacity)
                contract.check_compact(getattr(made, "compact", compact), x, capacity)


def kinds_of_indices(seeds):
    """Indices that are each there once, as a compaction would give them or not."""
    rng, keys = np.random.default_rng(0), np.arange(60 * 1025)
    any_order = rng.choice(2**31 - 1, 1025, replace=False)
    return {
        "any": any_order,
        "sorted": np.arange(1025),  # the first element among them
        "large": 2**24 + 1 + np.arange(1025),  # float32 cannot tell these apart
        "one part": keys[contract.murmur3(keys, seeds[0]) % 8 == 3][:1025],
        "some negative": np.where(np.arange(1025) % 3 == 1, -1, any_order),
    }


def check_partition(made, wanted=None):
    def run(indices, count, seeds, **sizes):
        operands = jnp.asarray(indices), jnp.int32(count), jnp.asarray(seeds)
        return made.partition(*operands, memory=kernels.HashMemory(**sizes))

    seeds = kernels.draw_seeds(4)
    kinds = kinds_of_indices(seeds)
    memories = ((256, 32, 3), (32, 8, 3), (1, 1, 1), (0, 200, 0), (0, 16, 0))
    # Each memory with all of one kind; fewer, and others, in one with hashes.
    for kind in wanted or kinds:
        for count in (1025, 0, 1, 1024) if kind == "any" else (1025,):
            every = kind == "any" and count == 1025
            for slots, serial, hashes in memories if every else memories[1:2]:
                contract.check_partition(
                    run,
                    kinds[kind].astype(np.int32),
                    count,
                    seeds,
                    parts=8,
                    slots=slots,
                    serial=serial,
                    hashes=hashes,
                )


def check_partition_dense(made):
    def run(x, seeds, **sizes):
        memory = kernels.HashMemory(**sizes)
        operands = jnp.asarray(x), jnp.asarray(seeds)
        return made.partition_dense(*operands, memory=memory)

    made._PROGRAMS = 2  # so that one goes over more than a block
    for size, density in ((8, 0.6), (8192, 0.05), (8193, 0.0), (8193, 0.6), (26_000, 0.6)):
        x = gradient(size, density)
        x[3:6] = 1e-40, np.nan, -0.0
        memories = (512, 64, 3), (32, 8, 2), (0, 300, 0)
        # More than a block is no matter of the memory.
        for slots, serial, hashes in memories[:1] if size > 10_000 else memories:
            contract.check_partition_dense(
                run,
                x,
                kernels.draw_seeds(hashes + 1),
                parts=8,
                slots=slots,
                serial=serial,
                hashes=hashes,
            )


def check_threshold_hash(made, sizes=(1, 7, 4096, 4097, 9000)):
    seeds = itertools.cycle(kernels.draw_seeds(2))
    for size in sizes:
        for threshold in (0.0, 0.5, 9.0):
            contract.check_threshold_hash(
                lambda x, level, seed, slots: made.threshold_hash(
                    jnp.asarray(x), level, jnp.uint32(seed), slots
                ),
                gradient(size, 0.6),
                threshold,
                next(seeds),
                512,
            )


def on_arrays(function):
    """The function, given JAX's arrays for NumPy's."""
    as_jax = lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x

    def call(*operands, **sizes):
        return function(*jax.tree.map(as_jax, operands), **sizes)

    return call


def check_bitmap_messages(made, index=None, names=tuple(messages.BITMAPS)):
    made._SLOTS = 64  # so that small arrays take several programs
    index = index or load("index_message.py", made.launched)
    index._ROWS = 8
    functions = on_arrays(index.index_message), on_arrays(made.unpack_bitmaps)
    for name in names:
        case = messages.BITMAPS[name]
        messages.check_bitmaps(*functions, case)
        if name == "half of all":
            with mock.patch.object(in_reference, "MOST_ROWS", 10):
                messages.check_bitmaps(*functions, case)


# A message of each code, and of rows of whole words and of halves.
WHERE_VALUES_GO = ("coo8", "coo16", "bitmap", "rows of one part", "rows of five halves")


# One of each kind of units and values; and of bitmaps one. First where parts have units in
# common.
SOME = ("coo8", "from a rank on", "mixed, coo16", "bitmap", "rows of five halves")
SOME_BITMAPS = ("thin",)
# And of each code, with what is full, empty, alone, wide, or begins behind its end; bits of
# two kinds.
MOST = (*SOME, "coo32", "halves", "full", "nothing", "one part", "rows of two axes")
MOST += ("behind the last",)
MOST_BITMAPS = ("half of all", "full, halves")


def check_messages(made, names=tuple(messages.CASES), bitmaps=tuple(messages.BITMAPS)):
    made._CLEARED = 128
    made._TILE = 64, 8  # so that small messages take several programs
    made.index._ROWS = 8  # and what is added up several turns
    pack, unpack = on_arrays(made.pack_message), on_arrays(made.unpack_message)
    for name in names:
        case = messages.CASES[name]
        messages.check_pack(pack, case)
        # Where values go, the others say for each code of these.
        hows = ({}, {"size": 100}, {"replaces": True}) if name in WHERE_VALUES_GO else ({},)
        for how in hows:
            messages.check_unpack(unpack, case, **how)
    these = lambda *wanted: [name for name in wanted if name in names]
    for name in these("coo8", "rows of five halves"):
        check_ordered(made, unpack, messages.CASES[name])
    index = on_arrays(made.index_message)
    for name in these("coo8", "coo16", "rows of five halves", "one part"):
        messages.check_pieces(index, unpack, messages.CASES[name], ordered=name == "coo8")
    check_bitmap_messages(made.bitmap, made.index, bitmaps)
    # With rows of several words, the last not full, as long sets have them.
    for name in these("coo8", "coo16", "from a rank on", "mixed, bitmap"):
        rows = 1000 if name == "coo16" else 10  # of its 4,101 words, or of 33
        with mock.patch.object(in_reference, "MOST_ROWS", rows):
            messages.check_pack(pack, messages.CASES[name])
            messages.check_unpack(unpack, messages.CASES[name])


def check_ordered(made, unpack, case):
    """A launch for each sender; ALONE is what leaves atomic additions out of the kernel."""
    launch, alone = made.launch, []

    def noting(*given, **sizes):
        alone.append(sizes.get("ALONE"))
        return launch(*given, **sizes)

    with mock.patch.object(made, "launch", noting):
        messages.check_unpack(unpack, case, ordered=True)
    if launch is None:  # of no file of kernels
        return
    assert [one for one in alone if one is not None] == [1] * len(case.received)


@contextlib.contextmanager
def sent_by(run):
    """While a step is traced, computes messages by `run`; takes note of what is sent."""
    sent = []
    to_owners, to_all = Wire.to_each, Wire.all_gather

    def noting(send):
        def call(wire, x, **how):
            note = lambda rank, x: sent.append((int(rank), np.asarray(x).tobytes()))
            jax.debug.callback(note, wire.rank, x)
            return send(wire, x, **how)

        return call

    with (
        helpers.for_gpus(),
        mock.patch.object(backends, "run", run),
        mock.patch.object(unpacking, "unpacks_in_kernels", return_value=True),
        mock.patch.object(Wire, "to_each", noting(to_owners)),
        mock.patch.object(Wire, "all_gather", noting(to_all)),
    ):
        yield sent


def check_exchange(made):
    """Zen on devices of a CPU sends by kernels what it sends by reference, and is exact."""
    for module in (made, made.index, made.bitmap):
        module.launch = functools.partial(when_run, made.launched)
    made._TILE, made._CLEARED = (64, 8), 256
    operations = {"pack_message", "index_message", "unpack_message"}
    original, launched = backends.run, set()

    def by_kernels(operation, named, of, size, *operands):
        if operation not in operations or "triton" not in of:
            return original(operation, named, of, size, *operands)
        launched.add(operation)
        axes = frozenset().union(*map(types.varying_axes, jax.tree.leaves(operands)))
        operands = types.without_types(operands, axes)
        kernel = of["triton"]
        result = getattr(made, kernel.func.__name__)(*operands, **kernel.keywords)
        return types.as_varying(result, axes)

    ranks, size = 3, 1501
    for shape, density in (((), 0.1), ((3,), 0.03)):
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
    assert launched == operations


CHECKS = {
    "bitmap.py": check_bitmap,
    "words.py": lambda made: check_bitmap(with_helpers("bitmap.py", made)),
    "partition.py": check_partition,
    "partition_dense.py": check_partition_dense,
    "threshold_hash.py": check_threshold_hash,
    "messages.py": check_messages,
    "some messages": lambda made: check_messages(made, names=SOME, bitmaps=SOME_BITMAPS),
    "most messages": lambda made: check_messages(made, names=MOST, bitmaps=MOST_BITMAPS),
    "exchange": check_exchange,
    "slots.py": lambda made: check_messages(with_helpers("messages.py", made)),
    "index_message.py": lambda made: check_messages(with_helpers("messages.py", made)),
    "bitmaps": check_bitmap_messages,
    "index of bitmaps": lambda made: check_bitmap_messages(
        load("bitmap.py", made.launched), made
    ),
}

FILES = {
    "some messages": "messages.py",
    "most messages": "messages.py",
    "exchange": "messages.py",
    "bitmaps": "bitmap.py",
    "index of bitmaps": "index_message.py",
}  # where a check has not the name of its file
