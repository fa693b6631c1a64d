"""How often loops of a program turn and which branches it takes: from a stage's counts."""

import dataclasses

import numpy as np
import pytest

from benchmarks.device import hlo, turns
from benchmarks.device.lists import ListStage
from benchmarks.device.ragged import RaggedStage
from benchmarks.device.walk import Ragged
from sparsejax.wire import index_codes
from sparsejax.wire.ladder import Ladder, Rung
from sparsejax.wire.ragged import Form


def stage(count):
    """Messages of 16 or 64 entries, 8 a tile; the fullest part has so many."""
    steps = Ladder(4096, 256, 8, (Rung(16, None, 1100), Rung(64, None, 4200)))
    counts = np.full((16, 4), 1)
    counts[2, 1] = count
    return turns.Stage(steps, 3, counts, np.full((16, 4), 9), 1e6)


def test_rounds_and_tiles_follow_from_the_ladder():
    assert stage(10).rounds == [(0, 10)]
    several = stage(64 + 64 + 5)
    assert several.rounds == [(1, 64), (1, 64), (0, 5)]
    known = turns.Turns({"push": several})
    place = ("push_pull.py:Stages._by_entries", "messages.py:transmit")
    assert known.turns(place) == 3
    # The fullest part has 8, 8 and 1 tiles, and the rank's other parts one each.
    assert several.collectives == 3
    assert dataclasses.replace(several, pieces=(1, 4)).collectives == 4 + 4 + 1
    tile, parts = "tiles.py:pack.<locals>.one_part", "tiles.py:_each"
    assert known.total(("push", (tile,)))[:4].tolist() == [4, 4, 17 + 3, 4]
    assert known.turns((*place, "tiles.py:pack", parts, tile)) == 20 / (3 * 4)
    assert known.turns((*place, "tiles.py:unpack", parts)) == 4
    # Of nine entries each, all in the first round: two tiles.
    received = "tiles.py:unpack.<locals>.one_sender"
    assert known.turns((*place, "tiles.py:unpack", parts, received)) == 8 / (3 * 4)
    assert known.taken((*place, turns.SWITCH), 2) == [1 / 3, 2 / 3]


@pytest.mark.parametrize(
    ("side", "last"),
    [*zip(turns.SIDES, turns.LAST, strict=True)],
    ids=["behind", "inside"],
)
def test_one_switch_takes_nothing_a_message_or_several(side, last):
    rungs = (Rung(16, None, 1100), Rung(64, None, 4200))
    counts = np.full((16, 4), 1)
    push = lambda count: turns.Stage(
        Ladder(4096, 256, 8, rungs, True), 3, counts * count, counts, 1e6
    )
    place = ("push_pull.py:Stages._by_entries", side)
    taken = {n: turns.Turns({"push": push(n)}).taken(place, 4) for n in (0, 10, 64, 130)}
    assert [one.index(1.0) for one in taken.values()] == [0, 1, 2, 3]
    known = turns.Turns({"push": push(130)})
    assert known.turns((place[0], last)) == 2
    assert known.taken((place[0], last), 2) == [1.0, 0.0]


def test_entries_are_sent_where_they_take_fewer_bytes():
    # Three messages of 4,200 words each are 50,400 bytes; 19 rounds stay below a million.
    assert stage(19 * 64).pays
    assert not stage(20 * 64).pays
    known = turns.Turns({"push": stage(20 * 64)})
    place = ("push_pull.py:Stages.__call__", *turns.CHOICE)
    assert known.taken(place, 2) == [1.0, 0.0]


def test_the_size_of_a_message_of_listed_rows_follows_from_the_fullest():
    one = ListStage((4, 6, 9), need=6)
    known = turns.Turns({"push": one})
    for send in turns.LISTS:
        place = ("rows.py:_Exchange._push", send)
        assert known.taken(place, 3) == [0.0, 1.0, 0.0]
    runs = [ListStage((4, 6, 9), need, run=3).collectives for need in (4, 6, 7)]
    assert (one.collectives, runs) == (1, [2, 2, 3])
    choice = ("rows.py:_Exchange.__call__", "axes.py:cond")
    assert known.taken(choice, 2) == [0.0, 1.0]
    known = turns.Turns({"push": ListStage((4, 6, 9), need=10)})
    assert known.taken(choice, 2) == [1.0, 0.0]


def ragged_stage(counts, dense=1e6, rest=0.0):
    """Four ranks, messages of slots as COO and values: two words an entry, room for 32."""
    steps = Ladder(1024, 4, 8, (Rung(32, index_codes.COO32, 0),))
    form = Form(steps, "coo32", (), np.dtype(np.float32), 4)
    counts = np.array(counts)
    unpacked = counts.T if counts.shape[1] > 1 else np.tile(counts[:, 0], (4, 1))
    return RaggedStage(form, counts, unpacked, dense, rest)


def test_a_ragged_stage_sends_what_its_counts_need():
    """Slots go four at a time; what a rank has for itself is not sent."""
    push = ragged_stage([[9, 4, 8, 0], [0, 2, 3, 4], [4, 4, 30, 4], [0, 0, 0, 20]])
    # The third rank has 3 times 4 entries for others; the first 4 and 8.
    assert push.sent == 4 * 2 * 12
    assert push.operands == (4 * 64, 4 * 64)
    assert (push.side, push.rounds) == (1, [30])
    # With its own: 30 entries are 32 slots and 30 values.
    assert push.collective == Ragged(4 * 24.0, 4.0 * (3 * 8 + 62), 4.0 * (16 + 7 + 62))
    pull = ragged_stage([[8], [70], [0], [4]])
    assert (pull.side, pull.rounds) == (2, [32, 32, 6])
    assert pull.sent == 3 * 4 * (2 * 64 + 8 + 6)
    assert pull.operands == (64, 4 * 64)
    assert pull.collective.sent == pull.sent / 3
    assert ragged_stage([[0] * 4] * 4).side == 0
    least = ragged_stage([[8]] * 4, dense=192)
    assert not least.pays
    assert ragged_stage([[8]] * 4, dense=193).pays
    assert not ragged_stage([[8]] * 4, dense=193, rest=1).pays


def test_a_ragged_stage_goes_densely_in_one_round_or_in_several():
    push, place = ragged_stage([[8] * 4] * 4), (turns.RAGGED[0], "axes.py:switch")
    pull, back = ragged_stage([[40]] * 4), (turns.RAGGED[1], "axes.py:switch")
    known = turns.Turns({"push": push, "pull": pull})
    assert known.taken(place, 3) == [0.0, 1.0, 0.0]
    assert known.taken(back, 4) == [0.0, 0.0, 0.0, 1.0]
    assert known.turns((turns.RAGGED[1], "ragged.py:Ragged.several")) == 2
    assert known.ragged(64, 256).sent == pull.sent / 2
    with pytest.raises(hlo.ProgramError, match="no stage has a ragged all-to-all of 63"):
        known.ragged(63, 256)
    whole = turns.Turns({"push": push, "pull": ragged_stage([[8]] * 4, dense=1)})
    assert whole.taken(back, 4) == [0.0, 1.0, 0.0, 0.0]
    dense = turns.Turns({"push": ragged_stage([[8] * 4] * 4, dense=1), "pull": pull})
    assert dense.taken(place, 3) == [1.0, 0.0, 0.0]
    assert dense.taken(back, 4) == [1.0, 0.0, 0.0, 0.0]
