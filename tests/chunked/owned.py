"""The exchange by owners in NumPy's float64, and a few rounds of it in one program."""

import functools
from typing import Any

import jax
import numpy as np

import sparsejax
from sparsejax.state.by_owner import ByOwner
from sparsejax.state.per_rank import find
from tests import helpers
from tests.chunked import reference, runs


# With blocks of 8 x 8, two leaves whose blocks are divided together, and runs of 8.
SHAPES = {"whole": (24, 16), "stack": (2, 8, 16), "vector": (40,)}
GROUPS = (("whole", "stack"), ("vector",))  # in the order of the tree: sorted names
PULL_K = 8


def gradients(ranks, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda shape: rng.standard_normal((ranks, runs.ROUNDS, *shape))
    return {name: draw(shape).astype(np.float32) for name, shape in SHAPES.items()}


def uneven(ranks):
    weights = np.random.default_rng(1).integers(1, 9, (ranks, runs.ROUNDS))
    weights[1, 1] = weights[0, 3] = 0
    return weights.astype(np.float32)


def blocks_of(shape):
    return reference.blocks_of(shape, runs.K, runs.CHUNK)[0]


def as_leaf(shape, blocks):
    """A leaf from its blocks [blocks, length], written entry by entry."""
    flat = np.zeros(int(np.prod(shape)))
    for places, block in zip(blocks_of(shape), blocks, strict=True):
        flat[places] = block
    return flat.reshape(shape)


def held_by_owners(held):
    """What owners hold, by leaf [rounds, ...], from arrays [ranks, rounds, 1, 1, c, L]."""
    found = {}
    groups = sorted(map(sorted, GROUPS), key=lambda names: names[0])
    for names, x in zip(groups, held, strict=True):
        x = np.swapaxes(np.asarray(x, np.float64)[:, :, 0, 0], 0, 1)
        x = x.reshape(len(x), -1, x.shape[-1])
        start = 0
        for name in names:
            count = len(blocks_of(SHAPES[name]))
            own = x[:, start : start + count]
            found[name] = np.stack([as_leaf(SHAPES[name], one) for one in own])
            start += count
        assert (x[:, start:] == 0).all()  # there are no such blocks
    return found


@functools.cache
def ran(ranks, values, over, decay, weighted):
    """Gradients, weights, updates by rank, and the states after each round."""
    grads, weights = gradients(ranks), uneven(ranks) if weighted else None
    by: dict[str, Any] = {"values": values, "over": over, "decay": decay, "via": "owners"}
    by |= {"k": runs.K, "chunk": runs.CHUNK, "pull_k": PULL_K}
    updates, states = runs.ran(sparsejax.chunked_sync(**by), grads, weights, ranks=ranks)
    weights = np.ones((ranks, runs.ROUNDS)) if weights is None else weights
    return grads, weights, updates, states


def rounds(*case):
    """Gradients, weights, updates, and what ranks and owners hold after each round."""
    grads, weights, updates, states = ran(*case)
    helpers.assert_same_on_all_ranks(updates)
    held = {k: np.swapaxes(x[:, :, 0], 0, 1) for k, x in states.residual.value.items()}
    (node,) = find(states, ByOwner)
    updates = jax.tree.map(lambda x: x[0], updates)
    return grads, weights, updates, held, held_by_owners(node.value)


def pulled(sums, quantized, ranks):
    """What owners send of sums by leaf: the largest of each block, in the codes given."""
    sent = {name: np.zeros(x.shape) for name, x in sums.items()}
    for names in GROUPS:
        of = [
            (name, places) for name in sorted(names) for places in blocks_of(SHAPES[name])
        ]
        length = len(of[0][1])
        kept = max(1, round(length * PULL_K / runs.CHUNK))
        kept = min(kept, length, ranks * max(1, round(length * runs.K / runs.CHUNK)))
        share = -(-len(of) // ranks)
        for owner in range(ranks):
            for name in sorted(names):
                chosen = []
                for one, places in of[owner * share : (owner + 1) * share]:
                    if one == name:
                        x = np.abs(sums[name].reshape(-1)[places])
                        order = np.argsort(-x, kind="stable")[:kept]
                        chosen.append(places[np.sort(order)])
                if chosen:
                    at = np.concatenate(chosen)
                    flat = sent[name].reshape(-1)
                    flat[at] = quantized(sums[name].reshape(-1)[at])
    return sent


def wanted(grads, weights, *, values, over, decay, ranks):
    """What each round returns, and what owners hold after it, by the formulas."""
    of_ranks: dict[str, Any] = {
        "k": runs.K,
        "chunk": runs.CHUNK,
        "values": values,
        "over": over,
    }
    means, _ = reference.rounds(grads, weights, decay=decay, **of_ranks)
    held = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    totals, after = [], []
    for turn in range(runs.ROUNDS):
        sums = {name: means[name][turn] + decay * held[name] for name in SHAPES}
        sent = pulled(sums, reference.QUANTIZED[values], ranks)
        held = {name: sums[name] - sent[name] for name in SHAPES}
        totals.append(sent)
        after.append(held)
    stacked = lambda rows: {name: np.stack([row[name] for row in rows]) for name in SHAPES}
    return stacked(totals), stacked(after)
