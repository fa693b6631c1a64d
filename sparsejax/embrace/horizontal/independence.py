"""Checks that a chain treats blocks separately, by its traced program.

The program of an update is interpreted with the blocks on which each of its arrays
depends. If the update of one block, or an array of the state, depends on two blocks, the
chain combines leaves: applied to each block by itself, it would compute different numbers.
Exchanges and sparsifiers are not analysed: they may be applied block by block.
"""

from typing import Any, NamedTuple

import jax

from sparsejax.errors import ArgumentError
from sparsejax.placement.chains import missing_keywords
from sparsejax.state import tree
from sparsejax.state.per_rank import OUTLINE
from sparsejax.tracing import programs
from sparsejax.tracing.interpreter import Domain, interpret
from sparsejax.wire.collectives import Wire


class _BlockDependence(NamedTuple):
    """The blocks on which an array depends.

    Attributes:
        blocks: The names of the blocks.
        why: The equation that first combined two blocks, or None.
        drawn: Whether it depends on random numbers.
    """

    blocks: frozenset[str] = frozenset()
    why: str | None = None
    drawn: bool = False


def check_apart(tx: Any, params: Any, block_of: dict[str, str], wire: Wire) -> None:
    """Raises if a chain's update of one block depends on another; inside `shard_map`.

    Args:
        tx: The chain.
        params: The parameters, with those masked that are not carried.
        block_of: The name of the block of each carried parameter, by its path.
        wire: The wire.
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
    except TypeError as error:
        if not missing_keywords(error):
            raise
        raise ArgumentError(
            "sparsejax.embrace.horizontal updates a block before the loss that reads it is "
            "computed, and gives its optimizer nothing but gradients, state and "
            f"parameters: {error}. Leave out what needs more, or horizontal."
        ) from error
    finally:
        OUTLINE.reset(token)
    own = [_BlockDependence(frozenset([block_of[path]])) for path in paths]
    inputs = [*own, *[_BlockDependence()] * len(held), *own]
    values = interpret(traced, _BlocksOfArrays(), inputs)
    drawn = set[str]()
    for path, value in zip(paths, values, strict=False):
        _check(f"the update of {path!r}", value)
        drawn |= {block_of[path]} if value.drawn else set()
    if len(drawn) > 1:
        raise ArgumentError(
            "horizontal: the chain adds random numbers to the updates of several blocks, "
            "as optax.add_noise does. Each block has a state of its own, and all would "
            "draw the same numbers: leave that out, or train without horizontal."
        )
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


# What draws random numbers, of typed keys and of others, and without keys.
_DRAWS = ("random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform")


def _draws(eqn):
    """Returns whether an equation, or one in a program inside it, draws random numbers."""
    inside = (one for program in programs.held(eqn) for one in program.jaxpr.eqns)
    return eqn.primitive.name in _DRAWS or any(map(_draws, inside))


class _BlocksOfArrays(Domain[_BlockDependence]):
    """The domain in which the value of an array is the blocks on which it depends."""

    def constant(self, x):
        return _BlockDependence()

    def other(self, eqn, given):
        made = _joined(eqn, given)
        return [made._replace(drawn=made.drawn or _draws(eqn))] * len(eqn.outvars)

    def joined(self, eqn, v, index, sides):
        return _joined(eqn, [index, *sides])


def _joined(eqn, values):
    blocks = frozenset[str]().union(*(value.blocks for value in values))
    why = next((value.why for value in values if value.why), None)
    if why is None and len(blocks) > 1:
        why = programs.named(eqn)
    return _BlockDependence(blocks, why, any(value.drawn for value in values))
