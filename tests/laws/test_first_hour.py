"""What a newcomer tries in the first hour: it works, or an error names the fix.

Each row is an attempt: a step in an own `shard_map`, one of `data_parallel`, or a call by
itself; other calls are in `test_bad_input`. What works is traced to its end. What does not
is refused by sparsejax, in a message with all the words of the row: the cause, the value
and the fix.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import errors, schemes
from tests.helpers import grid, mesh_of, shard_map


RANKS = 2
PARAMS = {"embedding": jnp.full((2000, 64), 0.1), "w": jnp.full((64, 4), 0.1)}
WORDS = np.arange(16).reshape(8, 2) * 50
BATCH = (WORDS, WORDS[:, 0] % 4)
ADAM = optax.adam(1e-3)
ZEN = sparsejax.zen_sync
DENSE = sparsejax.dense_sync


def loss_fn(params, batch):
    words, labels = batch
    logits = params["embedding"][words].mean(1) @ params["w"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@dataclasses.dataclass(frozen=True)
class OwnStep:
    """A train step in a `shard_map` of its own, traced.

    Attributes:
        tx: The optimizer.
        local: Whether it takes gradients of `sparsejax.local(params)`.
        change: From the gradients to those that the optimizer is given.
        state: From the parameters to the optimizer's state.
        specs: The state's specs; what `sparsejax.state_specs` says if None.
        hands_on_params: Whether the optimizer is given the parameters.
        params: The parameters.
    """

    tx: Any
    local: bool = True
    check_vma: bool = True
    change: Callable[[Any], Any] = lambda grads: grads
    state: Callable[[Any], Any] | None = None
    specs: Any = None
    hands_on_params: bool = True
    params: Any = dataclasses.field(default_factory=lambda: PARAMS)
    mesh: Any = None

    def __call__(self):
        mesh = self.mesh or mesh_of(RANKS)
        state = (self.state or self.tx.init)(self.params)
        specs = sparsejax.state_specs(state) if self.specs is None else self.specs

        def step(params, state, batch):
            read = sparsejax.local(params, "data") if self.local else params
            loss, grads = jax.value_and_grad(loss_fn)(read, batch)
            given = (params,) if self.hands_on_params else ()
            updates, state = self.tx.update(self.change(grads), state, *given)
            return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "data")

        run = shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), specs, P("data")),
            out_specs=(P(), specs, P()),
            check_vma=self.check_vma,
        )
        return jax.eval_shape(run, self.params, state, BATCH)


def on_mesh(tx, mesh=None):
    """The state made by `sparsejax.init`."""
    return lambda params: sparsejax.init(tx, params, mesh or mesh_of(RANKS))


def trained(tx, mesh=None, batch=BATCH, loss=loss_fn, params=None, **options):
    """A step of `data_parallel`, traced."""

    def run():
        trainer = sparsejax.data_parallel(loss, tx, mesh or mesh_of(RANKS), **options)
        state = trainer.init(PARAMS if params is None else params)
        return jax.eval_shape(trainer.compiled(state), state, batch)

    return run


def held(tx):
    return optax.chain(tx, optax.sgd(0.1))


def made(*chain):
    """An own step of a chain whose state `sparsejax.init` makes."""
    tx = optax.chain(*chain)
    return OwnStep(tx, state=on_mesh(tx))


SELDOM = made(sparsejax.accumulate(ZEN(), 2), optax.sgd(0.1))
ALREADY = ("'embedding'", "already summed over 'data'", "sparsejax.local(params)", "pmean")
FIRST = ("mu/embedding", "Move the synchronization", "chain(sparsejax.zen_sync()")
SPARDL = held(sparsejax.spardl_sync(0.01))
# What is tried, and what an error must name; nothing where it works.
ATTEMPTS = {
    # An own shard_map.
    "the usual step": (OwnStep(optax.chain(ZEN(), ADAM)), ()),
    "clipping in front": (
        OwnStep(optax.chain(optax.clip_by_global_norm(1.0), ZEN(), ADAM)),
        (),
    ),
    "MultiSteps behind": (
        OwnStep(optax.chain(ZEN(), optax.MultiSteps(ADAM, 2).gradient_transformation())),
        (),
    ),
    "gradients of 16 bits": (
        OwnStep(
            held(ZEN()), change=lambda g: jax.tree.map(lambda x: x.astype(jnp.bfloat16), g)
        ),
        (),
    ),
    "no local, and nothing is checked": (
        OwnStep(optax.chain(ZEN(), ADAM), local=False, check_vma=False),
        (),
    ),
    "every, unchecked": (dataclasses.replace(SELDOM, local=False, check_vma=False), ()),
    "a state of other ranks that has nothing by rank": (
        OwnStep(held(ZEN()), state=on_mesh(held(ZEN()), mesh_of(3))),
        (),
    ),
    "no local": (OwnStep(optax.chain(ZEN(), ADAM), local=False), ALREADY),
    "pmean first": (
        OwnStep(optax.chain(ZEN(), ADAM), change=lambda g: jax.lax.pmean(g, "data")),
        ALREADY,
    ),
    "two synchronizations": (
        OwnStep(optax.chain(ZEN(), ZEN(), ADAM)),
        (*ALREADY, "another synchronization in this chain"),
    ),
    "a sparsifier behind": (made(ZEN(), sparsejax.dgc(0.01), ADAM), ALREADY),
    "an axis that is not there": (
        OwnStep(optax.chain(ZEN("batch"), ADAM)),
        ("'batch'", "manual axes are 'data'. Name one of these"),
    ),
    "a pair of axes on a mesh of one": (
        OwnStep(optax.chain(ZEN(("hosts", "data")), ADAM)),
        ("'hosts'", "manual axes are 'data'"),
    ),
    "Adam in front": (made(ADAM, ZEN()), FIRST),
    "MultiSteps around": (
        OwnStep(optax.MultiSteps(optax.chain(ZEN(), ADAM), 2).gradient_transformation()),
        ("optax.MultiSteps", "sparsejax.accumulate(tx, every=k)"),
    ),
    "apply_if_finite around": (
        OwnStep(optax.apply_if_finite(optax.chain(ZEN(), ADAM), 2)),
        ("optax.apply_if_finite", "sparsejax.skip_nonfinite(tx)"),
    ),
    "conditionally_transform around": (
        OwnStep(
            optax.conditionally_transform(optax.chain(ZEN(), ADAM), lambda step: step > 0)
        ),
        ("optax.conditionally_transform is", "Put the synchronization before it: optax."),
    ),
    "every, and tx.init": (
        OwnStep(sparsejax.accumulate(optax.chain(ZEN(), ADAM), 2)),
        ("every=2", "sparsejax.init(tx, params, mesh)", "sparsejax.bind(tx, mesh)"),
    ),
    "a sparsifier, and tx.init": (
        OwnStep(optax.chain(sparsejax.dgc(0.01), ZEN(), ADAM)),
        ("sparsejax.init(tx, params, mesh)", "sparsejax.bind(tx, mesh)"),
    ),
    "a state of another mesh": (
        OwnStep(SPARDL, state=on_mesh(SPARDL, mesh_of(2 * RANKS))),
        ("4 ranks", "there are 2", "resized"),
    ),
    "a state of another chain": (
        OwnStep(SPARDL, state=on_mesh(held(ZEN()))),
        ("holds nothing back", "Make it with the transformation that updates it"),
    ),
    "clipping between": (
        made(sparsejax.dgc(0.01), optax.clip_by_global_norm(1.0), ZEN(), ADAM),
        ("SparseTensor", "nothing else may stand", "sparsejax.dgc(0.01)"),
    ),
    "scaling between, by an integer": (
        made(sparsejax.dgc(0.01), optax.scale(2), ZEN(), ADAM),
        ("'embedding'", "optax.scale", "after the synchronization"),
    ),
    "two that leave something out": (
        made(sparsejax.dgc(0.01), sparsejax.spardl_sync(0.01), ADAM),
        ("'embedding'", "SparDL", "sparsejax.zen_sync()"),
    ),
    # data_parallel.
    "the usual trainer": (trained(optax.chain(ZEN(), ADAM)), ()),
    "a trainer's axis that is not there": (
        trained(optax.chain(ZEN(), ADAM), axis_name="batch"),
        ("'batch'", "('data',). Name one of these"),
    ),
    "two axes, and none is named": (
        trained(optax.chain(ZEN(), ADAM), mesh=grid(data=2, model=2)),
        ("('data', 'model')", "axis_name='data'", "sparsejax.zen_sync('data')"),
    ),
    "momentum in front": (
        trained(optax.chain(optax.sgd(1e-3, momentum=0.9), ZEN())),
        ("trace/embedding", "Move the synchronization"),
    ),
    "nothing synchronizes": (
        trained(ADAM),
        ("'embedding'", "does not synchronize it", "sparsejax.zen_sync()"),
    ),
    "a part is not synchronized": (
        trained(held(optax.masked(DENSE(), {"embedding": True, "w": False}))),
        ("'w'", "sparsejax.dense_sync()"),
    ),
    "an integer among the parameters": (
        trained(optax.chain(ZEN(), ADAM), params=PARAMS | {"step": jnp.int32(0)}),
        ("'step'", "int32", "variables=", "optax.masked"),
    ),
    "parameters that are sharded over the data": (
        trained(held(DENSE()), param_specs={"embedding": P("data"), "w": P()}),
        ("'embedding'", "'data'", "another axis"),
    ),
    "ids of another leaf": (
        trained(optax.chain(ZEN(), ADAM), ids=lambda batch: {"embeding": batch[0]}),
        ("'embeding'", "{path: 'row'}"),
    ),
    "a loss for each example": (
        trained(held(ZEN()), loss=lambda p, b: jnp.ones(3) * p["w"].sum()),
        ("scalar", "[3]", "loss.mean()"),
    ),
    "has_aux was forgotten": (
        trained(held(ZEN()), loss=lambda p, b: (p["w"].sum(), 1)),
        ("tuple of 2", "has_aux=True"),
    ),
    # Calls by themselves.
    "jit alone": (
        lambda: jax.jit(ZEN().update)(PARAMS, ZEN().init(PARAMS)),
        ("jax.shard_map", "sparsejax.data_parallel(loss_fn, tx, mesh)"),
    ),
    "a rule with a class": (
        lambda: ZEN(rules={"embedding": schemes.AGSparse}),
        ("'embedding'", "AGSparse", "must be a scheme"),
    ),
    "a density in per cent": (lambda: sparsejax.dgc(10), ("density", "10", "0.01")),
    "residuals of what sends everything": (
        lambda: sparsejax.residuals(on_mesh(optax.chain(ZEN(), ADAM))(PARAMS)),
        ("sparsejax.dgc()", "sparsejax.spardl_sync()"),
    ),
    "MultiSteps itself": (
        lambda: on_mesh(optax.MultiSteps(optax.chain(ZEN(), ADAM), 2))(PARAMS),
        ("got a MultiSteps", "sparsejax.accumulate(tx, every=k) around the chain"),
    ),
    "a trainer with MultiSteps itself": (
        lambda: sparsejax.data_parallel(
            loss_fn, optax.MultiSteps(optax.chain(ZEN(), ADAM), 2), mesh_of(RANKS)
        ),
        ("got a MultiSteps", "sparsejax.accumulate(tx, every=k) around the chain"),
    ),
    "a trainer with arguments swapped": (
        lambda: sparsejax.data_parallel(loss_fn, mesh_of(RANKS), ADAM),
        ("data_parallel(loss_fn, tx, mesh)", "got a Mesh"),
    ),
}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_it_works_or_an_error_names_the_fix(name):
    attempt, words = ATTEMPTS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if not words:
            attempt()
            return
        with pytest.raises(errors.SparsejaxError) as caught:
            attempt()
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
