"""Messages as long as what is there: word for word, in every code, and past their ends."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import errors
from sparsejax.units import bits
from sparsejax.units.slots import Slots
from sparsejax.wire import collectives, forms, index_codes, ladder, messages, ragged
from tests import helpers
from tests.helpers import WIRE
from tests.wire.test_format import cases, string_of


WIDTH, ROOM = 1056, 264  # five blocks of 256 slots, the last one of a word
CODES = ("coo32", "coo16", "coo8", "bitmap")
# The first is a small slot in every code, and a number that is not zero in every dtype.
JUNK = (0x01010101, 0xDEADBEEF, 0xFFFFFFFF)


def form_of(code="auto", width=WIDTH, room=ROOM, shape=(), dtype=np.float32, rows=3):
    steps = ladder.Ladder(width, 4, 8, (ladder.Rung(room, index_codes.COO32, 0),))
    return ragged.Form(steps, code, shape, jnp.dtype(dtype), rows)


def index_words(name, count, width):
    """By hand: words of lanes, and of the string or the bitmap, of so many slots."""
    lane = index_codes.CODES[name].lane
    blocks = -(-width // 2**lane)
    string = width if lane == 0 else (count + blocks) * (blocks > 1)
    return -(-count // 4) * lane // 8, -(-string // 32)


def shortest(code, count, width):
    """The name of the code that is shortest for so many slots, by hand."""
    names = CODES if code == "auto" else (code,)
    return min(names, key=lambda name: sum(index_words(name, count, width)))


def words_of(code, count, width, unit_bytes=4):
    """Words of a message, by hand."""
    if not count:
        return 0
    return sum(index_words(shortest(code, count, width), count, width)) + -(
        -count * unit_bytes // 4
    )


@pytest.mark.parametrize("code", ["auto", *CODES])
def test_a_message_has_the_words_that_its_entries_need_and_the_longest_fits(code):
    form = form_of(code)
    counts = np.arange(ROOM + 1, dtype=np.int32)
    want = [words_of(code, int(count), WIDTH) for count in counts]
    np.testing.assert_array_equal(form.lengths(counts), want)
    assert form.words == max(want)
    assert [form.mean_bytes(int(count)) for count in counts] == [4.0 * w for w in want]
    # Of a count between two a mean, and of more than there is room for, rounds.
    assert form.mean_bytes(10.25) == 4 * (0.75 * want[10] + 0.25 * want[11])
    several = np.array([0, ROOM, ROOM + 1, 3 * ROOM, 4 * ROOM - 1], np.int32)
    rounds = [0, want[-1], want[-1] + want[1], 3 * want[-1], 3 * want[-1] + want[-2]]
    np.testing.assert_array_equal(form.bytes(several), 4.0 * np.array(rounds))
    assert [form.mean_bytes(int(c)) for c in several] == [4.0 * words for words in rounds]


def test_every_code_is_the_shortest_for_some_count():
    """In parts of three blocks of 65,536 slots; all are read by one program."""
    width, room = 3 * 65_536, 40_000
    taken = {shortest("auto", count, width) for count in (10, 1_000, 35_000)}
    assert taken == {"coo16", "coo8", "bitmap"}
    form = form_of(width=width, room=room)
    assert taken <= {code.name for code in form.codes}
    for count in (1, 10, 1_000, 35_000, room):
        assert int(form.lengths(jnp.int32(count))) == words_of("auto", count, width)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_an_odd_number_of_halves_ends_in_half_a_word(dtype):
    form = form_of("coo32", dtype=dtype)
    np.testing.assert_array_equal(form.lengths(jnp.arange(1, 6)), [5, 5, 6, 6, 11])


@functools.cache
def packing(code, width, room, parts):
    form = form_of(code, width, room, rows=parts)

    @jax.jit
    def run(words, values, first):
        slots = Slots.of(words)
        here = jnp.clip(slots.counts - first, 0, room)
        source = messages.Source(
            values.reshape(-1), units=lambda part, slots: part * width + slots
        )
        return ragged.pack(form, slots, source, first, here, frozenset())

    return form, run


def parsed(message, slots, values, code, width):
    """Asserts that a message is these slots and values, by hand."""
    name = shortest(code, len(slots), width)
    lane = index_codes.CODES[name].lane
    lanes, string = index_words(name, len(slots), width)
    if string:
        told, bits_ = string_of(slots, lane, width), helpers.unpacked(message[:string])
        np.testing.assert_array_equal(bits_[: len(told)], told)
        assert not bits_[len(told) :].any()
    for plane in range(lane // 8):
        each = -(-len(slots) // 4)
        octets = message[string + plane * each :][:each].view(np.uint8)
        np.testing.assert_array_equal(octets[: len(slots)], slots >> 8 * plane & 255)
    numbers = message[string + lanes :][: len(slots)].view(np.float32)
    np.testing.assert_array_equal(numbers, values)


@pytest.mark.parametrize(
    ("code", "words", "room"),
    [
        ("auto", 33, 264),
        ("coo8", 8, 64),  # one block: no string
        ("coo16", 33, 40),
        ("coo32", 33, 40),
        ("bitmap", 33, 40),
        ("auto", 9, 288),  # full parts, a string of as many bits as the part
        ("coo16", 2 * 2048 + 5, 4000),  # three blocks
    ],
)
def test_a_message_is_what_its_format_says(code, words, room):
    width = 32 * words
    flags = cases(words, full=room == width)
    values = np.random.default_rng(1).standard_normal(flags.shape).astype(np.float32)
    _, run = packing(code, width, room, len(flags))
    for first in range(0, int(flags.sum(1).max()), room):
        sent = np.asarray(run(helpers.packed(flags), values, jnp.int32(first)))
        for part, message in enumerate(sent):
            slots = np.flatnonzero(flags[part])[first : first + room]
            if len(slots):
                parsed(message, slots, values[part, slots], code, width)


@functools.cache
def unpacking(code, shape, dtype, rows):
    form = form_of(code, shape=shape, dtype=dtype, rows=rows)

    @jax.jit
    def run(message, here):
        def add(arrived, sender, slots, values):
            return arrived.at[sender, slots].add(values, mode="drop")

        fold = messages.Fold(None, add)
        start = jnp.zeros((rows, WIDTH, *shape), dtype)
        return ragged.unpack(form, message, here, fold, start)

    @jax.jit
    def send(flags, x, here):
        flat = x.reshape(-1, *shape)
        source = messages.Source(flat, units=lambda part, slots: part * WIDTH + slots)
        first = jnp.int32(0)
        return ragged.pack(form, Slots.of(flags), source, first, here, frozenset())

    return form, send, run


@pytest.mark.parametrize(
    ("code", "shape", "dtype"),
    [
        ("auto", (), np.float32),
        ("auto", (3,), jnp.bfloat16),
        *helpers.slow(*((code, (), jnp.bfloat16) for code in CODES)),
        *helpers.slow(*((code, (2, 2), np.float32) for code in CODES)),
    ],
    ids=str,
)
def test_what_lies_behind_a_message_is_never_read(code, shape, dtype):
    """Canaries from its end to that of the buffer, of no entry to as many as fit."""
    counts = np.array([0, 1, 2, 3, 100, ROOM - 1, ROOM])
    rows = len(counts)
    form, send, run = unpacking(code, shape, dtype, rows)
    flags = np.zeros((rows, WIDTH), bool)
    for row, count in enumerate(counts):
        flags[row, np.random.default_rng(row).permutation(WIDTH)[:count]] = True
    x = helpers.gradients(rows, WIDTH, 1.0, dtype, shape, seed=4)
    here = jnp.asarray(counts, jnp.int32)
    sent = send(helpers.packed(flags), x, here)
    inside = np.arange(form.words) < np.asarray(form.lengths(here))[:, None]
    assert not inside.all()
    wanted = np.where(flags.reshape(flags.shape + (1,) * len(shape)), x, 0)
    for junk in (0, *JUNK):
        got = run(np.where(inside, sent, np.uint32(junk)), here)
        np.testing.assert_array_equal(got, wanted)


class Given(NamedTuple):
    """What each rank gives to a ragged exchange of words."""

    x: Any
    sizes: Any
    coming: Any


def exchange(given):
    run = helpers.ranked(lambda x, sizes, coming: WIRE.ragged(x, sizes, coming), 3)
    return run(*given)


@pytest.mark.parametrize("to_all", [False, True])
def test_words_go_where_jax_says_that_they_do(to_all):
    rng = np.random.default_rng(0)
    x = rng.integers(1, 2**32, (3, 1 if to_all else 3, 7), np.uint32)
    sizes = np.array([[7, 0, 3], [1, 2, 7], [0, 5, 0]], np.int32)
    if to_all:
        sizes = np.repeat(sizes[:, :1], 3, axis=1)
    received, sent = exchange(Given(x, sizes, sizes.T))
    for source in range(3):
        for to in range(3):
            size = sizes[source, to]
            row = received[to, source]
            np.testing.assert_array_equal(row[:size], x[source, 0 if to_all else to, :size])
            assert not row[size:].any()
    np.testing.assert_array_equal(sent, 4 * (sizes.sum(1) - np.diagonal(sizes)))


def test_nothing_arrives_of_a_rank_of_which_another_number_of_words_is_expected():
    x = np.ones((3, 3, 7), np.uint32)
    sizes = np.full((3, 3), 4, np.int32)
    coming = sizes.copy()
    coming[1, 2] = 3
    received, _ = exchange(Given(x, sizes, coming))
    assert not received[1, 2].any()
    assert received.sum() == 8 * 4


def test_it_runs_under_vmap_as_inside_shard_map():
    x = np.arange(27, dtype=np.uint32).reshape(3, 3, 3)
    sizes = np.array([[3, 1, 0], [2, 2, 2], [0, 3, 1]], np.int32)
    mapped = jax.vmap(WIRE.ragged, axis_name=helpers.AXIS)
    for a, b in zip(
        mapped(x, sizes, sizes.T), exchange(Given(x, sizes, sizes.T)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_a_program_for_gpus_has_one_ragged_collective_and_no_other():
    x = np.ones((3, 3, 7), np.uint32)
    sizes = np.ones((3, 3), np.int32)
    run = lambda *given: WIRE.ragged(*given)[0]
    with helpers.every_platform():
        traced = jax.make_jaxpr(helpers.stacked(run, 3))(x, sizes, sizes.T)
    found = helpers.collectives(traced, "cuda")
    assert [c.name for c in found] == ["ragged_all_to_all"]
    assert {c.name for c in helpers.collectives(traced)} == {"all_gather"}


def test_room_that_int32_cannot_number_is_less_or_an_error(monkeypatch):
    whole = form_of("coo8")
    monkeypatch.setattr(forms, "MOST_FLAT", 3 * 150)
    form = form_of("coo8")
    assert 4 <= form.room < whole.room
    assert form.room % 4 == 0
    assert form.words <= 150
    steps = ladder.Ladder(WIDTH, 4, 8, (ladder.Rung(ROOM, index_codes.COO32, 0),))
    with pytest.raises(
        errors.ArgumentError,
        match=rf"264 entries or 339 words, .* set push_capacity to {form.room} or less, "
        "or use channel='ladder'",
    ):
        ragged.Form(steps, "coo8", (), jnp.dtype(np.float32), 3, "push_capacity")
    monkeypatch.setattr(forms, "MOST_FLAT", 3)
    with pytest.raises(errors.ArgumentError, match="set the capacity to 1 or less"):
        form_of("coo8")


def test_where_there_is_no_ragged_all_to_all_the_error_names_the_other_channel(monkeypatch):
    monkeypatch.setattr(collectives, "traced_for", lambda: "metal")
    with pytest.raises(errors.ArgumentError, match="run on 'metal': use channel='ladder'"):
        collectives.check_ragged()
    monkeypatch.undo()
    collectives.check_ragged()
    monkeypatch.delattr(collectives.lax, "ragged_all_to_all")
    with pytest.raises(errors.ArgumentError, match=r"JAX .* does not have: use channel="):
        collectives.check_ragged()


def test_bits_of_the_whole_room_are_told_in_the_words_of_the_message():
    """Entries in the last block alone: the last bit stands as far back as it can."""
    width, room = 2 * 65_536 + 160, 400
    flags = np.zeros((2, width), bool)
    flags[:, -room:] = True
    values = np.ones(flags.shape, np.float32)
    form, run = packing("coo8", width, room, 2)
    sent = np.asarray(run(helpers.packed(flags), values, jnp.int32(0)))
    _, string = index_words("coo8", room, width)
    ones = np.flatnonzero(helpers.unpacked(sent[0, :string]))
    assert ones[-1] == room + index_codes.COO8.blocks(width) - 2
    assert bits.WORD * string - bits.WORD < ones[-1] + 2 <= bits.WORD * string
    np.testing.assert_array_equal(sent[0], sent[1])
    assert form.words == sent.shape[1]
