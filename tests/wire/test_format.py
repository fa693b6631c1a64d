"""What is in a message, word for word, as NumPy reads it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.reference import layout
from sparsejax.units import bits
from sparsejax.units.bits import Slots
from sparsejax.wire import channels, collectives, index_codes, ladder, messages
from tests import helpers


def sent(code, flags, values, capacity, tile):
    """The messages [parts, words] of each round, and the set that arrives by part."""
    parts, width = flags.shape
    rungs = (ladder.Rung.of(capacity, width, 4, [code]),)
    steps = ladder.Ladder(width, 4, tile, rungs, collectives.at_once())
    rounds = []

    def send(x):
        jax.debug.callback(lambda x: rounds.append(np.asarray(x)), x)
        return x

    def run(packed, values):
        def add(arrived, sender, slots, values):
            return arrived.at[sender, slots].set(values, mode="drop")

        slots = Slots.of(packed)
        return messages.transmit(
            steps,
            channels.Channel(send, parts, channels.Route(parts)),
            slots,
            messages.Source(
                values.reshape(-1), units=lambda part, slots: part * width + slots
            ),
            jnp.max(slots.counts),
            messages.Fold(jnp.zeros((parts, width), np.float32), add),
        )

    arrived, told = jax.jit(run)(helpers.packed(flags), values)
    jax.effects_barrier()
    assert len(rounds) == told.rounds == -(-flags.sum(axis=1).max() // capacity)
    np.testing.assert_array_equal(told.counts, flags.sum(axis=1))
    np.testing.assert_array_equal(arrived, np.where(flags, values, 0))
    return rounds


def string_of(slots, lane, width):
    """By hand: a one for every slot, a zero behind each block; or one bit a slot."""
    if lane == 0:
        return np.isin(np.arange(width), slots)
    told = []
    for block in range(-(-width // (1 << lane))):
        told += [True] * int((slots >> lane == block).sum()) + [False]
    return np.array(told)


def cases(words, full=False):
    """Parts of all kinds: few slots, many in few blocks, both ends alone, none."""
    width = 32 * words
    flags = np.random.default_rng(words).random((4, width)) < [[0.02], [0.2], [0.1], [0.0]]
    flags[1, 600:] = False
    flags[2] = False
    flags[2, [0, width - 1]] = True
    return flags | full


@pytest.mark.parametrize(
    ("name", "words", "capacity", "tile"),
    [
        ("coo8", 33, 40, 16),
        ("bitmap", 33, 40, 16),
        *helpers.slow(
            ("coo16", 33, 40, 40),
            ("coo32", 33, 40, 16),
            ("coo8", 8, 64, 64),
            ("coo16", 2 * 2048 + 5, 4000, 512),
            ("coo8", 9, 288, 100),
            ("coo16", 2 * 2048 + 5, 131232, 8192),
        ),
    ],
)
def test_a_message_is_what_its_format_says(name, words, capacity, tile):
    width = 32 * words
    code, flags = index_codes.CODES[name], cases(words, full=capacity == width)
    values = np.random.default_rng(1).standard_normal(flags.shape).astype(np.float32)
    first = 0
    for message in sent(code, flags, values, capacity, tile):
        for part, told in enumerate(message):
            slots = np.flatnonzero(flags[part])
            assert told[0] == len(slots)
            slots = slots[first : first + capacity]
            length = code.string_words(capacity, width)
            string, lanes = told[1 : 1 + length], told[1 + length :]
            if length:
                expected = string_of(slots, code.lane, width)
                bits_ = helpers.unpacked(string)
                np.testing.assert_array_equal(bits_[: len(expected)], expected)
                assert not bits_[len(expected) :].any()
            for plane in range(code.planes):
                octets = lanes[plane * capacity // 4 :][: capacity // 4].view(np.uint8)
                np.testing.assert_array_equal(
                    octets[: len(slots)], slots >> 8 * plane & 255
                )
            numbers = lanes[code.planes * capacity // 4 :].view(np.float32)
            assert len(numbers) == capacity
            np.testing.assert_array_equal(numbers[: len(slots)], values[part, slots])
        first += capacity


def test_numbers_of_64_bits_change_nothing():
    with jax.enable_x64(True):
        test_a_message_is_what_its_format_says("coo8", 33, 40, 16)


def test_messages_that_int32_cannot_number_as_one_row_are_written_by_two(monkeypatch):
    monkeypatch.setattr(layout, "MOST_FLAT", 0)
    test_a_message_is_what_its_format_says("coo8", 33, 40, 16)


@pytest.mark.parametrize("name", ["coo8", *helpers.slow("coo16")])
def test_the_string_fits_the_words_it_is_given(name):
    code = index_codes.CODES[name]
    width, capacity = 2 * 65536 + 160, 400
    flags = np.zeros((1, width), bool)
    flags[0, -capacity:] = True  # the last one stands as far back as it can
    (message,) = sent(code, flags, np.ones(flags.shape, np.float32), capacity, 64)
    length = code.string_words(capacity, width)
    ones = np.flatnonzero(helpers.unpacked(message[0, 1 : 1 + length]))
    # Behind it there is one zero, and less than a word of room.
    assert ones[-1] == capacity + code.blocks(width) - 2
    assert bits.WORD * length - bits.WORD < ones[-1] + 2 <= bits.WORD * length
