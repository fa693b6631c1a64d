"""Casts between types of mesh axes: no work, and no end to a derivative."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import sparsejax
from pallas_kernels.types import as_invarying, as_varying, untyped, varying_axes
from sparsejax import schemes
from tests import helpers


AXES = frozenset(["data"])
X = jnp.array([2.0, 5.0])


def on_two_ranks(function):
    specs = {"in_specs": P("data"), "out_specs": P("data")}
    return jax.jit(helpers.shard_map(function, mesh=helpers.mesh_of(2), **specs))


def test_a_derivative_goes_through_a_cast():
    def cube(x):
        return as_varying(as_invarying(x**3, AXES), AXES)

    _, tangents = on_two_ranks(lambda x: jax.jvp(cube, (x,), (x,)))(X)
    np.testing.assert_allclose(tangents, 3 * X**3)


def test_a_loss_may_have_an_exchange_in_it():
    """Such as one that looks at its own update; no derivative comes out of that."""
    tx = sparsejax.sync(schemes.BalancedParallelism(), "data")

    def step(x):
        state = tx.init({"embedding": jnp.zeros((4096, 16))})

        def loss(x):
            grads = {"embedding": jnp.ones((4096, 16)) * x}
            return x[0] ** 2, tx.update(grads, state)[0]

        return jax.grad(jax.checkpoint(loss), has_aux=True)(x)[0]

    assert jax.eval_shape(on_two_ranks(step), X).shape == X.shape


def test_a_function_without_types_is_traced_once_and_its_results_vary_as_before():
    seen = []

    @untyped
    @jax.jit
    def doubled(x, y):
        seen.append(varying_axes(x) | varying_axes(y))
        return x + y

    def run(x):
        same = jnp.ones(1)
        results = doubled(x, same), doubled(same, x), doubled(same, same)
        assert [varying_axes(result) for result in results] == [AXES, AXES, frozenset()]
        return sum(results)

    np.testing.assert_array_equal(on_two_ranks(run)(X), 2 * X + 4)
    assert seen == [frozenset()]
