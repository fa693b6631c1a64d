"""The decoder on replicas of shards: equal losses, and what is sent where."""

import collections
import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax
from examples import decoder_hsdp
from examples.data.text import Corpus
from tests import helpers


# The shard of the embedding has 65,536 numbers, as many as are exchanged by the scheme.
WORDS, WIDTH, LAYERS, HEADS, LENGTH = 4_096, 32, 2, 2, 16
REPLICA, FSDP = frozenset({"replica"}), frozenset({"fsdp"})
FEW = 64  # Numbers of metrics and counts in one collective.


def decoder():
    return decoder_hsdp.Decoder(WORDS, WIDTH, LAYERS, HEADS, LENGTH, nnx.Rngs(0))


def drawn(count, seed=0):
    rng = np.random.default_rng(seed)
    shape = 16, LENGTH + 1
    return [(rng.zipf(1.3, shape) % WORDS).astype(np.int32) for _ in range(count)]


def trained(sync, mesh, steps):
    with jax.set_mesh(mesh):
        return decoder_hsdp.train(sync, decoder(), iter(drawn(steps)), mesh)


def placed(tokens, mesh):
    return jax.device_put(tokens, NamedSharding(mesh, P(mesh.axis_names)))


@functools.cache
def mesh_of_both():
    return helpers.grid(replica=4, fsdp=2)


@functools.cache
def ran(sync):
    """Three steps of the example: the step, its last arguments, and all types."""
    mesh = mesh_of_both()
    model, params = nnx.split(decoder(), nnx.Param)
    tx = optax.chain(decoder_hsdp.SYNCS[sync](), optax.adamw(1e-3))
    state = sparsejax.init(tx, params, axis_name="replica")
    step, types = decoder_hsdp.make_step(model, tx), []
    for tokens in drawn(3):
        tokens = placed(tokens, mesh)
        types.append([jax.typeof(x) for x in jax.tree.leaves((params, state))])
        # Nothing moves from device to device but by the step's own collectives.
        with jax.transfer_guard("disallow"):
            params, state, _ = step(params, state, tokens)
    types.append([jax.typeof(x) for x in jax.tree.leaves((params, state))])
    return step, (params, state, tokens), types


def difference(run, other):
    """The largest difference of a parameter."""
    pairs = zip(jax.tree.leaves(run.params), jax.tree.leaves(other.params), strict=True)
    return max(np.abs(a - b).max() for a, b in pairs)


@pytest.mark.slow
def test_zen_trains_as_jax_and_as_one_device(monkeypatch):
    """Up to the order in which sums are taken: some units in the last place of each.

    By SGD: Adam divides a gradient by its own magnitude, and would not see one of twice the
    size. On four shards: other tests of this file have two.
    """
    monkeypatch.setattr(decoder_hsdp, "adamw", lambda: optax.sgd(0.5))
    mesh = helpers.grid(replica=2, fsdp=4)
    dense, zen = (trained(sync, mesh, 10) for sync in ("dense", "zen"))
    for run in (zen, trained("dense", helpers.grid(replica=1, fsdp=1), 10)):
        np.testing.assert_allclose(run.losses, dense.losses, rtol=1e-5)
        assert difference(run, dense) < 1e-5
        assert run.replicas_equal
    assert zen.losses[-1] < zen.losses[0] - 1
    assert zen.sent["sync/dense_bytes"] == dense.sent["sync/wire_bytes"]
    table = "sync/words/embedding"
    assert zen.sent[f"{table}/wire_bytes"] < 0.3 * zen.sent[f"{table}/dense_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["zen", "dgc"])
def test_a_step_is_compiled_once_and_moves_nothing_else(sync):
    with jax.set_mesh(mesh_of_both()):
        step, _, types = ran(sync)
    assert all(later == types[0] for later in types)
    assert step._cache_size() == 1


@functools.cache
def collectives(sync):
    with jax.set_mesh(mesh_of_both()):
        step, given, _ = ran(sync)
        compiled = step.lower(*given).compile()
    return helpers.compiled_collectives(compiled, mesh_of_both()), given[0]


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["zen", "dgc"])
def test_gradients_are_scattered_over_the_fast_axis_once_and_exchanged_over_the_slow(sync):
    """On CPUs a reduce-scatter is an all-to-all and a sum."""
    found, params = collectives(sync)
    leaves = jax.tree.leaves(params)
    fast = [one for one in found if one.axes == FSDP]
    assert {one.path for one in fast} == {()}
    gathers = [one for one in fast if one.opcode == "all-gather"]
    # The forward pass gathers each parameter once, and no gradient is gathered.
    shapes = collections.Counter(one.arrays[0].shape for one in gathers)
    assert shapes == collections.Counter(x.shape for x in leaves)
    assert {one.operands for one in gathers} == {("parameter",)}
    scatters = [one for one in fast if one.opcode in ("all-to-all", "reduce-scatter")]
    sizes = collections.Counter(one.size for one in scatters)
    assert sizes == collections.Counter(x.size for x in leaves)
    rest = [one for one in fast if one not in gathers + scatters]
    assert {one.opcode for one in rest} <= {"all-reduce"}
    assert all(one.size <= FEW for one in rest)

    slow = [one for one in found if one.axes == REPLICA]
    shards = [x.size // 2 for x in leaves]
    small = sum(size for size in shards if size < 65_536)
    # Outside of branches, which depend on what there is to send: small leaves as one sum.
    always = [one for one in slow if not one.path]
    assert {one.opcode for one in always} == {"all-reduce"}
    assert small <= sum(one.size for one in always) <= small + FEW
    # Each array that a scheme sends is one of its own: a shard, or messages.
    tables = sum(size for size in shards if size >= 65_536)
    assert all(one.path[0] == "conditional" for one in slow if one.path)
    assert all(one.size <= tables for one in slow)
    # Counts that all devices agree on, and the loss.
    assert all(one.size <= FEW for one in found if one.axes > REPLICA)


@pytest.mark.slow
def test_the_command_line_shows_losses_and_bytes(monkeypatch, capsys):
    corpus = Corpus(np.concatenate(drawn(20)).ravel(), [], "", {})
    monkeypatch.setattr(decoder_hsdp.docstrings, "load", lambda words: corpus)
    monkeypatch.setattr(decoder_hsdp, "WORDS", WORDS)
    options = ["--replicas", "2", "--fsdp", "1", "--steps", "2", "--layers", "1"]
    run = decoder_hsdp.main([*options, "--sync", "dense"])["dense"]
    shown = capsys.readouterr().out
    assert f"dense  step    2  loss {run.losses[1]:.4f}" in shown
    size = sum(x.size for x in jax.tree.leaves(run.params))
    assert f"{4 * size:,} bytes across replicas a step, dense {4 * size:,}" in shown
    assert "times less than dense" in shown
    for wrong, sentence in [
        (["--fsdp", "3"], "--fsdp takes a divisor of 32, got 3"),
        (["--steps", "0"], "are at least 1"),
    ]:
        with pytest.raises(SystemExit):
            decoder_hsdp.main(wrong)
        assert sentence in capsys.readouterr().err
