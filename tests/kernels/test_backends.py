"""Which backend is taken, and what arguments are refused before anything is launched."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import pallas_kernels as kernels
from pallas_kernels import backends
from tests import helpers


KERNELS = {
    "reference": lambda x: ("reference", x),
    "pallas": lambda x, interpret: ("pallas", interpret),
    "triton": lambda x: ("triton", x),
}


def taken(operation="compact", named=None, size=8, of=KERNELS):
    return backends.run(operation, named, of, size, 1)[0]


def test_reference_is_the_default_and_what_auto_takes_without_a_measurement():
    assert taken() == "reference"
    with kernels.use_kernels("auto"):
        assert taken() == "reference"


def test_an_argument_goes_before_a_context_and_a_context_before_the_environment(
    monkeypatch,
):
    monkeypatch.setenv("SPARSEJAX_KERNELS", "reference")
    with kernels.use_kernels("pallas", interpret=True):
        assert taken() == "pallas"
        assert taken(named="reference") == "reference"
        with kernels.use_kernels("reference"):
            assert taken() == "reference"
            assert taken(named="reference") == "reference"
        assert taken() == "pallas"
    assert taken() == "reference"


def test_the_environment_is_heard_and_checked(monkeypatch):
    monkeypatch.setenv("SPARSEJAX_KERNELS", "cuda")
    with pytest.raises(
        kernels.KernelArgumentError, match="SPARSEJAX_KERNELS must be one of"
    ):
        taken()
    monkeypatch.setenv("SPARSEJAX_KERNELS", "")
    assert taken() == "reference"


def test_an_operation_without_such_a_kernel_takes_reference_unless_it_is_named():
    only = {"reference": KERNELS["reference"]}
    with kernels.use_kernels("pallas", interpret=True):
        assert taken(of=only) == "reference"
        with pytest.raises(kernels.BackendError, match="compact has no kernel"):
            taken("compact", "pallas", of=only)


def test_a_backend_that_cannot_run_here_says_why(monkeypatch):
    monkeypatch.setattr(backends, "_cuda_devices", lambda: ())
    with pytest.raises(kernels.BackendError, match="needs a CUDA GPU, and JAX sees only"):
        taken(named="pallas")
    with (
        pytest.raises(kernels.BackendError, match="needs a CUDA GPU"),
        kernels.use_kernels("pallas"),
    ):
        pass
    monkeypatch.setenv("SPARSEJAX_KERNELS", "pallas")
    with pytest.raises(kernels.BackendError, match="needs a CUDA GPU"):
        kernels.compact(jnp.ones(3), 3)
    with pytest.raises(kernels.KernelArgumentError, match="backend must be one of"):
        taken(named="cuda")


@pytest.mark.parametrize("there", [(), ("jax_cuda13_plugin",)])
def test_where_jax_has_no_plugin_for_gpus_it_says_which_extra_has_one(there, monkeypatch):
    monkeypatch.setattr(backends, "_missing", lambda name: None)
    monkeypatch.setattr(backends, "_cuda_devices", lambda: ())
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: name in there)
    for name in ("pallas", "triton"):
        reason = backends.why_not(name)
        assert ("with such a GPU, pip install 'sparsejax[cuda13]'." in reason) == (
            not there
        )


class Device:
    def __init__(self, platform, device_kind, compute_capability=None):
        self.platform, self.device_kind = platform, device_kind
        if compute_capability is not None:
            self.compute_capability = compute_capability


@pytest.mark.parametrize("name", ["pallas", "triton"])
def test_a_gpu_that_runs_no_kernels_is_named_with_what_to_use_instead(monkeypatch, name):
    monkeypatch.setattr(backends, "_missing", lambda name: None)
    only = lambda *devices: monkeypatch.setattr(backends, "_cuda_devices", lambda: devices)
    amd = Device("gpu", "AMD Instinct MI300X", "gfx942")
    monkeypatch.setattr(jax, "devices", lambda *_: [amd])
    only()
    reason = backends.why_not(name)
    assert "needs a CUDA GPU, and JAX sees only AMD Instinct MI300X" in reason
    assert "Use 'auto' or 'reference'" in reason
    # Triton's kernels are not interpreted, so that is no advice.
    assert ("interpret=True" in reason) == (name == "pallas")
    only(Device("gpu", "Tesla T4", "7.5"))
    reason = backends.why_not(name)
    assert "of compute capability 8.0 or more, and JAX sees a Tesla T4 of 7.5" in reason
    assert "Use 'auto' or 'reference'" in reason
    with pytest.raises(kernels.BackendError, match="Tesla T4"):
        taken(named=name)
    rows = [{"size": 0, "backend": name}]
    monkeypatch.setattr(backends, "_winners", lambda: {"Tesla T4": {"compact": rows}})
    assert taken() == "reference"
    for capability in ("8.0", "9.0", "10.0", None):
        only(Device("gpu", "NVIDIA Test", capability))
        assert backends.why_not(name) is None


def test_triton_needs_its_packages_and_is_not_interpreted_by_jax(monkeypatch):
    monkeypatch.setattr(backends, "_missing", lambda name: None)
    monkeypatch.setattr(backends, "_cuda_devices", lambda: ())
    with pytest.raises(kernels.BackendError, match="needs a CUDA GPU"):
        taken(named="triton")
    with (
        pytest.raises(kernels.BackendError, match="interprets its kernels outside"),
        kernels.use_kernels("triton", interpret=True),
    ):
        pass
    with kernels.use_kernels("triton", compile_only=True):
        assert backends.compute_capability() == 90


def test_where_jax_has_no_such_backend_it_says_so_and_auto_passes_over_it(monkeypatch):
    monkeypatch.setattr(backends, "_missing", lambda name: f"no {name} in this JAX")
    with pytest.raises(kernels.BackendError, match="no pallas in this JAX"):
        taken(named="pallas")
    pretend_winner(monkeypatch)
    assert taken() == "reference"


class Gpu:
    platform, device_kind = "gpu", "NVIDIA Test"


def pretend_winner(monkeypatch):
    rows = [{"size": 0, "backend": "reference"}, {"size": 100, "backend": "pallas"}]
    monkeypatch.setattr(backends, "_cuda_devices", lambda: (Gpu(),))
    monkeypatch.setattr(backends, "_winners", lambda: {"NVIDIA Test": {"compact": rows}})


def test_auto_takes_what_won_at_the_nearest_size_below(monkeypatch):
    pretend_winner(monkeypatch)
    winner = functools.partial(backends._winner, "compact")
    assert winner(99, KERNELS) == "reference"
    assert winner(100, KERNELS) == "pallas"
    assert winner(10**9, KERNELS) == "pallas"
    assert winner(10**9, {"reference": None}) == "reference"
    assert backends._winner("partition", 10**9, KERNELS) == "reference"


def test_with_auto_what_a_branch_does_is_done_by_the_backend_that_unpacks(monkeypatch):
    rows = {"unpack_message": [{"size": 30, "backend": "triton"}]}
    monkeypatch.setattr(backends, "_missing", lambda name: None)
    monkeypatch.setattr(backends, "_cuda_devices", lambda: (Gpu(),))
    monkeypatch.setattr(backends, "_winners", lambda: {"NVIDIA Test": rows})
    unpacks = functools.partial(kernels.unpacks_in_kernels, jnp.float32, jnp.float32)
    assert unpacks(30)
    assert not unpacks(29)
    with kernels.use_kernels("reference"):
        assert not unpacks(30)

    packed_by = lambda of: backends.chosen("pack_message", None, of, 3)
    with backends.auto_prefers("triton"):
        assert packed_by(("reference", "triton")) == "triton"
        assert packed_by(("reference", "pallas")) == "reference"
        assert backends._asked.get().name == "auto"  # under vmap the reference computes
    assert packed_by(("reference", "triton")) == "reference"
    with kernels.use_kernels("reference"), backends.auto_prefers("triton"):
        assert packed_by(("reference", "triton")) == "reference"
    monkeypatch.setattr(backends, "_missing", lambda name: "it is not there")
    with backends.auto_prefers("triton"):
        assert packed_by(("reference", "triton")) == "reference"


kernel_p = Primitive("a_kernel")  # with no rule to batch it
kernel_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(kernel_p, lambda ctx, x: [x])


def test_with_auto_the_reference_computes_under_vmap(monkeypatch, mesh_of):
    monkeypatch.setattr(backends, "_winner", lambda *_: "triton")
    of = {"reference": lambda x, y: x + 2 * y, "triton": lambda x, y: kernel_p.bind(x)}
    run = lambda x, y: backends.run("compact", None, of, 4, x, y)
    x, y = jnp.arange(8.0).reshape(2, 4), jnp.ones(4)
    for each in (
        jax.jit(jax.vmap(run, (0, None))),
        jax.vmap(jax.jit(run), (0, None)),
        helpers.shard_map(
            jax.vmap(run, (0, None)),
            mesh=mesh_of(2),
            in_specs=(P(helpers.AXIS), P()),
            out_specs=P(helpers.AXIS),
        ),
    ):
        np.testing.assert_array_equal(each(x, y), x + 2 * y)
    monkeypatch.setattr(backends, "_batched_by", lambda _, function: function)
    with pytest.raises(NotImplementedError, match="Batching"):
        jax.jit(jax.vmap(lambda x, y: run(x, y), (0, None)))(x, y)


def test_the_table_of_winners_is_well_formed():
    for by_operation in json.loads(json.dumps(backends._winners())).values():
        for operation, rows in by_operation.items():
            assert hasattr(kernels, operation)
            sizes = [row["size"] for row in rows]
            assert sizes == sorted(sizes)
            assert all(row["backend"] in backends.BACKENDS for row in rows)


ONES = np.ones(64, np.float32)
INDICES = np.arange(64, dtype=np.int32)
SEEDS = kernels.draw_seeds(3)


def partition(**changed):
    given = {"parts": 4, "slots": 32, "serial": 4, "hashes": 2} | changed
    indices = given.pop("indices", INDICES)
    seeds = given.pop("seeds", SEEDS)
    return kernels.partition(indices, 64, seeds, kernels.HashMemory(**given))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: kernels.compact(ONES, 0), "capacity must be a positive int, got 0"),
        (lambda: kernels.compact(ONES[None], 4), "reshape it"),
        (lambda: kernels.compact(INDICES, 4), "floating dtype, got int32"),
        (lambda: kernels.bitmap_encode(ONES, ONES), "units must be int32, got float32"),
        (lambda: kernels.bitmap_decode(INDICES, 3), "words must be uint32, got int32"),
        (lambda: partition(hashes=3), r"3 hashes need 4 seeds.*draw_seeds\(4\)"),
        (lambda: partition(serial=0), "serial must be a positive int"),
        (lambda: partition(slots=0), "slots must be a positive int"),
        (lambda: partition(hashes=-1), "hashes must be a positive int"),
        (lambda: partition(hashes=0), "nothing gets to the 32 slots: use slots=0"),
        (lambda: partition(seeds=SEEDS[:1], slots=0, serial=0), "serial must be"),
        (
            lambda: kernels.partition_dense(ONES, SEEDS, kernels.HashMemory(65, 9, 9)),
            "cannot fill 65 parts",
        ),
        (lambda: partition(parts=65), "cannot fill 65 parts"),
        (lambda: partition(indices=ONES), r"indices must be int32.*astype\(jnp.int32\)"),
        (lambda: partition(seeds=INDICES), "seeds must be uint32"),
        (lambda: partition(slots=2**29), "more than int32 can number"),
        (lambda: kernels.threshold_hash(ONES, 0.5, 1, slots=0), "slots must be"),
        (lambda: kernels.draw_seeds(0), "count must be a positive int"),
        (lambda: kernels.draw_seeds(3, -1), "seed must be an int of at least 0"),
    ],
)
def test_bad_arguments_raise_and_name_the_fix(call, says):
    with pytest.raises(kernels.KernelArgumentError, match=says):
        call()


MEMORY = kernels.HashMemory(parts=4, slots=32, serial=4)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: kernels.compact(x, 9),
        lambda x: kernels.bitmap_decode(kernels.bitmap_encode(x), 9),
        lambda x: kernels.partition(x.astype(jnp.int32), 64, SEEDS, MEMORY),
        lambda x: kernels.partition(
            x.astype(jnp.int32), 64, SEEDS[:1], kernels.HashMemory(4, 0, 9)
        ),
        lambda x: kernels.partition_dense(x, SEEDS, MEMORY),
        lambda x: kernels.threshold_hash(x, 0.5, 7, slots=9),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "pallas"])
def test_operations_work_inside_shard_map_with_checking_on(call, backend):
    """Loops carry what differs by rank as soon as operands do; kernels have no types."""
    each = lambda x: jax.tree.map(lambda y: y[None], call(x))
    inside = helpers.shard_map(
        each, mesh=helpers.mesh_of(2), in_specs=P("data"), out_specs=P("data")
    )
    with kernels.use_kernels(backend, interpret=backend == "pallas"):
        alone = jax.eval_shape(call, ONES)
        sharded = jax.eval_shape(inside, np.tile(ONES, 2))
    assert jax.tree.structure(sharded) == jax.tree.structure(alone)


def test_a_traced_capacity_is_told_to_be_static():
    with pytest.raises(kernels.KernelArgumentError, match="static_argnames"):
        jax.jit(kernels.compact)(ONES, 4)


def test_arrays_that_int32_cannot_number_are_refused_before_launch():
    like = lambda size: jax.ShapeDtypeStruct((size,), jnp.float32)
    with pytest.raises(kernels.KernelArgumentError, match="Take rows for units"):
        jax.eval_shape(lambda x: kernels.compact(x, 8), like(2**31))
    with pytest.raises(kernels.KernelArgumentError, match="2\\^31"):
        jax.eval_shape(lambda x: kernels.threshold_hash(x, 1.0, 0, slots=8), like(2**31))
    for backend in ("reference", "pallas"):
        with kernels.use_kernels(backend, interpret=True):
            found, _ = jax.eval_shape(lambda x: kernels.compact(x, 8), like(2**31 - 1))
            assert found.shape == (8,)


def test_seeds_are_the_same_for_the_same_numbers_and_all_different():
    np.testing.assert_array_equal(kernels.draw_seeds(9, 4), kernels.draw_seeds(9, 4))
    assert len(set(kernels.draw_seeds(100).tolist())) == 100
    assert not set(kernels.draw_seeds(9, 4).tolist()) & set(
        kernels.draw_seeds(9, 5).tolist()
    )
