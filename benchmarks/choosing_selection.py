"""How many Ok-Topk chooses, and how far from the true top-k of the sum it is (xi).

A training step of its own returns what each rank had due and what was applied, and NumPy
counts. Beside the numbers that the scheme chose stand those that Gaussian-k would have
chosen of the same: with its threshold as it is estimated, and as it is then moved.
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
from benchmarks.record import say
from benchmarks.training_tasks import RANKS, Task, mesh
from sparsejax import sparsifiers
from sparsejax.schemes.top_k.ok_topk import OkTopk, OkTopkState
from sparsejax.sparsifiers.base import Draw
from sparsejax.transforms.state.per_rank import SyncState
from sparsejax.units import magnitudes


SETTLED = 64  # steps after which thresholds are taken to have settled
COUNTS = ("local", "total", "gaussian", "gaussian, moved")


class Seen(NamedTuple):
    """One step.

    Attributes:
        before: The synchronization's state.
        after: The same after it.
        due: By rank, the gradient and what waited.
        mean: The mean gradient.
        applied: What the optimizer is given.
    """

    before: SyncState
    after: SyncState
    due: np.ndarray
    mean: np.ndarray
    applied: np.ndarray


def flat(tree, like) -> jax.Array:
    """The leaves of a tree that in another are not masked, end to end."""
    masked = lambda node: isinstance(node, optax.MaskedNode)
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(like, is_leaf=masked), strict=True)
    return jnp.concatenate([x.reshape(-1) for x, held in pairs if not masked(held)])


def watched(task: Task, sync, optimizer):
    """A step that also returns what was due by rank, the mean gradient, and the update."""

    def step(params, own, rest, batch):
        grads = jax.grad(task.loss)(sparsejax.local(params, "data"), batch)
        updates, after = sync.update(grads, own)
        held = own.residual.value
        kept = jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(held)])
        gradient = flat(grads, held)
        mean = lax.psum(gradient, "data") / RANKS
        applied = flat(updates, held)
        updates, rest = optimizer.update(updates, rest, params)
        params = optax.apply_updates(params, updates)
        return (params, after, rest), ((gradient + kept)[None], mean, applied)

    def run(params, batches):
        own, rest = sparsejax.init(sync, params, mesh()), optimizer.init(params)
        specs = (P(), sparsejax.state_specs(own), P())
        sharded = jax.shard_map(
            step,
            mesh=mesh(),
            in_specs=(*specs, P("data")),
            out_specs=(specs, (P("data"), P(), P())),
        )
        compiled = jax.jit(sharded)
        carry = (params, own, rest)
        for batch in batches:
            before = carry[1]
            carry, seen = compiled(*carry, batch)
            yield Seen(before, carry[1], *map(np.asarray, seen))

    return run


@functools.partial(jax.jit, static_argnums=1)
def gaussian(x, density):
    """How many Gaussian-k would choose, as estimated and once its threshold was moved."""
    of = sparsifiers.GaussianK(density)
    k = math.ceil(density * x.size)
    draw = Draw(jnp.int32(0), jnp.uint32(0), jnp.int32(k))
    level, _ = of.level(x, (), draw)
    moved = magnitudes.count(x, of.settled(x, level, draw))
    return magnitudes.count(x, level), jnp.minimum(moved, of.capacity(x.size))


def local(scheme: OkTopk, before: OkTopkState, due, k: int) -> tuple[np.ndarray, float]:
    """How many each rank chose, and the share of ranks that found them exactly."""
    above = (np.abs(due) >= np.asarray(before.thresholds)[:, None]).sum(1)
    found = np.full(len(above), int(before.step) % scheme.threshold_every == 0)
    if scheme.power is not None:
        most = math.ceil((1 + scheme.slack) * k)
        found |= (above > most) | (above < (1 - scheme.slack) * k)
    return np.where(found, k, above), float(found.mean())


def counts(seen: Seen, scheme, density: float) -> dict[str, float]:
    """What is told of one step, counts as shares of k."""
    n, size = seen.due.shape
    k = math.ceil(density * size)
    total = seen.due.sum(0, dtype=np.float64) / n
    best = np.argpartition(-np.abs(total), k)[:k]
    off = -seen.applied.astype(np.float64)
    off[best] += total[best]
    row = {
        "total": np.count_nonzero(seen.applied) / k,
        "xi": np.linalg.norm(off) / np.linalg.norm(seen.mean),
    }
    estimated = np.array([gaussian(x, density) for x in seen.due]) / k
    row["gaussian"], row["gaussian, moved"] = estimated.mean(0)
    if isinstance(scheme, OkTopk):
        own = {name: getattr(x, "value", x) for name, x in seen.before.schemes.items()}
        (name,) = [name for name, x in own.items() if isinstance(x, OkTopkState)]
        # Alike on all ranks.
        before = jax.tree.map(lambda x: np.asarray(x)[0], own[name])
        chosen, found = local(scheme, before, seen.due, k)
        # The scheme's own count: of the rank with most of them.
        fullest = float(seen.after.traffic[name].density_before) * size
        if abs(fullest - chosen.max()) > 0.01 * k:
            raise ValueError(f"{chosen.max()} are counted, the scheme says {fullest}.")
        row["local"], row["found"] = chosen.mean() / k, found
        # A threshold that was not found exactly hardly ever lets through exactly k.
        row["total found"] = row["total"] == 1
    return {name: float(value) for name, value in row.items()}


def deviation(rows: list[dict[str, float]], name: str) -> float:
    """By how much counts are off k on average, once thresholds have settled."""
    return float(np.mean([abs(row[name] - 1) for row in rows[SETTLED:]]))


def watch(task: Task, scheme, rules, optimizer, steps: int) -> dict:
    """One run: a list by step for each number, and what they come to."""
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
