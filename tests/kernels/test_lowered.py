"""What kernels of Pallas are lowered to for a GPU: interpreters run another program."""

import functools

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels as kernels
from benchmarks.kernels import lowered
from pallas_kernels.pallas import launch


# JAX says so from 0.11 on.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton:DeprecationWarning")


def for_gpus(function, *arrays):
    """A program that is traced for GPUs and lowered without one."""
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    with kernels.use_kernels("pallas", compile_only=True):
        return lowered.for_cuda(function, *like)


X, INDICES = jnp.ones(2048), jnp.arange(2048, dtype=jnp.int32)
MEMORY = kernels.HashMemory(parts=4, slots=1024, serial=64)
CALLS = {
    "compact": (functools.partial(kernels.compact, capacity=64), X),
    "bitmap_encode": (kernels.bitmap_encode, X),
    "threshold_hash": (lambda x: kernels.threshold_hash(x, 0.5, 7, slots=64), X),
    "partition": (
        lambda x: kernels.partition(x, 2048, kernels.draw_seeds(3), MEMORY),
        INDICES,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_kernel_of_pallas_has_atomic_operations(name):
    """Up to JAX 0.11 integers would be added as floats, and small ones taken for zero."""
    function, array = CALLS[name]
    program = for_gpus(function, array)
    assert lowered.texts(program)
    assert not lowered.in_pallas(program)


def test_an_integer_that_is_added_as_a_float_is_seen():
    """The control: as JAX lowers `atomic_add` of integers, up to a version."""

    def kernel(at_ref, into_ref, out_ref):
        del into_ref
        at = at_ref[jnp.arange(128)]
        launch.triton_backend().atomic_add(out_ref, (at,), jnp.ones(128, jnp.uint32))

    def run(at, into):
        like = [jax.ShapeDtypeStruct((128,), jnp.uint32)]
        return launch.launch(kernel, 1, (at, into), like, in_place={1: 0})

    zeros = jnp.zeros(128, jnp.int32), jnp.zeros(128, jnp.uint32)
    (found,) = lowered.in_pallas(for_gpus(run, *zeros))
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
