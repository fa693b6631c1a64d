"""Rows on GPUs, run on CPUs: each row of an array looks up its own entries in messages."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.reference.layout import Run
from pallas_kernels.reference.messages import read_message
from sparsejax import schemes
from sparsejax.units.bits import Slots
from sparsejax.wire import at_once, ladder, messages
from sparsejax.wire.at_once import size_groups
from sparsejax.wire.formats import Form
from tests import helpers


SENDERS, WIDTH, ROOM = 3, 320, 40


@pytest.fixture(autouse=True, scope="module")
def traced_for_gpus():
    with helpers.traced_for("cuda", overhead=0):
        yield


def assert_same_bytes(found, wanted):
    """Signs of zeros, and what is not a number, included."""
    assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


def odd(x):
    """Random numbers where x has any, among them -0.0, NaN, an infinity and a denormal."""
    x = np.where(x != 0, np.random.default_rng(1).normal(size=x.shape), 0).astype(x.dtype)
    there, flat = np.flatnonzero(x), x.reshape(-1)
    if there.size > 10:
        flat[there[::7]], flat[there[[3, 5, 8]]] = -0.0, [np.nan, np.inf, 1e-40]
    return x


def received(form, shape, need):
    """Sets of some slots, of as many as fit, and of one; and their values."""
    rng = np.random.default_rng(need)
    flags = np.zeros((SENDERS, WIDTH), bool)
    for sender, count in enumerate((need // 2, need, 1)):
        flags[sender, 1 + rng.permutation(WIDTH - 1)[: count - 1]] = True
    # All have the first, and of it only -0.0 for one number.
    flags[:, 0] = True
    rows = odd(np.ones((SENDERS * WIDTH, *shape), np.float32))
    rows[::WIDTH, 0, 0] = -0.0
    rows = jnp.asarray(rows, form.dtype)
    source = messages.Source(rows, form.dtype, lambda part, slot: part * WIDTH + slot)
    return Slots.of(helpers.packed(flags)), source


@pytest.mark.parametrize(
    ("code", "replaces", "dtype", "shape"),
    [
        ("bitmap", True, np.float32, (2, 4)),
        ("coo8", False, jnp.bfloat16, (2, 3)),
        *helpers.slow(
            ("coo16", True, np.float32, (2, 3)),
            ("coo8", False, np.float32, (2, 4)),
        ),
    ],
)
def test_rows_looked_up_are_rows_scattered(code, replaces, dtype, shape):
    """For messages of each size, full and not, and an array that ends before the last."""
    unit = math.prod(shape) * jnp.dtype(dtype).itemsize
    steps = ladder.exactly(WIDTH, unit, ROOM, code, least=20)
    form = Form(steps, shape, jnp.dtype(dtype), SENDERS)
    size = SENDERS * WIDTH - 7 if replaces else WIDTH - 7
    units = (lambda sender, slot: slot * SENDERS + sender) if replaces else None
    zeros = jnp.zeros((size, *shape), np.float32)
    into = messages.Into(replaces, units)
    fold = messages.Fold(zeros, lambda *_: None, in_order=True, into=into)
    for number, rung in enumerate(steps.rungs):
        for need in (rung.capacity, rung.capacity - 3):
            slots, source = received(form, shape, need)
            numbers = at_once.run_of(0, need, form.places(number))
            whole = at_once.pack(form.spec, slots, source, numbers)
            prefix = at_once.prefix(form.spec, slots, source, numbers, form.prefix)
            parts = source, form.begins[number], rung.capacity
            message = at_once.with_values(form.spec, prefix, *parts)
            np.testing.assert_array_equal(message, whole[:, : rung.words])
            unpadded = 1 + rung.code.string_words(rung.capacity, WIDTH)
            assert not np.asarray(message[:, unpadded : 1 + rung.string]).any()
            given = numbers, fold, zeros, 0
            found = at_once.unpack_rows(number, form, message, *given)
            assert_same_bytes(found, by_numpy(form, whole, numbers, fold))
            assert np.asarray(found).any()


def test_rows_of_many_senders_are_scattered():
    """A kernel that adds up all senders would take long to compile."""
    form = Form(ladder.exactly(WIDTH, 256, ROOM, "coo8"), (64,), jnp.dtype("float32"), 64)
    zeros = jnp.zeros((WIDTH, 64), np.float32)
    into = messages.Into()
    fold = messages.Fold(zeros, lambda *_: None, in_order=True, into=into)
    found = [size_groups.goes_by_rows(form, fold, senders) for senders in (16, 32, 33, 64)]
    assert found == [True, True, False, False]
    assert not size_groups.goes_by_rows(form, fold._replace(in_order=False), 16)


def by_numpy(form, whole, numbers, fold):
    """The array with each sender's rows added, or set."""
    run = Run.of(numbers, form.spec)
    slots, values, is_there = read_message(whole, run, form.spec, form.shape)
    total = np.array(fold.start)
    for sender in range(SENDERS):
        places = np.asarray(slots[sender])[np.asarray(is_there[sender])]
        rows = np.asarray(values[sender].astype(fold.start.dtype))[: len(places)]
        if fold.into.units is not None:
            places = fold.into.units(sender, places)
        for place, row in zip(places, rows, strict=True):
            if place < len(total):
                total[place] = row if fold.into.replaces else total[place] + row
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "wire_dtype", "programs"), [(8, jnp.bfloat16, 2), (3, None, 1)]
)
def test_sums_of_long_messages_of_rows_are_those_of_one_program(
    width, wire_dtype, programs, monkeypatch
):
    """Of a row that is shorter than ranks are many, a push is scattered."""
    ranks, size, groups, found = 4, 9000, at_once.groups, []
    inputs = [
        odd(helpers.gradients(ranks, size, density, shape=(width,), seed=5))
        for density in (0.0, 0.003, 0.02, 0.05, 0.1)
    ]

    def totals():
        scheme = schemes.Zen(wire_dtype=wire_dtype)
        run = lambda x: helpers.call(scheme, x, helpers.init(scheme, x)).total
        return list(map(helpers.ranked(run, ranks), inputs))

    def noted(*args):
        found.append(groups(*args))
        return found[-1]

    monkeypatch.setattr(at_once, "groups", noted)
    wanted = totals()
    assert [len(each) for each in found] == [1, 1]
    monkeypatch.setattr(size_groups, "_FEW_UNITS", 0)
    found.clear()
    for total, other in zip(totals(), wanted, strict=True):
        helpers.assert_same_on_all_ranks(total)
        assert_same_bytes(total, other)
    assert sum(len(each) > 1 for each in found) == programs
    # Each long message alone, and then several.
    assert all(len(group.sides) == 1 for group in found[-1][1:])
