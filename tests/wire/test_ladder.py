"""Message sizes: in order, large enough, and not much too large."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import errors
from sparsejax.wire import index_codes, ladder
from tests import helpers


# width, bytes of a unit, parts, codes, ratio
LADDERS = {
    "default": (65536, 4, 8, "auto", 1.35),
    "narrow": (32, 4, 3, "auto", 1.35),
    "half": (1024, 2, 8, "auto", 1.6),
    "rows": (4096, 512, 16, "auto", 1.3),
    "odd-rows": (4096, 6, 3, "coo16", 1.3),
    "coo32": (65536, 4, 8, "coo32", 1.35),
    "coo8": (1 << 20, 4, 1, "coo8", 2.0),
    "bitmap": (65536, 4, 8, "bitmap", 1.1),
    # A quarter of these would be more than 16 rounds' worth.
    "huge": (1 << 24, 4, 16, "auto", 2.0),
    "huge-half": (3 << 20, 2, 7, "auto", 2.0),
    "huge-rows": (1 << 18, 2048, 5, "auto", 2.0),
    "few-huge-rows": (8192, 1 << 16, 8, "auto", 2.0),
}
ROUND = 1 << 18  # bytes that are worth a round
every = pytest.mark.parametrize("name", LADDERS)


@functools.cache
def build(name):
    *sizes, code, ratio = LADDERS[name]
    return ladder.Message(code, ratio).ladder(*sizes)


def test_the_longest_message_follows_the_array_and_not_parts_as_wide_as_it():
    width, ranks = 1 << 26, 64
    wide = ladder.Message().ladder(width, 4, ranks, units=width)
    assert wide.top == width // 32 // ranks
    assert ladder.Message().ladder(width // ranks, 4, ranks).top == wide.top


@every
def test_rungs_grow_by_no_more_than_the_ratio_from_a_short_one(name):
    rungs, ratio = build(name).rungs, LADDERS[name][-1]
    assert 4 * rungs[0].words <= 1024 or rungs[0].capacity <= 4
    for low, high in itertools.pairwise(rungs):
        # Rounded up to a multiple of 4 at both ends.
        assert low.capacity < high.capacity <= ratio * low.capacity + 4
        assert low.words < high.words


@every
def test_a_rung_holds_a_header_the_slots_and_the_values(name):
    width, unit_bytes, _, codes, _ = LADDERS[name]
    for rung in build(name).rungs:
        allowed = index_codes.parse(codes)
        assert rung.code in allowed
        assert rung.code.words(rung.capacity, width) == min(
            code.words(rung.capacity, width) for code in allowed
        )
        # Lanes and values fill whole words.
        assert rung.capacity % 4 == 0
        values = rung.capacity * unit_bytes / 4
        assert rung.words == 1 + rung.code.words(rung.capacity, width) + values


@pytest.mark.parametrize("unit_bytes", [16, 256, 24, 4, 0])
def test_values_of_rows_are_aligned_on_gpus(unit_bytes):
    """A thread moves 16 bytes of a row at a time, of each message of a buffer."""
    with helpers.traced_for("cuda"):
        ladders = [
            ladder.Message(code).ladder(32 * words, unit_bytes, 3)
            for code in ("auto", "coo8", "coo16", "bitmap")
            for words in (9, 33, 2050, 1 << 13)
        ]
        ladders.append(ladder.exactly(1056, unit_bytes, 300, least=30))
    added = set()
    for steps in ladders:
        for rung in steps.rungs:
            string = rung.code.string_words(rung.capacity, steps.width)
            lanes = rung.code.lane_words(rung.capacity)
            is_padded = string > 0 and unit_bytes >= 16 and unit_bytes % 16 == 0
            added.add(rung.string - string)
            if is_padded:
                assert rung.string - string <= 3
                assert (1 + rung.string + lanes) % 4 == 0 == rung.words % 4
            else:
                assert rung.string == string
            assert rung.words == 1 + rung.string + lanes + rung.capacity * unit_bytes // 4
    assert added == ({0, 1, 2, 3} if unit_bytes in (16, 256) else {0})


@every
def test_the_top_rung_holds_a_quarter_16_rounds_or_a_32nd_in_tiles_of_one_length(name):
    width, unit_bytes, parts = LADDERS[name][:3]
    steps = build(name)
    least = min(width // 4, max(16 * ROUND // (parts * unit_bytes), width // 32))
    least = max(least, min(width, 128))
    assert steps.top == steps.rungs[-1].capacity
    assert least <= steps.top < least + 4
    # Tiles fill it, and no four entries of each more.
    tiles = -(-steps.top // steps.tile)
    assert steps.tile % 4 == 0
    assert (
        (tiles - 1) * steps.tile < steps.top <= tiles * steps.tile < steps.top + 4 * tiles
    )


@every
def test_the_rung_is_the_smallest_that_fits(name):
    steps = build(name)
    room = [rung.capacity for rung in steps.rungs]
    edges = [need for r in room for need in (r - 1, r, r + 1)]
    needs = np.array([1, *edges, 4 * room[-1]], np.int32)
    for need, got in zip(needs, jax.jit(jax.vmap(steps.rung))(needs), strict=True):
        fits = [number for number, r in enumerate(room) if r >= need]
        assert got == (fits[0] if fits else len(room) - 1)


@every
def test_bytes_are_those_of_the_fewest_messages_one_after_another(name):
    steps = build(name)
    top, bottom = steps.top, steps.rungs[0].capacity
    needs = [0, 1, bottom, bottom + 1, top - 1, top, top + 1, 2 * top, 3 * top + bottom + 1]
    found = jax.jit(jax.vmap(steps.bytes))(np.array(needs, np.int32))
    assert found.dtype == np.float32
    for number, need in enumerate(needs):
        left, sent = need, 0
        while left > 0:
            length = min(left, top)
            sent += 4 * next(r.words for r in steps.rungs if r.capacity >= length)
            left -= length
        assert found[number] == sent


@every
def test_a_second_round_is_taken_where_it_saves_more_than_it_costs(name):
    """All is sent, in no more bytes than the fewest messages take, and each choice pays."""
    steps = build(name)
    choose = jax.jit(lambda need: steps.next_message(need, 7))
    for need in (1, 5, 37, steps.top // 3, steps.top - 1, steps.top, 2 * steps.top + 7):
        left, sent = need, 0
        while left > 0:
            rung, length = map(int, choose(jnp.int32(left)))
            size = steps.rungs[rung]
            assert 0 < length <= size.capacity
            assert length == min(left, size.capacity)
            one = next((r for r in steps.rungs if r.capacity >= left), steps.rungs[-1])
            if length < min(left, steps.top):
                rest = next(r for r in steps.rungs if r.capacity >= left - length)
                saved = 4 * 7 * (one.words - size.words - rest.words)
                assert saved > ROUND
            left, sent = left - length, sent + 4 * size.words
        assert sent <= steps.bytes(jnp.int32(need))


def test_long_messages_are_split_and_short_ones_are_not():
    steps = ladder.Message(ratio=2).ladder(1 << 20, 4, 8)
    just_above = steps.rungs[-2].capacity + 1
    assert int(steps.next_message(jnp.int32(just_above), 7)[1]) == just_above - 1
    assert int(steps.next_message(jnp.int32(steps.rungs[0].capacity + 1), 7)[1]) == (
        steps.rungs[0].capacity + 1
    )


@every
def test_what_entries_need_is_no_more_than_the_message_that_holds_them(name):
    width, unit_bytes = LADDERS[name][:2]
    steps = build(name)
    numbers = np.arange(len(steps.rungs), dtype=np.int32)
    room = np.array([rung.capacity for rung in steps.rungs], np.int32)
    full = np.asarray(jax.jit(jax.vmap(steps.needed_bytes))(room, numbers))
    for rung, needed in zip(steps.rungs, full, strict=True):
        # A full message wastes less than the last word of its string.
        assert 4 * rung.words - 4 < needed <= 4 * rung.words
        bits = float(rung.code.needed_bits(np.int32(rung.capacity), width))
        assert needed == np.float32(4 + bits / 8 + unit_bytes * rung.capacity)


@pytest.mark.parametrize("ratio", [1.0, 65, "1.35", math.nan])
def test_ratios_that_make_no_ladder_are_refused(ratio):
    with pytest.raises(errors.ArgumentError, match=r"ratio must lie in \[1.05, 64\], got"):
        ladder.check_ratio(ratio)


def test_a_capacity_is_the_longest_message():
    for wanted, top in ((1, 4), (20, 20), (21, 24), (10**9, 4096)):
        steps = ladder.Message(capacity=wanted).ladder(4096, 4, 8)
        assert steps.top == top
    assert ladder.Message().ladder(4096, 4, 8).top == 1024
