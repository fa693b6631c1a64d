"""States with gradients that are carried: checkpoints, other ranks, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax.embrace import ColumnTable, column_lookup, horizontal
from sparsejax.errors import ArgumentError, AxisError, LeafError, StateError
from tests import helpers
from tests.embrace.horizontal.model import ORDER, batch_of, loss_fn, params, same
from tests.helpers import mesh_of


# A gradient of a ColumnTable that jax.grad takes is dense, and meant to be here.
pytestmark = pytest.mark.filterwarnings("ignore:sparsejax.column_lookup of a table")

CHAIN = optax.chain(sparsejax.dense_sync(), optax.adam(1e-2))


@functools.cache
def trainer(n, tx=None):
    tx = horizontal(CHAIN, ORDER) if tx is None else tx
    return sparsejax.data_parallel(loss_fn, tx, mesh_of(n), donate=False)


@functools.cache
def late(n=4):
    """A state that carries the gradients of its second step."""
    state = trainer(n).init(params())
    for step in range(2):
        state, _ = trainer(n).step(state, batch_of(step, n))
    return state


def close(one, other, rtol=2e-6):
    compare = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=1e-7)
    jax.tree.map(compare, one, other)


def test_what_is_carried_reaches_the_parameters_on_other_ranks():
    """The mean of the carried gradients is the same on two ranks as on four."""
    state = late(4)
    saved = jax.tree.map(np.asarray, state)
    tx = horizontal(CHAIN, ORDER)
    target = sparsejax.abstract_state(tx, params(), mesh_of(2), ranks=4)
    assert jax.tree.structure(target) == jax.tree.structure(saved.opt_state)
    shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    assert shapes(target) == shapes(saved.opt_state)
    fresh = sparsejax.init(tx, params(), mesh_of(2))
    moved = sparsejax.resized(saved.opt_state, like=fresh)
    assert int(moved.held) == 1
    for old, new in zip(
        jax.tree.leaves(saved.opt_state.carried.value),
        jax.tree.leaves(moved.carried.value),
        strict=True,
    ):
        assert new.shape == (2, *old.shape[1:])
        np.testing.assert_allclose(np.mean(new, 0), old.mean(0), rtol=1e-6, atol=1e-8)
        assert np.abs(old).max() > 0
    done = trainer(2).flush(saved._replace(opt_state=moved))
    close(done.params, trainer(4).flush(state).params)
    after, _ = trainer(2).step(saved._replace(opt_state=moved), batch_of(3, 2))
    assert same(after.params, done.params)


def test_a_state_of_other_ranks_says_how_it_is_resized():
    saved = jax.tree.map(np.asarray, late(4))
    with pytest.raises(StateError, match=r"made for 4 ranks, and there are 2.*resized"):
        trainer(2).step(saved, batch_of(0, 2))


@pytest.mark.slow
def test_tables_that_ranks_share_out_and_leaves_named_are_updated_at_once():
    """A ColumnTable by itself, `head` by name; the rest is carried."""
    n = 2
    chain = optax.chain(sparsejax.dense_sync(), optax.adam(1e-2))

    def loss(p, batch):
        hidden = column_lookup(p["words"], batch["ids"])
        hidden = jnp.tanh(hidden @ p["layers"][0]["w"] + p["layers"][0]["b"])
        return jnp.mean(jnp.square((hidden @ p["head"]["kernel"])[:, 0] - batch["y"]))

    given = params()
    given["layers"] = given["layers"][:1]
    del given["norm"]
    given["words"] = ColumnTable.of(given["words"], mesh_of(n))
    late = horizontal(chain, ["layers/0"], at_once=["head"])
    states = {}
    for name, tx in {"late": late, "usual": chain}.items():
        one = sparsejax.data_parallel(loss, tx, mesh_of(n), donate=False)
        state = one.init(given)
        for step in range(3):
            state, _ = one.step(state, batch_of(step, n))
        states[name] = state
    carried = states["late"].opt_state.carried.value
    assert [x.shape for x in jax.tree.leaves(carried)] == [(n, 8), (n, 8, 8)]
    got, want = states["late"].params, states["usual"].params
    close((got["head"], got["words"]), (want["head"], want["words"]))
    assert not np.allclose(got["layers"][0]["w"], want["layers"][0]["w"])
    one = sparsejax.data_parallel(loss, late, mesh_of(n), donate=False)
    close(one.flush(states["late"]).params, want)


def test_rules_hold_for_blocks_in_which_they_match_nothing():
    tx = optax.chain(sparsejax.zen_sync(rules={"words": "sparse"}), optax.sgd(0.1))
    sparsejax.init(horizontal(tx, ORDER), params(), mesh_of(2))
    tx = optax.chain(sparsejax.zen_sync(rules={"nowhere": "sparse"}), optax.sgd(0.1))
    with pytest.raises(sparsejax.errors.RuleError, match="'nowhere' matches no leaf"):
        sparsejax.init(horizontal(tx, ORDER), params(), mesh_of(2))


MIXING = {
    "a global norm": optax.chain(
        sparsejax.dense_sync(), optax.clip_by_global_norm(1.0), optax.adam(1e-2)
    ),
    "a rank's norm": optax.chain(
        sparsejax.transforms.clip_by_rank(1.0), sparsejax.dense_sync(), optax.sgd(0.1)
    ),
    "whether all is finite": sparsejax.skip_nonfinite(CHAIN),
}
APART = {
    "lamb": optax.chain(sparsejax.dense_sync(), optax.lamb(1e-2)),
    "block norms": optax.chain(
        sparsejax.dense_sync(), optax.clip_by_block_rms(1.0), optax.sgd(0.1)
    ),
    "a sparsifier": optax.chain(
        sparsejax.dgc(0.1),
        sparsejax.zen_sync(),
        optax.adamw(optax.cosine_decay_schedule(1, 9)),
    ),
    "a partition": optax.chain(
        sparsejax.dense_sync(),
        optax.partition(
            {"a": optax.adam(1e-2), "b": optax.sgd(1e-2)},
            {"head": "a", "layers": "b", "norm": "a", "words": "b"},
        ),
    ),
    "accumulation": sparsejax.accumulate(CHAIN, every=2),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_chain_that_looks_over_all_leaves_is_refused(name):
    by = r"by optax\.clip_by_global_norm\." if name == "a global norm" else "by "
    match = r"horizontal: .*depends on more than one block .*, " + by
    with pytest.raises(ArgumentError, match=match):
        sparsejax.init(horizontal(MIXING[name], ORDER), params(), mesh_of(2))


def gamma_in_a_loop():
    """A transformation that draws by another primitive, inside of a loop."""

    def noisy(i, x):
        return x + jax.random.gamma(jax.random.key(i), 1.0, x.shape)

    update = lambda grads, params: jax.tree.map(
        lambda x: jax.lax.fori_loop(0, 2, noisy, x), grads
    )
    return optax.stateless(update)


@pytest.mark.parametrize(
    "noise", [optax.add_noise(1.0, 0.55, 0), gamma_in_a_loop()], ids=["bits", "gamma"]
)
def test_noise_that_blocks_would_draw_alike_is_refused(noise):
    tx = optax.chain(sparsejax.dense_sync(), noise, optax.sgd(0.1))
    with pytest.raises(ArgumentError, match=r"adds random numbers .* several blocks"):
        sparsejax.init(horizontal(tx, ORDER), params(), mesh_of(2))
    sparsejax.init(
        horizontal(tx, [("words", "layers", "norm", "head")]), params(), mesh_of(2)
    )


def test_what_looks_over_all_leaves_in_front_of_a_sparsifier_is_refused():
    """Of leaves that are large enough to be sparsified."""
    parts = sparsejax.dgc(0.1), sparsejax.zen_sync(), optax.sgd(0.1)
    large = {"a": jnp.zeros((300, 300)), "b": jnp.zeros((300, 300))}
    init = lambda *chain: sparsejax.init(
        horizontal(optax.chain(*chain), ["a", "b"]), large, mesh_of(2)
    )
    init(*parts)
    with pytest.raises(ArgumentError, match="depends on more than one block"):
        init(sparsejax.transforms.clip_by_rank(1.0), *parts)


@pytest.mark.parametrize(
    "name",
    ["a partition", *helpers.slow("lamb", "block norms", "a sparsifier", "accumulation")],
)
def test_a_chain_that_treats_leaves_apart_is_taken(name):
    sparsejax.init(horizontal(APART[name], ORDER), params(), mesh_of(2))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (["words", "layers"], r"order misses 'head/kernel', 'norm/scale'.*at_once"),
        (["words", "layers", "norm", "head", "words"], r"names the block 'words' twice"),
        (["words", "layers", "layers/0", "norm", "head"], r"'layers/0/b' in two blocks"),
        (["words", "layers", "norm", "head", "tail"], r"'tail', and no leaf"),
        ("words", r"order must list the blocks"),
        (["words", 3], r"order must list the blocks"),
        (["words", ()], r"order must list the blocks"),
        (lambda paths: None, r"order must list the blocks"),
    ],
)
def test_an_order_that_misses_or_repeats_a_block_is_refused(order, message):
    init = lambda: jax.eval_shape(horizontal(CHAIN, order).init, params())
    with pytest.raises(ArgumentError, match=message):
        init()


def test_other_arguments_are_checked():
    init = lambda tx: jax.eval_shape(tx.init, params())
    with pytest.raises(ArgumentError, match="takes the whole chain"):
        horizontal(None)
    with pytest.raises(ArgumentError, match="nothing that synchronizes"):
        init(horizontal(optax.adam(1e-2), ORDER))
    with pytest.raises(ArgumentError, match="at_once names 'wrods'"):
        init(horizontal(CHAIN, ["layers", "norm", "head"], at_once="wrods"))
    with pytest.raises(ArgumentError, match="nothing to carry"):
        init(horizontal(CHAIN, [], at_once=["words", "layers", "norm", "head"]))
    lazy = optax.chain(sparsejax.zen_sync(), sparsejax.lazy(optax.adam(1e-2)))
    with pytest.raises(ArgumentError, match=r"updates '[a-z/0-9]*' by rows.*at_once"):
        init(horizontal(lazy, ORDER))
    with pytest.raises(StateError, match=r"sparsejax.init\(tx, params, mesh\)"):
        horizontal(CHAIN, ORDER).init(params())
    usual = trainer(2, CHAIN)
    with pytest.raises(ArgumentError, match=r"trainer.flush: nothing in tx waits"):
        usual.flush(late(2))
    moved = late(2).opt_state._replace(blocks={"moved": None})
    with pytest.raises(StateError, match="has the blocks \\['moved'\\]"):
        trainer(2).step(late(2)._replace(opt_state=moved), batch_of(0, 2))


def run_half(call, run=jax.eval_shape):
    """Calls a function of the transformation, parameters and state on ranks."""
    tx, state = horizontal(CHAIN, ORDER), late(2).opt_state
    mapped = helpers.shard_map(
        functools.partial(call, tx),
        mesh=mesh_of(2),
        in_specs=(P(), sparsejax.state_specs(state)),
        out_specs=P(),
    )
    return run(mapped, params(), state)


def test_halves_in_the_wrong_order_are_refused():
    def no_begin(tx, params, state):
        return tx.update(sparsejax.local(params), state, params)[0]

    def twice(tx, params, state):
        params, state = tx.begin(params, state)
        return tx.begin(params, state)[0]

    with pytest.raises(StateError, match=r"not applied, and would be lost.*tx\.begin"):
        run_half(no_begin)
    with pytest.raises(StateError, match="was given a Begun, and makes HorizontalState"):
        run_half(twice)
    chained = optax.chain(horizontal(CHAIN, ORDER), optax.scale(1.0))
    one = sparsejax.data_parallel(loss_fn, chained, mesh_of(2), donate=False)
    with pytest.raises(StateError, match=r"no optax.chain around it"):
        one.step(one.init(params()), batch_of(0, 2))


def test_gradients_that_cannot_be_carried_are_refused():
    def summed(tx, params, state):
        params, state = tx.begin(params, state)
        return tx.update(params, state, params)[0]

    def narrow(tx, params, state):
        params, state = tx.begin(params, state)
        grads = jax.tree.map(lambda x: x.astype(jnp.bfloat16), sparsejax.local(params))
        return tx.update(grads, state, params)[0]

    def weighted(tx, params, state):
        params, state = tx.begin(params, state)
        return tx.update(sparsejax.local(params), state, params, weight=1.0)[0]

    with pytest.raises(sparsejax.errors.AlreadySummedError, match=r"sparsejax\.local"):
        run_half(summed)
    with pytest.raises(ArgumentError, match=r"given weight=.* without weights\. Multiply"):
        run_half(weighted)
    with pytest.raises(LeafError, match="is bfloat16, and the parameter float32"):
        run_half(narrow)


def test_outside_of_its_axis_the_axis_is_named():
    tx, state = horizontal(CHAIN, ORDER, "data"), late(2).opt_state
    with pytest.raises(AxisError, match="'data'"):
        tx.begin(params(), state)


def test_an_update_of_what_is_carried_changes_no_bit():
    """Of negative zeros, too."""

    def call(tx, params, state):
        params, state = tx.begin(params, state)
        updates, _ = tx.update(sparsejax.local(params), state, params)
        return jax.tree.map(
            lambda x: sparsejax.apply_updates(jnp.zeros_like(x) * -1, x), updates
        )

    zeros = jax.tree.leaves(run_half(call, lambda mapped, *args: jax.jit(mapped)(*args)))
    assert zeros
    assert all(np.signbit(np.asarray(x)).all() for x in zeros)


@pytest.mark.parametrize("check_vma", helpers.slow(True, False))
def test_leaves_that_a_further_axis_shards_keep_their_types(check_vma):
    """Blocks with leaves sharded over `model`, and others that are not."""
    mesh, given = helpers.grid(data=2, model=2), params()
    specs = jax.tree.map(lambda _: P(), given)
    specs["layers"][0]["w"] = P(None, "model")
    chain = optax.chain(sparsejax.dense_sync("data"), optax.adam(1e-2))
    late = horizontal(chain, ORDER, "data")
    done, after = {}, None
    for name, tx in {"late": late, "usual": chain}.items():
        made = {"param_specs": specs, "check_vma": check_vma}
        state = sparsejax.init(tx, given, mesh, "data", **made)

        def step(params, state, tx=tx):
            if tx is late:
                params, state = tx.begin(params, state)
            local = sparsejax.local(params, "data")
            grads = jax.tree.map(lambda x: x * (1 + jax.lax.axis_index("data")), local)
            updates, state = tx.update(grads, state, params)
            params = sparsejax.apply_updates(params, updates)
            return tx.flush(params, state) if tx is late else (params, state)

        both = (specs, sparsejax.state_specs(state, given, specs))
        run = helpers.shard_map(
            step, mesh=mesh, in_specs=both, out_specs=both, check_vma=check_vma
        )
        done[name], after = jax.jit(run)(given, state)
    assert sparsejax.state_specs(after, given, specs)
    close(done["late"], done["usual"])
    assert not np.allclose(done["late"]["words"], given["words"])
