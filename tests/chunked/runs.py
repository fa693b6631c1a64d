"""Gradients by rank, and a few rounds of a chunked exchange on them in one program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import sparsejax
from tests import helpers


# With blocks of 8 x 8: whole ones, a matrix that 8 does not divide, vectors, a prime one, a
# scalar, and a stack of matrices.
SHAPES = {
    "whole": (24, 16),
    "odd": (14, 12),
    "vector": (40,),
    "prime": (13,),
    "scalar": (),
    "stack": (2, 8, 6),
}
K, CHUNK, RANKS, ROUNDS = 4, 64, 3, 5


def gradients(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    draw = lambda shape: rng.standard_normal((RANKS, ROUNDS, *shape)).astype(dtype)
    return {name: draw(shape) for name, shape in SHAPES.items()}


def uneven():
    """Weights [ranks, rounds], of which one is 0 in each of two rounds."""
    weights = np.random.default_rng(1).integers(1, 9, (RANKS, ROUNDS)).astype(np.float32)
    weights[1, 1] = weights[2, 3] = 0
    return weights


sync = functools.cache(sparsejax.chunked_sync)  # the same for the same options


@functools.cache
def _program(tx, check_vma, ranks):
    def on_rank(given):
        given = jax.tree.map(lambda x: x[0], given)
        params = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), given[0])

        def step(state, given):
            grads, weight = given
            extra = {} if weight is None else {"weight": weight}
            updates, state = tx.update(grads, state, params, **extra)
            return state, (updates, state)

        _, seen = jax.lax.scan(step, tx.init(params), given)
        return jax.tree.map(lambda x: x[None], seen)

    program = helpers.shard_map(
        on_rank,
        mesh=helpers.mesh_of(ranks),
        in_specs=P(helpers.AXIS),
        out_specs=P(helpers.AXIS),
        check_vma=check_vma,
    )
    return jax.jit(program)


def ran(tx, grads, weights=None, check_vma=True, ranks=RANKS):
    """The updates [ranks, rounds, ...] and the states after each round.

    What is compiled for one `sync` serves all that is given to it.
    """
    return jax.tree.map(np.asarray, _program(tx, check_vma, ranks)((grads, weights)))


@functools.cache
def rounds(values="2bit", over="senders", decay=1.0, weighted=False, **options):
    """The gradients, weights, updates and residuals by round of a few ranks."""
    grads, weights = gradients(), uneven() if weighted else None
    tx = sync(k=K, chunk=CHUNK, values=values, over=over, decay=decay, **options)
    updates, states = ran(tx, grads, weights)
    residuals = states.residual.value
    ones = np.ones((RANKS, ROUNDS))
    held = {name: np.swapaxes(x[:, :, 0], 0, 1) for name, x in residuals.items()}
    return grads, ones if weights is None else weights, updates, held
