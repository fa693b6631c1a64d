"""Memory of a launch: what may be read and written, and what was.

A buffer begins at an address of which nothing is known but its alignment, and holds garbage
where nothing was written. An access outside of all buffers, one that is not aligned to its
size, a read of what nobody wrote, and a write to what a kernel only reads are faults.
"""

import numpy as np

from tests.ptx.machine.races import Watch


# What a launch may promise of pointers, and no more than that.
ALIGNMENT = 16
_GAP = 4096


class Fault(Exception):
    """What a GPU does not do, or does with numbers that mean nothing."""


class Buffer:
    """Bytes that were given to a kernel, or the shared memory of a block."""

    def __init__(self, name, base, content, *, written, writable=True):
        self.name, self.base, self.size = name, base, len(content)
        self.content = content
        self.written = np.full(self.size, written)
        # With stores that are not visible yet; nobody reads it.
        self._stored, self._is_stored = content.copy(), self.written.copy()
        self.writable = writable
        self.watch: Watch | None = None

    def _at(self, offsets, size):
        return offsets[:, None] + np.arange(size)

    def read(self, offsets, size) -> np.ndarray:
        """The bytes at some offsets, uint8 [lanes, size]."""
        at = self._at(offsets, size)
        if not self.written[at].all():
            missing = at[~self.written[at]][0]
            raise Fault(f"reads byte {missing} of {self.name}, which nobody has written")
        return self.content[at]

    def store(self, offsets, octets) -> bool:
        """Takes note of a store to come; whether all of it had been stored before."""
        at = self._at(offsets, octets.shape[1])
        again = bool((self._is_stored[at] & (self._stored[at] == octets)).all())
        self._stored[at], self._is_stored[at] = octets, True
        return again

    def changed(self, offsets, size):
        """Takes note of what an atomic operation has made."""
        at = self._at(offsets, size)
        self._stored[at], self._is_stored[at] = self.content[at], True

    def write(self, offsets, octets):
        """Writes bytes, uint8 [lanes, size]; of lanes that collide the last one stays."""
        at = self._at(offsets, octets.shape[1])
        # One after another, as NumPy does not say which of several stays.
        self.content[at] = octets
        self.written[at] = True


class Memory:
    """The buffers of a launch."""

    def __init__(self):
        self.buffers: list[Buffer] = []
        self._next = 0x7F00_0000_0000

    def add(self, name, content, *, written=True, writable=True) -> Buffer:
        """A buffer with these bytes."""
        base = self._next + ALIGNMENT
        self._next = -(-(base + len(content) + _GAP) // 256) * 256
        buffer = Buffer(name, base, content, written=written, writable=writable)
        self.buffers.append(buffer)
        return buffer

    def locate(self, addresses: np.ndarray, size: int) -> tuple[Buffer, np.ndarray]:
        """The buffer in which all lanes' accesses are, and their offsets in it."""
        lowest = int(addresses.min())
        for buffer in self.buffers:
            if buffer.base <= lowest < buffer.base + max(1, buffer.size):
                return buffer, within(buffer, addresses, size)
        near = min(self.buffers, key=lambda x: abs(lowest - x.base))
        raise Fault(
            f"address {lowest:#x} is in no buffer; it is {lowest - near.base} bytes from "
            f"the beginning of {near.name}, which has {near.size}"
        )


def within(buffer: Buffer, addresses: np.ndarray, size: int) -> np.ndarray:
    """Offsets of accesses in a buffer, which must hold all of them, aligned."""
    offsets = addresses.astype(np.int64) - buffer.base
    outside = (offsets < 0) | (offsets + size > buffer.size)
    if outside.any():
        raise Fault(
            f"{size} bytes at {offsets[outside][0]} of {buffer.name}, which has "
            f"{buffer.size}"
        )
    if (addresses % addresses.dtype.type(size)).any():
        raise Fault(f"{size} bytes of {buffer.name} at an address that is not aligned")
    return offsets
