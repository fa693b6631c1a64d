"""Whether a chain treats blocks separately, by its traced program.

The program of an update is walked over once, with the blocks that each of its arrays
depends on. Where the update of one block, or something that the state keeps, depends on
two, the chain looks over leaves: run for each block by itself, it would come to other
numbers. Exchanges and sparsifiers are not looked into: they are to be run block by block.
"""

from typing import Any, NamedTuple

import jax

from sparsejax.errors import ArgumentError
from sparsejax.rows import programs
from sparsejax.rows.programs import CallKind
from sparsejax.state import tree
from sparsejax.state.per_rank import OUTLINE
from sparsejax.wire import Wire


# Calls of a program with all inputs of the equation.
_CALLS = {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}


class _BlockDependence(NamedTuple):
    """What an array depends on.

    Attributes:
        blocks: The blocks, by name.
        why: What first put two of them together, if there are two.
    """

    blocks: frozenset[str] = frozenset()
    why: str | None = None


def check_apart(tx: Any, params: Any, block_of: dict[str, str], wire: Wire) -> None:
    """Raises where a chain's update of one block depends on another; inside `shard_map`.

    Args:
        tx: The chain.
        params: The parameters that are carried, all else masked.
        block_of: The block of each of them, by its path.
        wire: The ranks.
    """
    paths, leaves, structure = tree.flatten(params)
    held, of_state = jax.tree.flatten(tx.init(params))

    def update(grads, held, leaves):
        grads, params = structure.unflatten(grads), structure.unflatten(leaves)
        updates, state = tx.update(grads, of_state.unflatten(held), params)
        return structure.flatten_up_to(updates), jax.tree.leaves(state)

    token = OUTLINE.set(True)
    try:
        traced = jax.make_jaxpr(update)([wire.per_rank(x) for x in leaves], held, leaves)
    finally:
        OUTLINE.reset(token)
    own = [_BlockDependence(frozenset([block_of[path]])) for path in paths]
    values = _follow(traced, [*own, *[_BlockDependence()] * len(held), *own])
    for path, value in zip(paths, values, strict=False):
        _check(f"the update of {path!r}", value)
    for value in values[len(paths) :]:
        _check("what it keeps", value)


def _check(what, value):
    if len(value.blocks) < 2:
        return
    some = ", ".join(repr(name) for name in sorted(value.blocks)[:3])
    raise ArgumentError(
        f"horizontal: {what} depends on more than one block ({some}), by "
        f"{value.why}. Blocks are updated one after the other, each by itself, so what "
        "looks over all leaves, as optax.clip_by_global_norm does, cannot stand in the "
        "chain: take what looks at each leaf alone, as optax.clip_by_block_rms does, or "
        "train without horizontal."
    )


def _follow(program, values):
    """What the outputs of a program depend on, from what its inputs do."""
    jaxpr = program.jaxpr
    env = dict.fromkeys(jaxpr.constvars, _BlockDependence())
    env.update(zip(jaxpr.invars, values, strict=True))
    get = lambda v: _BlockDependence() if programs.is_literal(v) else env[v]
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _made(eqn, list(map(get, eqn.invars))), strict=True))
    return list(map(get, jaxpr.outvars))


def _made(eqn, given):
    kind = programs.kind_of(eqn)
    if kind in (CallKind.INLINE, CallKind.REMAT) or eqn.primitive.name in _CALLS:
        return _follow(programs.programs(eqn)[0], given)
    if kind is CallKind.COND:
        sides = [_follow(side, given[1:]) for side in programs.programs(eqn)]
        return [_joined(eqn, [given[0], *some]) for some in zip(*sides, strict=True)]
    return [_joined(eqn, given)] * len(eqn.outvars)


def _joined(eqn, values):
    blocks = frozenset[str]().union(*(value.blocks for value in values))
    why = next((value.why for value in values if value.why), None)
    if why is None and len(blocks) > 1:
        why = programs.named(eqn)
    return _BlockDependence(blocks, why)
