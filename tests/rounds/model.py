"""A linear model on three ranks, its training by local steps, and the same in NumPy."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import sparsejax
from tests import helpers


RANKS, EVERY = 3, 4
SHAPES = {"w": (4, 3), "b": (3,)}


def first(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def batches(steps: int, dtype: Any = np.float32, examples: int = 2) -> list[Any]:
    """Of each step the examples of all ranks, one rank's after another's."""
    rng = np.random.default_rng(1)
    draw = lambda *shape: rng.normal(size=shape).astype(dtype)
    rows = RANKS * examples
    return [{"x": draw(rows, 4), "y": draw(rows, 3)} for _ in range(steps)]


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


class Trained(NamedTuple):
    """What became of a run; lists by step.

    Attributes:
        params: The anchors of all ranks, [ranks, ...].
        state: The last state.
        losses: The mean losses.
        step: The compiled step.
    """

    params: list[Any]
    state: Any
    losses: list[float]
    step: Any


def train(
    tx: optax.GradientTransformation,
    given: list[Any],
    *,
    check_vma: bool = True,
    start: Any = None,
    mesh: Any = None,
    watch: Callable[[Any], Any] = lambda state: None,
) -> Trained:
    """Trains in a `shard_map` of one's own, as the page shows it."""
    mesh = mesh or helpers.mesh_of(RANKS)
    dtype = given[0]["x"].dtype
    params = helpers.placed(first(dtype), mesh, P())
    state = sparsejax.init(tx, params, mesh, check_vma=check_vma)
    params, state = start or (params, state)
    specs = sparsejax.state_specs(state)

    def on_rank(params, state, batch):
        own = sparsejax.local(params, "data", state)
        loss, grads = jax.value_and_grad(loss_fn)(own, batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        # Each rank's copy, as it has it.
        copies = jax.tree.map(lambda x: x[None], helpers.WIRE.per_rank(params))
        return params, state, helpers.WIRE.psum(loss)[0] / RANKS, copies

    mapped = helpers.shard_map(
        on_rank,
        mesh=mesh,
        in_specs=(P(), specs, P("data")),
        out_specs=(P(), specs, P(), P("data")),
        check_vma=check_vma,
    )
    step, copies, losses = jax.jit(mapped), [], []
    for batch in given:
        params, state, loss, own = step(params, state, batch)
        copies.append(jax.tree.map(np.asarray, own))
        losses.append(float(loss))
        watch(state)
    return Trained(copies, state, losses, step)


# --- The same in NumPy, from the formulas.


class Sgd:
    """Momentum: m = mu m + g, and x = x - lr m."""

    def __init__(self, lr=0.05, mu=0.9):
        self.lr, self.mu, self.m = lr, mu, {}

    def __call__(self, name, x, g):
        self.m[name] = self.mu * self.m.get(name, 0) + g
        return x - self.lr * self.m[name]


class AdamW:
    """Kingma and Ba's moments, corrected for their start; decay beside the gradient."""

    def __init__(self, lr=0.02, b1=0.9, b2=0.999, eps=1e-8, decay=0.1):
        self.numbers, self.m, self.v, self.t = (lr, b1, b2, eps, decay), {}, {}, {}

    def __call__(self, name, x, g):
        lr, b1, b2, eps, decay = self.numbers
        t = self.t[name] = self.t.get(name, 0) + 1
        self.m[name] = b1 * self.m.get(name, 0) + (1 - b1) * g
        self.v[name] = b2 * self.v.get(name, 0) + (1 - b2) * g * g
        m, v = self.m[name] / (1 - b1**t), self.v[name] / (1 - b2**t)
        return x - lr * (m / (np.sqrt(v) + eps) + decay * x)


INNER = {
    "sgd": (lambda: optax.sgd(0.05, momentum=0.9), Sgd),
    "adamw": (lambda: optax.adamw(0.02, weight_decay=0.1), AdamW),
}


def gradient(params, x, y):
    """Of the mean of the squares, by hand."""
    error = 2 * (x @ params["w"] + params["b"] - y) / y.size
    return {"w": x.T @ error, "b": error.sum(0)}


def inner_round(anchor, optimizers, given):
    """Anchor minus parameters of each rank, after the steps of a round."""
    left = []
    for rank, optimizer in enumerate(optimizers):
        own = dict(anchor)
        for batch in given:
            rows = len(batch["x"]) // len(optimizers)
            part = slice(rank * rows, (rank + 1) * rows)
            grads = gradient(own, batch["x"][part], batch["y"][part])
            own = {name: optimizer(name, x, grads[name]) for name, x in own.items()}
        left.append({name: anchor[name] - own[name] for name in anchor})
    return left


def diloco(make, given, lr=0.7, beta=0.9, every=EVERY):
    """The anchors after each round, and the momentum."""
    anchor, optimizers = first(np.float64), [make() for _ in range(RANKS)]
    momentum, anchors = {name: 0.0 for name in anchor}, []
    for at in range(0, len(given), every):
        left = inner_round(anchor, optimizers, given[at : at + every])
        for name in anchor:
            mean = sum(one[name] for one in left) / RANKS
            momentum[name] = mean + beta * momentum[name]
            anchor[name] = anchor[name] - lr * (mean + beta * momentum[name])
        anchors.append(dict(anchor))
    return anchors, momentum
