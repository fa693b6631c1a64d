"""Messages packed and unpacked whole, as for GPUs, but compiled for CPUs."""

import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax.wire.messages
from pallas_kernels.reference import messages as in_reference
from tests import helpers
from tests.laws.test_exact_sum import SCHEMES
from tests.wire import test_format, test_messages
from tests.wire.test_messages import Setup


RANKS, SIZE = 3, 3001


@pytest.fixture(autouse=True)
def as_elsewhere(monkeypatch):
    """Takes what is meant for other platforms than CPUs."""
    taken = []

    def by_platform(cpu, default):
        taken.append(cpu)
        return default()

    monkeypatch.setattr(sparsejax.wire.messages, "by_platform", by_platform)
    # Programs that other tests have compiled walk over tiles.
    test_messages.exchange_of.cache_clear()
    yield taken
    test_messages.exchange_of.cache_clear()
    assert taken


@pytest.mark.parametrize(
    ("name", "words", "capacity", "tile"),
    [
        ("coo8", 33, 40, 16),
        ("coo8", 8, 64, 64),
        ("coo16", 2 * 2048 + 5, 4000, 512),
        ("coo32", 33, 40, 16),
        ("bitmap", 33, 40, 16),
        ("coo8", 9, 288, 100),
    ],
)
def test_a_message_is_what_its_format_says(name, words, capacity, tile):
    test_format.test_a_message_is_what_its_format_says(name, words, capacity, tile)


def test_numbers_of_64_bits_change_nothing():
    test_format.test_numbers_of_64_bits_change_nothing()


def test_messages_that_int32_cannot_number_as_one_row_are_written_by_two(monkeypatch):
    monkeypatch.setattr(in_reference, "MOST_FLAT", 0)
    test_format.test_a_message_is_what_its_format_says("coo8", 33, 40, 16)


SETUPS = {
    "mixed codes": Setup("falling", shape=(3,)),
    "half": Setup("rising", np.float16),
    "rows of bfloat16": Setup("auto", jnp.bfloat16, (3,), ratio=1.9),
    "bitmaps": Setup("bitmap", ratio=4),
    "several blocks": Setup("coo16", n=2, width=2 * 65536 + 64, ratio=8),
}


@pytest.mark.parametrize("name", ["mixed codes", *helpers.slow(*list(SETUPS)[1:])])
def test_everything_is_delivered_at_any_density(name):
    for x in test_messages.gradients(SETUPS[name]):
        test_messages.check(SETUPS[name], x)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "all_reduce"])
def test_schemes_are_exact_and_replicas_equal(name, as_elsewhere):
    scheme = SCHEMES[name]

    def run(x):
        return helpers.call(scheme, x, helpers.init(scheme, x)).total

    summed = helpers.ranked(run, RANKS)
    for density in (0.01, 0.2, 1.0):
        x = helpers.gradients(RANKS, SIZE, density, seed=5)
        totals = np.asarray(summed(x))
        helpers.assert_same_on_all_ranks(totals)
        np.testing.assert_array_equal(totals[0], helpers.total(x))
    # OmniReduce sends blocks, and does not choose.
    if name.startswith("omni_reduce"):
        as_elsewhere.append(None)
