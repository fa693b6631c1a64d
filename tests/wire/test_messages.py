"""Sets of units with their values, sent in every code, dtype and size of message."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax.wire.ladder
from sparsejax.units import bits
from sparsejax.units.bits import Slots
from sparsejax.wire import channels, collectives, index_codes, ladder, messages
from tests import helpers
from tests.helpers import WIRE


WIDTH = 1056  # slots in a part: five blocks of 256, the last one of a word; top rung 264


class Setup(NamedTuple):
    """What is fixed when an exchange is traced. Parts are ranges of `width` units."""

    code: str = "auto"
    dtype: Any = np.float32
    shape: tuple[int, ...] = ()
    n: int = 3
    width: int = WIDTH
    ratio: float = 1.6
    tile_numbers: int = 1 << 16
    check_vma: bool = True

    @property
    def size(self):
        return self.n * self.width

    @property
    def unit_bytes(self):
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    @property
    def ladder(self):
        if self.code in MIXED:
            return mixed_ladder(self.width, self.unit_bytes, MIXED[self.code])
        return ladder.Message(self.code, self.ratio).ladder(
            self.width, self.unit_bytes, self.n
        )


# Every code in one ladder, as no real one has them: what one writes must not harm another.
MIXED = {"rising": [*index_codes.CODES], "falling": [*index_codes.CODES][::-1]}


def mixed_ladder(width, unit_bytes, codes):
    """Rungs of 8 to 264 entries, in tiles of 24."""
    rungs = []
    rooms = np.geomspace(8, 264, len(codes)).astype(int) // 4 * 4
    for name, room in zip(codes, rooms.tolist(), strict=True):
        codes = index_codes.parse(name)
        rungs.append(ladder.Rung.of(room, width, unit_bytes, codes))
    return ladder.Ladder(width, unit_bytes, 24, tuple(rungs), collectives.at_once())


def transmit(steps, channel, slots, source, need, add, start, **options):
    """One exchange over one channel: the only place here that calls the library's."""
    fold = messages.Fold(start, add)
    return messages.transmit(steps, channel, slots, source, need, fold, **options)


@functools.cache
def exchange_of(setup):
    """Compiled: what every rank has is pushed to its owner, added up, and pulled by all.

    From x [n, size, *shape] to the sums that each rank owns, all sums, and both `Sent`.
    """

    def run(x):
        sets = Slots.of(bits.pack(bits.nonzero_units(x).reshape(setup.n, -1)))
        need, _ = WIRE.maximum(jnp.max(sets.counts))

        def add(totals, sender, slots, values):
            assert values.dtype == x.dtype
            return totals.at[slots].add(values.astype(totals.dtype), mode="drop")

        owned, pushed = transmit(
            setup.ladder,
            channels.push(WIRE),
            sets,
            messages.Source(x, units=lambda part, slots: part * setup.width + slots),
            need,
            add,
            jnp.zeros((setup.width, *setup.shape), jnp.promote_types(x.dtype, np.float32)),
        )
        sums = owned.astype(x.dtype)
        sets = Slots.of(bits.pack(bits.nonzero_units(sums))[None])
        need, _ = WIRE.maximum(sets.counts[0])

        def place(total, owner, slots, values):
            units = jnp.where(slots < setup.width, owner * setup.width + slots, setup.size)
            return total.at[units].set(values, mode="drop")

        everything, pulled = transmit(
            setup.ladder,
            channels.pull(WIRE),
            sets,
            messages.Source(sums),
            need,
            place,
            jnp.zeros((setup.size, *setup.shape), x.dtype),
        )
        return owned, everything, pushed, pulled

    return helpers.ranked(run, setup.n, setup.check_vma)


def check(setup, x):
    """Sums, replicas, and what was counted on the way, all from NumPy."""
    n = setup.n
    owned, everything, pushed, pulled = exchange_of(setup)(x)
    sums = helpers.total(x)
    np.testing.assert_array_equal(owned.reshape(sums.shape), sums)
    helpers.assert_same_on_all_ranks(everything)
    assert everything.dtype == x.dtype
    np.testing.assert_array_equal(everything[0], sums)

    sent = helpers.is_nonzero(x).reshape(n, n, setup.width, -1).any(axis=3).sum(axis=2)
    check_sent(setup, pushed, sent.T, sent.max())
    summed = helpers.is_nonzero(sums).reshape(n, setup.width, -1).any(axis=2).sum(axis=1)
    check_sent(setup, pulled, np.stack([summed] * n), summed.max())


def check_sent(setup, sent, counts, need):
    """counts[i, j] is what rank i was sent by rank j, and `need` the most of a message."""
    steps = setup.ladder
    rounds, words, payload, first = 0, 0, np.zeros(setup.n), 0
    for rung, length in helpers.rounds_of(steps, need, setup.n - 1):
        rounds += 1
        words += rung.words
        here = np.clip(counts - first, 0, length)
        payload += (setup.n - 1) * needed_bytes(setup, rung.code, here).mean(axis=1)
        first += length
    np.testing.assert_array_equal(sent.rounds, [rounds] * setup.n)
    np.testing.assert_array_equal(sent.wire, [(setup.n - 1) * 4 * words] * setup.n)
    np.testing.assert_array_equal(sent.counts, counts if rounds else 0 * counts)
    np.testing.assert_allclose(sent.payload, payload, rtol=1e-6)
    assert (sent.payload <= sent.wire).all()


def needed_bytes(setup, code, count):
    """A header, the slots in this code and the values, with no room to spare."""
    blocks = -(-setup.width // 2**code.lane)
    bits = code.lane * count + (count + blocks) * (blocks > 1)
    if code is index_codes.BITMAP:
        bits = setup.width + 0 * count
    return 4 + bits / 8 + setup.unit_bytes * count


def gradients(setup, seed=0):
    """From none to all, and ranks that differ as much as they can."""
    densities = [0.0, 1 / setup.size, 0.01, 0.1, 0.4, 1.0, [0.0, 1.0, 0.02][: setup.n]]
    if setup.n > 3:
        densities[-1] = [0.0, 1.0, *[0.02] * (setup.n - 2)]
    for number, density in enumerate(densities):
        yield helpers.gradients(
            setup.n, setup.size, density, setup.dtype, setup.shape, seed + number
        )


SETUPS = {
    "as it is": Setup(),
    "rows of halves": Setup("coo8", jnp.bfloat16, (3,)),
    **{code: Setup(code) for code in index_codes.CODES},
    # Tiles of 4 entries: 66 of them in a message of 264; and of 88.
    "small tiles": Setup(ratio=1.9, tile_numbers=1),
    "small tiles of rows": Setup("coo8", jnp.bfloat16, (3,), ratio=1.9, tile_numbers=88),
    "codes that fall": Setup("falling"),
    "other ranks": Setup(n=5, width=320, ratio=4, check_vma=False),
    "parts of one word": Setup(n=2, width=32),
    "doubles": Setup("auto", np.float64, n=2, ratio=4),
}


@pytest.mark.parametrize("name", helpers.mostly_slow(SETUPS, "as it is", "rows of halves"))
def test_everything_is_delivered_at_any_density(name, monkeypatch):
    setup = SETUPS[name]
    monkeypatch.setattr(sparsejax.wire.ladder, "_TILE_NUMBERS", setup.tile_numbers)
    if setup.tile_numbers < 100:
        # Full parts take four rounds of several tiles each.
        assert setup.ladder.tile < 100
        assert -(-WIDTH // setup.ladder.top) == 4
    with jax.enable_x64(setup.dtype is np.float64):
        for x in gradients(setup):
            check(setup, x + np.where(x != 0, 2.0**-40, 0) if name == "doubles" else x)


@pytest.mark.slow
def test_parts_of_several_blocks_of_65536_are_delivered():
    setup = Setup("coo16", n=2, width=2 * 65536 + 64, ratio=8)
    ends = np.zeros((2, setup.size), np.float32)
    ends[:, [0, 65535, 65536, 131072, setup.width - 1, setup.width, setup.size - 1]] = 5
    check(setup, ends)
    for density in (0.001, 0.05, 0.4):
        check(setup, helpers.gradients(2, setup.size, density, seed=3))


@pytest.mark.slow
def test_parts_of_more_than_the_longest_message_are_delivered_in_several_rounds():
    """Long rows: messages of 4 MiB, and shorter ones where two of those save a round."""
    setup = Setup("auto", shape=(64,), n=2, width=36 * 1024, ratio=2)
    steps = setup.ladder
    assert steps.top == 8192 < setup.width // 4
    assert setup.n * steps.top * setup.unit_bytes == 1 << 22
    rounds = {0.05: 1, 0.13: 2, 0.4: 2, 1.0: 5}
    for density, expected in rounds.items():
        x = helpers.gradients(2, setup.size, density, shape=(64,), seed=7)
        check(setup, x)
        most = helpers.is_nonzero(x).any(axis=2).reshape(2, 2, -1).sum(axis=2).max()
        assert len(helpers.rounds_of(steps, most, 1)) == expected


def test_values_that_are_no_ordinary_numbers_arrive_bit_for_bit():
    # Nothing is added up here: XLA on CPUs takes denormals for zero when it adds.
    pairs = ((0, 1), (1, 0))

    def swap(x):
        sets = Slots.of(bits.pack(bits.nonzero_units(x))[None])
        need, _ = WIRE.maximum(sets.counts[0])
        steps = ladder.Message(ratio=4).ladder(256, 4, 1)
        return transmit(
            steps,
            channels.swap(WIRE, [pairs]),
            sets,
            messages.Source(x),
            need,
            lambda total, _, slots, values: total.at[slots].set(values, mode="drop"),
            jnp.zeros_like(x),
        )

    x = np.zeros((2, 256), np.float32)
    x[0, [0, 99]] = np.nan, 1e-45
    x[1, 255] = -np.inf
    arrived, sent = helpers.run_ranks(swap, x, 2)
    assert arrived.tobytes() == x[::-1].tobytes()
    np.testing.assert_array_equal(sent.counts, [[1], [2]])
    # One message, of one partner.
    shortest = ladder.Message(ratio=4).ladder(256, 4, 1).rungs[0]
    np.testing.assert_array_equal(sent.wire, [4.0 * shortest.words] * 2)


def test_the_payload_can_be_reckoned_from_a_typical_count():
    """The same on all ranks then, and the bytes of that many entries in each message."""
    steps = ladder.Message("coo8", 4).ladder(1024, 4, 3)

    def run(x):
        sets = Slots.of(bits.pack((x != 0).reshape(3, -1)))
        need, _ = WIRE.maximum(jnp.max(sets.counts))
        _, sent = transmit(
            steps,
            channels.push(WIRE),
            sets,
            messages.Source(jnp.ones(1024, np.float32)),
            need,
            lambda count, sender, slots, values: count + jnp.sum(slots < 1024),
            jnp.int32(0),
            typical=jnp.array([20.0, 10.0]),
        )
        assert not sent.payload.aval.manual_axis_type.varying
        return sent

    x = np.zeros((3, 3 * 1024), np.float32)
    x[0, :30] = 1
    sent = helpers.run_ranks(run, x, 3)
    # Two messages. A header of 4 bytes; 9 bits a slot, and 4 for the blocks; 4 bytes a
    # value: 20 entries take 4 + 184 / 8 + 80 = 107 bytes, 10 take 4 + 94 / 8 + 40.
    np.testing.assert_array_equal(sent.payload, [2 * (107 + 55.75) / 2] * 3)
