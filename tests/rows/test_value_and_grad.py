"""Rows of gradients are the gradients that JAX gives, for losses as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparsejax import errors
from sparsejax.rows import value_and_grad
from sparsejax.tracing import programs
from sparsejax.units.merging import merge
from sparsejax.units.row_grads import is_row_grads
from tests import helpers
from tests.rows import cases
from tests.rows.cases import CASES, IDS, take


# What consists of other cases, or differs from one by little.
LONG = ["cast_in_jit", "cond_that_returns_the_table", "copied_and_named", "hard_negatives"]
LONG += ["fill_behind_a_scale", "indices_and_slices", "scan_in_scan", "scan_of_remat"]
LONG += ["remat_that_returns_what_it_has_scaled", "remat_that_scales_and_returns"]
LONG += ["scan_of_switch", "scan_over_the_table_without_a_gradient"]
LONG += ["scan_that_replaces_the_table", "several_rows_each_or_none", "vmap_over_tables"]


@jax.jit
def to_dense(grads):
    dense = lambda leaf: leaf.to_dense() if is_row_grads(leaf) else leaf
    return jax.tree.map(dense, grads, is_leaf=is_row_grads)


def assert_close(got, want, tolerance=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def both(loss, *args, has_aux=False, **kwargs):
    """Of a loss: the value and gradients by rows, and those of JAX, in one program."""
    ours = value_and_grad(loss, has_aux=has_aux)
    theirs = jax.value_and_grad(loss, has_aux=has_aux)
    run = jax.jit(lambda *args: (ours(*args, **kwargs), theirs(*args, **kwargs)))
    return run(*args)


@pytest.mark.parametrize(
    "name", [*(x for x in CASES if x not in LONG), *helpers.slow(*LONG)]
)
def test_gradients_are_those_of_jax(name):
    case = CASES[name]
    loss = lambda p, ids: case.loss(take, p, ids)
    (value, grads), (want_value, want) = both(loss, cases.params(), jnp.asarray(IDS))
    table = grads["table"]
    assert is_row_grads(table) == (case.rows is not None)
    if is_row_grads(table):
        table.check("table")
        assert table.capacity == case.rows
    assert not any(map(is_row_grads, (grads["u"], grads["w"])))
    assert_close(value, want_value, case.tolerance)
    assert_close(to_dense(grads), want, case.tolerance)


@pytest.mark.slow
def test_auxiliary_outputs_and_other_arguments_are_handed_on():
    def loss(p, ids, how, *, power, look):
        h = look(p["table"], ids) @ p["w"]
        best = (h[..., None] * p["table"].sum(1)).argmax(-1)
        aux = {"best": best, "how": how, "size": ids.size, "table": p["table"], "h": h}
        return jnp.float32(h**power).sum(), aux

    p, ids = cases.params(), jnp.asarray(IDS)
    handed = {"power": 2, "look": take}
    (value, aux), grads = value_and_grad(loss, has_aux=True)(p, ids, "mean", **handed)
    (want_value, want_aux), want = jax.value_and_grad(loss, has_aux=True)(
        p, ids, "mean", **handed
    )
    assert aux["how"] == "mean"
    assert aux["size"] is want_aux["size"]
    for one in (aux, want_aux):
        del one["how"], one["size"]
    assert_close((value, aux, to_dense(grads)), (want_value, want_aux, want))
    assert grads["table"].capacity == IDS.size


def test_flax_nnx():
    class Model(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(17, 4, rngs=nnx.Rngs(0))
            self.dense = nnx.Linear(4, 1, rngs=nnx.Rngs(1))

        def __call__(self, ids):
            return self.dense(self.embed(ids))

    graph, params = nnx.split(Model())
    loss = lambda params, ids: (nnx.merge(graph, params)(ids) ** 2).sum()
    (value, grads), (want_value, want) = both(loss, params, jnp.asarray(IDS))
    assert is_row_grads(grads["embed"]["embedding"].get_value())
    assert_close((value, to_dense(grads)), (want_value, want))


@pytest.mark.slow
def test_the_gradient_is_differentiated_and_mapped():
    """What is around `value_and_grad` sees rows as it would see any arrays."""

    def norm(p, ids):
        loss = lambda p, ids: CASES["once"].loss(take, p, ids)
        return (value_and_grad(loss)(p, ids)[1]["table"].to_dense() ** 2).sum()

    def norm_in_jax(p, ids):
        loss = lambda p, ids: CASES["once"].loss(take, p, ids)
        return (jax.grad(loss)(p, ids)["table"] ** 2).sum()

    def mapped(norm):
        of_one = lambda p: jax.vmap(jax.grad(norm), (None, 0))(p, IDS)
        return jax.jit(of_one)(cases.params())

    assert_close(mapped(norm), mapped(norm_in_jax))


@pytest.mark.parametrize("dtype", [jnp.int8, *helpers.slow(jnp.uint8, jnp.uint32)])
def test_ids_that_cannot_count_all_rows(dtype):
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )

    def loss(p, ids):
        read = lambda mode: jax.lax.gather(p, ids[:, None], numbers, (1, 2), mode=mode)
        return sum(jnp.nansum(jnp.sin(read(mode))) for mode in ("clip", "fill"))

    table = jnp.linspace(0, 1, 600).reshape(300, 2)
    ids = jnp.array([0, 100, 127, 255, -1, -(2**31)]).astype(dtype)
    (value, grads), want = both(loss, table, ids)
    assert is_row_grads(grads)
    assert_close((value, grads.to_dense()), want)


# --- Tables that are used densely too.


def abstract(**shapes):
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()
    }


def tied(p, ids):
    h = take(p["table"], ids)
    return (h @ p["table"].T).sum()


def decayed(p, ids):
    return take(p["table"], ids).sum() + (p["table"] ** 2).sum()


@pytest.mark.parametrize("loss", [tied, decayed])
def test_a_large_table_that_is_used_densely_is_named_once(loss):
    ours = value_and_grad(loss)
    p = abstract(table=(4096, 16))
    with pytest.warns(errors.DenseGradientWarning) as seen:
        grads = jax.eval_shape(ours, p, IDS)[1]
    assert not is_row_grads(grads["table"])
    (warning,) = seen
    line = loss.__code__.co_firstlineno + 2 - (loss is decayed)
    for named in (
        "'table'",
        "[4096, 16]",
        f"test_value_and_grad.py:{line}",
        "stop_gradient",
    ):
        assert named in str(warning.message)
    jax.eval_shape(ours, p, IDS[:2])  # traced again, and no more is said


@pytest.mark.parametrize(
    ("loss", "shape"),
    [
        (tied, (4095, 16)),  # small
        (lambda p, ids: (p["table"] ** 2).sum(), (4096, 16)),  # never read by rows
        (lambda p, ids: take(p["table"], ids).sum() + p["table"].sum(), (64, 32, 32)),
    ],
)
def test_other_leaves_are_not_spoken_of(loss, shape):
    grads = jax.eval_shape(value_and_grad(loss), abstract(table=shape), IDS)[1]
    assert not is_row_grads(grads["table"])


def test_a_leaf_has_rows_where_fewer_are_read_than_there_are():
    loss = lambda p, ids: take(p["table"], ids).sum()
    grad = lambda height: jax.eval_shape(
        value_and_grad(loss), abstract(table=(height, 2)), IDS
    )
    assert not is_row_grads(grad(IDS.size)[1]["table"])
    assert is_row_grads(grad(IDS.size + 1)[1]["table"])


@pytest.mark.slow
def test_unknown_parts_of_equations_make_gradients_dense(monkeypatch):
    """As another version of JAX might have them."""
    p, kinds = cases.params(), programs.CallKind
    for name, kind in [("scan", kinds.SCAN), ("cond_of_operands", kinds.COND)]:
        known = programs._KNOWN[kind]
        monkeypatch.setitem(programs._KNOWN, kind, known - {"unroll", "branches"})
        loss = lambda p, ids, name=name: CASES[name].loss(take, p, ids)
        (value, grads), want = both(loss, p, jnp.asarray(IDS))
        assert not is_row_grads(grads["table"])
        assert_close((value, grads), want)


# --- Bad input.


def test_bad_input_is_refused_by_name():
    p = cases.params()
    with pytest.raises(errors.ArgumentError, match="loss_fn must be a function, got 3"):
        value_and_grad(3)  # type: ignore
    with pytest.raises(errors.ArgumentError, match=r"has_aux=True .* got .*Tracer"):
        value_and_grad(lambda p: p["w"].sum(), has_aux=True)(p)
    with pytest.raises(TypeError, match="scalar"):
        value_and_grad(lambda p: p["w"])(p)
    with pytest.raises(TypeError, match="int32"):
        value_and_grad(lambda p: p["w"].sum())({**p, "ids": jnp.asarray(IDS)})


# --- Cost.


def test_the_loss_is_traced_once():
    calls = []

    def loss(p, ids):
        calls.append(1)
        return CASES["twice"].loss(take, p, ids)

    jax.eval_shape(value_and_grad(loss), cases.params(), IDS)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "name", ["cond_of_operands", *helpers.slow("scaled_by_a_parameter", "scan_of_remat")]
)
def test_nothing_is_of_the_tables_size_but_the_table(name):
    height, width = 200_000, 16
    case = CASES[name]
    loss = lambda p, ids: case.loss(take, p, ids)
    p = abstract(table=(height, width), w=(width,), u=(width, width), scale=())
    ids = jax.ShapeDtypeStruct((64, 2), jnp.int32)
    merged = lambda grads: {**grads, "table": merge(grads["table"])}
    step = lambda p, ids: merged(value_and_grad(loss)(p, ids)[1])
    compiled = jax.jit(step).lower(p, ids).compile()
    memory = compiled.memory_analysis()
    table = height * width * 4
    assert memory.argument_size_in_bytes > table
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < table / 20
    # What reads the table, and the loops and branches that it is handed to.
    makers = set()
    for line in compiled.as_text().splitlines():
        _, is_op, made = line.partition(" = ")
        if is_op and made.startswith((f"f32[{height},", f"bf16[{height},")):
            makers.add(made.split("(")[0].split()[-1])
    assert makers <= {"parameter", "get-tuple-element", "copy-done"}, makers
