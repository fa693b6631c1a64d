"""Every operation by every backend that has it, held to `contract` by `checks`.

Without a GPU kernels are interpreted. The checks are those of the kernels of Triton, which
`test_triton` has interpreted, too.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as kernels
from pallas_kernels.pallas import bitmap, launch, partition, threshold_hash
from tests.kernels import checks, contract


ON_GPU = jax.default_backend() == "gpu"


def by(backend, operation, **static):
    """An operation by one backend, compiled; NumPy in, whatever comes out."""
    named = jax.jit(functools.partial(operation, **static))

    def run(*operands, **named_operands):
        with kernels.use_kernels(backend, interpret=backend == "pallas" and not ON_GPU):
            return named(*operands, **named_operands)

    return run


@functools.cache
def made(backend):
    """The operations as a file of kernels has them, compiled once for what is static."""
    static = functools.cache(functools.partial(by, backend))
    return types.SimpleNamespace(
        bitmap_encode=static(kernels.bitmap_encode),
        bitmap_decode=lambda words, capacity, _: static(
            kernels.bitmap_decode, capacity=capacity
        )(words),
        compact=lambda x, capacity: static(kernels.compact, capacity=capacity)(x),
        partition=lambda *given, memory: static(kernels.partition, memory=memory)(*given),
        partition_dense=lambda *given, memory: static(
            kernels.partition_dense, memory=memory
        )(*given),
        threshold_hash=lambda x, level, seed, slots: static(
            kernels.threshold_hash, slots=slots
        )(x, x.dtype.type(level), seed),
    )


BACKENDS = ["reference", "pallas", pytest.param("triton", marks=pytest.mark.gpu)]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
FILES = ("bitmap.py", "partition.py", "threshold_hash.py")


@every_backend
def test_a_few_sizes_hold_what_the_contract_says(backend):
    checks.check_bitmap(made(backend), (7, 1025))
    checks.check_partition(made(backend), ["one part"])
    checks.check_threshold_hash(made(backend), (7, 4097))


@pytest.mark.slow
@every_backend
@pytest.mark.parametrize("file", [*FILES, "partition_dense.py"])
def test_every_operation_holds_what_the_contract_says(backend, file):
    if (backend, file) == ("pallas", "partition_dense.py"):
        pytest.skip("Pallas has no such kernel")
    checks.CHECKS[file](made(backend))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
@every_backend
def test_nan_denormals_and_the_first_element_count_in_16_bits(backend, dtype):
    x = np.zeros(1025, dtype)
    least = np.ones(1, np.uint16).view(dtype)[0]
    x[[0, 3, 9, 1024]] = least, np.nan, -np.inf, -least
    x[5] = -0.0
    assert contract.chosen(x).sum() == 4
    contract.check_compact(made(backend).compact, x, 1000)
    if backend != "pallas":  # which has no such kernel
        run = lambda x, seeds, **sizes: made(backend).partition_dense(
            x, seeds, memory=kernels.HashMemory(**sizes)
        )
        sizes = {"parts": 4, "slots": 256, "serial": 64, "hashes": 3}
        contract.check_partition_dense(run, x, kernels.draw_seeds(4), **sizes)


@pytest.mark.slow
@every_backend
def test_bitmaps_of_the_units_that_a_server_owns(backend):
    x, rng = checks.gradient(5000, 0.3), np.random.default_rng(5)
    owned = np.sort(rng.choice(5000, 1025, replace=False)).astype(np.int32)
    decode = lambda words, capacity, units: by(
        backend, lambda words, units: kernels.bitmap_decode(words, capacity, units)
    )(words, units)
    contract.check_bitmap(by(backend, kernels.bitmap_encode), decode, x, 700, owned)


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "hashes"), [(3000, 3), (0, 0)])
def test_partition_goes_over_more_than_a_tile(slots, hashes):
    indices = np.random.default_rng(3).choice(2**31 - 1, 60_000, replace=False)
    sizes = {"parts": 4, "slots": slots, "serial": 3000, "hashes": hashes}
    run = lambda indices, count, seeds, **sizes: made("reference").partition(
        indices, np.int32(count), seeds, memory=kernels.HashMemory(**sizes)
    )
    seeds = kernels.draw_seeds(hashes + 1)
    contract.check_partition(run, indices.astype(np.int32), 59_000, seeds, **sizes)


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
    x = jnp.asarray(checks.gradient(size, 1.0))
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
    nothing = np.zeros(0, np.float32)
    for backend in ("reference", "pallas"):
        run = made(backend)
        found, count = run.compact(nothing, 3)
        assert int(count) == 0
        np.testing.assert_array_equal(found, [0, 0, 0])
        assert np.asarray(run.bitmap_encode(nothing)).tolist() == [0]
        memory = run.threshold_hash(nothing, 1.0, np.uint32(3), 5)
        np.testing.assert_array_equal(memory, [-1] * 5)
