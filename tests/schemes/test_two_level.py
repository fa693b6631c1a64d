"""Dense sums inside a host, a sparse scheme across hosts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import errors, schemes
from sparsejax.units.dense import Dense
from tests import helpers


OUTER, INNER = 4, 2
SIZE = 40_000


def mesh():
    return helpers.grid(hosts=OUTER, chips=INNER)


@functools.cache
def program(scheme, check_vma):
    def run(x):
        state = helpers.init(scheme, x[0], ("hosts", "chips"))
        done = helpers.call(scheme, x[0], state, ("hosts", "chips"))
        return done.total[None], done.total, done.traffic

    step = helpers.shard_map(
        run,
        mesh=mesh(),
        in_specs=P(("hosts", "chips")),
        out_specs=(P(("hosts", "chips")), P(), P()),
        check_vma=check_vma,
    )
    return jax.jit(step)


def inputs(size, kind="spread", shape=(), dtype=np.float32):
    rng = np.random.default_rng(5)
    x = rng.integers(1, 5, (OUTER * INNER, size, *shape)).astype(dtype)
    mask = rng.random((OUTER * INNER, size)) < 0.01
    if kind == "one range":
        mask = np.broadcast_to(np.arange(size) < size // 50, mask.shape)
    return x * mask.reshape(*mask.shape, *[1] * len(shape)).astype(dtype)


@pytest.mark.parametrize(
    ("scheme", "size", "shape", "dtype", "check_vma"),
    [
        (schemes.TwoLevel(schemes.Zen()), SIZE, (), np.float32, True),
        *helpers.slow((schemes.TwoLevel(schemes.SparCML()), 517, (8,), np.float32, False)),
    ],
    ids=["zen", "rows"],
)
def test_the_total_is_the_sum_over_both_axes(scheme, size, shape, dtype, check_vma):
    x = inputs(size, shape=shape, dtype=dtype)
    by_rank, total, _ = program(scheme, check_vma)(x)
    np.testing.assert_array_equal(
        np.asarray(total).astype(np.float64), x.astype(np.float64).sum(0)
    )
    helpers.assert_same_on_all_ranks(by_rank)


def test_an_empty_array_has_an_empty_sum():
    _, total, _ = program(schemes.TwoLevel(schemes.Zen()), True)(
        np.zeros((8, 0), np.float32)
    )
    assert total.shape == (0,)


def test_dense_bytes_stay_inside_and_entries_go_across():
    x = inputs(SIZE)
    _, _, traffic = program(schemes.TwoLevel(schemes.Zen()), True)(x)
    shard = 20_000
    assert float(traffic.inside) == pytest.approx(4 * shard * 2 * (INNER - 1), rel=0.01)
    # An all-reduce of a part over the hosts; the sparse scheme sends far less.
    assert float(traffic.dense) == pytest.approx(1.5 * 4 * shard, rel=0.01)
    assert float(traffic.wire) < 0.2 * float(traffic.dense)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "levels", "room"),
    [({"two_level": False}, 1, 1e-6), ({"wire_dtype": jnp.bfloat16}, 2, 2e-2)],
    ids=["one", "two, narrow"],
)
def test_a_pair_of_axes_is_two_levels_in_sync(options, levels, room):
    x = {"embedding": inputs(SIZE // 8, shape=(16,))}
    pair = ("hosts", "chips")
    tx = sparsejax.zen_sync(pair, **options)

    def step(x):
        local = jax.tree.map(lambda g: g[0], x)
        mean, state = tx.update(local, tx.init({"embedding": jnp.zeros((SIZE // 8, 16))}))
        return mean, sparsejax.metrics(state)

    run = helpers.shard_map(step, mesh=mesh(), in_specs=P(pair), out_specs=(P(), P()))
    mean, metrics = jax.jit(run)(x)
    want = x["embedding"].astype(np.float64).mean(0)
    np.testing.assert_allclose(mean["embedding"], want, rtol=room)
    assert (metrics["sync/embedding/inside_bytes"] > 0) == (levels == 2)


def test_ranks_of_a_host_agree_on_what_was_sent_once_a_step():
    """Their parts differ, and what a state has of them is the largest."""
    tx = sparsejax.zen_sync(("hosts", "chips"), rules={"": "row"})
    params = {name: jnp.zeros((SIZE // 8, 16)) for name in ("one", "two")}
    params["two"] = params["two"].astype(jnp.bfloat16)

    def step(grads):
        return tx.update(jax.tree.map(lambda g: g[0], grads), tx.init(params))[1]

    by_rank = P(("hosts", "chips"))
    mapped = helpers.shard_map(step, mesh=mesh(), in_specs=(by_rank,), out_specs=P())
    zeros = lambda x: np.zeros((OUTER * INNER, *x.shape), x.dtype)
    program = jax.make_jaxpr(mapped)(jax.tree.map(zeros, params))
    numbers = 13 * len(params)
    agreed = helpers.Collective("pmax", 4 * numbers)
    assert helpers.collectives(program).count(agreed) == 1


def test_tables_by_rank_are_made_for_the_outer_axis():
    """A scheme with tables learns from `sparsejax.init` how many hosts there are."""
    params = {"embedding": jnp.zeros((SIZE // 8, 16))}
    scheme = schemes.BalancedParallelism(ownership=sparsejax.units.ownership.MurmurHash())
    tx = optax.chain(sparsejax.sync(scheme, ("hosts", "chips")), optax.sgd(1.0))
    state = sparsejax.init(tx, params, mesh(), ("hosts", "chips"))
    tables = state[0].inner.schemes["embedding"]
    assert tables.shape[0] == OUTER


def test_what_cannot_be_two_level_is_refused():
    with pytest.raises(errors.ArgumentError, match="scheme for one level"):
        schemes.TwoLevel(schemes.TwoLevel(schemes.Zen()))
    tx = sparsejax.sync(schemes.TwoLevel(schemes.Zen()), "data")
    init = lambda x: tx.init({"embedding": helpers.parameters(x)}).step
    with pytest.raises(errors.AxisError, match="two axes"):
        helpers.run_ranks(init, np.zeros((2, 9000, 8), np.float32), 2)
    with pytest.raises(errors.AxisError, match="two axes"):
        helpers.run_ranks(
            lambda x: helpers.call(schemes.TwoLevel(schemes.Zen()), x).total,
            np.zeros((2, 64), np.float32),
            2,
        )


@pytest.mark.slow
def test_owners_across_hosts_are_balanced_for_sets_in_one_range():
    """The units of a part would share an owner, were both hashes the same."""
    size = 65_536
    scheme = schemes.TwoLevel(schemes.BalancedParallelism())

    def run(x):
        return helpers.call(
            scheme, x[0], helpers.init(scheme, x[0], ("hosts", "chips")), ("hosts", "chips")
        ).traffic

    specs = {"in_specs": P(("hosts", "chips")), "out_specs": P()}
    step = helpers.shard_map(run, mesh=mesh(), **specs)
    x = np.zeros((8, size), np.float32)
    x[:, :4096] = np.random.default_rng(0).random((8, 4096)) < 0.25
    traffic = jax.jit(step)(x)
    assert float(traffic.push.imbalance) < 1.3
    assert float(traffic.pull.imbalance) < 1.3


@dataclasses.dataclass(frozen=True)
class KeepsHalf(schemes.Scheme):
    """Sends half of every number and keeps the other half."""

    def __call__(self, x, state, wire):
        half = x.dense() / 2
        return schemes.AllReduce()(Dense(half), state, wire)._replace(left=half)


def test_what_the_scheme_across_keeps_back_is_kept_at_its_units():
    scheme = schemes.TwoLevel(KeepsHalf())
    x = 2 * inputs(3001)

    def run(x):
        done = helpers.call(scheme, x[0], (), ("hosts", "chips"))
        return done.total, done.left[None]

    both = P(("hosts", "chips"))
    step = helpers.shard_map(run, mesh=mesh(), in_specs=both, out_specs=(P(), both))
    total, kept = jax.jit(step)(x)
    np.testing.assert_array_equal(total, x.sum(0) / 2)
    np.testing.assert_array_equal(total + np.asarray(kept).sum(0), x.sum(0))
