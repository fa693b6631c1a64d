"""What kernels of Pallas are lowered to for a GPU: interpreters run another program."""

import functools

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels as kernels
from benchmarks.kernels import lowered
from pallas_kernels.pallas import launch
from tests import helpers
from tests.kernels import messages


# JAX says so from 0.11 on.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton:DeprecationWarning")


def atomics(function, *arrays):
    """The atomic operations of a function, traced for GPUs and lowered without one."""
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    with kernels.use_kernels("pallas", compile_only=True):
        return lowered.in_pallas(lowered.for_cuda(function, *like))


def packing(name):
    """The operations of messages that are packed."""
    found = []

    def pack(*arrays, **static):
        run = functools.partial(kernels.pack_message, **static)
        found.extend(atomics(run, *arrays))
        raise _Lowered

    with pytest.raises(_Lowered):
        messages.check_pack(pack, messages.CASES[name])
    return found


def unpacking(name, **options):
    """The operations of messages that are unpacked."""
    found = []

    def unpack(*arrays, **static):
        run = functools.partial(kernels.unpack_message, **static)
        found.extend(atomics(run, *arrays))
        raise _Lowered

    with pytest.raises(_Lowered):
        messages.check_unpack(unpack, messages.CASES[name], **options)
    return found


class _Lowered(Exception):
    """Nothing is to be run."""


PACKED = ["coo8", "bitmap", "halves", "mixed, coo16"]


@pytest.mark.parametrize("name", ["coo8", "bitmap", *helpers.slow(*PACKED[2:])])
def test_bits_of_a_message_are_set_by_an_operation_on_integers(name):
    found = packing(name)
    assert {(one.operation, one.dtype) for one in found} == {("or", "i32")}


@pytest.mark.parametrize("name", ["coo8", "rows of five halves"])
def test_floats_are_added_as_floats(name):
    found = unpacking(name)
    assert found
    assert not [one for one in found if one.is_wrong]
    assert {one.operation for one in found} == {"fadd"}


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_integers_are_not_added_by_pallas(dtype):
    """Up to JAX 0.11 they would be added as floats, and small ones taken for zero."""
    assert not unpacking("coo8", dtype=dtype)


def test_an_integer_that_is_added_as_a_float_is_seen():
    """The control: as JAX lowers `atomic_add` of integers, up to a version."""

    def kernel(at_ref, into_ref, out_ref):
        del into_ref
        at = at_ref[jnp.arange(128)]
        launch.triton_backend().atomic_add(out_ref, (at,), jnp.ones(128, jnp.uint32))

    def run(at, into):
        like = [jax.ShapeDtypeStruct((128,), jnp.uint32)]
        return launch.launch(kernel, 1, (at, into), like, in_place={1: 0})

    (found,) = atomics(run, jnp.zeros(128, jnp.int32), jnp.zeros(128, jnp.uint32))
    assert found.dtype == "i32"
    # JAX 0.12 lowers it rightly.
    assert found.is_wrong == (jax.__version_info__ < (0, 12))


TEXTS = {
    (
        "fadd",
        "i32",
        True,
    ): "rmw fadd, acq_rel, gpu, %1, %2, %3 : (tensor<256x4x!tt.ptr<i32>>, "
    "tensor<256x4xi32>, tensor<256x4xi1>) -> tensor<256x4xi32> loc(#loc)",
    ("add", "i32", False): "rmw add, acq_rel, gpu, %1, %2 : (!tt.ptr<i32>, i32) -> i32",
    ("add", "f32", True): "rmw add, acq_rel, gpu, %1, %2 : (!tt.ptr<f32>, f32) -> f32",
    (
        "fadd",
        "bf16",
        False,
    ): "rmw fadd, relaxed, gpu, %1, %2 : (tensor<8x!tt.ptr<bf16>, #b>, "
    "tensor<8xbf16, #b>) -> tensor<8xbf16, #b>",
    ("cas", "i32", False): "cas acq_rel, gpu, %1, %2, %3 : (!tt.ptr<i32>, i32, i32) -> i32",
}


@pytest.mark.parametrize("want", TEXTS)
def test_operations_are_read_from_the_text_of_a_kernel(want):
    (found,) = lowered.in_text("kernel", f"    %0 = tt.atomic_{TEXTS[want]}")
    assert (found.operation, found.dtype, found.is_wrong) == want
