"""Local steps under `jit`: parameters sharded over a fast axis, on axes of both kinds."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import errors
from tests import helpers
from tests.rounds import model
from tests.rounds.model import RANKS


SPECS = {"w": P("fsdp", None), "b": P()}
BOTH = P(("replica", "fsdp"))
INNER = lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(0.02))


def on_explicit(params, batch):
    """The loss where types say how things are sharded: it gathers shards by itself."""
    return model.loss_fn({**params, "w": jax.reshard(params["w"], P())}, batch)


LOSSES = {"explicit": on_explicit, "auto": model.loss_fn}


class Run:
    """A step under `jit`, compiled, and what it begins with."""

    def __init__(self, tx, kind, replicas=RANKS):
        self.mesh = helpers.KINDS[kind](helpers.grid(replica=replicas, fsdp=2))
        self.params = helpers.placed(model.first(), self.mesh, SPECS)
        with jax.set_mesh(self.mesh):
            self.state = sparsejax.init(tx, self.params)
        value_and_grad = jax.value_and_grad(LOSSES[kind])
        value_and_grad = sparsejax.per_replica(value_and_grad, "replica", SPECS)

        def step(params, state, batch):
            own = sparsejax.local(params, "replica", state)
            losses, grads = value_and_grad(own, batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, losses

        self.step = jax.jit(step)

    def train(self, given):
        """The mean losses; then `params` and `state` are the last ones."""
        found = []
        with jax.set_mesh(self.mesh):
            for batch in helpers.placed(given, self.mesh, BOTH):
                self.params, self.state, losses = self.step(self.params, self.state, batch)
                found.append(np.asarray(losses).mean())
        return found


@pytest.mark.parametrize("kind", helpers.mostly_slow(helpers.KINDS, "explicit"))
def test_it_trains_as_inside_a_shard_map_of_ones_own(kind):
    """The norm by which the inner optimizer clips is that of all shards."""
    given = model.batches(7)
    alone = model.train(sparsejax.local_steps(INNER(), every=3), given)
    run = Run(sparsejax.local_steps(INNER(), every=3, axis_name="replica"), kind)
    before = [x.sharding for x in jax.tree.leaves(run.state)]
    np.testing.assert_allclose(run.train(given), alone.losses, rtol=1e-5)
    for name, x in run.params.items():
        np.testing.assert_allclose(x, alone.params[-1][name][0], rtol=1e-5, atol=1e-6)
        offset = run.state.offset.value[name]
        np.testing.assert_allclose(
            offset, alone.state.offset.value[name], rtol=1e-4, atol=1e-6
        )
        moments = optax.tree.get(run.state.inner.value, "mu")[name]
        for own in (offset, moments):
            wanted = jax.NamedSharding(run.mesh, P("replica", *SPECS[name]))
            assert own.sharding.is_equivalent_to(wanted, own.ndim)
    sparsejax.check_replicas((run.params, run.state))
    # Nothing has moved to other devices.
    for x, sharding in zip(jax.tree.leaves(run.state), before, strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)


@pytest.mark.parametrize("kind", helpers.mostly_slow(helpers.KINDS, "explicit"))
def test_nothing_goes_over_the_slow_axis_within_a_round(kind):
    run = Run(sparsejax.local_steps(INNER(), every=3, axis_name="replica"), kind)
    (batch,) = helpers.placed(model.batches(1), run.mesh, BOTH)
    with jax.set_mesh(run.mesh):
        compiled = run.step.lower(run.params, run.state, batch).compile()
    slow = [
        (one.opcode, one.path)
        for one in helpers.compiled_collectives(compiled, run.mesh)
        if "replica" in one.axes
    ]
    assert slow == [("all-reduce", ("conditional",))]


def test_a_sparsifier_keeps_what_it_leaves_out_by_rank_and_shard():
    """Over two rounds what ranks have moved is what the anchor was given, or a residual."""
    sync = optax.chain(
        sparsejax.top_k(0.3, min_size=0, axis_name="replica"), sparsejax.zen_sync("replica")
    )
    tx = sparsejax.local_steps(
        optax.sgd(0.05, momentum=0.9),
        every=3,
        outer=optax.sgd(1.0),
        sync=sync,
        axis_name="replica",
    )
    run = Run(tx, "auto")
    moved = {name: np.zeros(shape) for name, shape in model.SHAPES.items()}
    optimizers, anchor = [model.Sgd() for _ in range(RANKS)], model.first(np.float64)
    given = model.batches(6)
    for steps in (given[:3], given[3:]):
        left = model.inner_round(anchor, optimizers, steps)
        moved = {k: x + sum(one[k] for one in left) for k, x in moved.items()}
        run.train(steps)
        anchor = {k: np.asarray(x, np.float64) for k, x in run.params.items()}
    for name, x in model.first(np.float64).items():
        held = sparsejax.residuals(run.state)[name]
        assert np.asarray(held).any()
        total = RANKS * (x - anchor[name]) + np.asarray(held, np.float64).sum(0)
        np.testing.assert_allclose(total, moved[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_accumulated_gradients_of_replicas_are_one_step():
    """`accumulate` adds up microbatches: fewer steps, the same examples.

    By `optax.partition`: "b" is exchanged in every step, and "w" by rounds.
    """
    whole = model.batches(4, examples=4)
    cut = lambda batch, part: {
        k: x.reshape(RANKS, 2, 2, -1)[:, part].reshape(RANKS * 2, -1)
        for k, x in batch.items()
    }

    def made(axis_name):
        rounds = sparsejax.local_steps(optax.sgd(0.05), every=3, axis_name=axis_name)
        each = optax.chain(sparsejax.dense_sync(axis_name), optax.sgd(0.05))
        return optax.partition({"w": rounds, "b": each}, {"w": "w", "b": "b"})

    tx = sparsejax.accumulate(made("replica"), every=2, axis_name="replica")
    run, alone = Run(tx, "auto"), model.train(made(None), whole)
    run.train([cut(batch, part) for batch in whole for part in range(2)])
    for name, x in run.params.items():
        np.testing.assert_allclose(x, alone.params[-1][name][0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", helpers.mostly_slow(helpers.KINDS, "explicit"))
def test_an_inner_optimizer_gets_the_value_of_its_rank(kind):
    """Polyak's step of each rank, by its own loss; an outer step is their mean."""
    mesh = helpers.KINDS[kind](helpers.grid(replica=4))
    first, targets = np.arange(8, dtype=np.float32).reshape(2, 4) / 8, np.arange(4.0)
    inner, outer = optax.polyak_sgd(1.0), optax.sgd(1.0)
    tx = sparsejax.local_steps(inner, every=1, outer=outer, axis_name="replica")
    loss_fn = lambda params, x: ((params["w"] - x[0]) ** 2).sum()
    value_and_grad = sparsejax.per_replica(jax.value_and_grad(loss_fn), "replica")

    def moved(value_of):
        params = {"w": helpers.placed(first, mesh, P())}
        with jax.set_mesh(mesh):
            state = sparsejax.init(tx, params)
            own = sparsejax.local(params, "replica", state)
            x = helpers.placed(targets.astype(np.float32), mesh, P("replica"))
            losses, grads = value_and_grad(own, x)
            return tx.update(grads, state, params, value=value_of(losses))[0]["w"]

    apart = first - targets[:, None, None]
    steps = [np.square(x).sum() / np.square(2 * x).sum() * 2 * x for x in apart]
    wanted = -np.mean(steps, 0)
    np.testing.assert_allclose(moved(lambda losses: losses), wanted, rtol=1e-5)
    moved(lambda losses: losses.mean())  # one for all ranks
    with pytest.raises(errors.ArgumentError, match=r"value= has the shape \[2\]: .* of 4"):
        moved(lambda losses: np.zeros(2))


def test_other_arguments_of_an_inner_optimizer_are_for_all_ranks():
    """A vector with as many numbers as there are ranks, too."""
    mesh, scale = helpers.grid(replica=4), np.arange(4, dtype=np.float32)
    given = lambda updates, state, params=None, *, scale, **extra: (
        jax.tree.map(lambda x: -scale * x, updates),
        state,
    )
    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), given)
    outer = optax.sgd(1.0)
    tx = sparsejax.local_steps(inner, every=1, outer=outer, axis_name="replica")
    params = {"w": helpers.placed(np.zeros((2, 4), np.float32), mesh, P())}
    x = helpers.placed(np.ones((4, 2, 4), np.float32), mesh, P("replica"))
    grads = {"w": sparsejax.transforms.PerReplica(x, "replica", P(), mesh)}
    with jax.set_mesh(mesh):
        args = {"scale": scale, "weight": np.ones(1, np.float32)}
        found = tx.update(grads, sparsejax.init(tx, params), params, **args)[0]["w"]
    np.testing.assert_array_equal(found, np.broadcast_to(-scale, (2, 4)))


def test_what_is_no_stack_of_gradients_is_refused():
    tx = sparsejax.local_steps(optax.sgd(0.1), every=2, axis_name="replica")
    run = Run(tx, "explicit")

    def plain(params, state, batch):
        grads = jax.grad(lambda p: (p["w"] ** 2).sum() + p["b"].sum())(params)
        return tx.update(grads, state, params)

    with jax.set_mesh(run.mesh):
        with pytest.raises(
            errors.ArgumentError, match=r"gradient of 'b' is one array .*per_r"
        ):
            jax.eval_shape(plain, run.params, run.state, None)
        with pytest.raises(errors.AxisError, match="given the axis 'fsdp', and a state of"):
            sparsejax.local(run.params, "fsdp", run.state)
        own = sparsejax.local(run.params, "replica", run.state)
        of_fast = sparsejax.per_replica(jax.value_and_grad(model.loss_fn), "fsdp", SPECS)
        with pytest.raises(errors.AxisError, match=r"stacked over 'replica': give it and"):
            of_fast(own, model.batches(1)[0])
        zero = sparsejax.transforms.PerReplica(own["w"].value, "replica", P("replica"))
        grads = {**own, "w": zero}
        with pytest.raises(errors.ArgumentError, match=r"'w' is sharded .*'replica'"):
            tx.update(grads, run.state, run.params)
