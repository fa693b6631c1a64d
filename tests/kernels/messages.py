"""Messages written and read by hand, and the cases in which every backend must agree.

A case is a set of slots for each part, what a message of a size looks like, and where the
values are. The message is made byte by byte in NumPy from its definition.
"""

import dataclasses
import functools
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np

from pallas_kernels import striping
from pallas_kernels.reference import specs
from sparsejax.wire import collectives, formats, index_codes, ladder


AT = 3  # where the numbers of a run begin


@dataclasses.dataclass(frozen=True)
class Case:
    """What is sent, and how.

    Attributes:
        codes: The index code of each message size, the shortest first.
        rung: Which size is sent.
        words: Of the bits of a part.
        capacity: Entries in the shortest message; each other has twice the one before.
        density: The share of slots that are there, by part.
        first: The rank of the first entry that is sent.
        shape: Of a value.
        dtype: Of the values where they are.
        wire: Of the values while they travel.
        units: How units are told from slots: "slots", "given" or "striped".
    """

    codes: tuple[str, ...] = ("coo8",)
    rung: int = 0
    words: int = 33
    capacity: int = 64
    density: tuple[float, ...] = (0.02, 0.2, 0.0)
    first: int = 0
    shape: tuple[int, ...] = ()
    dtype: Any = np.float32
    wire: Any = np.float32
    units: str = "slots"

    @property
    def parts(self):
        return len(self.density)

    @property
    def width(self):
        return 32 * self.words

    @functools.cached_property
    def form(self):
        unit_bytes = int(np.prod(self.shape, dtype=int)) * jnp.dtype(self.wire).itemsize
        rungs = []
        for number, name in enumerate(self.codes):
            codes, capacity = index_codes.parse(name), self.capacity << number
            # As on GPUs, with strings that are padded.
            with mock.patch.object(collectives, "at_once", return_value=True):
                rungs.append(ladder.Rung.of(capacity, self.width, unit_bytes, codes))
        steps = ladder.Ladder(self.width, unit_bytes, 16, tuple(rungs), True)
        return formats.Form(steps, self.shape, jnp.dtype(self.wire), self.parts)

    @property
    def spec(self):
        return dataclasses.replace(self.form.spec, units=self.striping, at=AT)

    @property
    def row(self):
        return self.form.table[self.rung]

    @property
    def numbers(self):
        """What is data of a message, behind numbers that mean something else."""
        run = [self.first, self.length, *self.row]
        return np.array([99] * AT + run, np.int32)

    @property
    def bits(self):
        """The sets, packed."""
        flags = np.zeros((self.parts, self.width), bool)
        for row, slots in zip(flags, self.slots, strict=True):
            row[slots] = True
        return np.packbits(flags, axis=1, bitorder="little").view(np.uint32)

    @property
    def room(self):
        return self.form.ladder.top

    @property
    def length(self):
        return self.form.ladder.rungs[self.rung].capacity

    @functools.cached_property
    def striping(self):
        # Some slots of the last column belong to no unit.
        size = self.parts * self.width - 20
        return striping.Striping(size, self.parts, 5) if self.units == "striped" else None

    @functools.cached_property
    def slots(self):
        """The slots of each part, ascending: all of them, sent or not."""
        rng = np.random.default_rng(7)
        found = []
        for part, density in enumerate(self.density):
            slots = np.flatnonzero(rng.random(self.width) < density)
            if density:
                slots = np.union1d(slots, [0, self.width - 1])
            if self.striping:
                units = np.asarray(self.striping(part, jnp.asarray(slots, jnp.int32)))
                slots = slots[units < self.striping.size]
            found.append(slots.astype(np.int32))
        return found

    @property
    def counts(self):
        return np.array([len(slots) for slots in self.slots], np.int32)

    @property
    def sent(self):
        """The slots of each part that this message has."""
        return [slots[self.first :][: self.length] for slots in self.slots]

    @property
    def listed(self):
        """Those that are sent in order, and behind them what there may be."""
        listed = np.full((self.parts, self.room), -7, np.int32)
        for row, slots in zip(listed, self.slots, strict=True):
            # Slots that come in the next message, and nothing else, may follow.
            run = slots[self.first :][: self.room]
            row[: len(run)] = run
        return listed

    @functools.cached_property
    def array(self):
        """Values that any order adds up exactly: [units, ...]."""
        rng = np.random.default_rng(8)
        size = self.striping.size if self.striping else self.width
        return rng.integers(-64, 65, (size, *self.shape)).astype(self.dtype)

    def units_of(self, part, slots):
        if self.units == "given":
            return (self.width - 1 - slots + 3 * part) % self.width
        if self.striping and len(slots):
            return np.asarray(self.striping(part, jnp.asarray(slots)))
        return slots

    @property
    def given(self):
        """The units that `pack_message` is given in a list, if they are."""
        if self.units != "given":
            return None
        units = np.full((self.parts, self.room), 2**31 - 1, np.int32)
        for part, slots in enumerate(self.sent):
            units[part, : len(slots)] = self.units_of(part, slots)
        return units

    @functools.cached_property
    def message(self):
        """The messages, by their definition: uint32 [parts, words]."""
        string, _, values, has_lanes, has_string, shift, _, *planes = map(int, self.row)
        message = np.zeros((self.parts, self.form.room), np.uint32)
        message[:, 0] = self.counts
        octets = message.view(np.uint8)
        for part, slots in enumerate(self.sent):
            for rank, slot in enumerate(slots.tolist()):
                if has_string:
                    bit = 32 * string + (slot >> shift) + has_lanes * rank
                    octets[part, bit // 8] |= 1 << bit % 8
                for plane, begin in enumerate(planes[::2]):
                    if planes[2 * plane + 1]:
                        octets[part, 4 * begin + rank] = slot >> 8 * plane & 255
            numbers = self.array[self.units_of(part, slots)].astype(self.wire)
            told = np.frombuffer(numbers.tobytes(), np.uint8)
            octets[part, 4 * values :][: len(told)] = told
        return message

    @property
    def received(self):
        """The messages, with anything where nothing is said to be."""
        message = self.message.copy()
        message[:, self.form.ladder.rungs[self.rung].words :] = 0xFFFFFFFF
        return message

    def total(self, into, replaces):
        """What the array becomes in which values are added, or set."""
        total = np.array(into).astype(np.float64)
        for part, slots in enumerate(self.sent):
            units = slots if self.units == "given" else self.units_of(part, slots)
            numbers = self.array[self.units_of(part, slots)].astype(np.float64)
            inside = units < len(total)
            if replaces:
                total[units[inside]] = numbers[inside]
            else:
                np.add.at(total, units[inside], numbers[inside])
        return total


MIXED = tuple(index_codes.CODES)
HALVES = {"dtype": np.float32, "wire": jnp.bfloat16}
CASES = {
    "from a rank on": Case(first=30, capacity=40, units="striped"),
    **{
        f"mixed, {name}": Case(MIXED, rung, capacity=32, shape=(4,), units="striped")
        for rung, name in enumerate(MIXED)
    },
    "one byte of two": Case(("coo16", "coo8"), 1, units="striped"),
    "coo8": Case(),
    "one block": Case(words=8),
    "coo16": Case(("coo16",), words=2 * 2048 + 5, capacity=400, density=(0.003, 0.0001)),
    "coo32": Case(("coo32",), units="given"),
    "bitmap": Case(("bitmap",), capacity=256, units="striped"),
    "behind the last": Case(first=9999),
    "full": Case(words=9, capacity=288, density=(1.0, 1.0)),
    "nothing": Case(density=(0.0, 0.0)),
    "one part": Case(density=(0.1,), units="striped"),
    "rows of one part": Case(density=(0.1,), shape=(3,), capacity=256),
    "rows of five halves": Case(shape=(5,), units="given", **HALVES),
    "halves": Case(dtype=np.float16, wire=np.float16, units="striped"),
    "rows of two axes": Case(shape=(2, 9), capacity=40, density=(0.03, 0.0)),
}


def check_pack(pack, case):
    """A message, word for word; from a list, and from bits where units need none."""
    lists = [True, False] if case.units != "given" else [True]
    for listed in lists:
        slots = case.listed if listed else case.bits
        sets = specs.SlotSets(slots, case.counts, case.given)
        message = pack(sets, case.array, case.numbers, spec=case.spec)
        end = case.form.ladder.rungs[case.rung].words
        np.testing.assert_array_equal(message[:, :end], case.message[:, :end])


def check_unpack(unpack, case, *, replaces=False, size=None, dtype=np.float32, **how):
    """Sums in an array that has something in it already; what is behind it is left out."""
    whole = case.striping.size if case.striping else case.width
    size = whole if size is None else size
    if replaces and not case.striping:
        case = dataclasses.replace(case, density=case.density[:1])
    into = np.ones((size, *case.shape)).astype(dtype)
    total = unpack(
        into,
        specs.Received(case.received),
        case.numbers,
        spec=case.spec,
        how=specs.Unpacking(replaces, **how),
    )
    assert total.dtype == into.dtype
    np.testing.assert_array_equal(
        np.asarray(total).astype(np.float64), case.total(into, replaces)
    )


def unpacked_in_pieces(index, unpack, case, total, count, bitmaps=False, ordered=False):
    """What an array becomes by messages that are received in pieces, and end there."""
    steps = dataclasses.replace(case.form.ladder, piece=1)
    form = formats.Form(steps, case.shape, case.form.dtype, case.parts)
    head, ends, spec = None, None, dataclasses.replace(case.spec, bitmaps=bitmaps)
    if bitmaps:
        spec = dataclasses.replace(spec, longest=case.words)
    with mock.patch.object(ladder.Ladder, "pieces_of", return_value=count):
        pieces = form.pieces(case.rung)
    assert count == 1 or len(pieces) > 2
    for piece in pieces:
        words = np.ascontiguousarray(case.received[:, piece.words])
        if head is None:
            head = words
            counts, ends = index(head, case.numbers, spec=spec)
            np.testing.assert_array_equal(counts, case.counts)
        if piece.first == piece.last:
            continue
        received = specs.Received(head, ends, None if words is head else words)
        how = specs.Unpacking(bitmaps, ordered, piece.first, piece.last)
        total = unpack(total, received, case.numbers, spec=spec, how=how)
    return np.asarray(total).astype(np.float64)


def check_pieces(index, unpack, case, ordered=False):
    """The same sums, of messages that are received in three pieces, and end there."""
    ones = jnp.ones((case.width, *case.shape), jnp.float32)
    total = unpacked_in_pieces(index, unpack, case, ones, 3, ordered=ordered)
    np.testing.assert_array_equal(total, case.total(np.ones(total.shape), False))


# Of which all is sent in one message; the last has several columns whose ends are cut off.
BITMAPS = {
    "thin": Case(("bitmap",), capacity=512, units="striped"),
    "half of all": Case(
        ("bitmap",), capacity=1056, density=(0.5, 0.4, 0.6), units="striped"
    ),
    "full, halves": Case(
        ("bitmap",), capacity=288, words=9, density=(1.0,) * 4, units="striped", **HALVES
    ),
    "short parts": Case(
        ("bitmap",), capacity=32, words=1, density=(0.5,) * 5, units="striped"
    ),
    "nothing": Case(("bitmap",), density=(0.0, 0.0), units="striped"),
}


def check_bitmaps(index, unpack, case):
    """The array, zeros included, of bitmaps that come whole, and in three pieces."""
    zeros = jnp.zeros(case.striping.size, jnp.float32)
    wanted = case.total(np.zeros(zeros.size), True)
    for count in (1, 3):
        total = unpacked_in_pieces(index, unpack, case, zeros, count, bitmaps=True)
        np.testing.assert_array_equal(total, wanted)
