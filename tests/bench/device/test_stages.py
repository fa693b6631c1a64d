"""How often loops of a program turn and which branches it takes: from a stage's counts."""

import dataclasses

import numpy as np
import pytest

from benchmarks.device import turns
from benchmarks.device.lists import ListStage
from sparsejax.wire.ladder import Ladder, Rung


def stage(count):
    """Messages of 16 or 64 entries, 8 a tile; the fullest part has so many."""
    steps = Ladder(4096, 256, 8, (Rung(16, None, 0, 1100), Rung(64, None, 0, 4200)))
    counts = np.full((16, 4), 1)
    counts[2, 1] = count
    return turns.Stage(steps, 3, counts, np.full((16, 4), 9), 1e6)


def test_rounds_and_tiles_follow_from_the_ladder():
    assert stage(10).rounds == [(0, 10)]
    several = stage(64 + 64 + 5)
    assert several.rounds == [(1, 64), (1, 64), (0, 5)]
    known = turns.Turns({"push": several})
    place = ("push_pull.py:Stages.by_entries", "messages.py:transmit")
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


@pytest.mark.parametrize(("side", "last"), [*zip(turns.SIDES, turns.LAST, strict=True)])
def test_one_switch_takes_nothing_a_message_or_several(side, last):
    rungs = (Rung(16, None, 0, 1100), Rung(64, None, 0, 4200))
    counts = np.full((16, 4), 1)
    push = lambda count: turns.Stage(
        Ladder(4096, 256, 8, rungs, True), 3, counts * count, counts, 1e6
    )
    place = ("push_pull.py:Stages.by_entries", side)
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
        place = ("row_push.py:RowPush._sent", send)
        assert known.taken(place, 3) == [0.0, 1.0, 0.0]
    runs = [ListStage((4, 6, 9), need, run=3).collectives for need in (4, 6, 7)]
    assert (one.collectives, runs) == (1, [2, 2, 3])
    choice = ("rows.py:_RowExchange.__call__", "branches.py:cond")
    assert known.taken(choice, 2) == [0.0, 1.0]
    known = turns.Turns({"push": ListStage((4, 6, 9), need=10)})
    assert known.taken(choice, 2) == [1.0, 0.0]
