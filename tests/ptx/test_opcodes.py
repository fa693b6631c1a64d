"""Each opcode against the ISA's words for it, lane by lane."""

import numpy as np
import pytest

from tests.ptx import opcodes
from tests.ptx.machine.lanes import LANES, OPCODES, TYPES


ROUNDS = 12
EDGES = {
    "pred": [0, 1],
    "16": [0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x00FF, 0x7C00, 0xFC00, 0x3C00],
    "32": [
        *(0, 1, 2, 31, 32, 33, 255, 256, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF),
        # Of float32: 1, -1, infinities, NaN, the least and the largest denormal, and halves
        # of what float16 and bfloat16 can tell.
        *(0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x00800000),
        *(0x80000001, 0x007FFFFF, 0x477FF000, 0x477FEFFF, 0x33000000, 0x33000001),
        *(0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F7F8000),
    ],
    "64": [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1],
}


def drawn(kind, rng):
    """Numbers of 32 lanes: edges, small ones and any."""
    bits = opcodes.bits_of(kind)
    edges = EDGES["pred" if bits == 1 else str(bits)]
    any_ = [int(x) >> 64 - bits for x in rng.integers(0, 2**64, LANES, np.uint64)]
    small = [int(x) & (1 << bits) - 1 for x in rng.integers(0, 70, LANES)]
    pick = rng.integers(0, 3, LANES)
    edge = [edges[i] for i in rng.integers(0, len(edges), LANES)]
    return [(edge, small, any_)[pick[i]][i] for i in range(LANES)]


def operands(opcode, kinds, rng):
    given = [drawn(kind, rng) for kind in kinds]
    if ".sync." in opcode:
        given[-1] = [0xFFFFFFFF] * LANES
    if opcode.startswith("shfl"):
        # As compilers write them: all of the warp, or segments of it.
        segment = int(rng.choice([0, 16, 24, 28]))
        clamp = 0 if ".up." in opcode else 31
        given[2] = [segment << 8 | clamp] * LANES
    return given


def register(numbers, kind):
    dtype = TYPES[kind]
    return np.array(numbers, bool if kind == "pred" else f"u{dtype.itemsize}")


@pytest.mark.parametrize("opcode", sorted(OPCODES))
def test_an_opcode_computes_what_the_isa_says(opcode):
    one = OPCODES[opcode]
    rng = np.random.default_rng(0)
    known = 0
    for _ in range(ROUNDS):
        given = operands(opcode, one.operands, rng)
        wanted = opcodes.expected(opcode, given)
        lanes = [register(x, kind) for x, kind in zip(given, one.operands, strict=True)]
        with np.errstate(all="ignore"):
            got = one.function(*lanes)
        assert got.dtype == register([0], one.result).dtype
        for lane, want in enumerate(wanted):
            if want is not None:
                here = [hex(x[lane]) for x in given]
                assert int(got[lane]) == int(want), f"{opcode} of {here}"
                known += 1
    assert known > ROUNDS * LANES / 3


def test_warps_of_which_lanes_take_no_part_are_refused():
    lanes = [register(range(LANES), "b32")] * 3
    mask = register([0xFFFFFFFE] * LANES, "b32")
    with pytest.raises(NotImplementedError, match="take no part"):
        OPCODES["shfl.sync.idx.b32"].function(*lanes, mask)
    with pytest.raises(NotImplementedError, match="take no part"):
        OPCODES["redux.sync.add.s32"].function(lanes[0], mask)
