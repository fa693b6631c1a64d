"""Training with rows that are held back is training without."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax
from sparsejax import rows
from sparsejax.embrace import lookahead, rows_held
from sparsejax.embrace.vertical.sending import columns_of
from sparsejax.embrace.vertical.split import Chosen, split
from sparsejax.errors import ArgumentError, UntoldBatchWarning
from sparsejax.state import pending
from sparsejax.training.ahead import ReportedBatch
from tests import helpers
from tests.embrace.model import SHARE, TABLES, batch_of, loss_fn, params
from tests.helpers import mesh_of


DROPS = optax.piecewise_constant_schedule(0.1, {2: 0.3, 3: 0.3})


def optimizer(exact):
    """With `exact` only Adam's momentum moves rows without a gradient, which is costly."""
    each = {
        "sgd": optax.sgd(DROPS, momentum=None if exact else 0.9),
        "adagrad": optax.adagrad(DROPS),
        "adam": optax.adam(1e-2),
        "kernel": optax.adam(1e-2),
    }
    return sparsejax.lazy(optax.partition(each, {k: k for k in each}), exact=exact)


LAZY = {exact: optimizer(exact) for exact in (True, False)}
STEPS = 5
# Ranks, `exact` of the optimizer, and room: for all delayed rows, and for few of them.
CASES = [(2, False, 64), (3, True, 3)]


@functools.cache
def trainer_of(n, exact, vertical, delayed):
    tx = sparsejax.embrace_sync(vertical=vertical, delayed=delayed)
    tx = optax.chain(tx, LAZY[exact])
    weight = lambda batch: batch["mask"].sum()
    return sparsejax.data_parallel(loss_fn, tx, mesh_of(n), weight=weight)


@functools.cache
def trained(n, exact, vertical, delayed=64):
    """The losses, the state after the steps, and how many rows were held back."""
    trainer = trainer_of(n, exact, vertical, delayed)
    state, losses, held = trainer.init(params(n, sharded=True)), [], []
    for batch, following in lookahead(batch_of(step, n) for step in range(STEPS)):
        told = (following,) if vertical else ()
        state, loss = trainer.step(state, batch, *told)
        losses.append(float(loss))
        held.append(sum(int(x.sum()) for x in rows_held(state.opt_state).values()))
    return losses, state, held


def settled(state, exact):
    if not exact:
        return state.params, state.opt_state  # no row is ever late
    return jax.jit(rows.settle, static_argnums=(2,), static_argnames="flushed")(
        state.params, state.opt_state, LAZY[exact], flushed=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(("n", "exact", "delayed"), CASES)
def test_it_is_training_without_a_schedule(n, exact, delayed):
    """SGD, Adagrad and Adam: what is read at each step, and all after the last."""
    losses, state, held = trained(n, exact, vertical=True, delayed=delayed)
    want, whole, _ = trained(n, exact, vertical=False)
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    assert min(held[:-1]) > 0
    assert held[-1] == 0
    ours, theirs = (settled(x, exact) for x in (state, whole))
    for k in TABLES:
        np.testing.assert_allclose(ours[0][k].whole(), theirs[0][k].whole(), 2e-6, 1e-7)
    np.testing.assert_allclose(ours[0]["kernel"], theirs[0]["kernel"], rtol=2e-6)
    moved = np.abs(theirs[0]["adam"].whole() - params(n, sharded=False)["adam"])
    assert moved.max() > 1e-2


def of_ranks(program):
    """The program of a rank, the body of the one `shard_map`, and its inputs.

    Arrays that are known when it is traced are inputs of the body as well, before these.
    """
    (eqn,) = (x for x in program.jaxpr.eqns if x.primitive.name == "shard_map")
    body = eqn.params["jaxpr"]
    return body, body.invars[-len(program.jaxpr.invars) :]


@pytest.mark.slow
def test_nothing_waits_for_delayed_rows_and_they_wait_for_nothing():
    """In the program of a step, neither its loss nor its prior rows depend on them."""
    n = 2
    trainer = trainer_of(n, False, True, 64)
    state = trainer.init(params(n, sharded=True))
    step, batch = trainer.compiled(state, has_next=True), batch_of(0, n)
    (call,) = jax.make_jaxpr(step)(state, batch, batch).jaxpr.eqns
    names = [jax.tree_util.keystr(k) for k, _ in jax.tree_util.tree_leaves_with_path(state)]
    jaxpr, inputs = of_ranks(call.params["jaxpr"])
    held = {v for v, name in zip(inputs, names, strict=False) if "pending" in name}
    assert len(held) == 9  # ids, rows and the number of ranks of each table
    others = {*inputs} - held
    from_held, from_others, sent = set(held), set(others), []
    for eqn in jaxpr.eqns:
        given = {v for v in eqn.invars if not hasattr(v, "val")}
        late, now = bool(given & from_held), bool(given & from_others)
        from_held |= set(eqn.outvars) if late else set()
        from_others |= set(eqn.outvars) if now else set()
        if "all_to_all" in str(eqn):
            sent.append((late, now))
    loss = jaxpr.outvars[-1]
    assert loss in from_others
    assert loss not in from_held
    # Ids and vectors of the lookups, ids of the next batch, prior rows, and delayed ones;
    # prior rows are in lists of seven lengths, of which one is taken.
    assert sorted(sent) == [(False, True)] * 4 + [(True, False)]
    kinds = [x.name for x in helpers.collectives(jaxpr)]
    assert (kinds.count("all_to_all"), kinds.count("all_gather")) == (4 + 7, 0)


def test_prior_rows_are_sent_in_one_of_eight_lengths():
    """The shortest that has room for the rows of every rank; the last is the whole list."""
    room, columns = 32, 3

    def send(count):
        rows = jnp.ones((room, 2 * columns))
        counts = [helpers.WIRE.all_gather(count)[0]]
        received, sent = columns_of(helpers.WIRE, [rows], counts)
        return received[0], sent

    run = helpers.ranked(send, 2)
    for most in range(room + 1):
        received, sent = run(np.array([most, most // 2], np.int32))
        length = min(k for k in (2, 4, 6, 8, 12, 16, 24, room) if k >= most)
        np.testing.assert_array_equal(sent, length * columns * 4)
        assert received.shape == (2, 2, room, columns)
        assert (received[:, :, :length] == 1).all()
        assert not received[:, :, length:].any()


def test_rows_of_tables_of_all_dtypes_are_one_message():
    """As bytes, and in whole words, whatever the rows have."""
    n = 3
    shapes = (7, 3, "bfloat16"), (5, 1, "float16"), (0, 2, "float32"), (4, 2, "float32")
    rows, want, rng = [], [], np.random.default_rng(n)
    for room, columns, name in shapes:
        rows.append(rng.normal(size=(n, room, n * columns)).astype(jnp.dtype(name)))
        want.append(np.moveaxis(rows[-1].reshape(n, room, n, columns), 2, 0))
    send = lambda rows: columns_of(helpers.WIRE, rows)
    received, sent = helpers.run_ranks(send, rows, n)
    for found, expected in zip(received, want, strict=True):
        assert found.tobytes() == expected.tobytes()
    np.testing.assert_array_equal(sent, (n - 1) * 4 * (11 + 3 + 0 + 8))
    (one,) = helpers.traced_collectives(send, rows, n)
    assert helpers.sent_bytes(one, n) == sent[0]


@pytest.mark.parametrize("height", [40, *helpers.slow(40_000)])  # by flags, and by a search
def test_a_row_is_now_or_waits_on_all_ranks_and_none_is_lost(height):
    rng = np.random.default_rng(3)
    # Of the first rank 3 and 9 have no room, and so they wait on no other.
    lists = [[1, 2, 3, 9], [3, 4, 5], [0, 9, 30]]
    ids = np.array([x + [height] * (12 - len(x)) for x in lists], np.int32)
    following = np.array([[0, 5, 0], [39, 5, height]])
    room = 2
    now, waits = map(np.asarray, split(ids, following, height, room))
    np.testing.assert_array_equal(now ^ waits, ids < height)
    assert [[*x[flags]] for x, flags in zip(ids, waits, strict=True)] == [[1, 2], [4], [30]]
    assert not set(ids[now]) & set(ids[waits])
    assert not set(ids[waits]) & set(following.ravel())
    chosen = Chosen.of(waits, ids, height, room)
    rows = rng.normal(size=(3, 12, 2)).astype(np.float32)
    for rank in range(3):
        there = np.asarray(chosen.ids[rank]) < height
        np.testing.assert_array_equal(chosen.ids[rank][there], ids[rank][waits[rank]])
        found = chosen.rows_of(jnp.asarray(rows[rank]), rank)
        np.testing.assert_array_equal(found[there], rows[rank][waits[rank]])
        assert chosen.counts[rank] == there.sum()
    for now, waits in (split(ids, None, height, 12), split(ids, following, height, 0)):
        assert not np.any(waits)
        np.testing.assert_array_equal(now, ids < height)


def halfway(n, exact, delayed=64, steps=3):
    """A trainer, and a state with rows held back."""
    trainer = trainer_of(n, exact, True, delayed)
    state = trainer.init(params(n, sharded=True))
    for step in range(steps):
        state, _ = trainer.step(state, batch_of(step, n), batch_of(step + 1, n))
    return trainer, state


def copied(state):
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), state)


def test_replicas_are_equal_and_what_was_sent_is_counted():
    n = 2
    _, state = halfway(n, False)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
        if leaf.is_fully_replicated:
            first, *others = (np.asarray(x.data).tobytes() for x in leaf.addressable_shards)
            assert all(other == first for other in others), keys
    found = sparsejax.metrics(state.opt_state)
    assert found["sync1/exchanges"] == 3
    # Whole lists of delayed rows: of three tables 60 rows at most, of two times 7 columns.
    want = 3 * 60 * 14 * 4 * (n - 1) / n
    assert found["sync1/delayed rows/wire_bytes"] == want
    assert 0 < found["sync1/delayed rows/payload_bytes"] < want
    prior = found["sync1/prior rows/wire_bytes"], found["sync1/prior rows/payload_bytes"]
    assert 0 < prior[1] <= prior[0] <= 3 * 10 * 14 * 4 * (n - 1) / n
    assert found["sync1/next ids/wire_bytes"] == 3 * 10 * 4 * (n - 1)
    (own,) = [x for x in jax.tree.leaves(state, is_leaf=is_ours) if is_ours(x)]
    assert own.stale == 0


def is_ours(node):
    return isinstance(node, sparsejax.embrace.EmbraceState)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "exact", "delayed"), CASES)
def test_what_is_held_back_is_applied_before_parameters_are_read(n, exact, delayed):
    trainer, state = halfway(n, exact, delayed)
    plain = trainer_of(n, exact, False, 64)
    want = plain.init(params(n, sharded=True))
    for step in range(3):
        want, _ = plain.step(want, batch_of(step, n))
    loss = trainer.evaluate(state, batch_of(7, n))
    np.testing.assert_allclose(loss, plain.evaluate(want, batch_of(7, n)), rtol=1e-6)
    flushed = trainer.flush(copied(state))
    whole, _ = settled(want, exact)
    for k in TABLES:
        np.testing.assert_allclose(flushed.params[k].whole(), whole[k].whole(), 2e-6, 1e-7)
    again = trainer.flush(copied(flushed))
    for a, b in zip(jax.tree.leaves(flushed), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    # And training goes on from either, whatever batch comes: it is another one than told.
    states = [trainer.step(copied(x), batch_of(9, n), None) for x in (state, flushed)]
    want, loss = plain.step(want, batch_of(9, n))
    for state, ours in states:
        np.testing.assert_allclose(ours, loss, rtol=1e-6)
        ours, whole = settled(state, exact)[0], settled(want, exact)[0]
        for k in TABLES:
            np.testing.assert_allclose(ours[k].whole(), whole[k].whole(), 4e-6, 1e-7)


# Where there was more than the room of a state, the first step cannot reuse its memory.
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.slow
def test_a_checkpoint_with_rows_held_back_goes_to_other_ranks():
    """Saved by two ranks whole, and restored by one, all that was held back comes.

    Where rows that no step lists move, a checkpoint is one of `tests/training/test_lazy`.
    """
    n, ranks, exact = 2, 1, False
    trainer, state = halfway(n, exact)
    saved = jax.tree.map(np.asarray, state)
    moved = lambda table: sparsejax.ColumnTable.of(table.whole(), mesh_of(ranks))
    tables = {k: moved(state.params[k]) for k in TABLES}
    want = trainer.flush(state).params
    other = trainer_of(ranks, exact, True, 2)

    def restored():
        fresh = other.init(tables | {"kernel": saved.params["kernel"]})
        opt_state = sparsejax.resized(saved.opt_state, like=fresh.opt_state)
        return fresh, fresh._replace(step=saved.step, opt_state=opt_state)

    shapes = lambda tree: [x.shape for x in jax.tree.leaves(tree)]
    fresh, state = restored()
    target = sparsejax.abstract_state(other._tx, fresh.params, mesh_of(ranks), ranks=n)
    assert jax.tree.structure(target) == jax.tree.structure(saved.opt_state)
    assert sum(int(x.sum()) for x in rows_held(state.opt_state).values()) > 0
    found = other.flush(state).params
    for k in TABLES:
        np.testing.assert_allclose(found[k].whole(), want[k].whole(), 4e-6, 1e-7)
    # It was more than there is room for, as a rule; the next state has no more of it.
    _, state = restored()
    after, _ = other.step(state, batch_of(3, ranks), batch_of(4, ranks))
    assert shapes(after.opt_state) == shapes(fresh.opt_state)


@pytest.mark.parametrize(("ranks", "mean"), [(5, True), (2, False)])
def test_what_ranks_hold_back_is_the_same_by_other_ranks(ranks, mean):
    """A mean over other ranks of what they hold, or its sum; each row on one of them."""
    rng, height, dim, room = np.random.default_rng(1), 30, 3, 4

    def of(n, ids, rows):
        rows = pending.per_rank(jnp.asarray(rows), "users", "data", jnp.int32(n))
        return pending.Pending(jnp.asarray(ids, jnp.int32), rows, height, dim)

    def total(x):
        made = np.zeros((height + 1, dim))
        rows = np.asarray(x.rows.value)[..., :dim].reshape(-1, dim)
        np.add.at(made, np.asarray(x.ids).reshape(-1), rows)
        return made[:height] / (len(x.ids) if mean else 1)

    ids = rng.integers(0, height + 1, (3, room))
    ids = np.stack([np.unique(x) if len({*x}) == room else [1, 2, 8, height] for x in ids])
    old = of(3, ids, rng.normal(size=(3, room, 3)).astype(np.float32))
    columns = -(-dim // ranks) * ranks
    fresh = of(
        ranks, np.full((ranks, 2), height), np.zeros((ranks, 2, columns), np.float32)
    )
    new = old.resized(fresh, mean, lambda path, x: np.asarray(x), "pending/users")
    assert new.rows.value.shape == (ranks, max(2, new.ids.shape[1]), columns)
    assert new.rows.ranks == ranks
    np.testing.assert_allclose(total(new), total(old), rtol=1e-5, atol=1e-7)
    real = np.asarray(new.ids)[np.asarray(new.ids) < height]
    assert len({*real}) == len(real) == len({*ids[ids < height]})


def test_a_step_is_told_its_batch_or_flushes():
    told, first, other = ReportedBatch(), {"x": np.arange(3)}, {"x": np.arange(1, 4)}
    steps = [object(), object()]
    told.after(steps[0], first)
    assert told.is_kept(steps[0], first)
    assert told.is_kept(steps[0], {"x": jnp.arange(3)})
    assert not told.is_kept(steps[0], other)
    assert not told.is_kept(steps[0], {"y": first["x"]})
    assert not told.is_kept(steps[0], first | {"y": first["x"]})
    assert not told.is_kept(steps[1], first)  # a state from elsewhere
    # Of several processes one might flush that others do not know of, and wait for ever.
    told = ReportedBatch(processes=2)
    told.after(steps[0], first)
    assert told.is_kept(steps[0], first)
    with pytest.warns(UntoldBatchWarning, match=r"another batch.*none applies.*flush"):
        assert told.is_kept(steps[0], other)
    assert not told.is_kept(steps[1], first)  # which all of them see
    told.after(steps[1], None)  # nothing is held back
    assert told.is_kept(steps[1], other)


def test_batches_of_all_processes_are_compared_by_what_is_here(monkeypatch, recwarn):
    spread = lambda x: jax.device_put(x, NamedSharding(mesh_of(2), P("data")))
    told, step, numbers = ReportedBatch(processes=2), object(), np.arange(4)
    told.after(step, {"x": spread(numbers)})
    again, other = ({"x": spread(x)} for x in (numbers, numbers[::-1]))
    array = type(again["x"])
    monkeypatch.setattr(array, "is_fully_addressable", property(lambda x: False))
    assert told.is_kept(step, again)
    assert not recwarn
    with pytest.warns(UntoldBatchWarning):
        assert told.is_kept(step, other)


def test_a_batch_that_does_not_fit_uses_up_no_state():
    """Another batch than was told flushes first, but not if it cannot be trained on."""
    trainer = trainer_of(2, False, True, 64)
    state = trainer.init(params(2, sharded=True))
    state, _ = trainer.step(state, batch_of(0, 2), batch_of(1, 2))
    uneven = {k: x[:-1] for k, x in batch_of(2, 2).items()}
    with pytest.raises(ArgumentError, match="leading axis, which 2 must divide"):
        trainer.step(state, uneven, None)
    wrong = batch_of(2, 2) | {"y": np.ones((2 * SHARE, 3), np.float32)}
    with pytest.raises(ValueError, match="Incompatible shapes"):  # in the loss
        trainer.step(state, wrong, None)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    trainer.step(state, batch_of(1, 2), batch_of(2, 2))
