"""How kernels of Triton are launched: by which way, with what, and what is missing for it.

The way of JAX 0.12 runs here on every JAX: what it gives `thunky.ptx_kernel` is executed by
the machine of `tests.ptx`. On JAX 0.12 it is lowered by JAX itself, too.
"""

import functools
import importlib.util
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

import pallas_kernels as kernels
from benchmarks.kernels import lowered
from pallas_kernels import backends
from pallas_kernels.triton import launch
from tests.kernels import contract


HAS_TRITON = sys.platform == "linux" and importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(
    not HAS_TRITON, reason="needs Triton, which is there for Linux: pip install '.[triton]'"
)
needs_thunky = pytest.mark.skipif(
    not HAS_TRITON or not launch.by_ptx(), reason="needs Triton, and JAX 0.12 or newer"
)
rng = np.random.default_rng(3)
X = np.where(rng.random(2000) < 0.3, rng.normal(size=2000), 0).astype(np.float32)


# --- By which way.


@pytest.mark.parametrize(
    ("version", "way"),
    [((0, 11, 9), "by_jax_triton"), ((0, 12, 0), "by_jax"), ((1, 0, 0), "by_jax")],
)
def test_the_version_of_jax_says_by_which_way(version, way, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", version)
    taken = []
    for name in ("by_jax", "by_jax_triton"):
        monkeypatch.setattr(launch, name, lambda one, name=name: taken.append((name, one)))
    launch.launch(None, 7, [X], in_place=[X], warps=8, SIZE=3)
    ((name, one),) = taken
    assert name == way
    assert (one.programs, one.warps, one.zeroed, one.sizes) == (7, 8, False, {"SIZE": 3})
    assert one.dtypes == ("float32",) * 3


def test_jax_triton_is_given_aliases_zeros_and_sizes(monkeypatch):
    given = {}

    def triton_call(*operands, **how):
        given.update(how, operands=operands)
        return how["out_shape"]

    stub = types.ModuleType("jax_triton")
    stub.triton_call = triton_call
    monkeypatch.setitem(sys.modules, "jax_triton", stub)
    monkeypatch.setattr(launch, "by_ptx", lambda: False)
    monkeypatch.setattr(backends, "compute_capability", lambda: 80)
    a, b, c = np.zeros(3, np.int32), np.ones(4, np.uint32), np.ones((2, 2), np.float32)
    made = [jax.ShapeDtypeStruct((5,), jnp.int32), jax.ShapeDtypeStruct((6,), jnp.int32)]
    found = launch.launch(
        "kernel", 9, [a, b], in_place=[c], results=made, warps=2, zeroed=True, SIZE=8
    )
    assert found == [jax.ShapeDtypeStruct((2, 2), jnp.float32), *made]
    assert [id(x) for x in given.pop("operands")] == [id(a), id(b), id(c)]
    assert given == {
        "kernel": "kernel",
        "out_shape": found,
        "grid": (9,),
        "num_warps": 2,
        "compute_capability": 80,
        "input_output_aliases": {2: 0},
        "zeroed_outputs": (1, 2),
        "SIZE": 8,
    }
    launch.launch("kernel", 9, [a], results=made)
    assert (given["zeroed_outputs"], given["input_output_aliases"]) == ((), {})


# --- What is missing.


def why_not(monkeypatch, version, absent=(), platform="linux"):
    """Why "triton" cannot run on a JAX, and where some modules are not to be imported."""
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(jax, "__version__", ".".join(map(str, version)))
    monkeypatch.setattr(sys, "platform", platform)
    for name in ("triton", "jax_triton", "jax.experimental.thunky"):
        there = types.ModuleType(name)
        there.jit = there.memzero = there.ptx_kernel = None
        monkeypatch.setitem(sys.modules, name, None if name in absent else there)
    monkeypatch.delattr(jax.experimental, "thunky", raising=False)
    return backends._missing.__wrapped__("triton")


def test_each_way_needs_no_package_of_the_other(monkeypatch):
    assert why_not(monkeypatch, (0, 12, 0), ["jax_triton"]) is None
    assert why_not(monkeypatch, (0, 11, 2), ["jax.experimental.thunky"]) is None


@pytest.mark.parametrize(
    ("version", "absent", "platform", "says"),
    [
        (
            (0, 11, 2),
            ["jax_triton"],
            "linux",
            r"jax-triton 0\.3 on JAX 0\.11\.2.*pip install 'sparsejax\[cuda13,triton\]'; "
            r"or JAX 0\.12, which needs no jax-triton",
        ),
        (
            (0, 12, 0),
            ["triton"],
            "linux",
            r"Triton 3\.6 .*pip install 'sparsejax\[triton\]'",
        ),
        (
            (0, 14, 0),
            ["jax.experimental.thunky"],
            "linux",
            r"ptx_kernel, which JAX 0\.14\.0 has not .*pip install 'jax==0\.12\.\*'",
        ),
        ((0, 12, 0), [], "darwin", r"Triton, which there is for Linux, and this is darwin"),
    ],
)
def test_what_is_missing_is_named_with_the_fix(
    version, absent, platform, says, monkeypatch
):
    reason = why_not(monkeypatch, version, absent, platform)
    assert re.match(r"the backend 'triton' needs ", reason)
    assert re.search(says, reason)
    assert reason.endswith("Use 'auto' or 'reference'.")


def test_kernels_that_cannot_be_launched_are_refused_before_they_are_traced(monkeypatch):
    monkeypatch.setattr(launch, "missing", lambda: "what nobody has")
    monkeypatch.setattr(backends, "_missing", backends._missing.__wrapped__)
    with pytest.raises(kernels.BackendError, match="needs what nobody has"):
        kernels.compact(jnp.ones(3), 3, backend="triton")
    with (
        pytest.raises(kernels.BackendError, match="needs what nobody has"),
        kernels.use_kernels("triton", compile_only=True),
    ):
        pass


# --- The way of JAX 0.12, executed.


class Buffer:
    """A reference to memory, as `jax.new_ref` and `jax.empty_ref` make one."""

    def __init__(self, content):
        self.content, self.zeroed = np.asarray(content), False

    def __getitem__(self, _):
        return jnp.asarray(self.content)


class Thunky(types.ModuleType):
    """`jax.experimental.thunky` on the machine of `tests.ptx`."""

    def __init__(self):
        from tests.ptx import compiler, launches

        super().__init__("thunky")
        self.gpu = launches.Gpu()
        self.names = []
        code = lambda ptx: compiler.Code(compiler.read(ptx))
        self._code = lambda ptx, shared: compiler.Compiled(code(ptx), shared, ptx)

    def jit(self, function):
        as_buffer = lambda x: x if isinstance(x, Buffer) else Buffer(x)
        return lambda *given: function(*map(as_buffer, given))

    def memzero(self, buffer):
        buffer.zeroed = True

    def ptx_kernel(
        self, *buffers, written, kernel_name, ptx, grid_dim, block_dim, shmem_bytes
    ):
        first = written.index(True)
        results = [x for x, is_written in zip(buffers, written, strict=True) if is_written]
        assert buffers[first : first + len(results)] == (*results,)
        code = self._code(ptx, shmem_bytes)
        assert code.code.program.name == kernel_name
        assert len(code.code.program.parameters) == len(buffers)
        assert grid_dim[1:] == block_dim[1:] == (1, 1)
        assert f".reqntid {block_dim[0]}" in ptx
        made = [x for x in results if x not in buffers[:first]]
        aliases = {buffers.index(x): i for i, x in enumerate(results) if x not in made}
        found = self.gpu.run(
            code,
            grid_dim[0],
            [x.content for x in buffers[:first]],
            [x.content for x in results],
            aliases,
            zeroed=bool(made) and all(x.zeroed for x in made),
        )
        for buffer, content in zip(results, found, strict=True):
            buffer.content = content
        self.names.append(kernel_name)


@pytest.fixture
def thunky(monkeypatch):
    """The way of JAX 0.12, with PTX executed as soon as it is launched."""
    machine = Thunky()
    empty = lambda x: Buffer(np.broadcast_to(np.zeros((), x.dtype), x.shape))
    monkeypatch.setitem(sys.modules, "jax.experimental.thunky", machine)
    monkeypatch.setattr(jax.experimental, "thunky", machine, raising=False)
    monkeypatch.setattr(jax, "new_ref", Buffer)
    monkeypatch.setattr(jax, "empty_ref", empty, raising=False)
    monkeypatch.setattr(launch, "by_ptx", lambda: True)
    monkeypatch.setattr(backends, "compute_capability", lambda: 90)
    return machine


@pytest.mark.slow
@needs_triton
def test_what_is_worked_on_in_place_is_given_twice_and_returned(thunky):
    from pallas_kernels.triton import partition_dense, threshold_hash

    select = lambda x, level, seed, slots: threshold_hash.threshold_hash(
        x, level, jnp.uint32(seed), slots
    )
    contract.check_threshold_hash(select, X, 1.0, 7, 512)
    memory = kernels.HashMemory(parts=2, hashes=2, slots=800, serial=600)
    # Three arrays in place, and a result beside.
    found = partition_dense.partition_dense(X, kernels.draw_seeds(3), memory=memory)
    placed = np.concatenate([row[row >= 0] for row in np.asarray(found.memory)])
    assert sorted(placed) == np.flatnonzero(X).tolist()
    assert thunky.names == ["threshold_hash_kernel", "partition_dense_kernel"]


@needs_triton
def test_results_are_zeroed_where_that_is_asked_for(thunky):
    from tests.kernels import toy

    x = np.arange(100, dtype=np.int32)
    even, odd = toy.by_parity(x, zeroed=True)
    assert even.tolist() == [n if n % 2 == 0 else 0 for n in range(100)]
    assert odd.tolist() == [n if n % 2 else 0 for n in range(100)]
    # The control: else they hold what was there.
    even, _ = toy.by_parity(x, zeroed=False)
    assert even.tolist()[::2] == [*range(0, 100, 2)]
    assert any(even.tolist()[1::2])


# --- The way of JAX 0.12, lowered.


def modules(function, *arrays):
    """The launches in a program lowered for a GPU: their attributes as text."""
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    with kernels.use_kernels("triton", compile_only=True):
        text = lowered.for_cuda(function, *like).as_text()
    return [line for line in text.splitlines() if "@thunky.inline_module" in line]


@needs_thunky
def test_a_launch_is_lowered_to_ptx_and_results_are_not_filled():
    encode = functools.partial(kernels.bitmap_encode, backend="triton")
    (line,) = modules(encode, X)
    assert ".visible .entry encode_kernel(" in line
    assert re.search(r"tensor<63xui32>\) -> tensor<63xui32>", line)
    with kernels.use_kernels("triton", compile_only=True):
        like = jax.ShapeDtypeStruct(X.shape, X.dtype)
        text = lowered.for_cuda(encode, like).as_text()
    assert "@AllocateBuffer() : () -> tensor<63xui32>" in text


@needs_thunky
def test_what_is_in_place_is_aliased():
    select = lambda x: kernels.threshold_hash(x, 1.0, 7, slots=8, backend="triton")
    (line,) = modules(select, X)
    (alias,) = re.findall(r"operand_index = (\d+)", line)
    assert alias == "3"  # behind the numbers, the level and the seed


@needs_thunky
@pytest.mark.parametrize(
    ("manual", "kind", "checked"),
    [
        ({"a", "b"}, AxisType.Auto, True),
        ({"a"}, AxisType.Explicit, False),
        ({"a"}, AxisType.Auto, True),
        (set(), AxisType.Explicit, True),
    ],
)
def test_a_launch_may_stand_where_axes_are_manual_and_where_they_are_not(
    manual, kind, checked
):
    from tests.kernels import toy

    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
    mesh = AbstractMesh((2, 2), ("a", "b"), (kind, kind), abstract_device=device)
    specs, inside = P("a"), functools.partial(toy.by_parity, zeroed=False)
    if manual:
        inside = jax.shard_map(
            inside,
            mesh=mesh,
            in_specs=specs,
            out_specs=specs,
            axis_names=manual,
            check_vma=checked,
        )

    def run(x):
        return inside(jax.sharding.reshard(x, specs) if kind == AxisType.Explicit else x)

    with (
        kernels.use_kernels("triton", compile_only=True),
        jax.sharding.use_abstract_mesh(mesh),
    ):
        like = jax.ShapeDtypeStruct((4096,), jnp.int32)
        text = jax.jit(run).trace(like).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = (line for line in text.splitlines() if "@thunky.inline_module" in line)
    # Its own half, or all of it where no axis is manual.
    whole = f"tensor<{2048 if manual else 4096}xi32>"
    assert f": ({', '.join([whole] * 3)}) -> ({whole}, {whole})" in line


@needs_thunky
@pytest.mark.parametrize(
    "of",
    [
        lambda add, x: jax.vmap(add)(x[None]),
        lambda add, x: jax.jvp(add, (x,), (x,)),
        lambda add, x: jax.grad(lambda x: add(x).sum())(x),
    ],
    ids=["vmap", "jvp", "grad"],
)
def test_kernels_are_neither_batched_nor_differentiated(of):
    spec = kernels.MessageSpec(room=4, words=6, longest=1)
    numbers = np.array([0, 4, 1, 1, 2, 0, 1, 0, 6], np.int32)
    received = kernels.Received(jnp.zeros((1, 6), jnp.uint32))
    add = lambda x: kernels.unpack_message(x, received, numbers, spec, backend="triton")
    with (
        kernels.use_kernels("triton", compile_only=True),
        pytest.raises(NotImplementedError, match="rule for"),
    ):
        jax.make_jaxpr(functools.partial(of, add))(np.ones(4, np.float32))


# --- For which GPU.


def test_the_capability_is_that_of_the_gpu_unless_none_need_be(monkeypatch):
    device = types.SimpleNamespace(compute_capability="10.0")
    monkeypatch.setattr(backends, "_cuda_devices", lambda: (device,))
    monkeypatch.setattr(backends, "_missing", lambda name: None)
    assert backends.compute_capability() == 100
    with kernels.use_kernels("triton", compile_only=True):
        assert backends.compute_capability() == 90
