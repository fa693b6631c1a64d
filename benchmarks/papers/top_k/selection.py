"""The numbers that Ok-Topk chooses, and their distance from the true top-k of the sum (xi).

A training step returns each rank's accumulated gradient and the update that was applied,
and NumPy counts. Beside the numbers that the scheme chose stand those that Gaussian-k would
have chosen of the same: with its threshold as it is estimated, and as it is then moved.
"""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import sparsejax
from benchmarks.harness.record import say
from benchmarks.training.tasks import RANKS, Task, mesh
from sparsejax import sparsifiers
from sparsejax.schemes.base import Traffic
from sparsejax.schemes.top_k.ok_topk import OkTopk, OkTopkState
from sparsejax.sparsifiers.base import Draw
from sparsejax.transforms.feedback import FeedbackState
from sparsejax.units.selection import magnitudes


SETTLED = 64  # steps after which thresholds are taken to have settled
COUNTS = ("local", "total", "gaussian", "gaussian, moved")


class Seen(NamedTuple):
    """One step.

    Attributes:
        before: The synchronization's state before the step.
        after: Its state after the step.
        accumulated: By rank, the accumulated gradient: the gradient and the residual.
        mean: The mean gradient.
        applied: The update that the optimizer is given.
    """

    before: FeedbackState
    after: FeedbackState
    accumulated: np.ndarray
    mean: np.ndarray
    applied: np.ndarray


def flat(tree, like) -> jax.Array:
    """The leaves of a tree that are not masked in another, end to end."""
    masked = lambda node: isinstance(node, optax.MaskedNode)
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(like, is_leaf=masked), strict=True)
    return jnp.concatenate([x.reshape(-1) for x, leaf in pairs if not masked(leaf)])


def watched(task: Task, sync, optimizer):
    """A run that also yields the accumulated gradients, their mean, and the updates."""

    def step(params, before, opt_state, batch):
        grads = jax.grad(task.loss)(sparsejax.local(params, "data"), batch)
        updates, after = sync.update(grads, before)
        residuals = before.residual.value
        residual = jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(residuals)])
        gradient = flat(grads, residuals)
        mean = lax.psum(gradient, "data") / RANKS
        applied = flat(updates, residuals)
        updates, opt_state = optimizer.update(updates, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, after, opt_state), ((gradient + residual)[None], mean, applied)

    def run(params, batches):
        state, opt_state = sparsejax.init(sync, params, mesh()), optimizer.init(params)
        specs = (P(), sparsejax.state_specs(state), P())
        sharded = jax.shard_map(
            step,
            mesh=mesh(),
            in_specs=(*specs, P("data")),
            out_specs=(specs, (P("data"), P(), P())),
        )
        compiled = jax.jit(sharded)
        carry = (params, state, opt_state)
        for batch in batches:
            before = carry[1]
            carry, seen = compiled(*carry, batch)
            yield Seen(before, carry[1], *map(np.asarray, seen))

    return run


@functools.partial(jax.jit, static_argnums=1)
def gaussian(x, density):
    """The numbers that Gaussian-k would choose, with its estimate and with it moved."""
    sparsifier = sparsifiers.GaussianK(density)
    k = math.ceil(density * x.size)
    draw = Draw(jnp.int32(0), jnp.uint32(0), jnp.int32(k))
    level, _ = sparsifier.level(x, (), draw)
    moved = magnitudes.count(x, sparsifier.settled(x, level, draw))
    return magnitudes.count(x, level), jnp.minimum(moved, sparsifier.capacity(x.size))


def local(
    scheme: OkTopk, before: OkTopkState, accumulated, k: int
) -> tuple[np.ndarray, float]:
    """The counts that ranks chose, and the share of ranks that searched for exactly k."""
    above = (np.abs(accumulated) >= np.asarray(before.thresholds)[:, None]).sum(1)
    exact = np.full(len(above), int(before.step) % scheme.threshold_every == 0)
    if scheme.power is not None:
        most = math.ceil((1 + scheme.slack) * k)
        exact |= (above > most) | (above < (1 - scheme.slack) * k)
    return np.where(exact, k, above), float(exact.mean())


def counts(seen: Seen, scheme, density: float) -> dict[str, float]:
    """The numbers of one step: counts as shares of k, and xi."""
    n, size = seen.accumulated.shape
    k = math.ceil(density * size)
    total = seen.accumulated.sum(0, dtype=np.float64) / n
    best = np.argpartition(-np.abs(total), k)[:k]
    off = -seen.applied.astype(np.float64)
    off[best] += total[best]
    row = {
        "total": np.count_nonzero(seen.applied) / k,
        "xi": np.linalg.norm(off) / np.linalg.norm(seen.mean),
    }
    estimated = np.array([gaussian(x, density) for x in seen.accumulated]) / k
    row["gaussian"], row["gaussian, moved"] = estimated.mean(0)
    if isinstance(scheme, OkTopk):
        states = {
            name: getattr(x, "value", x) for name, x in seen.before.inner.schemes.items()
        }
        (name,) = [name for name, x in states.items() if isinstance(x, OkTopkState)]
        # Equal on all ranks.
        before = jax.tree.map(lambda x: np.asarray(x)[0], states[name])
        chosen, exact = local(scheme, before, seen.accumulated, k)
        # The count of the scheme itself: of the rank with most of them.
        traffic = Traffic.of_one(seen.after.inner.traffic[name])
        fullest = float(traffic.density_before) * size
        if abs(fullest - chosen.max()) > 0.01 * k:
            raise ValueError(f"{chosen.max()} are counted, the scheme says {fullest}.")
        row["local"], row["found"] = chosen.mean() / k, exact
        # A threshold that was not found exactly hardly ever lets through exactly k.
        row["total found"] = row["total"] == 1
    return {name: float(value) for name, value in row.items()}


def deviation(rows: list[dict[str, float]], name: str) -> float:
    """The mean distance of counts from k, once thresholds have settled."""
    return float(np.mean([abs(row[name] - 1) for row in rows[SETTLED:]]))


def watch(task: Task, scheme, rules, optimizer, steps: int) -> dict:
    """One run: each number by step, its mean distance from k, and its mean."""
    batches = itertools.islice(task.batches(0), steps)
    sync = sparsejax.sync(scheme, rules=rules, two_level=False)
    rows = [
        counts(seen, scheme, scheme.density)
        for seen in watched(task, sync, optimizer)(task.init(0), batches)
    ]
    off = {name: deviation(rows, name) for name in COUNTS if name in rows[0]}
    say("    off k by " + ", ".join(f"{name} {x:.1%}" for name, x in off.items()))
    settled = lambda name: float(np.mean([row[name] for row in rows[SETTLED:]]))
    means = {name: settled(name) for name in rows[0]}
    say("    mean " + ", ".join(f"{name} {x:.2f}" for name, x in means.items()))
    by_step = {name: [round(row[name], 4) for row in rows] for name in rows[0]}
    return {"by_step": by_step, "off": off, "means": means}
