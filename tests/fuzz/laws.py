"""What must hold of a case, in NumPy's float64, with the room that `tests.laws` gives.

A sum of numbers that together are larger than the largest finite one may be anything but
another finite number: which partial sums overflow depends on their order. Of denormals the
processor may make zeros, each by itself, so each has the room of the smallest normal one.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from sparsejax.schemes.base import Traffic
from tests import helpers
from tests.fuzz import data as given, messages, programs, ways, words
from tests.fuzz.pool import LOSSY, Program
from tests.laws.test_exact_sum import LOSSLESS_NEVER_WORSE


# They say how many units are not zero: denormals and NaN, but not -0.0.
COUNTING = ("balanced", "zen", "ag_sparse")
ALMOST = 1 + 1e-6  # bytes are float32


def check(program: Program, data: Any) -> set[str]:
    """Raises unless the law of the program holds for what it is given.

    Returns:
        The ways that it went: see `ways`.
    """
    return _LAWS[program.law](program, data)


def data_of(program: Program) -> st.SearchStrategy[Any]:
    """What a program may be given."""
    if program.law == "messages":
        return words.drawn()
    if program.law in ("entries", "rows"):
        return given.drawn(given.LISTS, ("integers", "normal"), ())
    if program.law == "chosen":
        return given.drawn(values=given.TAME, specials=())
    if program.narrow:
        return given.drawn(values=given.TAME, specials=())
    if program.law == "tree" and program.steps > 1:
        skips = "skip_nonfinite" in program.wrapper
        return given.drawn(values=given.TAME, specials=("nan", "inf") if skips else ())
    return given.drawn()


def check_sum(program: Program, data: given.Data) -> set[str]:
    """The total is the exact sum on every rank, and bytes and shares are as told."""
    x = _gradients(program, data)
    totals, numbers = programs.compiled(program)(x)
    helpers.assert_same_on_all_ranks((totals, numbers))
    if program.narrow:
        # A value is rounded once, and a sum once more.
        exact = x[:, 0].astype(np.float64)
        error = np.abs(totals[0] - exact.sum(0))
        assert (error <= 2 * 2**-8 * 1.02 * np.abs(exact).sum(0) + 1e-30).all()
    else:
        assert_sum(totals[0], x[:, 0])
    traffic = Traffic.of_one(numbers[0])
    check_traffic(program, traffic)
    if program.scheme.startswith(COUNTING) and program.ranks > 1 and x.size:
        there = helpers.is_nonzero(x[:, 0]).reshape(*x.shape[:1], x.shape[2], -1)
        share = there.any(2).mean(1).max()
        # What is so small that it always goes densely is not looked at.
        told = float(traffic.density_before)
        assert told == 1 or abs(told - share) <= 1e-5 * share, f"{told} for {share}"
    return ways.of_sum(program, x[:, 0], traffic)


def check_traffic(program: Program, traffic: Traffic) -> None:
    """Payload, wire and dense bytes are in this order."""
    wire = float(traffic.wire - traffic.scalars)
    assert float(traffic.payload) <= wire * ALMOST, f"sent {wire} of {traffic.payload}"
    if program.scheme in LOSSLESS_NEVER_WORSE:
        assert wire <= float(traffic.dense) * ALMOST, f"{wire} > dense {traffic.dense}"


def check_chosen(program: Program, data: given.Data) -> set[str]:
    """What a rank leaves out of the sum it is told, step by step."""
    x = _gradients(program, data)
    totals, left, numbers = programs.compiled(program)(x)
    helpers.assert_same_on_all_ranks((totals, numbers))
    held, went = np.zeros_like(x[:, 0]), set()
    for step in range(program.steps):
        whole = (x[:, step] + held).astype(np.float64)
        held = left[:, step]
        found = totals[0, step].astype(np.float64) + held.astype(np.float64).sum(0)
        room = 1e-6 * np.abs(whole).sum(0) + 1e-30
        helpers.assert_within(found, whole.sum(0), room, f"step {step}")
        told = Traffic.of_one(numbers[0, step])
        assert float(told.payload) <= float(told.wire) * ALMOST
        went |= ways.of_bytes(told.wire, told.dense)
    return went


def check_tree(program: Program, data: given.Data) -> set[str]:
    """Gradients come out as updates, or ranks hold them: leaf by leaf.

    Without a wrapper, and with a scheme that sends all, every step is the exact sum.
    """
    leaves = programs.shapes(program)
    grads = {
        name: given.gradients(data, program.ranks, program.steps, *leaf, number)
        for number, (name, leaf) in enumerate(leaves.items())
    }
    run = programs.compiled(program)(grads)
    helpers.assert_same_on_all_ranks((run.updates, run.seen))
    wire, payload, dense = run.seen
    assert payload[0] <= wire[0] * ALMOST
    went = ways.of_bytes(wire[0], dense[0])
    mean = program.reduce == "mean"
    if program.steps == 1 and program.scheme not in LOSSY and program.wrapper == "alone":
        for name, x in grads.items():
            assert_sum(run.updates[name][0, 0], x[:, 0], mean)
        return went
    every = programs.EVERY if mean and "accumulate" in program.wrapper else 1
    times = program.ranks * every if mean else 1
    finite = [np.isfinite(x.astype(np.float32)) for x in grads.values()]
    axes = lambda flags: tuple(i for i in range(flags.ndim) if i != 1)
    good = np.all([flags.all(axes(flags)) for flags in finite], axis=0)
    kept = helpers.held(run.state, every)
    for name, x in grads.items():
        assert not run.updates[name][:, ~good].any(), f"{name}: a skipped step sent some"
        exact = np.where(good.reshape(1, -1, *[1] * (x.ndim - 2)), x.astype(np.float64), 0)
        sent = run.updates[name][0].astype(np.float64).sum(0) * times
        held = kept.get(name, 0)
        scale = np.abs(exact).sum((0, 1))
        if program.scheme == "PowerSGD":
            # Each number is a sum over those of its row and column.
            scale = np.full_like(scale, scale.sum())
        info = jnp.finfo(x.dtype)
        room = max(1e-6, (program.ranks + 2 + mean) * float(info.eps))
        least = 1e-30 + (program.ranks * program.steps * times) * float(info.tiny)
        helpers.assert_within(sent + held, exact.sum((0, 1)), room * scale + least, name)
    return went


def check_entries(program: Program, data: given.Data) -> set[str]:
    """Entries out of range are left out, those of one index add up, all come back."""
    units = int(np.prod(program.shape)) if programs.is_elements(program) else 0
    units = units or program.shape[0]
    n, listed = program.ranks, program.listed
    ids = given.listed(data, n, listed, units, program.indices)
    width = () if programs.is_elements(program) else program.shape[1:]
    values = _numbers(program, data, (n, listed, *width))
    totals = programs.compiled(program)(ids, values)
    helpers.assert_same_on_all_ranks(totals)
    if len(totals) == 1:
        dense = totals[0][0].astype(np.float64).reshape(units, *width)
        _assert_listed(program, dense, ids, values, units)
        return ways.of_ids(ids, units)
    indices, sums = totals
    found, real = indices[0], indices[0] < units
    assert (found >= 0).all()
    assert (np.diff(found[real]) > 0).all(), "indices are not ascending"
    assert (np.diff(real.astype(int)) <= 0).all(), "a gap among the entries"
    dense = np.zeros((units, *width))
    dense[found[real]] = sums[0][real].astype(np.float64)
    _assert_listed(program, dense, ids, values, units)
    return ways.of_ids(ids, units)


def check_rows(program: Program, data: given.Data) -> set[str]:
    """Rows that any rank lists come back, once each, and no others."""
    height, n = program.shape[0], program.ranks
    ids = given.listed(data, n, program.listed, height, program.indices)
    rows = _numbers(program, data, (n, program.listed, program.shape[1]))
    total, told = programs.compiled(program)(ids, rows)
    helpers.assert_same_on_all_ranks((total, told))
    assert told[1][0] <= told[0][0] * ALMOST
    if len(total) == 1:
        dense = total[0][0].astype(np.float64)
    else:
        found, sums = total[0][0], total[1][0]
        real = found < height
        # Of a table without numbers no row is there.
        inside = (ids >= 0) & (ids < height) & (program.shape[1] > 0)
        assert sorted(found[real].tolist()) == sorted(set(ids[inside].tolist()))
        assert (found >= 0).all()
        assert not sums[~real].any(), "a row that is none has numbers"
        dense = np.zeros(program.shape)
        dense[found[real]] = sums[real].astype(np.float64)
    _assert_listed(program, dense, ids, rows, height)
    return ways.of_rows(program, ids)


def _assert_listed(program, dense, ids, values, units):
    """Those of one index are added up one by one, in float32 or wider, then rounded."""
    scale, exact = np.zeros_like(dense), np.zeros_like(dense)
    many, inside = np.zeros(units, int), (ids >= 0) & (ids < units)
    at, numbers = ids[inside].astype(np.int64), values[inside].astype(np.float64)
    np.add.at(exact, at, numbers)
    np.add.at(scale, at, np.abs(numbers))
    np.add.at(many, at, 1)
    mean = program.ranks if program.reduce == "mean" else 1
    # Of one rank and of all: each is rounded to the dtype.
    wide = jnp.promote_types(program.dtype, jnp.float32)
    eps = (program.ranks + 2) * float(jnp.finfo(program.dtype).eps)
    room = eps + many.max(initial=0) * float(jnp.finfo(wide).eps)
    least = float(jnp.finfo(program.dtype).tiny) * mean
    helpers.assert_within(dense * mean, exact, room * scale + least)


def assert_sum(got: np.ndarray, x: np.ndarray, mean: bool = False) -> None:
    """Raises unless `got` is the sum of x [ranks, ...], or its mean."""
    n, info = len(x), jnp.finfo(x.dtype)
    exact = x.astype(np.float64)
    finite = np.isfinite(exact)
    with np.errstate(invalid="ignore", over="ignore"):
        want = exact.sum(0) / (n if mean else 1)
        scale = np.abs(np.where(finite, exact, 0)).sum(0)
    fits = scale <= float(info.max)
    tiny = (np.abs(exact) < float(info.tiny)) & (exact != 0)
    room = (n + 2 + mean) * float(info.eps) * scale
    room += (1 + tiny.sum(0)) * float(info.tiny)
    got = got.astype(np.float64)
    strict = fits & np.isfinite(want)
    np.testing.assert_array_equal(np.isnan(got[fits]), np.isnan(want[fits]))
    odd = fits & ~np.isfinite(want)
    np.testing.assert_array_equal(got[odd], want[odd])
    # What overflows somewhere may come out whole, but then it is the sum.
    close = strict | (~fits & np.isfinite(got))
    assert np.isfinite(want[close & fits]).all()
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(got - want)
        bad = close & ~(error <= room) & (error == error)
    assert not bad.any(), f"off by {error[bad].max()}: {helpers.places_of(bad)}"


def _gradients(program, data):
    return given.gradients(data, program.ranks, program.steps, program.shape, program.dtype)


def _numbers(program, data, shape):
    rng = np.random.default_rng((data.seed, 1))
    normal = data.values == "normal"
    x = rng.standard_normal(shape) if normal else rng.integers(-4, 5, shape)
    return np.asarray(x, jnp.dtype(program.dtype))


_LAWS: dict[str, Callable[[Program, Any], set[str]]] = {
    "sum": check_sum,
    "chosen": check_chosen,
    "tree": check_tree,
    "entries": check_entries,
    "rows": check_rows,
    "messages": messages.check,
}
