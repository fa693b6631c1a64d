"""The iterations ("turns") of each loop of an exchange for a load, and the branches taken.

Change this table when loops of the library change. A loop is identified by the innermost
functions around it, and its stage by the innermost function that begins one. A loop or a
conditional that is not in the table is an error.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from benchmarks.device.hlo import ProgramError
from benchmarks.device.lists import ListStage
from benchmarks.device.loads import RANKS, Counts, Load
from benchmarks.device.stage import Stage
from benchmarks.device.traffic import Work
from pallas_kernels import platforms
from sparsejax.schemes import row_lists
from sparsejax.wire import at_once, messages
from sparsejax.wire.ladder import Ladder


Place = tuple[str, ...]


def _packed(stage: Stage) -> Work:
    """Returns the bytes of a kernel that packs the messages of a round, on average."""
    entries, indices = stage.moved(stage.packed)
    sets = stage.packed.shape[1] * stage.ladder.width / 8
    values = entries * stage.ladder.unit_bytes
    return Work(sets + values, values + indices)


def _unpacked(stage: Stage) -> Work:
    """Returns the bytes of a kernel that unpacks a piece of the messages of a round.

    It also reads the elements that it adds to. An ordered sum has one kernel a sender.
    """
    entries, indices = stage.moved(stage.unpacked)
    values = entries * stage.ladder.unit_bytes
    rungs = [stage.ladder.rungs[i] for i, _ in stage.rounds]
    pieces = stage.in_turn * sum(map(stage.ladder.pieces_of, rungs)) / max(len(rungs), 1)
    return Work((2 * values + indices) / pieces, values / pieces)


def _indexed(stage: Stage) -> Work:
    """Returns the bytes of a kernel that counts the bits of unary strings or bitmaps."""
    return Work(stage.moved(stage.unpacked)[1], 0.0)


def _cleared(stage: Stage) -> Work:
    """Returns the bytes of a kernel that zeroes the indices and the padding of messages."""
    entries, indices = stage.moved(stage.packed)
    words = [stage.ladder.rungs[number].words for number, _ in stage.rounds]
    sent = 4 * stage.packed.shape[1] * sum(words) / max(len(words), 1)
    padding = max(sent - entries * stage.ladder.unit_bytes - indices, 0.0)
    return Work(0.0, indices + padding)


# The library's kernels whose bytes depend on the load, by the functions that launch them.
KERNELS = {
    "messages.py:pack_message": _packed,
    "messages.py:_cleared": _cleared,
    "messages.py:unpack_message": _unpacked,
    "index_message.py:index_message": _indexed,
}

# The functions that begin a stage, and the name of the stage.
STAGES = {
    "push_pull.py:Stages.by_entries": "push",
    "pulls.py:Owned.gather": "pull",
    "ag_sparse.py:AGSparse.add_up": "gather",
    "row_push.py:RowPush._sent": "push",
    "rows.py:_RowExchange._pull": "pull",
    "row_lists.py:gathered": "gather",
}
# The functions that choose between entries and a dense sum, and the stage that decides.
CHOICES = {
    "push_pull.py:Stages.__call__": "push",
    "pulls.py:PullEntries.__call__": "pull",
    "ag_sparse.py:AGSparse.add_up": "gather",
    "rows.py:_RowExchange.__call__": "push",
}


class Loop(NamedTuple):
    """A loop of a stage, as functions of the stage.

    Attributes:
        begun: Returns how often it begins in a step.
        turns: Returns its iterations in a step, one number for each rank or for all.
    """

    begun: Callable[[Any], int]
    turns: Callable[[Any], int | np.ndarray]


_packs, _unpacks = (lambda stage: stage.packed), (lambda stage: stage.unpacked)


def _parts(counts) -> Loop:
    """Returns a loop over parts in each round."""
    all_turns = lambda stage: len(stage.rounds) * counts(stage).shape[1]
    return Loop(lambda stage: len(stage.rounds), all_turns)


def _tiles_of_part(counts) -> Loop:
    """Returns a loop over tiles for each part of a round."""
    begun = lambda stage: len(stage.rounds) * counts(stage).shape[1]
    return Loop(begun, lambda stage: stage.tiles(counts(stage)))


_after = lambda stage: max(len(stage.rounds) - 1, 0)
_SEVERAL = Loop(lambda stage: min(_after(stage), 1), _after)
_ROUNDS = Loop(lambda stage: 1, lambda stage: len(stage.rounds))
# The loops, by their innermost functions; if several keys match, the longest holds.
LOOPS: dict[Place, Loop] = {
    ("messages.py:transmit",): _ROUNDS,
    # If there is one switch for all rounds: the rounds before the last, if any.
    ("messages.py:_Transmission.of_group.<locals>.several",): _SEVERAL,
    ("messages.py:_Transmission.in_branches.<locals>.several",): _SEVERAL,
    # Only on CPUs: one part after another, tile by tile.
    ("tiles.py:pack", "tiles.py:_each"): _parts(_packs),
    ("tiles.py:unpack", "tiles.py:_each"): _parts(_unpacks),
    ("tiles.py:pack.<locals>.one_part",): _tiles_of_part(_packs),
    ("tiles.py:unpack.<locals>.one_sender",): _tiles_of_part(_unpacks),
}
SWITCH = "messages.py:transmit.<locals>.one_round"
SIDES = ("messages.py:_Transmission.of_group", "messages.py:_Transmission.in_branches")
LAST = tuple(f"{side}.<locals>.several" for side in SIDES)
CHOICE = ("or_dense.py:or_dense", "branches.py:cond")
# The switch that selects the program which unpacks messages.
GROUPS = ("messages.py:_Transmission.at_once", "branches.py:switch")
# Listed rows: the switch over message sizes, and whether owners have capacity.
LISTS = ("sizes.py:send_heads", "row_lists.py:Lists.place")
OWNERS = ("rows.py:_RowExchange.__call__", "branches.py:cond")
# The push decides by itself, and the pull has three branches.
PUSHES = ("push_pull.py:Stages._one_after_the_other", "branches.py:cond")
PULLS = ("pulls.py:PullEntries.__call__", "branches.py:switch")


@dataclasses.dataclass(frozen=True)
class Turns:
    """The iterations and branches of a program for a load.

    Attributes:
        stages: The stages, by name.
        asked: The names of the loops of which `turns` was called.
    """

    stages: dict[str, Stage | ListStage]
    asked: set[tuple[str, Place]] = dataclasses.field(default_factory=set)

    def stage(self, place: Place) -> str:
        """Returns the name of the stage to which a place belongs."""
        for frame in reversed(place):
            if STAGES.get(frame) in self.stages:
                return STAGES[frame]
        raise _unknown("the stage of a loop", place)

    def name(self, place: Place) -> tuple[str, Place]:
        """Returns the name of a loop: its stage, and its key in `LOOPS`."""
        for length in (2, 1):
            if place[-length:] in LOOPS:
                return self.stage(place), place[-length:]
        raise _unknown("a loop", place)

    def total(self, name: tuple[str, Place]) -> np.ndarray:
        """Returns for each rank the iterations of a loop in one step."""
        stage, functions = name
        return np.broadcast_to(LOOPS[functions].turns(self.stages[stage]), RANKS)

    def turns(self, place: Place) -> float:
        """Returns the iterations of a loop per start, the mean on the busiest rank."""
        name = self.name(place)
        self.asked.add(name)
        begun = LOOPS[name[1]].begun(self.stages[name[0]])
        return float(self.total(name).max() / max(begun, 1))

    def taken(self, place: Place, branches: int) -> list[float]:
        """Returns for each branch of a conditional how often it is taken, on average."""
        if place and place[-1] == SWITCH:
            rounds = self.stages[self.stage(place)].rounds
            found = [rung for rung, _ in rounds]
            return [found.count(i) / max(len(found), 1) for i in range(branches)]
        if place and place[-1] in SIDES + LAST:
            stage = self.stages[self.stage(place)]
            last = stage.rounds[-1][0] if stage.rounds else 0
            finals = stage.ladder.finals
            last = finals.index(last) if last in finals else 0
            taken = stage.side_of_group if place[-1] in SIDES else last
            return [float(i == taken) for i in range(branches)]
        if place[-2:] == GROUPS:
            taken = self.stages[self.stage(place)].group
            return [float(i == taken) for i in range(branches)]
        if place and place[-1] in LISTS:
            taken = self.stages[self.stage(place)].side
            return [float(i == taken) for i in range(branches)]
        if place[-2:] == OWNERS:
            fits = self.stages["push"].fits
            return [float(not fits), float(fits)]
        if place[-2:] == PUSHES:
            pays = self.stages["push"].pays
            return [float(not pays), float(pays)]
        if place[-2:] == PULLS and branches == 3:
            side = 2 if not self.stages["push"].pays else int(not self.stages["pull"].pays)
            return [float(i == side) for i in range(branches)]
        if place[-2:] == CHOICE and place[-3] in CHOICES and branches == 2:
            pays = self.stages[CHOICES[place[-3]]].pays
            return [float(not pays), float(pays)]
        raise _unknown(f"a conditional of {branches} branches", place)

    def kernel(self, place: Place) -> Work | None:
        """Returns the work of a kernel of `KERNELS`, which moves entries only, or None."""
        does = [KERNELS[frame] for frame in place if frame in KERNELS]
        stage = self.stages[self.stage(place)] if does else None
        return does[-1](stage) if isinstance(stage, Stage) else None


def _unknown(what: str, place: Place) -> ProgramError:
    return ProgramError(
        f"nothing is known of {what} at {' > '.join(place[-6:]) or 'an unnamed place'}: "
        "say in benchmarks/device/turns.py what it does for a load."
    )


def here() -> Place:
    """Returns the place of the caller's caller, written as in compiled programs."""
    frames, frame = [], sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        frames.append(f"{code.co_filename.rpartition('/')[2]}:{code.co_qualname}")
        frame = frame.f_back
    return tuple(reversed(frames))


def _stage_of(place: Place) -> str:
    """Returns the name of the stage that is traced at a place."""
    name = next((STAGES[frame] for frame in reversed(place) if frame in STAGES), None)
    if name is None:
        raise _unknown("a stage", place)
    return name


@contextlib.contextmanager
def watched(load: Load):
    """Records the stages of a step that is traced inside, with its message sizes.

    Yields the `Turns`, to which stages are added as they are traced.
    """
    stages: dict[str, Stage] = {}
    original, counts = messages.transmit, load.counts

    def transmit(ladder, channel, *args, **kwargs):
        name = _stage_of(here())
        stages[name] = _stage(name, load.bytes, counts, ladder, channel)
        return original(ladder, channel, *args, **kwargs)

    def in_branches(form, *args):
        if found := original_in_branches(form, *args):
            name = _stage_of(here())
            pieces = tuple(len(form.pieces(i)) for i in range(len(form.ladder.rungs)))
            fold = args[-1]
            ordered = fold.in_order and not fold.into.replaces
            stages[name] = dataclasses.replace(
                stages[name], pieces=pieces, in_turn=form.rows if ordered else 1
            )
        return found

    def groups(*args):
        name, found = _stage_of(here()), original_groups(*args)
        sides = tuple(group.sides for group in found)
        stages[name] = dataclasses.replace(stages[name], groups=sides)
        return found

    def rows_of(name, lists, room, run=None):
        most = counts.pull if name == "pull" else counts.push
        most = most.sum(1) if name == "gather" else most
        sizes = row_lists.message_sizes(room, lists.row_bytes)
        stages[name] = ListStage(list(sizes.rooms), int(most.max()), run)

    def send(lists, collective, slots, *args):
        rows_of(_stage_of(here()), lists, slots.shape[1])
        return original_send(lists, collective, slots, *args)

    def place(lists, collective, slots, *args):
        room = slots.shape[0]
        rows_of(_stage_of(here()), lists, room, lists.run(room))
        return original_place(lists, collective, slots, *args)

    original_in_branches, original_groups = at_once.in_branches, at_once.groups
    original_send, original_place = row_lists.Lists.send, row_lists.Lists.place
    with (
        mock.patch.object(messages, "transmit", transmit),
        mock.patch.object(at_once, "in_branches", in_branches),
        mock.patch.object(at_once, "groups", groups),
        mock.patch.object(row_lists.Lists, "send", send),
        mock.patch.object(row_lists.Lists, "place", place),
    ):
        yield Turns(stages)


def _stage(name: str, size: int, counts: Counts, ladder: Ladder, channel) -> Stage:
    sent = channel.route.messages
    whole = float((RANKS - 1) * ladder.width * ladder.unit_bytes)
    all_reduce = 2 * (RANKS - 1) / RANKS * size
    over = platforms.policy().overhead
    if name == "push":
        return Stage(ladder, sent, counts.push, counts.push.T, all_reduce, whole, over)
    mine = counts.pull if name == "pull" else counts.push.sum(1)
    to_all = mine[:, None], np.tile(mine, (RANKS, 1))
    if name == "pull":
        return Stage(ladder, sent, *to_all, whole)
    return Stage(ladder, sent, *to_all, all_reduce, 4.0 * sent, over)
