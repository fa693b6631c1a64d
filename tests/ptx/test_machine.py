"""What the machine reports, and in which orders warps go, by small programs."""

import contextlib
import re

import jax
import numpy as np
import pytest

from tests.ptx import runs
from tests.ptx.launches import Gpu, Race
from tests.ptx.machine.lanes import LANES
from tests.ptx.machine.memory import Fault
from tests.ptx.machine.orders import Order
from tests.ptx.machine.program import PtxError
from tests.ptx.programs import compiled, launch, run


WORDS = np.arange(LANES, dtype=np.uint32)
HERE = "add.s64 %rd10, %rd1, %rd9;"
SEEDS = range(12)


# --- Memory.


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("[%rd10+4]", r"4 bytes at 128 of p_0, which has 128"),
        ("[%rd10+-4]", r"is in no buffer; it is -4 bytes from the beginning of p_0"),
        ("[%rd10+2]", r"4 bytes of p_0 at an address that is not aligned|at 126 of p_0"),
    ],
)
def test_accesses_outside_of_buffers_and_unaligned_ones(address, said):
    with pytest.raises(Fault, match=said) as error:
        run(f"{HERE}\nld.global.b32 %r10, {address};", WORDS)
    assert "small, line" in str(error.value)
    assert "(warp 0)" in str(error.value)


def test_a_read_of_what_nobody_has_written():
    with pytest.raises(Fault, match="reads byte 0 of p_0, which nobody has written"):
        run(f"{HERE}\nld.global.b32 %r10, [%rd10];", results=(WORDS,))
    with pytest.raises(Fault, match="of shared memory, which nobody has written"):
        run("mov.b32 %r5, global_smem;\nld.shared.b32 %r10, [%r5];", shared=64)


def test_a_store_to_an_operand():
    with pytest.raises(Fault, match="writes to p_0, which is an operand"):
        run(f"{HERE}\nst.global.b32 [%rd10], %r1;", WORDS)


def test_pointers_are_aligned_to_16_bytes_and_no_more():
    wide = "ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd1];"
    run(wide, WORDS)
    with pytest.raises(Fault, match="not aligned"):
        run(wide.replace("[%rd1]", "[%rd1+8]"), WORDS)
    one = launch("", WORDS, WORDS[:3], WORDS)
    one.run(Order(0))
    bases = [buffer.base for buffer in one.memory.buffers]
    assert all(base % 16 == 0 for base in bases)
    assert any(base % 32 for base in bases)


def test_registers_and_results_hold_garbage():
    body = "add.s64 %rd10, %rd1, %rd9;\nst.global.b32 [%rd10], %r20;"
    got = {run(body, results=(WORDS,), seed=seed)[0].tobytes() for seed in SEEDS}
    assert len(got) == len(SEEDS)
    assert run(body, results=(WORDS,))[0].tobytes() in got  # of seed 0, once more
    left = {run("", results=(WORDS,), seed=seed)[0].tobytes() for seed in SEEDS}
    assert len(left) == len(SEEDS)


# --- Conflicts between threads.

# Lane i of each of two warps stores into shared memory, and loads what the other stored.
EXCHANGED = """
    mov.b32 %r5, global_smem;
    shl.b32 %r6, %r1, 2;
    add.s32 %r7, %r5, %r6;
    xor.b32 %r8, %r6, 128;
    add.s32 %r8, %r5, %r8;
    st.shared.b32 [%r7], %r1;
    {barrier}
    ld.shared.b32 %r10, [%r8];
    add.s64 %rd10, %rd1, %rd9;
    st.global.b32 [%rd10], %r10;
"""
TWO_WARPS = {"threads": 64, "shared": 256, "results": (np.zeros(64, np.uint32),)}


STORED = "add.s64 %rd10, %rd1, {at};\nst.global.b32 [%rd10], {what};"


@pytest.mark.parametrize(
    ("what", "is_race"), [("%r3", True), ("%r2", True), ("%r4", False), ("7", False)]
)
def test_stores_of_other_values_by_blocks_are_a_race_and_of_equal_ones_none(what, is_race):
    """By the number of the thread, of the block, and what is the same for both."""
    body = f"mul.wide.u32 %rd20, %r1, 4;\n{STORED.format(at='%rd20', what=what)}"
    for seed in SEEDS:
        if is_race:
            with pytest.raises(Race, match=r"nothing orders a store by .* and a store by"):
                run(body, blocks=2, results=(WORDS,), seed=seed)
        else:
            run(body, blocks=2, results=(WORDS,), seed=seed)


def test_lanes_of_one_store_that_collide():
    body = "st.global.b32 [%rd1], %r1;"
    with pytest.raises(Race, match=r"\d lanes store other values in one place"):
        run(body, results=(WORDS,))
    run("st.global.b32 [%rd1], 5;", results=(WORDS,))


def test_an_atomic_operation_and_a_load_are_not_ordered():
    """Whichever comes first."""
    body = """
        setp.eq.b32 %p1, %r2, 0;
        @%p1 atom.global.gpu.relaxed.add.u32 %r10, [%rd1], 1;
        @!%p1 ld.global.b32 %r11, [%rd1];
    """
    for seed in SEEDS:
        with pytest.raises(Race, match="nothing orders"):
            run(body, blocks=2, results=(WORDS,), zeroed=True, seed=seed)


# Each block adds one, and the last one sets the counter back to a value.
COUNTED = """
    setp.eq.b32 %p1, %r1, 0;
    mov.b32 %r10, -1;
    @%p1 atom.global.gpu.relaxed.add.u32 %r10, [%rd1], 1;
    setp.eq.b32 %p2, %r10, {last};
    @%p2 st.global.b32 [%rd1], {value};
"""


@pytest.mark.parametrize("value", [0, 7])
def test_a_store_and_an_atomic_operation_are_not_ordered(value):
    """Whether the value is that which was there at first, or another."""
    for seed in SEEDS:
        body = COUNTED.format(last=1, value=value)
        with pytest.raises(Race, match="nothing orders a"):
            run(body, blocks=2, results=(WORDS,), zeroed=True, seed=seed)


def test_a_barrier_of_a_block_orders_no_other_block():
    body = """
        mul.wide.u32 %rd20, %r1, 4;
        add.s64 %rd10, %rd1, %rd20;
        setp.eq.b32 %p1, %r2, 0;
        @%p1 st.global.b32 [%rd10], %r1;
        bar.sync 0;
        @!%p1 ld.global.b32 %r10, [%rd10];
    """
    with pytest.raises((Race, Fault)):
        run(body, blocks=2, results=(WORDS,))


# --- When stores become visible.

# Block 0 stores, then sets a flag; block 1 reads the flag, and then what was stored.
HANDED_ON = """
    setp.ne.b32 %p1, %r2, 0;
    @%p1 bra $reads;
    st.global.b32 [%rd1], 41;
    {fence}
    atom.global.gpu.relaxed.add.u32 %r10, [%rd1+4], 1;
    bra.uni $end;
    $reads:
    mov.b32 %r11, 99;
    atom.global.gpu.relaxed.add.u32 %r10, [%rd1+4], 0;
    setp.ne.b32 %p2, %r10, 0;
    @%p2 ld.global.b32 %r11, [%rd1];
    st.global.b32 [%rd1+8], %r11;
    $end:
"""


def handed_on(fence):
    """What the reader found where the flag was set, by many orders."""
    found = set()
    for seed in range(60):
        body = HANDED_ON.format(fence=fence)
        one = launch(body, results=(np.zeros(3, np.uint32),), blocks=2, zeroed=True)
        one.seed = seed
        with contextlib.suppress(Race):  # blocks are never ordered, and that is reported
            one.run(Order(seed))
        found.add(int(one.memory.buffers[0].content.view(np.uint32)[2]))
    return found - {99}


def test_a_store_may_become_visible_late_unless_a_fence_follows():
    assert handed_on("") == {0, 41}
    assert handed_on("fence.acq_rel.gpu;") == {41}


# --- Lanes and warps that part.


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("@%p1 bra $out;\nredux.sync.add.s32 %r12, %r10, -1;", "warp do not come"),
        ("@%p1 shfl.sync.idx.b32 %r12, %r10, 5, 31, -1;", "warp take no part"),
        ("@%p1 bra.uni $out;", "some lanes of a warp take a branch that all take"),
        ("@%p2 bra $out;\nbar.sync 0;", "wait at a barrier, and others have ret"),
    ],
)
def test_what_all_have_to_do_and_some_do_not(body, said):
    before = "setp.lt.u32 %p1, %r1, 7;\nsetp.lt.u32 %p2, %r1, 32;\n"
    with pytest.raises((Fault, PtxError), match=said):
        run(f"{before}{body}\n$out:", threads=64, shared=4)


def test_a_kernel_without_an_end(monkeypatch):
    from tests.ptx.machine import launch as module

    monkeypatch.setattr(module, "STEPS", 100)
    with pytest.raises(Fault, match="it does not end"):
        run("$again:\nbra.uni $again;")


# --- Orders.

# A warp that is the first to count reads far away, unless it is warp 0.
FIRST = """
    and.b32 %r5, %r1, 31;
    setp.eq.b32 %p1, %r5, 0;
    mov.b32 %r10, 1;
    @%p1 atom.global.gpu.relaxed.add.u32 %r10, [%rd1], 1;
    setp.eq.b32 %p2, %r10, 0;
    setp.ge.u32 %p3, %r1, 32;
    and.pred %p4, %p2, %p3;
    @%p4 ld.global.b32 %r11, [%rd1+4096];
"""


def test_an_order_is_drawn_from_its_seed_and_can_be_given():
    one = launch(EXCHANGED.format(barrier="bar.sync 0;"), **TWO_WARPS)
    seen = {}
    for seed in SEEDS:
        one.run(Order(seed))
        seen[seed] = one.ran.order
        one.run(Order(seed))
        assert one.ran.order == seen[seed]
    assert len({tuple(x) for x in seen.values()}) > 3
    given = (1, 1, 0, 1)
    one.run(Order(0, given))
    assert one.ran.order[:3] == [1, 1, 0]


def test_what_a_check_finds_is_told_with_its_order():
    gpu = Gpu(seed=next(seed for seed in SEEDS if launch_of_first(seed) is not None))
    kernel = compiled(FIRST, 1, 128)
    like = jax.ShapeDtypeStruct((1,), np.uint32)
    with pytest.raises(Fault) as error:
        gpu.run(kernel, 1, [], [like], {}, zeroed=True)
    text = runs.said(gpu, error.value)
    assert text.startswith("launch 1, small: Fault: small, line ")
    assert re.search(r"in which it shows: [123], then by number\.$", text)
    gpu.last.error = None
    with pytest.raises(AssertionError) as error:
        raise AssertionError("wrong numbers")
    text = runs.said(gpu, error.value)
    assert re.match(r"launch 1, small: AssertionError: wrong numbers \(test_machine", text)


def launch_of_first(seed):
    """The fault in the order that a `Gpu` of this seed draws for its first launch."""
    gpu, like = Gpu(seed=seed), jax.ShapeDtypeStruct((1,), np.uint32)
    try:
        gpu.run(compiled(FIRST, 1, 128), 1, [], [like], {}, zeroed=True)
    except Fault as error:
        return error
    return None
