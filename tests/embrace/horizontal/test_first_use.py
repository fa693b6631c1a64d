"""The order of a loss's parameters is that in which they first meet data."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import sparsejax
from sparsejax.embrace import find_order, horizontal
from sparsejax.embrace.horizontal import blocks
from sparsejax.embrace.horizontal.first_use import uses
from tests.embrace.horizontal.model import batch_of, loss_fn, params
from tests.helpers import mesh_of, shard_map


W = jax.ShapeDtypeStruct((4, 4), jnp.float32)
X = jax.ShapeDtypeStruct((3, 4), jnp.float32)


def tree(*names):
    return dict.fromkeys(names, W)


def test_of_a_model_that_uses_the_last_name_first():
    found = find_order(loss_fn, params(), batch_of(0, 1))
    assert found == ("words", "layers/0", "layers/1", "norm", "head")
    cut = [("norm", "head"), "layers", "words"]
    found = find_order(loss_fn, params(), batch_of(0, 1), order=cut)
    assert found == ("words", "layers", ("norm", "head"))
    found = find_order(loss_fn, params(), batch_of(0, 1), at_once=["words"])
    assert found == ("layers/0", "layers/1", "norm", "head")


def test_a_cast_of_all_parameters_is_no_use():
    def loss(p, x):
        p = jax.tree.map(lambda w: w.astype(jnp.bfloat16).T, p)
        tied = p["a"] @ p["b"]  # waits for data
        return jnp.sum(x @ p["c"] @ tied)

    assert uses(loss, tree("a", "b", "c"), X) == ["c", "a", "b"]


def test_inside_of_jit_remat_and_functions_with_derivatives_of_their_own():
    @jax.custom_vjp
    def special(w, x):
        return x @ w

    special.defvjp(lambda w, x: (special(w, x), None), lambda _, g: (g, g))

    def loss(p, x):
        x = jax.jit(lambda w, x: jnp.tanh(x @ w))(p["d"], x)
        x = jax.checkpoint(lambda w, x: jnp.tanh(x @ w["c"]) @ w["b"])(p, x)
        x = special(p["e"], x)
        return jnp.sum(jax.nn.relu(x) @ p["a"])

    assert uses(loss, tree("a", "b", "c", "d", "e"), X) == ["d", "c", "b", "e", "a"]


def test_inside_of_scan_and_cond():
    """What is stacked over layers, what a body closes over, and what a carry begins as."""
    stacked = {"up": jax.ShapeDtypeStruct((2, 4, 4), jnp.float32), "down": None}
    stacked["down"] = stacked["up"]

    def loss(p, x):
        def layer(h, w):
            return jnp.tanh(h @ w["up"]) @ w["down"] @ p["shared"], None

        h, _ = lax.scan(jax.checkpoint(layer), x, p["layers"])
        swap = lambda h: h @ p["b"] @ p["a"]
        return jnp.sum(lax.cond(h[0, 0] > 0, swap, lambda h: h @ p["b"], h) @ p["end"])

    given = tree("a", "b", "end", "shared") | {"layers": stacked}
    want = ["layers/up", "layers/down", "shared", "b", "a", "end"]
    assert uses(loss, given, X) == want


def test_a_carry_that_begins_as_a_parameter_is_used_where_it_meets_data():
    def loss(p, xs):
        def cell(h, x):
            return jnp.tanh(h @ p["u"] + x @ p["w"]), None

        return jnp.sum(lax.scan(cell, p["h"], xs)[0] @ p["z"])

    given = tree("u", "w", "z") | {"h": jax.ShapeDtypeStruct((3, 4), jnp.float32)}
    xs = jax.ShapeDtypeStruct((5, 3, 4), jnp.float32)
    found = uses(loss, given, xs)
    assert set(found[:3]) == {"h", "u", "w"}
    assert found[3] == "z"


def test_a_carry_that_meets_data_in_a_later_turn_is_data():
    """What it is multiplied by is used in the loop, though not in its first turn."""

    def loss(p, xs):
        turn = lambda h, x: (x @ p["w"], h @ p["x"])
        return jnp.sum(lax.scan(turn, jnp.zeros((3, 4)), xs)[1] @ p["a"])

    xs = jax.ShapeDtypeStruct((5, 3, 4), jnp.float32)
    assert uses(loss, tree("a", "w", "x"), xs) == ["w", "x", "a"]


def test_what_is_never_used_comes_last():
    assert uses(lambda p, x: jnp.sum(x @ p["b"]), tree("a", "b", "c"), X) == [
        *("b", "a", "c")
    ]


def test_blocks_are_what_is_numbered_or_else_of_one_parent():
    paths = ["encoder/layers/0/attention/q", "encoder/layers/0/mlp", "encoder/norm/scale"]
    paths += ["encoder/layers/1/mlp", "conv_2/kernel", "head/bias", "head/kernel", "w1"]
    found = {block.name: block.paths for block in blocks.cut(paths, None)}
    assert found == {
        "encoder/layers/0": tuple(paths[:2]),
        "encoder/norm": ("encoder/norm/scale",),
        "encoder/layers/1": ("encoder/layers/1/mlp",),
        "conv_2": ("conv_2/kernel",),
        "head": ("head/bias", "head/kernel"),
        "w1": ("w1",),
    }


def test_a_leaf_beside_blocks_is_a_block_of_its_own_parent():
    """`decoder` holds a leaf and blocks, and has the leaf alone."""
    paths = ["decoder/cross/ask", "decoder/cross/tell", "decoder/scale", "scale"]
    found = {block.name: block.paths for block in blocks.cut(paths, None)}
    assert found == {
        "decoder/cross": ("decoder/cross/ask", "decoder/cross/tell"),
        "decoder": ("decoder/scale",),
        "scale": ("scale",),
    }


@pytest.mark.parametrize("as_function", [False, True])
def test_an_order_may_be_a_function_of_the_paths(as_function):
    order = ["words", "layers", "norm", "head"]
    given = (lambda paths: order) if as_function else order
    found = blocks.cut(["head/k", "layers/0", "norm", "words"], given)
    assert [block.name for block in found] == order


def test_half_a_step_of_ones_own_takes_the_order_that_was_found():
    tx = horizontal(optax.chain(sparsejax.dense_sync(), optax.sgd(0.1)))
    mesh, given = mesh_of(2), params()
    state = sparsejax.init(tx, given, mesh)
    specs = sparsejax.state_specs(state)
    order = find_order(loss_fn, given, batch_of(0, 1))
    same = jax.sharding.PartitionSpec()

    def begin(order, params, state):
        return tx.begin(params, state, order)[0]

    def run(order):
        call = functools.partial(begin, order)
        mapped = shard_map(call, mesh=mesh, in_specs=(same, specs), out_specs=same)
        return jax.make_jaxpr(mapped)(given, state)

    run(order)
    with pytest.raises(sparsejax.errors.ArgumentError, match="find_order"):
        run(None)
    with pytest.raises(sparsejax.errors.ArgumentError, match="the order is of the blocks"):
        run(order[1:])
