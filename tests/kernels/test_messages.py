"""Messages packed and unpacked by every backend that runs here, as by hand.

The kernels of Triton are held to the same in its interpreter: see `test_triton`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as kernels
from pallas_kernels.pallas import messages as in_pallas
from tests import helpers
from tests.kernels import messages
from tests.kernels.test_kernels import ON_GPU, by, guarded


# The four mixed ones are one program.
QUICK = ["from a rank on", *(name for name in messages.CASES if "mixed" in name)]
OTHERS = [name for name in messages.CASES if name not in QUICK]


@functools.cache
def compiled(backend, operation, static):
    return by(backend, getattr(kernels, operation), **dict(static))


def packing(backend):
    """`pack_message` as the checks call it."""

    def pack(slots, counts, array, numbers, *, units, **static):
        given = isinstance(units, np.ndarray)
        static |= {} if given else {"units": units}
        run = compiled(backend, "pack_message", tuple(static.items()))
        arrays = slots, counts, array, numbers
        return run(*arrays, units=units) if given else run(*arrays)

    return pack


def unpacking(backend):
    """`unpack_message` as the checks call it."""

    def unpack(into, message, numbers, **static):
        run = compiled(backend, "unpack_message", tuple(static.items()))
        return run(into, message, numbers)

    return unpack


# Pallas is interpreted where there is no GPU, which takes its time to compile.
every_backend = pytest.mark.parametrize(
    "backend",
    [
        "reference",
        *helpers.slow("pallas"),
        pytest.param("triton", marks=pytest.mark.gpu),
    ],
)
every_case = pytest.mark.parametrize("name", [*QUICK, *helpers.slow(*OTHERS)])


@every_backend
@every_case
def test_a_message_is_what_is_written_by_hand(backend, name):
    messages.check_pack(packing(backend), messages.CASES[name])


@every_backend
@every_case
@pytest.mark.parametrize("replaces", [False, True])
def test_what_arrives_is_added_or_set(backend, name, replaces):
    case = messages.CASES[name]
    messages.check_unpack(unpacking(backend), case, replaces=replaces)


def test_pallas_writes_and_reads_halves_of_odd_rows():
    case = messages.CASES["rows of five halves"]
    messages.check_pack(packing("pallas"), case)
    messages.check_unpack(unpacking("pallas"), case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed, coo8", "rows of five halves"])
def test_pallas_clears_what_it_writes_and_nothing_behind_an_end(name, monkeypatch):
    dead, case = guarded(monkeypatch), messages.CASES[name]
    how = {"interpret": not ON_GPU}
    arrays = lambda *arrays: [jnp.asarray(x) for x in arrays]

    def pack(slots, counts, array, numbers, *, units, **static):
        given = arrays(units) if isinstance(units, np.ndarray) else []
        units = None if given else units
        operands = *arrays(slots, counts, numbers, array), *given
        return in_pallas.pack_message(*operands, units=units, **static, **how)

    def unpack(into, message, numbers, **static):
        return in_pallas.unpack_message(*arrays(into, message, numbers), **static, **how)

    messages.check_pack(pack, case)
    for replaces in (False, True):
        messages.check_unpack(unpack, case, replaces=replaces)
    assert not dead, f"past its end wrote {dead}"


@pytest.mark.parametrize("name", ["coo8", *helpers.slow("bitmap", "rows of five halves")])
def test_what_arrives_in_pieces_is_added_piece_by_piece(name):
    def unpack(into, message, numbers, ends, values, **sizes):
        told = {"ends": ends, "values": values, "backend": "reference"}
        return kernels.unpack_message(into, message, numbers, **told, **sizes)

    index = functools.partial(kernels.index_message, backend="reference")
    messages.check_pieces(index, unpack, messages.CASES[name])


SOME_BITMAPS = ("half of all", "short parts")
OTHER_BITMAPS = helpers.slow(*(x for x in messages.BITMAPS if x not in SOME_BITMAPS))


@pytest.mark.parametrize("name", [*SOME_BITMAPS, *OTHER_BITMAPS])
def test_bitmaps_are_unpacked_whole_and_piece_by_piece(name):
    def unpack(into, message, numbers, ends, *values, **sizes):
        told = {"ends": ends, "values": values[0] if values else None}
        return kernels.unpack_message(into, message, numbers, **told, **sizes)

    check = functools.partial(messages.check_bitmaps, case=messages.BITMAPS[name])
    named = {"backend": "triton"} if ON_GPU else {"backend": "reference"}
    how = lambda function: functools.partial(function, **named)
    check(how(kernels.index_message), how(unpack))


def test_bitmaps_that_no_kernel_unpacks_are_refused():
    case = messages.BITMAPS["thin"]
    sizes = {"room": case.room, "longest": case.words, "planes": 0, "at": messages.AT}
    into, given = jnp.zeros(case.striping.size), (case.received, case.numbers)
    known = {"bitmaps": True, "replaces": True, "units": case.striping}
    ends = jnp.zeros((case.words, case.parts, 2), jnp.int32)
    for wrong, said in (
        ({"replaces": False}, "replaces=False"),
        ({"units": None}, "units=None"),
        ({"ends": None}, "got None"),
        ({"ends": ends[:-1]}, r"int32\[33, 3, 2\], got int32\[32, 3, 2\]"),
        ({"longest": 32, "ends": ends[:-1]}, "3 parts of 33 words; .* longest=32"),
        ({"units": case.striping._replace(parts=4)}, "in 4 parts .* 3 messages"),
    ):
        how = {"ends": ends} | sizes | known | wrong
        with pytest.raises(kernels.KernelArgumentError, match=said):
            kernels.unpack_message(into, *given, **how)
    with pytest.raises(kernels.KernelArgumentError, match="numbers that replace zeros"):
        kernels.unpack_message(into[:, None], *given, ends=ends, **sizes, **known)


def test_what_one_sender_sends_needs_no_atomic_additions():
    # On GPUs those take denormals for zero, and ranks that swap messages would differ.
    case = messages.CASES["rows of one part"]
    messages.check_unpack(unpacking("reference"), case)
    scatters = []
    for message in (case.received, np.tile(case.received, (2, 1))):
        unpack = functools.partial(
            kernels.unpack_message,
            room=case.room,
            longest=case.form.longest,
            planes=case.form.planes,
            at=messages.AT,
            backend="reference",
        )
        made = jax.make_jaxpr(unpack)(case.array, message, case.numbers)
        scatters += [e for e in made.eqns if e.primitive.name == "scatter-add"]
    assert [e.params["unique_indices"] for e in scatters] == [True, False]


@every_backend
@pytest.mark.slow
def test_what_lies_behind_the_array_is_left_out(backend):
    for name in ("coo8", "bitmap", "rows of five halves"):
        messages.check_unpack(unpacking(backend), messages.CASES[name], size=100)


def test_without_room_or_with_other_shapes_it_says_so():
    case = messages.CASES["coo8"]
    sizes = {"room": case.room, "words": case.form.room, "planes": case.form.planes}
    bits, array = jnp.asarray(case.bits), jnp.asarray(case.array)
    counts, numbers = jnp.asarray(case.counts), jnp.asarray(case.numbers)
    pack = functools.partial(kernels.pack_message, **sizes)
    refused = pytest.raises(kernels.KernelArgumentError, match="slots must be uint32 or")
    with refused:
        pack(bits.astype(jnp.float32), counts, array, numbers)
    with pytest.raises(kernels.KernelArgumentError, match="multiple of 4"):
        pack(bits, counts, array, numbers, room=6)
    with pytest.raises(kernels.KernelArgumentError, match="must be a list"):
        pack(bits, counts, array, numbers, units=jnp.asarray(case.listed))
    with pytest.raises(kernels.KernelArgumentError, match="must be a list"):
        pack(jnp.asarray(case.listed[:, 4:]), counts, array, numbers)
    with pytest.raises(kernels.KernelArgumentError, match="numbers must be 14"):
        pack(bits, counts, array, numbers[: messages.AT + 9], at=messages.AT)
    with pytest.raises(kernels.KernelArgumentError, match="2, 4 or 8 bytes"):
        pack(bits, counts, array, numbers, dtype=jnp.int8)
    unpack = functools.partial(kernels.unpack_message, room=case.room, planes=1)
    with pytest.raises(kernels.KernelArgumentError, match="too few for a header"):
        unpack(array, jnp.zeros((3, 9), jnp.uint32), numbers, longest=9)
    with pytest.raises(kernels.KernelArgumentError, match="message must be uint32"):
        unpack(array, jnp.zeros((3, 90), jnp.int32), numbers, longest=9)


def test_pieces_that_no_message_has_are_refused():
    case = messages.CASES["coo8"]
    arrays = map(jnp.asarray, (case.bits, case.counts, case.array, case.numbers))
    sizes = {"room": case.room, "words": case.form.room, "planes": case.form.planes}
    pack = functools.partial(kernels.pack_message, *arrays, **sizes)
    ends = jnp.zeros((case.parts, case.bits.shape[1]), jnp.int32)
    with pytest.raises(kernels.KernelArgumentError, match=r"end must be 1 to words"):
        pack(end=case.form.room + 1)
    with pytest.raises(kernels.KernelArgumentError, match=r"packed words, int32\[3, "):
        pack(ends=ends[:, 1:])
    message = jnp.zeros((3, 90), jnp.uint32)
    unpack = functools.partial(kernels.unpack_message, jnp.zeros(9), message)
    unpack = functools.partial(unpack, jnp.asarray(case.numbers), room=case.room)
    unpack = functools.partial(unpack, longest=9, planes=1, ends=ends[:3, :9])
    for piece in ((8, 8), (0, case.room + 4), (-4, 4), (2, 8), (case.room, None)):
        with pytest.raises(kernels.KernelArgumentError, match="a multiple of 4 below last"):
            unpack(first=piece[0], last=piece[1])


def test_numbers_of_64_bits_travel_by_reference():
    with jax.enable_x64(True):
        case = messages.Case(
            ("coo8",), dtype=np.float64, wire=np.float64, shape=(2,), units="striped"
        )
        messages.check_pack(packing("reference"), case)
        messages.check_unpack(unpacking("reference"), case, dtype=np.float64)
