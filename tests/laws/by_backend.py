"""Schemes run by the kernels of one backend, and by their reference, side by side.

    python -m tests.laws.by_backend BACKEND [SCHEME[:SHAPE] ...]

holds schemes, or all of the conformance table, to the law with the kernels of "pallas" or
of "triton" in their interpreters, or with Triton's compiled for a GPU and executed from
their PTX: by the machine on the CPU, "ptx", or by the GPU that is here, "gpu". Triton's
interpreter is chosen before Triton is imported, and checks no bounds, so it has a process
of its own, in which arrays lie between canaries. Programs are traced as for GPUs, and run
on simulated devices; each calls Triton's kernels back.
"""

import collections
import contextlib
import functools
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_kernels
import sparsejax
from pallas_kernels import backends
from sparsejax.units.row_grads import RowGrads
from sparsejax.wire import collectives
from tests import helpers
from tests.laws.test_exact_sum import SCHEMES


RANKS = 3
# The collectives that take what a scheme has packed.
_SENDS = ("to_each", "all_gather", "reduce_scatter", "permute", "all_reduce")
# Its kernel writes entries in the order in which threads come.
_UNORDERED = ("balanced_algorithm_1",)
_SHAPES = {"numbers": (1601,), "rows": (261, 16), "listed rows": (261, 16)}
# Their rows are those of others, which take them as well.
NOT_LISTED = ("zen_after_a_step",)


def check(name: str, shape: str, kernels: contextlib.AbstractContextManager) -> int:
    """Asserts that a scheme sums and sends with kernels what it does without.

    Args:
        name: Of the scheme.
        shape: "numbers", "rows" or "listed rows".
        kernels: Inside it the kernels are taken.

    Returns:
        How many of the messages were compared.
    """
    with helpers.for_gpus():
        with pallas_kernels.use_kernels("reference"):
            wanted = list(_runs(name, shape))
        jax.clear_caches()
        with kernels:
            found = list(_runs(name, shape))
    compared = 0
    for (x, totals, traffic, sent), other in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(totals[0], helpers.total(x))
        for results in (totals, other[1]):
            helpers.assert_same_on_all_ranks(results)
        assert totals.tobytes() == other[1].tobytes(), f"{name}: other sums"
        assert traffic == other[2], f"{name}: another traffic"
        if name in _UNORDERED:
            sent, other_sent = (sorted(map(_length, each)) for each in (sent, other[3]))
            assert sent == other_sent, f"{name}: messages of other lengths"
            compared += len(sent)
            continue
        assert sent == other[3], f"{name}: other bytes are sent"
        compared += sum(sent.values())
    return compared


def _of_listed(scheme, x):
    """The sum of rows that each rank lists: those that are not zero."""
    rules = {"": "row", "w": "sparse"}
    tx = sparsejax.sync(scheme, helpers.AXIS, reduce="sum", rules=rules)
    height = len(x)
    (ids,) = jnp.nonzero((x != 0).any(1), size=height, fill_value=height)
    rows = x.at[ids].get(mode="fill", fill_value=0)
    own = RowGrads(ids.astype(jnp.int32), rows, x.shape)
    state = tx.init({"w": jnp.zeros(x.shape)})
    total = tx.update({"w": own}, state)[0]["w"]
    return total.to_dense() if isinstance(total, RowGrads) else total


def _length(message):
    site, rank, words = message
    return site, rank, len(words)


def _runs(name, kind):
    """Gradients, totals of all ranks, bytes counted and messages sent, case by case."""
    scheme, sent, lock = SCHEMES[name], collections.Counter(), threading.Lock()
    shape = _SHAPES[kind]
    sites = iter(range(1000))

    def record(site, rank, x):
        with lock:
            sent[site, int(rank), np.asarray(x).tobytes()] += 1

    def watched(method):
        def call(wire, x, *given, **how):
            site = next(sites)
            jax.debug.callback(
                functools.partial(record, site), lax.axis_index(wire.axis), x
            )
            return method(wire, x, *given, **how)

        return call

    def run(x):
        if kind == "listed rows":
            return _of_listed(scheme, x), jnp.zeros(2)
        reduced = helpers.call(scheme, x, helpers.init(scheme, x))
        return reduced.total, reduced.traffic.wire

    with pytest.MonkeyPatch.context() as patch:
        for one in _SENDS:
            patch.setattr(collectives.Wire, one, watched(getattr(collectives.Wire, one)))
        step = helpers.ranked(run, RANKS)
        for density in (0.03, 0.4, 0.0, 1.0):
            rng = np.random.default_rng(int(100 * density))
            x = rng.integers(1, 50, (RANKS, *shape)).astype(np.float32)
            there = rng.random((RANKS, shape[0])) < density
            x *= there.reshape(RANKS, shape[0], *[1] * (len(shape) - 1))
            totals, wire = step(x)
            jax.effects_barrier()
            yield x, totals, wire.tolist(), dict(sent)
            sent.clear()


@contextlib.contextmanager
def triton_by(launched):
    """Takes Triton's kernels, which callbacks launch, as `pallas_kernels.triton.launch`."""
    from tests.kernels import checks

    stub = types.ModuleType("pallas_kernels.triton.launch")
    stub.launch = functools.partial(checks.when_run, launched)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, stub.__name__, stub)
        patch.setattr(backends, "why_not", lambda asked: None)
        token = backends._asked.set(backends._Asked("triton", interpret=True))
        try:
            yield
        finally:
            backends._asked.reset(token)


def kernels_of(backend: str) -> contextlib.AbstractContextManager:
    """Inside it the kernels of "pallas", "triton", "ptx" or "gpu" are taken."""
    if backend == "pallas":
        return pallas_kernels.use_kernels("pallas", interpret=True)
    if backend == "triton":
        from tests.kernels import triton_worker

        return triton_by(triton_worker.interpreted)
    if backend == "gpu":
        from tests.ptx import hardware

        return triton_by(hardware.Hardware(hardware.capability()).launched)
    from tests.ptx.launches import Gpu

    return triton_by(Gpu().launched)


def main() -> None:
    backend, *names = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", RANKS)
    for given in names or SCHEMES:
        name, _, only = given.partition(":")
        for shape in [only] if only else _SHAPES:
            if shape == "listed rows" and name in NOT_LISTED:
                continue
            compared = check(name, shape, kernels_of(backend))
            print(f"{name}, {shape}: {compared} messages", flush=True)


if __name__ == "__main__":
    main()
