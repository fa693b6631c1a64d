"""Instructions that reach memory or lead elsewhere, each in a program of its own."""

import numpy as np
import pytest

from tests.ptx import opcodes
from tests.ptx.machine.code import Code
from tests.ptx.machine.lanes import LANES
from tests.ptx.machine.program import PtxError, read
from tests.ptx.programs import compiled, run


WORDS = np.random.default_rng(0).integers(0, 2**32, 16 * LANES, np.uint32)
SIZES = {"b8": 1, "b16": 2, "b32": 4, "s32": 4, "b64": 8}
CLASSES = {"b8": "%rs", "b16": "%rs", "b32": "%r", "s32": "%r", "b64": "%rd"}


def moved(opcode):
    """What an opcode moves: its size, its registers, and their type each by itself."""
    *vector, kind = opcode.split(".")[2:]
    count = int(vector[0][1:]) if vector else 1
    names = [f"{CLASSES[kind]}{10 + i}" for i in range(count)]
    text = f"{{{', '.join(names)}}}" if vector else names[0]
    return SIZES[kind] * count, text, kind, names


def loads(space, base, kind, names):
    """Loads of registers one by one."""
    size = SIZES[kind]
    return [
        f"ld.{space}.{kind} {name}, [{base}+{size * i}];" for i, name in enumerate(names)
    ]


def stores(space, base, kind, names):
    """Stores of registers one by one."""
    size = SIZES[kind]
    return [
        f"st.{space}.b{8 * size} [{base}+{size * i}], {name};"
        for i, name in enumerate(names)
    ]


def of(space, what):
    return sorted(one for one in opcodes.INSTRUCTIONS if one.startswith(f"{what}.{space}."))


def copied(load, store, size, through_shared=False):
    """A program in which each lane copies `size` bytes."""
    shared = """
        mov.b32 %r5, global_smem;
        add.s32 %r6, %r5, %r30;
    """
    body = f"""
        mul.lo.s32 %r30, %r1, {size};
        cvt.u64.u32 %rd20, %r30;
        add.s64 %rd21, %rd1, %rd20;
        add.s64 %rd22, %rd2, %rd20;
        {shared if through_shared else ""}
        {load}
        {store}
    """
    data = WORDS.view(np.uint8)[: size * LANES]
    (got,) = run(body, data, results=(data,), shared=512 if through_shared else 0)
    np.testing.assert_array_equal(got, data)


def in_turn(*lines):
    return "\n".join(line for part in lines for line in part)


@pytest.mark.parametrize("opcode", of("global", "ld"))
def test_a_load_from_global_memory(opcode):
    size, text, kind, names = moved(opcode)
    store = in_turn(stores("global", "%rd22", kind, names))
    copied(f"{opcode} {text}, [%rd21];", store, size)


@pytest.mark.parametrize("opcode", of("global", "st"))
def test_a_store_to_global_memory(opcode):
    size, text, kind, names = moved(opcode)
    load = in_turn(loads("global", "%rd21", kind, names))
    copied(load, f"{opcode} [%rd22], {text};", size)


@pytest.mark.parametrize("opcode", of("shared", "ld"))
def test_a_load_from_shared_memory(opcode):
    size, text, kind, names = moved(opcode)
    inside = loads("global", "%rd21", f"b{8 * SIZES[kind]}", names)
    inside += stores("shared", "%r6", kind, names)
    load = in_turn(inside, ["bar.sync 0;", f"{opcode} {text}, [%r6];"])
    store = in_turn(stores("global", "%rd22", kind, names))
    copied(load, store, size, through_shared=True)


@pytest.mark.parametrize("opcode", of("shared", "st"))
def test_a_store_to_shared_memory(opcode):
    size, text, kind, names = moved(opcode)
    load = in_turn(
        loads("global", "%rd21", kind, names), [f"{opcode} [%r6], {text};", "bar.sync 0;"]
    )
    out = loads("shared", "%r6", kind, names) + stores("global", "%rd22", kind, names)
    copied(load, in_turn(out), size, through_shared=True)


def test_a_load_extends_a_number_by_its_sign():
    numbers = np.array([-1, 5, -(2**31)] + [0] * 29, np.int32)
    body = """
        add.s64 %rd10, %rd1, %rd9;
        ld.global.s32 %rd11, [%rd10];
        shl.b64 %rd12, %rd9, 1;
        add.s64 %rd13, %rd2, %rd12;
        st.global.b64 [%rd13], %rd11;
    """
    (got,) = run(body, numbers, results=(np.zeros(LANES, np.int64),))
    np.testing.assert_array_equal(got, numbers.astype(np.int64))


def matrices_of(words):
    """Four matrices of 8 x 8 halves, the rows of which begin at every 16 bytes, by lane."""
    rows = words[: 4 * LANES].reshape(LANES, 4)
    return np.array([[rows[8 * i + lane // 4, lane % 4] for lane in range(LANES)]
                     for i in range(4)])  # fmt: skip


INTO_SHARED = """
    mov.b32 %r5, global_smem;
    mul.lo.s32 %r30, %r1, 16;
    add.s32 %r6, %r5, %r30;
    cvt.u64.u32 %rd20, %r30;
    add.s64 %rd21, %rd1, %rd20;
    add.s64 %rd22, %rd2, %rd20;
"""


def test_ldmatrix():
    body = f"""
        {INTO_SHARED}
        ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd21];
        st.shared.v4.b32 [%r6], {{%r10, %r11, %r12, %r13}};
        bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r6];
        st.global.v4.b32 [%rd22], {{%r10, %r11, %r12, %r13}};
    """
    (got,) = run(body, WORDS[:128], results=(WORDS[:128],), shared=512)
    np.testing.assert_array_equal(got.reshape(LANES, 4).T, matrices_of(WORDS))


def test_stmatrix():
    body = f"""
        {INTO_SHARED}
        ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd21];
        stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r6], {{%r10, %r11, %r12, %r13}};
        bar.sync 0;
        ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r6];
        st.global.v4.b32 [%rd22], {{%r10, %r11, %r12, %r13}};
    """
    (stored,) = run(body, WORDS[:128], results=(WORDS[:128],), shared=512)
    np.testing.assert_array_equal(matrices_of(stored), WORDS[:128].reshape(LANES, 4).T)


CHANGED = """
    add.s64 %rd10, %rd1, %rd9;
    ld.global.b32 %r10, [%rd10];
    add.s64 %rd11, %rd3, %rd9;
    {opcode} %r11, [%rd2], {operands};
    st.global.b32 [%rd11], %r11;
"""


def changed(opcode, given, operands="%r10"):
    """All lanes change one word, which is zero; it, and what each lane found there."""
    body = CHANGED.format(opcode=opcode, operands=operands)
    like = np.zeros(1, given.dtype), np.zeros(LANES, given.dtype)
    return run(body, given, results=like, zeroed=True)


@pytest.mark.parametrize("words", opcodes.WORDS_OF_ATOMICS)
class TestAtomics:
    def test_add_of_integers(self, words):
        given = WORDS[:LANES]
        word, found = changed(f"atom.global.{words}.add.u32", given)
        assert word[0] == given.sum(dtype=np.uint32)
        # In some order, each lane found what those before it had made.
        after = found + given
        assert {0, *after.tolist()} == {*found.tolist(), int(word[0])}

    def test_add_of_floats(self, words):
        given = np.arange(1, LANES + 1, dtype=np.float32)
        word, found = changed(f"atom.global.{words}.add.f32", given)
        assert word[0] == given.sum()
        assert {0, *(found + given).tolist()} == {*found.tolist(), float(word[0])}

    def test_additions_take_denormals_for_zero(self, words):
        given = np.full(LANES, 1e-40, np.float32)
        word, found = changed(f"atom.global.{words}.add.f32", given)
        assert word[0] == 0
        assert not found.any()

    def test_additions_make_one_nan_of_all(self, words):
        given = np.full(LANES, 0xFFC12345, np.uint32).view(np.float32)
        word, _ = changed(f"atom.global.{words}.add.f32", given)
        assert word.view(np.uint32)[0] == 0x7FFFFFFF

    def test_or(self, words):
        given = np.uint32(1) << np.arange(LANES, dtype=np.uint32)
        word, found = changed(f"atom.global.{words}.or.b32", given)
        assert word[0] == 0xFFFFFFFF
        assert not (found & given).any()

    def test_compare_and_swap(self, words):
        """The lane that comes first alone finds zero, and swaps."""
        given = np.arange(1, LANES + 1, dtype=np.uint32)
        opcode = f"atom.global.{words}.cas.b32"
        word, found = changed(opcode, given, operands="0, %r10")
        (winner,) = np.flatnonzero(found == 0)
        assert word[0] == given[winner]
        assert (np.delete(found, winner) == word[0]).all()


def test_lanes_that_collide_go_in_any_order():
    given = np.arange(1, LANES + 1, dtype=np.uint32)
    body = CHANGED.format(opcode="atom.global.gpu.relaxed.cas.b32", operands="0, %r10")
    like = np.zeros(1, np.uint32), np.zeros(LANES, np.uint32)
    words = {
        int(run(body, given, results=like, zeroed=True, seed=seed)[0][0])
        for seed in range(12)
    }
    assert len(words) > 3


def test_registers_are_taken_apart_and_put_together():
    body = """
        add.s64 %rd10, %rd1, %rd9;
        ld.global.b32 %r10, [%rd10];
        mov.b32 {%rs1, %rs2}, %r10;
        mov.b32 %r11, {%rs2, %rs1};
        mov.b64 %rd11, {%r11, %r10};
        mov.b64 {%r12, %r13}, %rd11;
        xor.b32 %r14, %r12, %r13;
        add.s64 %rd12, %rd2, %rd9;
        st.global.b32 [%rd12], %r14;
    """
    x = WORDS[:LANES]
    (got,) = run(body, x, results=(x,))
    np.testing.assert_array_equal(got, (x << 16 | x >> 16) ^ x)


def test_branches_that_lanes_decide():
    """Each lane counts to its own number; lanes that are done wait for the others."""
    body = """
        mov.b32 %r10, 0;
        setp.eq.b32 %p1, %r1, 0;
        @%p1 bra $after;
        $again:
        add.s32 %r10, %r10, 1;
        setp.lt.u32 %p2, %r10, %r1;
        @%p2 bra $again;
        $after:
        mov.b32 %r11, -1;
        shfl.sync.idx.b32 %r12, %r10, 5, 31, %r11;
        add.s32 %r13, %r10, %r12;
        bra.uni $out;
        mov.b32 %r13, 77;
        $out:
        add.s64 %rd12, %rd1, %rd9;
        @!%p1 st.global.b32 [%rd12], %r13;
        @%p1 st.global.b32 [%rd12], 99;
    """
    (got,) = run(body, results=(np.zeros(LANES, np.int32),))
    np.testing.assert_array_equal(got, [99, *(np.arange(1, LANES) + 5)])


@pytest.mark.parametrize("line", ["ret;", "nop;", "bra $end;\n$end:"])
def test_instructions_that_do_nothing_but_lead_on(line):
    (got,) = run(
        f"add.s64 %rd12, %rd1, %rd9;\nst.global.b32 [%rd12], %r1;\n{line}",
        results=(np.zeros(LANES, np.int32),),
    )
    np.testing.assert_array_equal(got, np.arange(LANES))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sqrt.rn.f32 %r10, %r11;", "the machine does not know 'sqrt.rn.f32'"),
        ("ld.local.b32 %r10, [%rd1];", "does not know 'ld.local.b32'"),
        ("atom.global.cta.relaxed.add.u32 %r10, [%rd1], 1;", "does not know 'atom"),
        ("bar.sync 1;", "does not know 'bar.sync'"),
        ("fence.proxy.async;", "does not know 'fence.proxy.async'"),
        ("bra $nowhere;", "does not know 'bra'"),
        ("add.s32 %rd10, %r11, %r12;", "%rd10 is not as wide as .s32"),
        ("add.s32 %r10, %r11;", "1 operands"),
        ("add.s32 %r10, %r11, what;", "'what' is not understood"),
        ("ld.global.b32 %r10, (%rd1);", "is no address"),
    ],
)
def test_what_the_machine_does_not_know_is_an_error_with_kernel_and_line(line, said):
    with pytest.raises(PtxError, match=r"^small, line \d+ of the PTX") as error:
        compiled(line, 1)
    assert said in str(error.value)
    assert line.rstrip(";") in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (".reqntid 32", "", "does not say how many threads"),
        (".visible .entry", ".func", "no entry"),
        (".param .u64", ".param .u32", "parameters are 64 bits wide"),
        (".reg .b64 	%rd<40>", ".reg .f32 	%f<40>", "registers %f of .f32 are not"),
        ("ret;", "ret; ret;", "is not understood"),
    ],
)
def test_texts_that_are_not_understood(old, new, said):
    text = compiled("", 1).ptx
    with pytest.raises(PtxError, match=said.replace(".", r"\.")):
        Code(read(text.replace(old, new)))
