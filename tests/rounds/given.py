"""Training by gradients that are given, of each rank and step, in one program."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from sparsejax.state.per_rank import find
from sparsejax.transforms.feedback import FeedbackState
from tests import helpers


RANKS, STEPS = 3, 5


def drawn(shapes: Any, steps: int = STEPS, seed: int = 0) -> dict[str, np.ndarray]:
    """Gradients [ranks, steps, ...]."""
    rng = np.random.default_rng(seed)
    draw = lambda shape: rng.standard_normal((RANKS, steps, *shape)).astype(np.float32)
    return {name: draw(shape) for name, shape in shapes.items()}


def parameters(shapes: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def trained(
    tx: optax.GradientTransformation, params: Any, grads: Any, check_vma: bool = True
) -> Any:
    """The parameters of all ranks after each step [ranks, steps, ...], and the state."""

    def on_rank(given):
        def step(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        given = jax.tree.map(lambda x: x[0], given)
        start = jax.tree.map(jnp.asarray, params)
        (_, state), seen = jax.lax.scan(step, (start, tx.init(start)), given)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], (seen, state))

    program = helpers.shard_map(
        on_rank,
        mesh=helpers.mesh_of(RANKS),
        in_specs=P(helpers.AXIS),
        out_specs=P(helpers.AXIS),
        check_vma=check_vma,
    )
    return jax.tree.map(np.asarray, jax.jit(program)(grads))


def held(state: Any) -> dict[str, np.ndarray]:
    """The residuals of all ranks at the end, [ranks, ...]."""
    (residual,) = [x.residual for x in find(state, FeedbackState) if x.residual is not None]
    return {name: x[:, 0] for name, x in residual.value.items()}
