"""What waits for what in a step: a forward for its own reductions and those before it."""

import itertools

import jax
import optax
import pytest

import sparsejax
from benchmarks.device import hlo
from sparsejax.embrace import horizontal
from sparsejax.tracing import programs
from tests.embrace.horizontal.model import ORDER, batch_of, loss_fn, params
from tests.helpers import mesh_of


N = 2
# XLA:CPU takes barriers out before it puts reductions together; GPUs' compilers do not.
KEEP = {"xla_disable_hlo_passes": "cse_barrier_expander"}


def step_of(order):
    tx = optax.chain(sparsejax.dense_sync(), optax.adam(1e-2))
    trainer = sparsejax.data_parallel(loss_fn, horizontal(tx, order), mesh_of(N))
    state = trainer.init(params())
    return trainer.compiled(state), (state, batch_of(0, N))


def waits(jaxpr, given, made):
    """The reductions on which each variable depends, by number; `made` lists equations."""
    env = dict.fromkeys(jaxpr.constvars, frozenset())
    env.update(zip(jaxpr.invars, given, strict=True))
    for eqn in jaxpr.eqns:
        sets = [env[v] for v in eqn.invars if not programs.is_literal(v)]
        inside = programs.programs(eqn)
        if len(inside) == 1 and len(inside[0].jaxpr.invars) == len(eqn.invars):
            ins = [frozenset() if programs.is_literal(v) else env[v] for v in eqn.invars]
            outs = waits(inside[0].jaxpr, ins, made)
            env.update(zip(eqn.outvars, outs, strict=True))
            continue
        union = frozenset().union(*sets)
        if eqn.primitive.name.startswith("psum"):
            union |= {sum(name == "psum" for name, *_ in made)}
            made.append(("psum", union, eqn.invars[0].aval.size))
        elif eqn.primitive.name in ("gather", "tanh", "optimization_barrier"):
            made.append((eqn.primitive.name, union, 0))
        env.update((v, union) for v in eqn.outvars)
    return [frozenset() if programs.is_literal(v) else env[v] for v in jaxpr.outvars]


@pytest.mark.parametrize("order", [ORDER, None], ids=["given", "found"])
def test_a_forward_waits_for_no_reduction_of_a_later_block(order):
    step, args = step_of(order)
    traced, made = jax.make_jaxpr(step)(*args), []
    waits(traced.jaxpr, [frozenset()] * len(traced.jaxpr.invars), made)
    sums = [(size, waited) for name, waited, size in made if name == "psum"]
    # Words, two layers, norm and head; the loss last. Each behind the one before it.
    sizes = [96, 72, 72, 16, 1] if order else [96, 72, 72, 8, 8, 1]
    assert [size for size, _ in sums] == sizes
    for number, (_, waited) in enumerate(sums):
        assert waited == set(range(number + 1)), number
    forward = [(name, waited) for name, waited, _ in made if name in ("gather", "tanh")]
    assert forward[:3] == [("gather", {0}), ("tanh", {0, 1}), ("tanh", {0, 1, 2})]


def test_a_block_is_one_reduction_in_order_where_barriers_are_kept():
    step, args = step_of(ORDER)
    lowered = step.lower(*args)
    program = hlo.parse(lowered.compile(compiler_options=KEEP).as_text())
    entry = program.entry.instructions
    sums = [one for one in entry.values() if one.opcode.startswith("all-reduce")]
    assert [one.bytes for one in sums] == [4 * size for size in (96, 72, 72, 16, 1)]

    def behind(one, found):
        for name in one.operands:
            if name not in found:
                found.add(name)
                behind(entry[name], found)
        return found

    for before, after in itertools.pairwise(sums):
        assert before.name in behind(after, set())
    # Without barriers they are one, which every forward would wait for; XLA:CPU of JAX 0.12
    # joins none.
    program = hlo.parse(lowered.compile().as_text())
    entry = program.entry.instructions.values()
    sums = [one for one in entry if one.opcode.startswith("all-reduce")]
    joined = [4, 1] if jax.__version_info__ < (0, 12) else [1] * 5
    assert [len(one.arrays) for one in sums] == joined
