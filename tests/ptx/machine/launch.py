"""A launch: blocks of warps that run in an order from a seed, one access at a time.

A warp runs up to its next access of memory and stops before it; then any other may go. Its
stores are visible to itself at once and to others later: at the latest at a barrier of its
block, a fence, an atomic operation that releases, or the end of the kernel. A barrier makes
stores visible to all blocks, where a GPU promises it of one: a missing fence between two
blocks is reported as a race and need not show otherwise.

Registers and results hold garbage until they are written. A warp's lanes go in any order
where they collide. Where lanes of a warp part at a branch, some go first, up to where they
meet again, and no instruction that needs all lanes may lie between.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np

from tests.ptx.machine import lanes, orders
from tests.ptx.machine.code import SHARED, Action, Code
from tests.ptx.machine.lanes import LANES, NUMBERS, TYPES
from tests.ptx.machine.memory import Buffer, Fault, Memory, within
from tests.ptx.machine.program import PtxError
from tests.ptx.machine.races import Access, Conflict, Watch


# A kernel that takes more than this has no end.
STEPS = 3_000_000


@dataclasses.dataclass
class Ran:
    """What a launch did.

    Attributes:
        conflicts: Accesses that nothing orders, each pair of instructions once.
        collisions: Stores of one instruction to a buffer, of other values to one place:
            how many.
        order: The warps in the order in which they went, a step each: an access, a
            barrier or a branch.
    """

    conflicts: dict[tuple, Conflict]
    collisions: Counter
    order: list[int]

    @property
    def steps(self) -> int:
        return len(self.order)


class Block:
    """A block: its shared memory, its warps, and how many barriers it has passed."""

    def __init__(self, number, launch):
        code, rng = launch.code, launch.rng
        self.number, self.epoch = number, 0
        content = rng.integers(0, 256, max(1, launch.shared), np.uint8)
        self.shared = Buffer("shared memory", SHARED, content, written=False)
        self.shared.watch = Watch(
            "shared memory", launch.shared, launch.threads, code.grain["shared"]
        )
        self.warps = [Warp(self, i, launch) for i in range(launch.threads // LANES)]


class Warp:
    """A warp: its registers and where it is."""

    def __init__(self, block, number, launch):
        code, rng = launch.code, launch.rng
        self.block, self.number = block, block.number * (launch.threads // LANES) + number
        self.threads = (self.number * LANES + NUMBERS).astype(np.int32)
        self.registers = _garbage(code, rng)
        for place, value in code.constants.items():
            self.registers[place] = value
        within_block = (number * LANES + NUMBERS).astype(np.uint32)
        given = {
            "%tid.x": within_block,
            "%laneid": NUMBERS.astype(np.uint32),
            "%ntid.x": np.full(LANES, launch.threads, np.uint32),
            "%ctaid.x": np.full(LANES, block.number, np.uint32),
            "%nctaid.x": np.full(LANES, launch.blocks, np.uint32),
        }
        for name, address in zip(code.program.parameters, launch.addresses, strict=True):
            given[name] = np.full(LANES, address, np.uint64)
        for name, value in given.items():
            self.registers[code.special[name]] = value
        self.active: np.ndarray | None = None  # None: all lanes
        self.ways: list[Way] = []
        self.waiting: list[tuple[Buffer, np.ndarray, np.ndarray]] = []
        self.at = 0
        self.is_at_barrier = self.is_done = False

    def executes(self, action: Action) -> np.ndarray:
        """Which lanes execute an action."""
        active = np.ones(LANES, bool) if self.active is None else self.active
        if action.predicate is None:
            return active
        predicate = self.registers[action.predicate]
        return active & (~predicate if action.negated else predicate)

    def mask(self, action: Action) -> np.ndarray | None:
        """The lanes that execute an action; None: all of them."""
        if action.predicate is None and self.active is None:
            return None
        executes = self.executes(action)
        return None if executes.all() else np.flatnonzero(executes)

    def part(self, taken: np.ndarray, target: int, join: int, first: bool):
        """Sends lanes two ways, one after the other, until they meet."""
        active = np.ones(LANES, bool) if self.active is None else self.active
        ways = [(target, taken), (self.at, active & ~taken)]
        now, later = ways if first else ways[::-1]
        self.ways.append(Way(join, self.active, later))
        self.at, self.active = now

    def meet(self):
        """Goes the other way, or on together, where lanes meet."""
        while self.ways and self.at == self.ways[-1].join:
            way = self.ways[-1]
            if way.later is not None:
                (self.at, self.active), way.later = way.later, None
            else:
                self.active = way.before
                self.ways.pop()


@dataclasses.dataclass
class Way:
    """Where lanes part.

    Attributes:
        join: The instruction where they meet.
        before: Which were together before; None: all.
        later: Where the others begin, and which they are; None: they have gone.
    """

    join: int
    before: np.ndarray | None
    later: tuple[int, np.ndarray] | None


def _garbage(code, rng):
    """What registers hold before anything is written to them."""
    wide = rng.integers(0, 2**64, (len(code.dtypes), LANES), np.uint64)
    return [
        row.astype(dtype) if dtype is not np.dtype(bool) else row > row[0]
        for row, dtype in zip(wide, code.dtypes, strict=True)
    ]


class Launch:
    """One launch of a kernel."""

    def __init__(
        self,
        code: Code,
        blocks: int,
        arguments: Sequence[Buffer | None],
        memory: Memory,
        *,
        shared: int,
        order: "orders.Order",
    ):
        """The arguments are buffers in the order of the parameters; None is no pointer."""
        self.code, self.blocks, self.memory, self.shared = code, blocks, memory, shared
        self.threads = code.program.threads
        self.addresses = [0 if one is None else one.base for one in arguments]
        self.rng = np.random.default_rng(order.seed)
        self._choices = random.Random(order.seed)
        self._order = order
        self.ran = Ran({}, Counter(), [])
        for buffer in memory.buffers:
            buffer.watch = Watch(
                buffer.name, buffer.size, self.threads, code.grain["global"]
            )
        self._do = {
            "load": self._load,
            "store": self._store,
            "atomic": self._atomic,
            "load matrices": self._load_matrices,
            "store matrices": self._store_matrices,
            "barrier": self._barrier,
            "fence": self._fence,
            "branch": self._branch,
            "return": self._return,
        }

    def run(self) -> Ran:
        """Runs it to its end."""
        with np.errstate(all="ignore"):  # numbers overflow and wrap in a GPU
            return self._run()

    def _run(self):
        pending = list(range(self.blocks))
        if not self._order.is_given:
            self._choices.shuffle(pending)
        pending.reverse()
        ready: dict[int, Warp] = {}
        pick = self._order.start(self._choices)
        resident = pick.resident
        live = 0
        while pending or ready:
            while pending and live < resident:
                block = Block(pending.pop(), self)
                live += 1
                for warp in block.warps:
                    self._compute(warp)
                    ready[warp.number] = warp
            warp = ready[pick(ready)]
            self.ran.order.append(warp.number)
            self._step(warp)
            if warp.waiting and self._choices.random() < pick.visible:
                self._show(warp, 1)
            if warp.is_at_barrier or warp.is_done:
                del ready[warp.number]
                live -= self._met(warp.block, ready)
            if len(self.ran.order) > STEPS:
                raise Fault("it does not end")
        return self.ran

    def _met(self, block, ready) -> bool:
        """Lets a block go on whose warps have all come to a barrier; whether it is done."""
        if not all(warp.is_at_barrier or warp.is_done for warp in block.warps):
            return False
        for warp in block.warps:
            self._show(warp)
        if all(warp.is_done for warp in block.warps):
            return True
        if any(warp.is_done for warp in block.warps):
            raise Fault("some warps wait at a barrier, and others have returned")
        block.epoch += 1
        for warp in block.warps:
            warp.is_at_barrier = False
            ready[warp.number] = warp
        return False

    def _step(self, warp):
        """Executes the action at which a warp is, and computes up to the next."""
        action = self.code.actions[warp.at]
        warp.at += 1
        try:
            self._do[action.kind](warp, action)
        except Fault as error:
            where = self.code.program.where(action.number)
            raise Fault(f"{where}: {error} (warp {warp.number})") from None
        if not warp.is_done:
            self._compute(warp)

    def _compute(self, warp):
        """Computes up to the next action."""
        while True:
            warp.meet()
            if self.code.actions[warp.at] is not None:
                return
            run, warp.at = self.code.computes(warp.at, warp.active is not None)
            if run is not None:
                run(warp.registers, warp.active)

    # Memory.

    def _show(self, warp, count=None):
        """Makes stores visible that wait, the oldest first."""
        for buffer, offsets, octets in warp.waiting[:count]:
            buffer.write(offsets, octets)
        del warp.waiting[:count]

    def _show_own(self, warp, buffer, offsets, size):
        """Makes stores of a warp visible that it would see in an access of its own."""
        if not warp.waiting:
            return
        low, high = offsets.min(), offsets.max() + size
        last = -1
        for number, (other, at, octets) in enumerate(warp.waiting):
            if other is buffer and at.min() < high and low < at.max() + octets.shape[1]:
                last = number
        self._show(warp, last + 1)

    def _reached(self, warp, action, mask, size):
        """The buffer that an action reaches, and the offset of each lane."""
        if action.base is None:
            addresses = np.full(LANES, action.offset, np.uint32)
        else:
            addresses = self._address(warp, action)
        if mask is not None:
            addresses = addresses[mask]
        if action.space == "shared":
            return warp.block.shared, within(warp.block.shared, addresses, size)
        return self.memory.locate(addresses, size)

    def _access(self, warp, action):
        """Which lanes reach which bytes: mask, buffer, offsets, size; None if none do."""
        mask = warp.mask(action)
        if mask is not None and not len(mask):
            return None
        size = TYPES[action.type].itemsize * len(action.registers)
        buffer, offsets = self._reached(warp, action, mask, size)
        if action.kind != "load" and not buffer.writable:
            raise Fault(f"writes to {buffer.name}, which is an operand")
        return mask, buffer, offsets, size

    def _address(self, warp, action):
        base = warp.registers[action.base]
        wrapped = action.offset & (2 ** (8 * base.itemsize) - 1)
        return base + base.dtype.type(wrapped) if action.offset else base

    def _note(self, kind, warp, action, buffer, offsets, size, mask):
        threads = warp.threads if mask is None else warp.threads[mask]
        access = Access(action.number, warp.block.number, warp.block.epoch, threads)
        return buffer.watch.note(kind, offsets, size, access)

    def _conflict(self, found):
        for one in found:
            self.ran.conflicts.setdefault(one.pair, one)

    def _load(self, warp, action):
        access, dtype = self._access(warp, action), TYPES[action.type]
        if access is None:
            return
        mask, buffer, offsets, size = access
        self._show_own(warp, buffer, offsets, size)
        self._conflict(self._note("load", warp, action, buffer, offsets, size, mask))
        octets = buffer.read(offsets, size)
        numbers = np.ascontiguousarray(octets).view(dtype)
        for column, register in enumerate(action.registers):
            self._put(warp, register, numbers[:, column], mask)

    def _put(self, warp, register, numbers, mask):
        """Puts numbers into a register, extended to its width by their type."""
        if register is None:
            return
        dtype = self.code.dtypes[register]
        if numbers.dtype.kind == "i":
            numbers = numbers.astype(f"i{dtype.itemsize}")
        wide = numbers.astype(dtype) if numbers.dtype.kind in "iu" else numbers.view(dtype)
        if mask is not None:
            kept = warp.registers[register].copy()
            kept[mask] = wide
            wide = kept
        warp.registers[register] = wide

    def _store(self, warp, action):
        access, dtype = self._access(warp, action), TYPES[action.type]
        if access is None:
            return
        mask, buffer, offsets, _ = access
        columns = [warp.registers[place] for place in action.registers]
        numbers = np.stack([x.astype(f"u{dtype.itemsize}") for x in columns], 1)
        if mask is not None:
            numbers = numbers[mask]
        octets = numbers.view(np.uint8)
        self._store_octets(warp, action, buffer, offsets, octets, mask)

    def _store_octets(self, warp, action, buffer, offsets, octets, mask):
        """Stores; a value that was stored there before conflicts with no other store."""
        size = octets.shape[1]
        shuffled = self.rng.permutation(len(offsets))
        if len(np.unique(offsets)) < len(offsets):
            values = {}
            for at, value in zip(offsets.tolist(), octets, strict=True):
                other = values.setdefault(at, value.tobytes())
                if other != value.tobytes():
                    self.ran.collisions[action.number, buffer.name] += 1
        found = self._note("store", warp, action, buffer, offsets, size, mask)
        if buffer.store(offsets, octets):
            found = [one for one in found if one.first[0] != "store"]
        self._conflict(found)
        warp.waiting.append((buffer, offsets[shuffled], octets[shuffled]))

    def _matrices(self, warp, action):
        """Of four matrices of 8 x 8 halves, where each lane's two of each are.

        A row of a matrix begins where one of eight lanes says; four lanes share it.
        """
        self._check_whole(warp, action)
        rows = np.full(LANES, action.offset, np.uint32)
        if action.base is not None:
            rows = self._address(warp, action)
        within(warp.block.shared, rows, 16)
        for number, register in enumerate(action.registers):
            begins = rows[8 * number + NUMBERS // 4]
            yield register, begins.astype(np.int64) - SHARED + NUMBERS % 4 * 4

    def _load_matrices(self, warp, action):
        buffer = warp.block.shared
        for register, offsets in self._matrices(warp, action):
            self._show_own(warp, buffer, offsets, 4)
            self._conflict(self._note("load", warp, action, buffer, offsets, 4, None))
            octets = np.ascontiguousarray(buffer.read(offsets, 4))
            self._put(warp, register, octets.view(np.uint32)[:, 0], None)

    def _store_matrices(self, warp, action):
        buffer = warp.block.shared
        for register, offsets in self._matrices(warp, action):
            octets = warp.registers[register][:, None].view(np.uint8)
            self._store_octets(warp, action, buffer, offsets, octets, None)

    def _atomic(self, warp, action):
        access, dtype = self._access(warp, action), TYPES[action.type]
        if access is None:
            return
        (mask, buffer, offsets, every), size = access, dtype.itemsize
        if action.orders:
            self._show(warp)
        self._show_own(warp, buffer, offsets, every)
        self._conflict(self._note("atomic", warp, action, buffer, offsets, every, mask))
        buffer.read(offsets, every)
        numbers = buffer.content[: buffer.size // size * size].view(dtype)
        for column, register in enumerate(action.registers):
            given = [warp.registers[one[column]].view(dtype) for one in action.operands]
            if mask is not None:
                given = [x[mask] for x in given]
            places = offsets // size + column
            old = self._changed(numbers, places, action.operation, given)
            self._put(warp, register, old, mask)
        buffer.changed(offsets, every)

    def _changed(self, numbers, places, operation, given):
        """What was in memory before each lane changed it, one after another."""
        old = np.empty(len(places), numbers.dtype)
        change = _CHANGES[operation]
        left = self.rng.permutation(len(places))
        while len(left):  # of lanes that collide one at a time
            _, first = np.unique(places[left], return_index=True)
            now = left[first]
            old[now] = numbers[places[now]]
            numbers[places[now]] = change(old[now], *(x[now] for x in given))
            left = np.delete(left, first)
        return old

    # Order.

    def _barrier(self, warp, action):
        self._check_whole(warp, action)
        warp.is_at_barrier = True

    def _check_whole(self, warp, action):
        if warp.active is not None:
            where = self.code.program.where(action.number)
            raise PtxError(f"{where}: some lanes of a warp do not come here")

    def _fence(self, warp, action):
        del action
        self._show(warp)

    def _branch(self, warp, action):
        taken = warp.executes(action)
        if not taken.any():
            return
        if action.predicate is None or (
            taken.all() if warp.active is None else (taken == warp.active).all()
        ):
            warp.at = action.target
        elif action.uniform:
            raise Fault("some lanes of a warp take a branch that all take, or none")
        else:
            first = self._choices.random() < 0.5
            warp.part(taken, action.target, self.code.joins[action.number], first)

    def _return(self, warp, action):
        self._check_whole(warp, action)
        if action.predicate is not None:
            raise PtxError("a return that a predicate decides")
        warp.is_done = True


def _added(old, by):
    """Atomic additions to global memory take denormals for zero."""
    if old.dtype.kind in "iu":
        return old + by
    if old.dtype == np.float32:
        total = lanes.summed(lanes.flushed(old), lanes.flushed(by))
        return lanes.flushed(total)
    return (old.astype(np.float32) + by.astype(np.float32)).astype(old.dtype)


_CHANGES = {
    "add": _added,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, by: by,
    "cas": lambda old, expected, by: np.where(old == expected, by, old),
}
