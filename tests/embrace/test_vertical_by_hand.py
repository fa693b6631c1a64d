"""Vertical scheduling in a `shard_map` of one's own, and what is wrong with its input."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import embrace, schemes
from sparsejax.embrace import ColumnTable, column_lookup, lookahead, rows_held
from sparsejax.errors import ArgumentError, AxisError, LeafError, StateError
from tests.helpers import mesh_of, shard_map


HEIGHT, DIM, SHARE, STEPS = 24, 5, 4, 4


def params(n, dim=DIM):
    rng = np.random.default_rng(0)
    table = rng.normal(size=(HEIGHT, dim)).astype(np.float32)
    return {"users": ColumnTable.of(table, mesh_of(n)), "bias": jnp.zeros(dim)}


def batch_of(step, n):
    rng = np.random.default_rng(step)
    ids = rng.integers(-2, HEIGHT + 2, (n * SHARE, 2)).astype(np.int32)
    return {"ids": ids, "y": rng.normal(size=(n * SHARE, DIM)).astype(np.float32)}


def loss_fn(params, batch):
    """Reads the table twice, once of it in a loop; its gradient is that of a linear one."""
    read = lambda ids: column_lookup(params["users"], ids, fill_value=0)
    first = read(batch["ids"][:, 0])
    halves = batch["ids"][:, 1].reshape(2, -1)
    _, second = jax.lax.scan(lambda carry, ids: (carry, read(ids)), 0, halves)
    vectors = first + second.reshape(first.shape) + params["bias"]
    return jnp.mean(jnp.sum(vectors * batch["y"], axis=1))


SGD = sparsejax.lazy(optax.sgd(0.1))


@functools.cache
def step_of(n, check):
    """A step of params, state, batch and ids, a flush, and the chain's first state."""
    tx = optax.chain(sparsejax.embrace_sync(), SGD)
    state = sparsejax.init(tx, params(n), mesh_of(n), check_vma=check)
    specs = sparsejax.state_specs((params(n), state))

    def step(params, state, batch, following):
        local = sparsejax.local(params)
        loss, grads = embrace.value_and_grad(loss_fn)(local, batch)
        ids = embrace.rows_read(loss_fn)(local, following)
        updates, state = tx.update(grads, state, params, next_ids=ids)
        loss = jax.lax.pmean(loss, "data")
        return sparsejax.apply_updates(params, updates), state, loss

    wrap = functools.partial(shard_map, mesh=mesh_of(n), check_vma=check)
    both = P("data"), P("data")
    run = jax.jit(wrap(step, in_specs=(*specs, *both), out_specs=(*specs, P())))
    flush = lambda params, state: embrace.flush(params, state, SGD)
    flush = jax.jit(wrap(flush, in_specs=specs, out_specs=specs))
    return run, flush, state


def run_of(n, check, told=1):
    """A run whose steps are told the batch so many steps ahead, and a flush behind it.

    Returns the losses, how many rows were held back, what there was before the flush, and
    what after it.
    """
    step, flush, state = step_of(n, check)
    ours, losses, held = params(n), [], []
    for at in range(STEPS):
        ours, state, loss = step(ours, state, batch_of(at, n), batch_of(at + told, n))
        losses.append(loss)
        held.append(int(rows_held(state)["users"].sum()))
    return losses, held, (ours, state), flush(ours, state)


def sgd_by_hand(n):
    """The losses and the table of `STEPS` steps of SGD, with the gradient written out."""
    table, bias = np.asarray(params(n)["users"].whole()), np.zeros(DIM)
    losses = []
    for step in range(STEPS):
        batch = batch_of(step, n)
        ids, y = batch["ids"], batch["y"]
        ids = np.where(ids < 0, ids + HEIGHT, ids)
        vectors = np.where(ids[..., None] < HEIGHT, table[ids % HEIGHT], 0).sum(1)
        losses.append(np.sum((vectors + bias) * y) / len(y))
        moved = np.zeros((2 * HEIGHT, DIM))
        for at in (0, 1):
            np.add.at(moved, ids[:, at], y / len(y))
        table, bias = table - 0.1 * moved[:HEIGHT], bias - 0.1 * y.mean(0)
    return losses, table, bias


@pytest.mark.slow
@pytest.mark.parametrize("check", [True, False])
def test_it_is_sgd_by_hand(check):
    n = 2
    losses, held, (ours, _), (flushed, emptied) = run_of(n, check)
    want, table, bias = sgd_by_hand(n)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    close(losses, want)
    assert min(held) > 0
    assert np.abs(ours["users"].whole() - table).max() > 0.01
    close(flushed["users"].whole(), table)
    close(flushed["bias"], bias)
    assert not rows_held(emptied)["users"].any()


@pytest.mark.slow
def test_rows_of_another_batch_than_was_told_are_counted_and_none_is_lost():
    n = 2
    _, held, (_, state), (flushed, _) = run_of(n, check=False, told=2)
    assert min(held) > 0
    assert state[0].stale > 0
    _, table, _ = sgd_by_hand(n)
    np.testing.assert_allclose(flushed["users"].whole(), table, rtol=1e-5, atol=1e-6)


# --- Bad input.


@functools.cache
def chain(**options):
    return optax.chain(sparsejax.embrace_sync(**options), SGD)


def traced(n=2, tx=None, state=None, take=None, given=None, **extra):
    """Traces one update of a chain."""
    tx, given = tx or chain(), given or params(n)
    state = sparsejax.init(tx, given, mesh_of(n)) if state is None else state
    specs = sparsejax.state_specs((given, state))

    def step(params, state, batch):
        grads = (take or embrace.value_and_grad)(loss_fn)(sparsejax.local(params), batch)
        grads = grads[1] if isinstance(grads, tuple) else grads
        updates, state = tx.update(grads, state, params, **extra)
        return sparsejax.apply_updates(params, updates), state

    run = shard_map(step, mesh=mesh_of(n), in_specs=(*specs, P("data")), out_specs=specs)
    return jax.eval_shape(run, given, state, batch_of(0, n))


def refused(error, match, **options):
    with pytest.raises(error, match=match):
        traced(**options)


@pytest.mark.slow
def test_next_ids_that_are_missing_or_of_something_else():
    refused(ArgumentError, r"was not given the rows that this rank reads.*next_ids=None")
    wrong = r"map the path of each table to ids, \['users'\], and has "
    refused(ArgumentError, wrong + r"\['items'\]: .*rows_read", next_ids={"items": 1})
    refused(ArgumentError, wrong + "int: ", next_ids=3)
    floats = {"users": jnp.ones(3)}
    refused(ArgumentError, "'users' must be integers, got float32", next_ids=floats)
    traced(next_ids={"users": jnp.arange(3, dtype=jnp.int16)})


def test_a_weight_of_a_rank():
    match = r"embrace_sync was given weight=: 'users' is a table .* Leave weight out"
    refused(ArgumentError, match, next_ids=None, weight=1.0)


def test_gradients_that_were_sent_already():
    match = r"'users' itself, and its gradient was sent .*embrace.value_and_grad"
    refused(ArgumentError, match, take=sparsejax.value_and_grad, next_ids=None)
    tx = optax.chain(sparsejax.zen_sync(), SGD)
    refused(ArgumentError, "'users' was taken to be sent by .*a synchronization", tx=tx)


def test_a_table_that_is_not_looked_up():
    other = params(2) | {"items": params(2)["users"]}
    match = "does not read the table 'items' by sparsejax.column_lookup"
    refused(ArgumentError, match, given=other, next_ids=None)


def test_a_state_of_other_ranks_or_of_other_tables():
    state = sparsejax.init(chain(), params(4), mesh_of(4))
    match = r"'users' the state holds back rows of 4 ranks, and there are 2.*resized"
    refused(StateError, match, state=state, next_ids=None)
    trainer = sparsejax.data_parallel(loss_fn, chain(), mesh_of(2))
    other = trainer.init(params(2))._replace(opt_state=state)
    match = r"by its 'users', was made for 4 ranks, and there are 2: sparsejax.resized"
    with pytest.raises(StateError, match=match):
        trainer.flush(other)
    other = {"items": params(2)["users"], "bias": jnp.zeros(DIM)}
    state = sparsejax.init(chain(), other, mesh_of(2))
    match = r"have the tables \['users'\], and the state holds back rows of \['items'\]"
    refused(StateError, match, state=state, next_ids=None)
    other = params(2, dim=9) | {"bias": jnp.zeros(DIM)}
    state = sparsejax.init(chain(), other, mesh_of(2))
    match = r"table 'users' \[24, 10\], and its gradient is one of \[24, 6\]"
    refused(StateError, match, state=state, next_ids=None)
    state = sparsejax.init(optax.chain(sparsejax.zen_sync(), SGD), params(2), mesh_of(2))
    refused(StateError, r"embrace_sync \(vertical=True\) was given", state=state)


def test_an_optimizer_that_knows_no_late_rows():
    tx = optax.chain(sparsejax.embrace_sync(), optax.sgd(0.1))
    refused(LeafError, r"rows of the last step.*only sparsejax.lazy", tx=tx, next_ids=None)
    trainer = sparsejax.data_parallel(loss_fn, tx, mesh_of(2))
    with pytest.raises(ArgumentError, match=r"no sparsejax.lazy optimizer directly"):
        trainer.step(trainer.init(params(2)), batch_of(0, 2), None)


def test_wrappers_that_leave_steps_out():
    match = "'users' was taken .* was given to sparsejax.skip_nonfinite: .*vertical=False"
    refused(ArgumentError, match, tx=sparsejax.skip_nonfinite(chain()), next_ids=None)
    tx = sparsejax.warm_up(chain(), 2)
    trainer = sparsejax.data_parallel(loss_fn, tx, mesh_of(2))
    with pytest.raises(ArgumentError, match="the very next step, and stands in a wrapper"):
        trainer.step(trainer.init(params(2)), batch_of(0, 2), None)


def test_outside_of_its_axis():
    with pytest.raises(StateError, match=r"embrace_sync holds rows .*sparsejax.init"):
        chain().init(params(2))
    with pytest.raises(AxisError, match="of the table 'users': there is no manual axis"):
        embrace.value_and_grad(loss_fn)(params(2), batch_of(0, 2))


def test_batches_that_are_missing_or_of_another_shape():
    trainer = sparsejax.data_parallel(loss_fn, chain(), mesh_of(2))
    state, batch = trainer.init(params(2)), batch_of(0, 2)
    with pytest.raises(ArgumentError, match=r"not given the next batch.*lookahead"):
        trainer.step(state, batch)
    shorter = jax.tree.map(lambda x: x[:4], batch)
    match = r"'ids' is int32\[8, 2\] here, and int32\[4, 2\] there.*next_batch=None"
    with pytest.raises(ArgumentError, match=match):
        trainer.step(state, batch, shorter)
    with pytest.raises(ArgumentError, match=r"'y' is float32\[8, 5\] here, and missing"):
        trainer.step(state, batch, {"ids": batch["ids"]})
    with pytest.raises(ArgumentError, match=r"None for its batch: the data has ended"):
        trainer.step(state, None, None)
    tx = optax.chain(sparsejax.embrace_sync(vertical=False), SGD)
    plain = sparsejax.data_parallel(loss_fn, tx, mesh_of(2))
    state = plain.init(params(2))
    with pytest.raises(ArgumentError, match="given a next batch, and nothing in tx"):
        plain.step(state, batch, batch)
    with pytest.raises(ArgumentError, match=r"trainer.flush: nothing in tx waits"):
        plain.flush(state)


def test_a_capacity_beside_it():
    trainer = sparsejax.data_parallel(loss_fn, chain(), mesh_of(2), capacity=3)
    with pytest.raises(ArgumentError, match=r"leave capacity out.*column_lookup"):
        trainer.step(trainer.init(params(2)), batch_of(0, 2), None)


def test_flushing_and_settling_what_is_not_theirs():
    state = sparsejax.init(chain(), params(2), mesh_of(2))
    with pytest.raises(
        ArgumentError, match=r"settle: .*take.*flush|settle: .*Take trainer"
    ):
        sparsejax.rows.settle(params(2), state, SGD)
    with pytest.raises(ArgumentError, match=r"flush: tx must be what sparsejax.lazy"):
        embrace.flush(params(2), state, optax.sgd(0.1))
    with pytest.raises(StateError, match=r"must be one state of embrace_sync.*there are 0"):
        embrace.flush(params(2), (), SGD)


def test_arguments():
    with pytest.raises(ArgumentError, match=r"replicated must be .*'ring'"):
        sparsejax.embrace_sync(replicated="ring")
    with pytest.raises(ArgumentError, match=r"delayed must be .* 0"):
        sparsejax.embrace_sync(delayed=0)
    with pytest.raises(ArgumentError, match="reduce"):
        sparsejax.embrace_sync(reduce="median")
    with pytest.raises(ArgumentError, match="batches must be iterable, got a function"):
        lookahead(lambda: [])


@pytest.mark.parametrize("replicated", ["all_reduce", "all_gather", "parallax", "zen"])
def test_tables_that_each_rank_has_whole_go_by_a_baseline(replicated):
    """And all else is summed densely, however large."""
    shapes = {"embedding": (5000, 16), "kernel": (300, 300), "bias": (4,)}
    given = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    tx = sparsejax.embrace_sync(replicated=replicated, vertical=False)
    seen = sparsejax.state.observing.observed(tx, given)
    (exchange,) = seen.exchanges
    used = {path: x.scheme for x in exchange.buckets for path in x.paths}
    dense = schemes.AllReduce()
    want = {"all_reduce": dense, "all_gather": schemes.AGSparse()}
    want |= {"parallax": schemes.SparsePS(), "zen": schemes.Zen()}
    assert used == {"embedding": want[replicated], "kernel": dense, "bias": dense}


def test_pairs_of_a_batch_and_the_next():
    fetched = []

    def batches():
        for number in range(3):
            fetched.append(number)
            yield {"x": number}

    pairs = lookahead(batches())
    first, second = next(pairs)
    assert (first, second, fetched) == ({"x": 0}, {"x": 1}, [0, 1])  # one ahead, no more
    (same, third), last = pairs
    assert same is second
    assert last == (third, None)
    assert last[0] is third
    assert list(lookahead([])) == []
    assert list(lookahead([7])) == [(7, None)]
    assert re.match("<generator", repr(lookahead(range(2))))
