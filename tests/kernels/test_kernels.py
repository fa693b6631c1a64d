"""Every operation by every backend that has it, held to `contract`.

Without a GPU kernels are interpreted. What compiles is decided by a few shapes; the data in
them is many.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as kernels
from pallas_kernels.pallas import bitmap, launch, partition, threshold_hash
from tests import helpers
from tests.helpers import slow
from tests.kernels import contract


# Around a block of decoding, which takes 256 words, and over several.
SIZES = [7, 1025, *slow(1, 2048, 20_001)]
DENSITIES = [0.0, 0.01, 0.3, 1.0]


ON_GPU = jax.default_backend() == "gpu"


def by(backend, operation, **static):
    """An operation by one backend, compiled; NumPy in, whatever comes out."""
    named = jax.jit(functools.partial(operation, **static))

    def run(*operands, **named_operands):
        with kernels.use_kernels(backend, interpret=backend == "pallas" and not ON_GPU):
            return named(*operands, **named_operands)

    return run


@functools.cache
def ops(backend):
    """The operations as the checks call them, compiled once a shape."""

    @functools.cache
    def compact(capacity):
        return by(backend, kernels.compact, capacity=capacity)

    @functools.cache
    def decode(capacity):
        listed = lambda words, *units: kernels.bitmap_decode(words, capacity, *units)
        return by(backend, listed)

    @functools.cache
    def partition(sizes):
        return by(backend, kernels.partition, memory=kernels.HashMemory(**dict(sizes)))

    @functools.cache
    def dense(sizes):
        memory = kernels.HashMemory(**dict(sizes))
        return by(backend, kernels.partition_dense, memory=memory)

    @functools.cache
    def hashed(slots):
        return by(backend, kernels.threshold_hash, slots=slots)

    encode = by(backend, kernels.bitmap_encode)
    listed = lambda units: () if units is None else (units,)
    return {
        "compact": lambda x, capacity: compact(capacity)(x),
        "encode": lambda x, units=None: encode(x, *listed(units)),
        "decode": lambda words, capacity, units=None: decode(capacity)(
            words, *listed(units)
        ),
        "partition": lambda indices, count, seeds, **sizes: partition(
            tuple(sorted(sizes.items()))
        )(indices, np.int32(count), seeds),
        "partition_dense": lambda x, seeds, **sizes: dense(tuple(sorted(sizes.items())))(
            x, seeds
        ),
        "threshold_hash": lambda x, level, seed, slots: hashed(slots)(
            x, x.dtype.type(level), np.uint32(seed)
        ),
    }


every_backend = pytest.mark.parametrize(
    "backend",
    ["reference", "pallas", pytest.param("triton", marks=pytest.mark.gpu)],
)


with_launches = pytest.mark.parametrize(
    "backend", ["reference", pytest.param("triton", marks=pytest.mark.gpu)]
)


def gradient(size, density, seed=0, dtype=np.float32):
    rng = np.random.default_rng([size, seed])
    x = rng.standard_normal(size) * (rng.random(size) < density)
    return x.astype(dtype)


@every_backend
@pytest.mark.parametrize("size", SIZES)
def test_bitmaps(backend, size):
    """And compaction, with room for all or for a few."""
    run = ops(backend)
    for density in DENSITIES:
        x = gradient(size, density)
        for capacity in {min(size, 2000), 3}:
            contract.check_bitmap(run["encode"], run["decode"], x, capacity)
            contract.check_compact(run["compact"], x, capacity)


@every_backend
@pytest.mark.parametrize("dtype", [np.float32, *helpers.slow(np.float16, jnp.bfloat16)])
def test_nan_denormals_and_the_first_element_count(backend, dtype):
    x = np.zeros(1025, dtype)
    least = np.ones(1, f"u{x.dtype.itemsize}").view(dtype)[0]
    x[[0, 3, 9, 1024]] = least, np.nan, -np.inf, -least
    x[5] = -0.0
    assert contract.chosen(x).sum() == 4
    contract.check_compact(ops(backend)["compact"], x, 1000)
    contract.check_bitmap(ops(backend)["encode"], ops(backend)["decode"], x, 1000)


@pytest.mark.slow
@every_backend
def test_bitmaps_of_the_units_that_a_server_owns(backend):
    rng = np.random.default_rng(5)
    for density in DENSITIES:
        x = gradient(5000, density, seed=2)
        owned = np.sort(rng.choice(5000, 1025, replace=False)).astype(np.int32)
        run = ops(backend)
        contract.check_bitmap(run["encode"], run["decode"], x, 700, owned)


ROOMY = {"parts": 8, "slots": 256, "serial": 32, "hashes": 3}


def indices_of(kind, capacity, rng):
    """Indices that are each there once, as a compaction would give them or not."""
    if kind == "large":  # float32 cannot tell these apart
        return np.arange(2**24 + 1, 2**24 + 1 + capacity).astype(np.int32)
    if kind == "all in one part":
        keys = np.arange(60 * capacity)
        parts = contract.murmur3(keys, kernels.draw_seeds(4)[0]) % 8
        return keys[parts == 3][:capacity].astype(np.int32)
    if kind == "some negative":
        found = rng.choice(2**31 - 1, capacity, replace=False)
        return np.where(np.arange(capacity) % 3 == 1, -1, found).astype(np.int32)
    if kind == "in any order":
        return rng.choice(2**31 - 1, capacity, replace=False).astype(np.int32)
    found = np.sort(rng.choice(1 << 20, capacity, replace=False)).astype(np.int32)
    found[0] = 0  # element 0 is an element
    return found


@every_backend
@pytest.mark.parametrize(
    ("kind", "capacity"),
    [
        ("sorted", 8),
        *slow(
            ("all in one part", 1025),
            ("some negative", 1025),
            ("sorted", 1025),
            ("in any order", 1025),
            ("large", 1025),
        ),
    ],
)
def test_partition(backend, kind, capacity):
    rng = np.random.default_rng(capacity)
    indices = indices_of(kind, capacity, rng)
    for count in sorted({0, 1, 7, capacity - 1, capacity}):
        contract.check_partition(
            ops(backend)["partition"], indices, count, kernels.draw_seeds(4), **ROOMY
        )


@pytest.mark.slow
@every_backend
@pytest.mark.parametrize(("slots", "serial", "hashes"), [(64, 16, 1), (1, 1, 3)])
def test_partition_returns_what_finds_no_place(backend, hashes, slots, serial):
    indices = indices_of("sorted", 1025, np.random.default_rng(0))
    sizes = {"parts": 8, "slots": slots, "serial": serial, "hashes": hashes}
    seeds = kernels.draw_seeds(4, seed=1)
    contract.check_partition(ops(backend)["partition"], indices, 1025, seeds, **sizes)


@every_backend
@pytest.mark.parametrize("serial", [16, 2048])
def test_without_hashes_partition_appends(backend, serial):
    rng = np.random.default_rng(2)
    sizes = {"parts": 8, "slots": 0, "serial": serial, "hashes": 0}
    for kind in ("sorted", "in any order", "all in one part"):
        indices = indices_of(kind, 1025, rng)
        for count in (0, 1, 1025):
            contract.check_partition(
                ops(backend)["partition"], indices, count, kernels.draw_seeds(1), **sizes
            )


@pytest.mark.slow
@with_launches
@pytest.mark.parametrize("size", [7, 20_000])
def test_partition_dense(backend, size):
    for density in DENSITIES:
        x = gradient(size, density, seed=8)
        x[0] = 1e-40  # element 0 is an element, and a denormal is not zero
        for slots, serial, hashes in ((4096, 512, 3), (64, 16, 2), (0, 1000, 0)):
            contract.check_partition_dense(
                ops(backend)["partition_dense"],
                x,
                kernels.draw_seeds(hashes + 1, seed=3),
                parts=4,
                slots=slots,
                serial=serial,
                hashes=hashes,
            )


@with_launches
@pytest.mark.parametrize("dtype", [np.float32, *slow(np.float16, jnp.bfloat16)])
def test_partition_dense_of_every_dtype(backend, dtype):
    x = gradient(9000, 0.3, seed=9, dtype=dtype)
    x[[0, 8999]] = 1.5, np.nan
    sizes = {"parts": 4, "slots": 256, "serial": 64, "hashes": 3}
    contract.check_partition_dense(
        ops(backend)["partition_dense"], x, kernels.draw_seeds(4), **sizes
    )


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "hashes"), [(3000, 3), (0, 0)])
def test_partition_goes_over_more_than_a_tile(slots, hashes):
    indices = indices_of("in any order", 60_000, np.random.default_rng(3))
    sizes = {"parts": 4, "slots": slots, "serial": 3000, "hashes": hashes}
    seeds = kernels.draw_seeds(hashes + 1)
    contract.check_partition(ops("reference")["partition"], indices, 59_000, seeds, **sizes)


@every_backend
@pytest.mark.parametrize("size", SIZES)
def test_threshold_hash(backend, size):
    for density, threshold in [(0.0, 0.5), (0.3, 0.5), (1.0, 2.0), (1.0, 0.0)]:
        x = gradient(size, density, seed=4)
        x[0] = 3.0  # element 0 is an element
        for seed in kernels.draw_seeds(2):
            contract.check_threshold_hash(
                ops(backend)["threshold_hash"], x, threshold, seed, 512
            )


CANARY, GUARD = 0x7B7B7B7B, 1024  # a word, and how many behind the end of each array


def guarded(monkeypatch):
    """Puts canaries behind everything that a Pallas kernel may write; tells who died.

    The kernels are called as they are, outside of jit, so that each launch can be checked.
    """
    real, dead = launch.launch, []

    def with_guards(kernel, programs, operands, results, *, in_place=None, **how):
        operands, in_place = list(operands), dict(in_place or {})
        sizes = [x.shape[0] for x in results]
        given = len(operands)
        for number, result in enumerate(results):
            if number not in in_place.values():
                in_place[len(operands)] = number
                # What is there before is anything.
                filled = jnp.full(result.shape, CANARY, jnp.uint32)
                operands.append(filled.view(result.dtype))
        for operand in in_place:
            x = operands[operand]
            canary = jnp.full(GUARD, CANARY, jnp.uint32).view(x.dtype)
            operands[operand] = jnp.concatenate([x, canary])
        like = [jax.ShapeDtypeStruct((x.shape[0] + GUARD,), x.dtype) for x in results]
        total = len(operands)

        @functools.wraps(kernel)
        def inner(*refs, **sizes):
            kernel(*refs[:given], *refs[total:], **sizes)

        done = real(inner, programs, operands, like, in_place=in_place, **how)
        for x, size in zip(done, sizes, strict=True):
            if not (np.asarray(x[size:]).view(np.uint32) == CANARY).all():
                dead.append(kernel.__name__)
        return [x[:size] for x, size in zip(done, sizes, strict=True)]

    monkeypatch.setattr(launch, "launch", with_guards)
    return dead


@pytest.mark.slow
@pytest.mark.parametrize("size", [1025, 8193])
def test_no_kernel_writes_behind_the_end_of_an_array(size, monkeypatch):
    dead, how = guarded(monkeypatch), {"interpret": not ON_GPU}
    x = jnp.asarray(gradient(size, 1.0))
    words = bitmap.bitmap_encode(x, **how)
    for capacity in (size, 1):
        bitmap.bitmap_decode(words, capacity, x.size, **how)
    threshold_hash.threshold_hash(x, 0.0, kernels.draw_seeds(1)[0], 33, **how)
    for slots in (256, 1):
        how["memory"] = kernels.HashMemory(parts=8, slots=slots, serial=1, hashes=2)
        indices = jnp.arange(max(size, 8), dtype=jnp.int32)
        partition.partition(indices, size, kernels.draw_seeds(3), **how)
    assert not dead, f"past its end wrote {dead}"


def test_a_write_behind_the_end_kills_a_canary(monkeypatch):
    dead = guarded(monkeypatch)

    def by_one(x_ref, y_ref):
        at = launch.lanes(64)
        launch.store(y_ref, at + 1, x_ref[at], at >= 0)

    like = [jax.ShapeDtypeStruct((64,), jnp.int32)]
    launch.launch(by_one, 1, [jnp.arange(64)], like, interpret=not ON_GPU)
    assert dead == ["by_one"]


def test_nothing_in_nothing_out():
    nothing = jnp.zeros(0, jnp.float32)
    for backend in ("reference", "pallas"):
        run = ops(backend)
        found, count = run["compact"](np.asarray(nothing), 3)
        assert int(count) == 0
        np.testing.assert_array_equal(found, [0, 0, 0])
        assert np.asarray(run["encode"](np.asarray(nothing))).tolist() == [0]
        memory = run["threshold_hash"](np.asarray(nothing), 1.0, 3, 5)
        np.testing.assert_array_equal(memory, [-1] * 5)
