"""Where parameters lie, against what is said or done: on meshes of both kinds.

Ranks are those of "replica". What is sharded over that axis is refused in words; what is
sharded over "fsdp" stays so, or is refused where it would be made whole without a word.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax.errors import ArgumentError
from sparsejax.placement import initial
from tests import helpers


SHAPES = {"rows": (60, 8), "columns": (8, 44), "same": (7,)}
OVER = {
    "nothing": {name: P() for name in SHAPES},
    "fsdp": {"rows": P("fsdp"), "columns": P(None, "fsdp"), "same": P()},
    "replica": {"rows": P(), "columns": P(None, ("fsdp", "replica")), "same": P()},
}
NAMED = {"axis_name": "replica"}


def mesh(kind):
    return helpers.KINDS[kind](helpers.grid(replica=2, fsdp=2))


def params(kind, over):
    tree = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    return helpers.placed(tree, mesh(kind), OVER[over])


def chain():
    select = sparsejax.sparsify(
        sparsejax.sparsifiers.ReuseThreshold(0.1), min_size=0, **NAMED
    )
    return optax.chain(select, sparsejax.zen_sync(**NAMED), optax.adam(0.1))


def loss_fn(params, batch):
    return sum(jnp.sum(x) for x in params.values()) * jnp.mean(batch)


def init(kind, params, tx=None, **options):
    return sparsejax.init(tx or chain(), params, mesh(kind), **NAMED, **options)


def bound(kind, params):
    return sparsejax.bind(chain(), mesh(kind), **NAMED).init(params)


def abstract(kind, params):
    return sparsejax.abstract_state(chain(), params, mesh(kind), **NAMED)


def trainer(kind, params, **options):
    tx = optax.chain(sparsejax.dense_sync(**NAMED), optax.adam(0.1))
    made = sparsejax.data_parallel(loss_fn, tx, mesh(kind), **NAMED, **options)
    return made.init(params)


REFUSED = {
    ("init", "replica"): (init, "'columns' is sharded .*each of its ranks needs the whole"),
    ("bind", "replica"): (
        bound,
        "'columns' is sharded .*each of its ranks needs the whole",
    ),
    ("abstract_state", "replica"): (abstract, "'columns' is sharded .*over 'replica'"),
    ("trainer.init", "replica"): (trainer, "trainer.init: .*'columns'.*over 'replica'"),
    ("trainer.init", "fsdp"): (trainer, r"trainer.init: .*'columns'.*param_specs=\.\.\."),
}


@pytest.mark.parametrize("kind", helpers.KINDS)
@pytest.mark.parametrize("case", REFUSED, ids=" ".join)
def test_what_would_be_wrong_or_whole_is_refused(case, kind):
    make, match = REFUSED[case]
    with pytest.raises(ArgumentError, match=match):
        make(kind, params(kind, case[1]))


def lies(tree):
    return [
        (x.shape, x.sharding.devices_indices_map(x.shape)) for x in jax.tree.leaves(tree)
    ]


def wanted(kind, state, over):
    """Where a state belongs whose arrays are like parameters that are sharded."""
    of_shape = {SHAPES[name]: spec for name, spec in OVER[over].items()}
    specs = sparsejax.state_specs(state)

    def one(x, spec):
        own = of_shape.get(x.shape[len(spec) :], P())
        there = jax.NamedSharding(mesh(kind), P(*spec, *own))
        return x.shape, there.devices_indices_map(x.shape)

    return list(map(one, jax.tree.leaves(state), jax.tree.leaves(specs)))


@pytest.mark.parametrize("kind", helpers.KINDS)
@pytest.mark.parametrize("make", [init, bound, abstract])
def test_a_state_is_sharded_as_its_parameters_are(make, kind):
    """Moments, residuals and what optimizers keep; what is by rank stays by rank."""
    state = make(kind, params(kind, "fsdp"))
    assert set(jax.tree.leaves(sparsejax.state_specs(state))) == {P(), P("replica")}
    assert lies(state) == wanted(kind, state, "fsdp")
    assert lies(make(kind, params(kind, "nothing"))) == wanted(kind, state, "nothing")


@pytest.mark.parametrize("kind", helpers.KINDS)
def test_nothing_is_gathered_to_make_a_state(kind):
    """An optimizer that keeps a copy of the parameters has its shards alone."""
    tx = optax.chain(sparsejax.zen_sync(**NAMED), optax.contrib.schedule_free_sgd(0.1))
    at = params(kind, "fsdp")
    maker = initial.Maker.of(tx, at, mesh(kind), "replica")
    assert "all-gather" not in maker.make.lower(at).compile().as_text()
    copies = init(kind, at, tx)[1].z
    assert lies(copies) == lies(at)


@pytest.mark.parametrize("kind", helpers.KINDS)
@pytest.mark.parametrize("over", ["nothing", "fsdp", "replica"])
def test_specs_are_followed_wherever_parameters_lie(over, kind):
    state = init(kind, params(kind, over), param_specs=OVER["fsdp"])
    assert lies(state[2][0].mu) == lies(params(kind, "fsdp"))
