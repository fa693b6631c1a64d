"""What every backend of an operation must do, in NumPy: one check an operation.

Each check runs the operation on given data and raises AssertionError where a law is
broken. Laws, never an order of threads: every index once, in its part, in a place that is
its own. The hashes are written again here, from their definition.
"""

import numpy as np


def murmur3(keys, seed):
    """MurmurHash3_x86_32 of four bytes, in 64 bits, where no product overflows."""
    mask = np.uint64(0xFFFFFFFF)
    of = lambda number: np.uint64(int(number))
    rotate = lambda x, by: ((x << of(by)) | (x >> of(32 - by))) & mask
    k = np.asarray(keys).astype(np.int64).astype(np.uint64) & mask
    k = rotate(k * of(0xCC9E2D51) & mask, 15) * of(0x1B873593) & mask
    h = (rotate(of(seed) ^ k, 13) * of(5) + of(0xE6546B64)) & mask
    h ^= of(4)
    h = (h ^ (h >> of(16))) * of(0x85EBCA6B) & mask
    h = (h ^ (h >> of(13))) * of(0xC2B2AE35) & mask
    return (h ^ (h >> of(16))).astype(np.int64).reshape(-1)


def chosen(x, threshold=None):
    """Which elements count, by their bits, or by their magnitude in float64."""
    x = np.asarray(x)
    if threshold is None:
        bits = x.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize])
        return (bits << bits.dtype.type(1)) != 0
    with np.errstate(invalid="ignore"):
        return np.abs(x.astype(np.float64)) >= float(threshold)


def check_compact(compact, x, capacity):
    """Ascending, filled with the size, and a count that the capacity does not bound."""
    found, count = compact(x, capacity)
    expected = np.flatnonzero(chosen(x))
    assert found.shape == (capacity,)
    assert found.dtype == np.int32
    assert int(count) == len(expected)
    fill = np.full(max(0, capacity - len(expected)), x.size)
    np.testing.assert_array_equal(found, np.concatenate([expected[:capacity], fill]))


def check_bitmap(encode, decode, x, capacity, units=None):
    """Bits as NumPy packs them; decoding gives back positions, or units, in order."""
    words = np.asarray(encode(x, units))
    flags = chosen(x if units is None else x[units])
    room = max(1, -(-flags.size // 32)) * 32
    expected = np.packbits(np.pad(flags, (0, room - flags.size)), bitorder="little")
    np.testing.assert_array_equal(words, expected.view(np.uint32))
    found, count = decode(words, capacity, units)
    at = np.flatnonzero(flags)
    assert int(count) == len(at)
    fill = room if units is None else -1
    expected = (at if units is None else units[at])[:capacity]
    expected = np.concatenate([expected, np.full(capacity - len(expected), fill)])
    np.testing.assert_array_equal(found, expected)


def check_partition(partition, indices, count, seeds, *, parts, slots, serial, hashes):
    """Algorithm 1: each index once, or left; in its part; in a slot that it may have."""
    done = partition(
        indices, count, seeds, parts=parts, slots=slots, serial=serial, hashes=hashes
    )
    memory, counts, left = (np.asarray(array) for array in done)
    given = np.asarray(indices)[:count]
    given = given[given >= 0]
    assert memory.shape == (parts, slots + serial)
    assert memory.dtype == np.int32
    part_of, place = np.nonzero(memory != -1)
    stored = memory[part_of, place]
    # Every index once: stored, or left and said to be left, and nothing else.
    assert left.shape == indices.shape
    assert not left[count:].any(), "something left that was not given"
    everywhere = np.concatenate([stored, np.asarray(indices)[left]])
    np.testing.assert_array_equal(np.sort(everywhere), np.sort(given))
    # In its part.
    np.testing.assert_array_equal(murmur3(stored, seeds[0]) % parts, part_of)
    # In a slot of one of its hashes.
    parallel = place < slots
    legal = np.zeros(parallel.sum(), bool)
    for seed in seeds[1 : 1 + hashes]:
        legal |= murmur3(stored[parallel], seed) % slots == place[parallel]
    assert legal.all(), "an index is in a slot that no hash gives it"
    # The serial memory is a prefix, counted exactly; what is left is what it cannot hold.
    held = np.minimum(counts, serial)
    prefix = np.arange(serial) < held[:, None]
    np.testing.assert_array_equal(memory[:, slots:] != -1, prefix)
    over = murmur3(np.asarray(indices)[left], seeds[0]) % parts
    np.testing.assert_array_equal(np.bincount(over, minlength=parts), counts - held)
    # Serial is who found all its slots taken by others.
    waited = np.concatenate([memory[:, slots:][prefix], np.asarray(indices)[left]])
    own = (murmur3(waited, seeds[0]) % parts)[:, None]
    for seed in seeds[1 : 1 + hashes]:
        wanted = (murmur3(waited, seed) % slots)[:, None]
        assert (memory[own, wanted] != -1).all(), "an index waits beside a free slot"


def check_partition_dense(partition, x, seeds, **sizes):
    """Algorithm 1 for the non-zero elements; what is left is told by a bit each."""
    flags = chosen(x)
    given = np.flatnonzero(flags).astype(np.int32)

    def as_listed(indices, count, seeds, **sizes):
        del indices, count
        memory, counts, words = partition(x, seeds, **sizes)
        assert words.shape == (max(1, -(-x.size // 32)),)
        left = np.unpackbits(np.asarray(words).view(np.uint8), bitorder="little")
        assert not left[x.size :].any(), "bits of elements that there are not"
        left = left[: x.size].astype(bool)
        assert not left[~flags].any(), "something left that does not count"
        return memory, counts, left[given]

    check_partition(as_listed, given, given.size, seeds, **sizes)


def check_threshold_hash(threshold_hash, x, threshold, seed, slots):
    """A slot holds one of those that hash to it, if any does."""
    memory = np.asarray(threshold_hash(x, threshold, seed, slots=slots))
    assert memory.shape == (slots,)
    assert memory.dtype == np.int32
    large = np.flatnonzero(chosen(x, threshold))
    wanted = murmur3(large, seed) % slots
    np.testing.assert_array_equal(
        np.flatnonzero(memory != -1), np.unique(wanted), "slots that are taken"
    )
    taken = memory[memory != -1]
    assert np.isin(taken, large).all(), "an element below the threshold was taken"
    np.testing.assert_array_equal(
        murmur3(taken, seed) % slots, np.flatnonzero(memory != -1)
    )
