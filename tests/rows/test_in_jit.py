"""Rows under `jit`: tables that a loss reads on an explicit mesh, or on Auto axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax
from sparsejax import errors
from tests import helpers
from tests.helpers import hlo


ROWS, WIDTH, BATCH, LENGTH = 512, 16, 16, 6
BOTH = ("replica", "fsdp")


def grid(kind="explicit"):
    return helpers.KINDS[kind](helpers.grid(replica=4, fsdp=2))


def table(seed=0):
    return np.random.default_rng(seed).standard_normal((ROWS, WIDTH)).astype(np.float32)


def ids_of(seed=1):
    rng = np.random.default_rng(seed)
    return (rng.zipf(1.3, (BATCH, LENGTH)) % ROWS).astype(np.int32)


def through(x):
    return jnp.sum(jnp.sin(x) * x)


OUT = P(BOTH, None, None)


def by_get(params, ids):
    return through(params["table"].at[ids].get(out_sharding=OUT))


def by_two(params, ids):
    first = params["table"].at[ids].get(out_sharding=OUT)
    second = params["table"].at[ids[:, :2] + 1].get(out_sharding=OUT)
    return through(first) + 3 * through(second)


def by_cast(params, ids):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    return by_get(half, ids)


def by_mode(params, ids):
    given = {"mode": "fill", "fill_value": 1.0, "out_sharding": OUT}
    return through(params["table"].at[2 * ids].get(**given))


def by_scan(params, ids):
    turns = jnp.stack([ids, ids // 2])

    def turn(total, ids):
        return total + by_get(params, ids), None

    return jax.lax.scan(jax.checkpoint(turn), 0.0, turns)[0]


LOSSES = {f.__name__: f for f in (by_get, by_two, by_cast, by_mode, by_scan)}


def dense_gradient(loss, ids):
    """The gradient on one device, of parameters that are not cast."""
    mesh = jax.make_mesh((1, 1), BOTH)
    with jax.set_mesh(mesh):
        params = {"table": helpers.placed(table(), mesh, P(None, None))}
        own = helpers.placed(ids, mesh, P(BOTH, None))
        return np.asarray(jax.jit(jax.grad(loss))(params, own)["table"])


@pytest.mark.parametrize("name", helpers.mostly_slow(LOSSES, "by_get", "by_two"))
def test_a_table_that_is_read_has_rows_by_device(name):
    mesh, loss = grid(), LOSSES[name]
    ids = ids_of()
    with jax.set_mesh(mesh):
        params = {"table": helpers.placed(table(), mesh, P("fsdp", None))}

        @jax.jit
        def grads_of(params, ids):
            return sparsejax.value_and_grad(loss)(sparsejax.local(params, BOTH), ids)[1]

        given = helpers.placed(ids, mesh, P(BOTH, None))
        grads = grads_of(params, given)["table"]
        assert isinstance(grads, sparsejax.RowGrads)
        assert jax.typeof(grads.ids).sharding.spec.partitions == (BOTH,)
        # Each device lists rows of its own examples alone.
        own = np.asarray(grads.ids).reshape(8, -1)
        if name == "by_get":
            np.testing.assert_array_equal(own, ids.reshape(8, -1))
        found = np.zeros((ROWS + 1, WIDTH), np.float32)
        np.add.at(found, np.minimum(np.asarray(grads.ids), ROWS), np.asarray(grads.rows))
        # In 16 bits JAX adds up what is read twice in 16 bits; here it is listed twice.
        close = 1e-2 if name == "by_cast" else 1e-5
        wanted = dense_gradient(loss, ids)
        np.testing.assert_allclose(found[:ROWS], wanted, rtol=close, atol=close)
        # Nothing of them is sent: neither rows nor ids.
        compiled = grads_of.lower(params, given).compile()
        sent = hlo.compiled_collectives(compiled, mesh)
        assert [one.opcode for one in sent if one.size > 64] == ["all-gather"]


def test_rows_that_all_devices_read_are_refused():
    """JAX adds their gradients up over all devices, as a partial sum each."""
    mesh = grid()
    everywhere = helpers.placed(np.arange(8, dtype=np.int32), mesh, P(None))
    half = helpers.placed(np.arange(8, dtype=np.int32), mesh, P("replica"))

    def read(spec):
        def loss(params, ids):
            return through(params["table"].at[ids].get(out_sharding=spec))

        return jax.jit(
            lambda params, ids: sparsejax.value_and_grad(loss)(
                sparsejax.local(params, BOTH), ids
            )
        )

    with jax.set_mesh(mesh):
        params = {"table": helpers.placed(table(), mesh, P(None, None))}
        with pytest.raises(errors.ArgumentError, match=r"not sharded over 'fsdp'.*Shard"):
            read(P(None, None))(params, everywhere)
        with pytest.raises(errors.ArgumentError, match=r"not sharded over 'fsdp'.*Shard"):
            read(P("replica", None))(params, half)


def by_slice(params, rows):
    """Rows that all devices read: positions, the vector of a first token."""
    return through(params["table"][: len(rows)])


def by_reduced(params, rows):
    out = P(None, None, reduced={*BOTH})
    return through(params["table"].at[rows].get(out_sharding=out))


def by_whole(params, rows):
    return through(params["table"].at[rows].get(out_sharding=P(None, None)))


def gradient_of_all(make, loss):
    """The gradient of a loss of the first eight rows, that all devices have read."""
    mesh, rows = grid(), np.arange(8, dtype=np.int32)
    with jax.set_mesh(mesh):
        params = {"table": helpers.placed(table(), mesh, P(None, None))}

        @jax.jit
        def grads_of(params, rows):
            grads = make(loss)(sparsejax.local(params, BOTH), rows)[1]
            return jax.reshard(grads["table"], P(None, None))

        found = np.asarray(grads_of(params, helpers.placed(rows, mesh, P(None))))
    assert not found[8:].any()
    return found[:8]


@pytest.mark.parametrize("loss", [by_slice, by_reduced])
def test_what_all_devices_read_and_stays_reduced_has_a_dense_gradient(loss):
    found = gradient_of_all(sparsejax.value_and_grad, loss)
    np.testing.assert_allclose(found, jax.grad(through)(table()[:8]), rtol=1e-6)


def test_what_all_devices_read_is_added_up_by_jax_unless_it_stays_reduced():
    """As the pages warn: the gradient of each of eight devices is the whole one."""
    wanted = jax.grad(through)(table()[:8])
    found = gradient_of_all(jax.value_and_grad, by_reduced)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    found = gradient_of_all(jax.value_and_grad, by_whole)
    np.testing.assert_allclose(found, 8 * wanted, rtol=1e-6)


def test_a_scaled_table_has_the_dense_gradient_of_jax():
    mesh = grid()
    twice = lambda params, ids: by_get({"table": 2.0 * params["table"]}, ids)
    with jax.set_mesh(mesh):
        params = {"table": helpers.placed(table(), mesh, P(None, None))}
        ids = helpers.placed(ids_of(), mesh, P(BOTH, None))
        grads = lambda params, ids, make: make(twice)(sparsejax.local(params, BOTH), ids)
        ours = jax.jit(functools.partial(grads, make=sparsejax.value_and_grad))
        theirs = jax.jit(functools.partial(grads, make=jax.value_and_grad))
        whole = jax.jit(lambda x: jax.reshard(x, P(None, None)))
        found, wanted = ours(params, ids)[1], theirs(params, ids)[1]
        assert not isinstance(found["table"], sparsejax.RowGrads)
        np.testing.assert_array_equal(whole(found["table"]), whole(wanted["table"]))


WHERE = {
    "replicated": P(None, None),
    "rows": P("fsdp", None),
    "columns": P(None, "fsdp"),
    "zero": P("replica", None),
    "both": P(("fsdp", "replica"), None),
    "rows and columns": P("replica", "fsdp"),
}


def stepped(where, kind, chain):
    """A table after three steps, the losses, and the metrics."""
    mesh, spec = grid(kind), WHERE[where]
    typed = kind == "explicit"
    sync = sparsejax.zen_sync(
        "replica", reduce="sum" if typed else "mean", rules={"table": "sparse"}
    )
    tx = CHAINS[chain](sync)
    plain = lambda params, ids: through(params["table"][ids]) / BATCH
    with jax.set_mesh(mesh):
        params = {"table": helpers.placed(table(), mesh, spec)}
        state = sparsejax.init(tx, params)

        @jax.jit
        def step(params, state, ids):
            if typed:
                loss = lambda params, ids: by_get(params, ids) / BATCH
                value_and_grad = sparsejax.value_and_grad(loss)
                value, grads = value_and_grad(sparsejax.local(params, BOTH), ids)
            else:
                shares = sparsejax.value_and_grad(lambda *args: 4 * plain(*args))
                made = sparsejax.per_replica(shares, "replica", {"table": spec})
                value, grads = made(params, ids)
                value = value.mean()
            updates, state = tx.update(grads, state, params)
            return sparsejax.apply_updates(params, updates), state, value

        losses = []
        for seed in range(3):
            ids = helpers.placed(ids_of(seed), mesh, P(BOTH, None))
            params, state, loss = step(params, state, ids)
            losses.append(float(loss))
    metrics = {key: float(value) for key, value in sparsejax.metrics(state).items()}
    return np.asarray(params["table"]), losses, metrics


CHAINS = {
    "adam": lambda sync: optax.chain(sync, optax.adam(1e-2)),
    "guarded": lambda sync: sparsejax.skip_nonfinite(
        optax.chain(sync, optax.adam(1e-2)), "replica"
    ),
    "guarded_lazy": lambda sync: sparsejax.skip_nonfinite(
        optax.chain(sync, sparsejax.lazy(optax.adam(1e-2), exact=False)), "replica"
    ),
    "clipped": lambda sync: optax.chain(
        sparsejax.transforms.clip_by_rank(1e6, "replica"), CHAINS["lazy"](sync)
    ),
    "lazy": lambda sync: optax.chain(sync, sparsejax.lazy(optax.adam(1e-2), exact=False)),
}


@functools.cache
def reference(chain):
    """The same on one device, by `jax.grad` and the optimizer alone."""
    params, tx = {"table": jnp.asarray(table())}, CHAINS[chain](optax.identity())
    state, losses = tx.init(params), []
    loss = lambda params, ids: through(params["table"][ids]) / BATCH
    by_rows = chain == "lazy"
    value_and_grad = (sparsejax if by_rows else jax).value_and_grad(loss)
    value_and_grad, update = jax.jit(value_and_grad), jax.jit(tx.update)
    for seed in range(3):
        value, grads = value_and_grad(params, jnp.asarray(ids_of(seed)))
        updates, state = update(grads, state, params)
        params = sparsejax.apply_updates(params, updates)
        losses.append(float(value))
    return np.asarray(params["table"]), losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "kind", "chain"),
    [
        ("both", "auto", "lazy"),
        ("columns", "auto", "guarded"),
        ("rows", "auto", "clipped"),
        ("zero", "explicit", "guarded_lazy"),
        ("rows and columns", "explicit", "adam"),
    ],
)
def test_a_table_trains_by_rows_as_densely(where, kind, chain):
    found, losses, metrics = stepped(where, kind, chain)
    alone = {"guarded": "adam", "guarded_lazy": "lazy", "clipped": "lazy"}
    wanted, of_dense = reference(alone.get(chain, chain))
    np.testing.assert_allclose(losses, of_dense, rtol=1e-5)
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    # Lists of the rows that were read, and nothing of the table's size.
    room = 8 * BATCH * LENGTH * (4 + 4 * WIDTH)
    assert 0 < metrics["sync/table/wire_bytes"] < room
    assert metrics["sync/table/wire_bytes"] < metrics["sync/table/dense_bytes"]


def test_what_rows_cannot_do_under_jit_is_refused_by_name():
    mesh = grid()
    with jax.set_mesh(mesh):
        params = {"table": helpers.placed(table(), mesh, P(None, None))}
        lazy = sparsejax.lazy(optax.adam(1e-2))
        sync = sparsejax.zen_sync("replica", reduce="sum", rules={"table": "sparse"})
        tx = optax.chain(sync, lazy)
        ids = helpers.placed(ids_of(), mesh, P(BOTH, None))

        def grads_of(params, ids):
            return sparsejax.value_and_grad(by_get)(sparsejax.local(params, BOTH), ids)[1]

        grads = jax.jit(grads_of)(params, ids)
        own = sync.init(params)
        with pytest.raises(errors.ArgumentError, match=r"update\(grads, opt_state, params"):
            jax.jit(sync.update)(grads, own)
        listed = sparsejax.RowGrads(
            jnp.zeros(2, jnp.int32), jnp.zeros((2, WIDTH)), (ROWS, WIDTH)
        )
        listed = {"table": jax.device_put(listed, NamedSharding(mesh, P(None)))}
        with pytest.raises(errors.AlreadySummedError, match=r"'table'.*all ranks list"):
            jax.jit(sync.update)(listed, own, params)
        clip = sparsejax.transforms.clip_by_rank(1.0, "replica")
        with pytest.raises(errors.ArgumentError, match=r"clip_by_rank.*'fsdp'.*'table'"):
            jax.jit(clip.update)(grads, clip.init(params), params)
    auto = grid("auto")
    with jax.set_mesh(auto):
        params = {"table": helpers.placed(table(), auto, P(None, None))}
        state = sparsejax.init(tx, params)
        ids = helpers.placed(ids_of(), auto, P(BOTH, None))
        plain = lambda params, ids: through(params["table"][ids])

        def late(params, state, ids):
            read = lazy.reader(params, state)
            rows = sparsejax.value_and_grad(plain, read=read)
            return sparsejax.per_replica(rows, "replica")(params, ids)

        with pytest.raises(errors.ArgumentError, match=r"inside.*per_replica.*Explicit"):
            jax.jit(late)(params, state, ids)


@pytest.mark.slow
def test_lookups_that_are_sharded_otherwise_make_one_gradient():
    """Over the same axes in another order, and over fewer of them."""
    mesh, over = grid(), ("replica",)
    ids = ids_of()[:4, :1]
    wide = ids_of()

    def loss(params, ids, wide):
        table = params["table"]
        first = table.at[wide].get(out_sharding=P(BOTH, None, None))
        second = table.at[wide.T].get(out_sharding=P(None, BOTH[::-1], None))
        third = table.at[ids].get(out_sharding=P("replica", None, None))
        return through(first) + 2 * through(second) + 3 * through(third)

    def plain(params, ids, wide):
        read = lambda ids: through(params["table"][ids])
        return read(wide) + 2 * read(wide.T) + 3 * read(ids)

    with jax.set_mesh(mesh):
        params = {"table": helpers.placed(table(), mesh, P(None, None))}
        given = (
            helpers.placed(ids, mesh, P("replica", None)),
            helpers.placed(wide, mesh, P(BOTH, None)),
        )
        grads_of = lambda *args: sparsejax.value_and_grad(loss)(*args)[1]["table"]
        found = jax.jit(
            lambda params, *args: grads_of(sparsejax.local(params, over), *args)
        )(params, *given)
    dense = np.zeros((ROWS + 1, WIDTH), np.float32)
    np.add.at(dense, np.asarray(found.ids), np.asarray(found.rows))
    wanted = jax.grad(plain)({"table": jnp.asarray(table())}, ids, wide)["table"]
    np.testing.assert_allclose(dense[:ROWS], wanted, atol=1e-4)
