"""Which domain looks into which kinds of equations; what it does not is one thing to it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from sparsejax.embrace.horizontal import first_use, independence
from sparsejax.placement import program as numbers
from sparsejax.rows import reading, replay
from sparsejax.rows.updates.facts import values
from sparsejax.tracing import programs
from sparsejax.tracing.interpreter import interpret
from sparsejax.tracing.programs import CallKind
from tests import helpers


def jitted(run, flag, *args):
    return jax.jit(run)(*args)


def rematerialized(run, flag, *args):
    return jax.checkpoint(run)(*args)


def with_a_jvp(run, flag, *args):
    function = jax.custom_jvp(run)
    function.defjvp(lambda primals, tangents: (run(*primals), run(*tangents)))
    return function(*args)


def with_a_vjp(run, flag, *args):
    function = jax.custom_vjp(run)
    function.defvjp(lambda *args: (run(*args), args), lambda args, _: args)
    return function(*args)


def chosen(run, flag, *args):
    return lax.cond(flag, run, lambda *args: jax.tree.map(jnp.negative, run(*args)), *args)


def zeros(run, *args):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, *args))


def scanned(run, flag, *args):
    return lax.scan(lambda _, x: (run(*args), x), zeros(run, *args), None, 2)[0]


def while_it_is_less(run, flag, *args):
    first = jnp.int32(0), zeros(run, *args)
    return lax.while_loop(lambda x: x[0] < 1, lambda x: (x[0] + 1, run(*args)), first)[1]


def sharded(run, flag, *args):
    return helpers.shard_map(run, mesh=helpers.mesh_of(1), in_specs=P(), out_specs=P())(
        *args
    )


# By what runs a program: its kind, or the primitive that is of none, and who looks into it.
KINDS = {
    jitted: (CallKind.INLINE, {"rows", "facts", "uses", "blocks"}),
    rematerialized: (CallKind.REMAT, {"rows", "facts", "uses", "blocks"}),
    chosen: (CallKind.COND, {"rows", "facts", "uses", "blocks"}),
    # With a derivative of its own, a gradient of rows is not that of the program inside.
    with_a_jvp: (CallKind.CUSTOM, {"facts", "uses", "blocks"}),
    with_a_vjp: (CallKind.CUSTOM, {"facts", "uses", "blocks"}),
    scanned: (CallKind.SCAN, {"rows", "uses"}),
    while_it_is_less: ("while", set()),
    sharded: ("shard_map", set()),
}
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(9, 3)), jnp.float32)


def traced(kind, run, *args):
    """A program with an equation of a kind, of a flag and arrays."""
    program = jax.make_jaxpr(lambda *args: kind(run, *args))(jnp.bool(True), *args)
    eqns = program.jaxpr.eqns
    assert KINDS[kind][0] in [programs.kind_of(eqn) or eqn.primitive.name for eqn in eqns]
    return program


def test_each_kind_that_is_known_is_looked_into():
    assert {*programs.CallKind} <= {kind for kind, _ in KINDS.values()}


@every_kind
def test_of_rows_that_a_loss_reads(kind):
    program = traced(kind, lambda table, ids: table[ids] * 2, TABLE, jnp.array([3, 5]))
    found = reading.read(program, {1: TABLE}, [True])
    assert bool(found.plan.sites) == ("rows" in KINDS[kind][1])
    for flag in True, False:
        args = jnp.bool(flag), TABLE, jnp.array([3, 5])
        inputs = list(args)
        if found.plan.sites:
            inputs[1] = replay.ProgramTable(TABLE, "table")
        deltas = map(replay.zeros, found.plan.sites)
        (made,), _ = replay.run(program, found.plan, inputs, deltas)
        want = TABLE[jnp.array([3, 5])] * 2
        np.testing.assert_array_equal(made, -want if kind is chosen and not flag else want)


@every_kind
def test_of_rows_that_an_optimizer_keeps_apart(kind):
    program = traced(kind, jnp.tanh, TABLE)
    table = values.ArrayFacts(frozenset({1}), (0, 0))
    flag = values.ArrayFacts(frozenset({0}), flat=True)
    (made,) = values.follow(program, [flag, table])
    inside = "facts" in KINDS[kind][1]
    assert (made.row == (0, 0)) == (made.mixed is None) == inside


@every_kind
def test_of_the_order_in_which_a_loss_uses_parameters(kind):
    def loss(p, x):
        run = lambda x, a, b: (x @ b) @ a
        return jnp.sum(kind(run, jnp.bool(True), x, p["a"], p["b"]))

    square = {name: jnp.ones((3, 3)) for name in "ab"}
    want = ["b", "a"] if "uses" in KINDS[kind][1] else ["a", "b"]
    assert first_use.uses(loss, square, TABLE) == want


@every_kind
def test_of_blocks_that_depend_on_each_other(kind):
    program = traced(kind, lambda a, b: (a + 1, b * 2), TABLE, TABLE)
    given = [independence._BlockDependence(frozenset(name)) for name in ("", "a", "b")]
    a, b = interpret(program, independence._BlocksOfArrays(), given)
    inside = "blocks" in KINDS[kind][1]
    assert [a.blocks, b.blocks] == ([{"a"}, {"b"}] if inside else [{"a", "b"}] * 2)
    assert (a.why is None) == inside


@every_kind
def test_of_the_numbers_that_a_program_computes_with(kind):
    """These are found in all that holds a program, whatever it does with it."""
    one, other = (
        numbers.numbers_of(traced(kind, lambda x, by=by: x * by, TABLE)) for by in (2, 3)
    )
    assert one != other
