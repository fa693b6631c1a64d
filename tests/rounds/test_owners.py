"""Local steps by way of owners, on axes of every kind."""

from typing import Any

import numpy as np
import optax
import pytest

import sparsejax
from sparsejax.state.by_owner import ByOwner
from sparsejax.state.per_rank import find
from tests import helpers
from tests.rounds import model, test_in_jit
from tests.rounds.model import RANKS


BLOCKS: dict[str, Any] = {"k": 2, "chunk": 4, "via": "owners", "pull_k": 2}


def made(axis_name=None, **options):
    """Half of each block from each rank, in float32, and half of each sum comes back."""
    sync = sparsejax.chunked_sync(axis_name, values="float32", **BLOCKS)
    options = {"every": 2, "outer": optax.sgd(0.5)} | options
    return sparsejax.local_steps(
        optax.adamw(0.02), sync=sync, axis_name=axis_name, **options
    )


@pytest.fixture(scope="module")
def alone():
    return model.train(made(), model.batches(6))


def test_owners_hold_what_the_anchor_has_not_moved_by(alone):
    (held,) = find(alone.state, ByOwner)
    assert any(np.asarray(x).any() for x in held.value)
    for own in alone.params:
        helpers.assert_same_on_all_ranks(own)


@pytest.mark.slow
def test_an_unchecked_step_has_the_same_bytes(alone):
    unchecked = model.train(made(), model.batches(6), check_vma=False)
    assert helpers.octets(unchecked.params[-1]) == helpers.octets(alone.params[-1])
    assert helpers.octets(unchecked.state) == helpers.octets(alone.state)


@pytest.mark.slow
def test_under_jit_shards_have_owners_of_their_own():
    """On Auto axes; on explicit ones they go to other replicas, below."""
    run = test_in_jit.Run(made("replica"), "auto")
    losses = run.train(model.batches(6))
    assert losses[-1] < losses[0]
    sparsejax.check_replicas((run.params, run.state))
    held = [x.shape[:2] for node in find(run.state, ByOwner) for x in node.value]
    assert held == [(RANKS, 2)] * 2  # blocks of two lengths, of two shards


@pytest.mark.slow
def test_fragments_have_owners_each():
    run = model.train(made(fragments=2), model.batches(6))
    assert len(find(run.state, ByOwner)) == 2
    for own in run.params:
        helpers.assert_same_on_all_ranks(own)


@pytest.mark.slow
def test_what_owners_and_ranks_hold_goes_to_other_replicas(tmp_path):
    run = test_in_jit.Run(made("replica"), "explicit")
    run.train(model.batches(3))
    sparsejax.save(tmp_path / "run", {"params": run.params, "state": run.state})
    more = test_in_jit.Run(made("replica"), "explicit", replicas=4)
    like = {"params": more.params, "state": more.state}
    found = sparsejax.restore(tmp_path / "run", like)
    for before, after in zip(
        find(run.state, ByOwner), find(found["state"], ByOwner), strict=True
    ):
        for x, y in zip(before.value, after.value, strict=True):
            old, new = map(by_shard, (x, y))
            rows = min(old.shape[1], new.shape[1])
            np.testing.assert_array_equal(old[:, :rows], new[:, :rows])
            assert not old[:, rows:].any()
            assert not new[:, rows:].any()
    for name, x in run.params.items():
        np.testing.assert_array_equal(found["params"][name], x)
        mean = np.asarray(run.state.offset.value[name], np.float64).mean(0)
        offset = found["state"].offset.value[name]
        np.testing.assert_allclose(offset, np.stack([mean] * 4), rtol=1e-6, atol=1e-9)
        wanted = more.state.offset.value[name].sharding
        assert offset.sharding.is_equivalent_to(wanted, offset.ndim)
        assert mean.any()


def by_shard(held):
    """What owners [ranks, shards, blocks, length] hold of each shard, block by block."""
    return np.moveaxis(np.asarray(held), 1, 0).reshape(held.shape[1], -1, held.shape[-1])
