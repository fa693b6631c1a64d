"""Checks of the arguments of local steps, and of the kinds of their gradients."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax import arguments
from sparsejax.errors import ArgumentError, LeafError
from sparsejax.state import observing, sharded, tree
from sparsejax.tracing import outputs
from sparsejax.units.row_grads import is_row_grads


CALL = "sparsejax.local_steps"
UPDATE = f"update of {CALL}"
_EXAMPLES = {
    "inner": "optax.adamw(1e-3)",
    "outer": "optax.sgd(0.7, momentum=0.9, nesterov=True)",
    "sync": "sparsejax.dense_sync()",
}
_TABLES = (
    "an offset is a whole array. Give local_steps dense gradients (jax.value_and_grad), or "
    "train tables outside of it, by optax.partition"
)


def check_transformation(name: str, tx: Any, call: str = CALL) -> None:
    """Raises unless an argument is an optax transformation that may be wrapped.

    Args:
        name: The name of the argument.
        tx: Its value.
        call: The function whose argument it is.
    """
    if not isinstance(tx, optax.GradientTransformation):
        fix = ": call it" if hasattr(tx, "init") else ""
        raise ArgumentError(
            f"{call}: {name} must be an optax transformation, such as {_EXAMPLES[name]}, "
            f"got {tx!r}{fix}."
        )
    if getattr(tx, "stands_alone", False):
        raise ArgumentError(
            f"{call}: {name} is sparsejax.embrace.horizontal, which sends gradients in "
            f"every step. Give {name} another transformation, such as {_EXAMPLES[name]}."
        )


def check_parts(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    sync: optax.GradientTransformation,
    params: Any,
) -> None:
    """Raises if `inner` or `outer` sends, or `sync` does not synchronize.

    Args:
        inner: The optimizer of each rank.
        outer: The optimizer of the anchor.
        sync: The chain that synchronizes.
        params: The parameters.
    """
    sharded.refuse(
        params, CALL, "of which no rank has a copy to train. Leave it out of it."
    )
    for name, tx in (("inner", inner), ("outer", outer)):
        seen = observing.observed(tx, params)
        found = [*seen.exchanges, *seen.sparsifiers]
        if found:
            does = "synchronizes" if seen.exchanges else "selects entries to be sent"
            raise ArgumentError(
                f"{CALL}: {name} {does} ({found[0].part.name}), and all that is sent in a "
                f"round goes through sync: give {name} an optimizer, such as "
                f"{_EXAMPLES[name]}, and the rest as sync=optax.chain(...)."
            )
        if seen.rows:
            raise LeafError(
                f"{CALL}: {name} updates rows of {seen.rows[0].paths[0]!r}, as "
                f"sparsejax.lazy does, and {_TABLES}."
            )
    _check_follows(inner, params)
    exchanges = observing.observed(sync, params).exchanges
    if not exchanges:
        raise ArgumentError(
            f"{CALL}: nothing in sync synchronizes, got {sync!r}, and the anchor would "
            "differ by rank: end it with a synchronization, sync=sparsejax.dense_sync() or "
            "sync=optax.chain(sparsejax.top_k(0.01), sparsejax.zen_sync())."
        )
    if any(wrapper.is_round for part in exchanges for wrapper in part.inside):
        raise ArgumentError(
            f"{CALL}: sync has local steps of its own, whose result moves parameters and "
            "is no mean of differences: give it the exchange alone, as that of "
            "sparsejax.rounds.sparse_loco is, sync=sparsejax.chunked_sync()."
        )


def _check_follows(inner, params):
    """Raises if the inner optimizer keeps copies of parameters, which no round would move.

    Its first state shows it: an array that depends on the values of parameters, and not
    only on their shapes, is such a copy.
    """
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params
    )
    program, state = jax.make_jaxpr(inner.init, return_shape=True)(shapes)
    places = [keys for keys, _ in jax.tree_util.tree_leaves_with_path(state)]
    for keys, made in zip(places, outputs.alone(program), strict=True):
        if made.reads_inputs:
            raise ArgumentError(
                f"{CALL}: the state of inner has parameters of its own, at "
                f"{tree.written(keys)!r}, as those of optax.contrib.schedule_free and "
                "madgrad have: they would stay where they are when a round moves the "
                "anchor. Give inner an optimizer whose first state does not depend on the "
                f"values of parameters, such as {_EXAMPLES['inner']}; as outer= such a one "
                "is right."
            )


def check_dtypes(params: Any) -> None:
    """Raises unless all parameters are of real floating dtypes that ranks can add up."""
    paths, leaves, _ = tree.flatten(sharded.apart(params).rest, f"init of {CALL}")
    for path, leaf in zip(paths, leaves, strict=True):
        tree.check_dtype(path, leaf)


def check_kind(path: str, leaf: Any) -> None:
    """Raises unless a gradient is a dense array of a floating dtype.

    Args:
        path: The path of the gradient.
        leaf: The gradient of one rank, or the stacked gradients of all.
    """
    if is_row_grads(leaf) or tree.is_sparse(leaf) or sharded.is_sharded(leaf):
        raise LeafError(
            f"{UPDATE}: the gradient of {path!r} is {type(leaf).__name__}, and {_TABLES}."
        )
    tree.check_dtype(path, leaf)


def check_blend(blend: Any, delay: int) -> None:
    """Raises unless a blend lies in [0, 1), and is 0 without a delay."""
    if not arguments.is_number(blend) or not 0 <= blend < 1:
        raise ArgumentError(
            f"blend must lie in [0, 1), got {blend!r}: it is the share of its own "
            "parameters that a rank keeps, and with 1 ranks would never meet."
        )
    if blend and not delay:
        raise ArgumentError(
            f"blend={blend} keeps a share of what ranks have moved since an exchange "
            "began, and without a delay that is nothing but what was sent: leave it out, "
            "or give delay=5."
        )


def check_delayed(delay: int, extra: Mapping[str, Any]) -> None:
    """Raises if ranks have weights, and an exchange is applied in a later step."""
    if delay and extra.get("weight") is not None:
        raise ArgumentError(
            f"{UPDATE} was given weight=, and with delay={delay} what is applied in a step "
            "was sent in an earlier one, whose weight is not kept. Leave weight out, or "
            "take delay=0."
        )


def require_params(params: Any) -> None:
    """Raises if `update` was given no parameters."""
    if params is None:
        raise ArgumentError(
            f"{UPDATE} was given no parameters, and inner and outer optimizer are given "
            "them: tx.update(grads, opt_state, params)."
        )
