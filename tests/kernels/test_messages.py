"""Messages packed and unpacked by every backend that runs here, as by hand.

The kernels of Triton are held to the same in its interpreter: see `test_triton`.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as kernels
from tests.kernels import checks, messages
from tests.kernels.test_kernels import by


# The four mixed ones are one program.
QUICK = ["from a rank on", *(name for name in messages.CASES if "mixed" in name)]


@functools.cache
def compiled(backend, operation, static):
    return by(backend, getattr(kernels, operation), **dict(static))


def running(backend, operation):
    """An operation as the checks call it, compiled once for what is static."""

    def run(*arrays, **static):
        return compiled(backend, operation, tuple(static.items()))(*arrays)

    return run


packing = functools.partial(running, operation="pack_message")
unpacking = functools.partial(running, operation="unpack_message")


def made(backend):
    """The operations as a file of kernels has them."""
    names = ("pack_message", "index_message", "unpack_message")
    one = types.SimpleNamespace(**{name: running(backend, name) for name in names})
    one.index, one.bitmap, one.launch = one, one, None
    one.unpack_bitmaps = one.unpack_message
    return one


def test_messages_of_each_code_are_as_by_hand():
    checks.check_messages(made("reference"), QUICK, bitmaps=())


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["reference", pytest.param("triton", marks=pytest.mark.gpu)]
)
def test_every_message_is_as_by_hand(backend):
    """Whole and in pieces, added or set, sender by sender, and bitmaps."""
    checks.check_messages(made(backend))


def test_bitmaps_that_no_kernel_unpacks_are_refused():
    case, sets = messages.BITMAPS["thin"], kernels.Unpacking(replaces=True)
    spec = dataclasses.replace(case.spec, longest=case.words, bitmaps=True)
    into = jnp.zeros(case.striping.size)
    ends = jnp.zeros((case.words, case.parts, 2), jnp.int32)
    other = lambda **changed: dataclasses.replace(spec, **changed)
    for wrong, given, how, said in (
        (spec, ends, kernels.Unpacking(), "replaces=False"),
        (other(units=None), ends, sets, "units=None"),
        (spec, None, sets, "got None"),
        (spec, ends[:-1], sets, r"int32\[33, 3, 2\], got int32\[32, 3, 2\]"),
        (other(longest=32), ends[:-1], sets, "3 parts of 33 words; .* longest=32"),
        (
            other(units=case.striping._replace(parts=4)),
            ends,
            sets,
            "in 4 parts .* 3 messages",
        ),
    ):
        received = kernels.Received(case.received, given)
        with pytest.raises(kernels.KernelArgumentError, match=said):
            kernels.unpack_message(into, received, case.numbers, wrong, how)
    received = kernels.Received(case.received, ends)
    with pytest.raises(kernels.KernelArgumentError, match="numbers that replace zeros"):
        kernels.unpack_message(into[:, None], received, case.numbers, spec, sets)


def test_what_one_sender_sends_needs_no_atomic_additions():
    # On GPUs those take denormals for zero, and ranks that swap messages would differ.
    case = messages.CASES["rows of one part"]
    messages.check_unpack(unpacking("reference"), case)
    scatters = []
    for message in (case.received, np.tile(case.received, (2, 1))):
        spec = dataclasses.replace(case.spec, units=None)
        unpack = functools.partial(kernels.unpack_message, spec=spec, backend="reference")
        received = kernels.Received(message)
        made = jax.make_jaxpr(unpack)(case.array, received, case.numbers)
        scatters += [e for e in made.eqns if e.primitive.name == "scatter-add"]
    assert [e.params["unique_indices"] for e in scatters] == [True, False]


def test_without_room_or_with_other_shapes_it_says_so():
    case = messages.CASES["coo8"]
    bits, array = jnp.asarray(case.bits), jnp.asarray(case.array)
    counts, numbers = jnp.asarray(case.counts), jnp.asarray(case.numbers)
    plain = dataclasses.replace(case.spec, at=0)
    other = functools.partial(dataclasses.replace, plain)

    def pack(slots, units=None, numbers=numbers, spec=plain):
        sets = kernels.SlotSets(slots, counts, units)
        return kernels.pack_message(sets, array, numbers, spec)

    refused = pytest.raises(kernels.KernelArgumentError, match="slots must be uint32 or")
    with refused:
        pack(bits.astype(jnp.float32))
    with pytest.raises(kernels.KernelArgumentError, match="multiple of 4"):
        pack(bits, spec=other(room=6))
    with pytest.raises(kernels.KernelArgumentError, match="must be a list"):
        pack(bits, units=jnp.asarray(case.listed))
    with pytest.raises(kernels.KernelArgumentError, match="must be a list"):
        pack(jnp.asarray(case.listed[:, 4:]))
    with pytest.raises(kernels.KernelArgumentError, match="numbers must be 14"):
        pack(bits, numbers=numbers[: messages.AT + 9], spec=case.spec)
    with pytest.raises(kernels.KernelArgumentError, match="2, 4 or 8 bytes"):
        pack(bits, spec=other(dtype=jnp.complex128))

    def unpack(message):
        spec = other(planes=1, longest=9)
        return kernels.unpack_message(array, kernels.Received(message), numbers, spec)

    with pytest.raises(kernels.KernelArgumentError, match="too few for a header"):
        unpack(jnp.zeros((3, 9), jnp.uint32))
    with pytest.raises(kernels.KernelArgumentError, match="message must be uint32"):
        unpack(jnp.zeros((3, 90), jnp.int32))


def test_pieces_that_no_message_has_are_refused():
    case = messages.CASES["coo8"]
    bits, counts, array, numbers = map(
        jnp.asarray, (case.bits, case.counts, case.array, case.numbers)
    )
    spec = dataclasses.replace(case.spec, at=0)
    ends = jnp.zeros((case.parts, case.bits.shape[1]), jnp.int32)
    sets, too_long = kernels.SlotSets(bits, counts), case.form.room + 1
    with pytest.raises(kernels.KernelArgumentError, match=r"end must be 1 to words"):
        kernels.pack_message(sets, array, numbers, dataclasses.replace(spec, end=too_long))
    with pytest.raises(kernels.KernelArgumentError, match=r"packed words, int32\[3, "):
        kernels.pack_message(sets._replace(ends=ends[:, 1:]), array, numbers, spec)
    received = kernels.Received(jnp.zeros((3, 90), jnp.uint32), ends[:3, :9])
    spec = dataclasses.replace(spec, planes=1, longest=9)
    for first, last in ((8, 8), (0, case.room + 4), (-4, 4), (2, 8), (case.room, None)):
        how = kernels.Unpacking(first=first, last=last)
        with pytest.raises(kernels.KernelArgumentError, match="a multiple of 4 below last"):
            kernels.unpack_message(jnp.zeros(9), received, numbers, spec, how)


@pytest.mark.slow
def test_numbers_of_64_bits_travel_by_reference():
    with jax.enable_x64(True):
        case = messages.Case(
            ("coo8",), dtype=np.float64, wire=np.float64, shape=(2,), units="striped"
        )
        messages.check_pack(packing("reference"), case)
        messages.check_unpack(unpacking("reference"), case, dtype=np.float64)
