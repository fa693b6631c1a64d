"""Checks of a whole chain of transformations, by types alone: nothing is computed or sent.

A transformation is given gradients, and does not know what precedes or follows it in the
chain. So mistakes that raise no error in `update` are found when a state is made, where the
whole chain is known:

    a stateful optimizer before a synchronization         its state differs by rank
    another part between sparsifier and synchronization   it is given entries
    a sparsifier without a synchronization after it       entries are no update
    `accumulate` before a stateful optimizer              it runs on zeros in between
    `local_steps` before a stateful optimizer             the same
    a norm over a table that is sharded by columns        it differs by rank

One update is traced with gradients that vary over the ranks. In it, synchronizations and
sparsifiers only return values of the right types.
"""

import functools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from sparsejax import axes
from sparsejax.axes import AxisName
from sparsejax.errors import (
    AlreadySummedError,
    ArgumentError,
    SparsejaxError,
    StateError,
)
from sparsejax.placement import columns
from sparsejax.rounds.state import LocalStepsState
from sparsejax.state import sharded, tree
from sparsejax.state.observing import observed
from sparsejax.state.per_rank import OUTLINE, PerRank, find
from sparsejax.transforms.exchange import ExchangeState
from sparsejax.transforms.feedback import FeedbackState
from sparsejax.transforms.select import SelectState
from sparsejax.transforms.wrappers import AccumulateState, SkipState, WarmUpState


_OURS = (FeedbackState, AccumulateState, WarmUpState, SkipState, PerRank)
_PERIODIC = (AccumulateState, LocalStepsState)
_INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
_CONDITIONAL = (optax.ConditionallyMaskState, optax.ConditionallyTransformState)

# Transformations of optax that must not be around a synchronization, by their states.
_NOT_AROUND: dict[type, tuple[str, str]] = {
    optax.MultiStepsState: (
        "MultiSteps",
        "it adds up gradients that differ by rank in a state that is declared equal on "
        "all. Use sparsejax.accumulate(tx, every=k) around the chain instead.",
    ),
    optax.ApplyIfFiniteState: (
        "apply_if_finite",
        "each rank would decide by its own gradient whether to take part. Use "
        "sparsejax.skip_nonfinite(tx) around the chain instead, by which all ranks decide "
        "the same.",
    ),
    optax.ConditionallyTransformState: (
        "conditionally_transform",
        "in a step that it leaves out, each rank would apply its own gradient. Put the "
        "synchronization before it: "
        "optax.chain(sparsejax.zen_sync(), optax.conditionally_transform(...)).",
    ),
}
_ORDER = "optax.chain(sparsejax.dgc(0.01), sparsejax.zen_sync(), optax.adam(1e-3))"


def check_chain(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Mesh | AbstractMesh,
    axis_name: AxisName,
    in_specs: Any,
) -> Any:
    """Raises, or warns, if the parts of a chain do not fit together.

    Args:
        tx: The chain.
        params: The shapes and dtypes of the parameters.
        mesh: The mesh on which it will run.
        axis_name: The mesh axis of the ranks.
        in_specs: The PartitionSpecs of the parameters.

    Returns:
        The traced program of `init` and, if the chain sums any leaf, of one update, without
        collectives: a `ClosedJaxpr`.
    """
    summed = {
        path
        for exchange in observed(tx, params).exchanges
        for bucket in exchange.buckets
        for path in bucket.paths
    }

    given = _given_value(tx)

    def outline(params):
        paths, leaves, structure = tree.flatten(params)
        names = frozenset(axes.axis_names(axis_name))
        local = [
            # Computed from the leaf, by which `flow.flow_of` tells gradients apart.
            axes.as_varying(lax.optimization_barrier(leaf), names)
            if path in summed
            else leaf
            for path, leaf in zip(paths, leaves, strict=True)
        ]
        state = tx.init(params)
        check_not_inside(state)
        # A state that contains whole chains has counters beside them: check each chain.
        for inside in getattr(state, "chains", [state]):
            _check_idle_steps(inside)
        has_tables = bool(sharded.apart(params).places)
        if not summed and find(state, SelectState):
            _warn_of_entries("all leaves")
        if not summed and not has_tables:
            return jnp.zeros(())
        grads = structure.unflatten(local)
        if isinstance(grads, optax.LookaheadParams):
            grads = grads.fast  # gradients are of one of its two copies
        updates, after = _updated(given, grads, state, params)
        if after is not None:
            if has_tables:
                columns.check_by_column(given, grads, state, params)
            _check_updates(updates)
            _check_state(after, names)
        return jnp.zeros(())

    run = jax.shard_map(outline, mesh=mesh, in_specs=(in_specs,), out_specs=PartitionSpec())
    token = OUTLINE.set(True)
    try:
        # A new function, so that JAX does not cache this trace for one that computes.
        return jax.make_jaxpr(functools.partial(run))(params)
    finally:
        OUTLINE.reset(token)


def _given_value(tx):
    """Returns a chain whose update is given a loss of zero where it needs `value`."""
    tx = optax.with_extra_args_support(tx)

    def update(updates, state, params=None, **extra):
        try:
            return tx.update(updates, state, params, **extra)
        except TypeError as error:
            if missing_keywords(error) != ["value"]:
                raise
            return tx.update(updates, state, params, value=jnp.zeros(()), **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _updated(tx, grads, state, params):
    """Returns the updates and the next state; None for both if they cannot be traced."""
    try:
        return tx.update(grads, state, params)
    except AlreadySummedError:
        # Leaves that no exchange of the chain sums were assumed to be summed already.
        return None, None
    except SparsejaxError:
        raise
    except Exception as error:
        # It may need arguments that only a real step has, or types that are not checked.
        if find(state, SelectState) and _takes_arrays(tx, grads, state, params):
            raise ArgumentError(
                "the chain failed on gradients that a sparsifier gave as selected entries "
                f"(SparseTensor): {_first_line(error)} Between a sparsifier and its "
                "synchronization nothing else may stand: clip and scale in front of the "
                f"one or behind the other, as in {_ORDER}."
            ) from error
        return None, None


def _takes_arrays(tx, grads, state, params):
    """Returns whether an update can be traced in which sparsifiers select no entries."""
    try:
        tx.update(grads, state, params, dense=True)
    except Exception:  # the one of entries is reported, if any
        return False
    return True


def _first_line(error):
    return f"{type(error).__name__}: {str(error).strip().splitlines()[:1] or ['']}"


def _check_updates(updates):
    paths, leaves, _ = tree.flatten(updates)
    sparse = [
        path for path, leaf in zip(paths, leaves, strict=True) if tree.is_sparse(leaf)
    ]
    if sparse:
        _warn_of_entries(repr(sparse[0]))


def _warn_of_entries(what):
    """Warns, and does not raise, since a caller may sum them by `sparsejax.all_reduce`."""
    warnings.warn(
        f"the updates of {what} are a sparsifier's selected entries (SparseTensor), and no "
        "synchronization follows it in the chain to sum them. Put one there: "
        f"{_ORDER}.",
        stacklevel=2,
    )


def _check_state(state, names):
    """Raises if a part of a state differs by rank and is not declared to."""
    kinds = (*_OURS, ExchangeState, SelectState, sharded.Sharded)
    ours = lambda node: isinstance(node, kinds)
    for keys, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=ours):
        if isinstance(node, (AccumulateState, WarmUpState, SkipState)):
            _check_state(node.inner, names)
        elif sharded.is_sharded(node):
            node.specs(tree.named(keys))
        elif not ours(node) and axes.varying_axes(node) & names:
            raise StateError(
                f"the optimizer's state at {tree.named(keys)!r} would differ by rank: a "
                "transformation with a state stands in front of the synchronization, and "
                "is given each rank's own gradient. Its copies would drift apart, and a "
                "checkpoint keep one of them. Move the synchronization before it, as in "
                "optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))."
            )


def _check_idle_steps(state):
    """Warns if a stateful optimizer runs on the zeros between two synchronizations."""
    state = _without_injected(state)
    parted = find(state, optax.transforms.PartitionState)
    parted = [part for part in parted if find(part, _PERIODIC)]
    for inside in (one for part in parted for one in part.inner_states.values()):
        _check_idle_steps(inside)  # Each has leaves of its own.
    known = (*_OURS, *_CONDITIONAL, LocalStepsState)
    ours = lambda node: isinstance(node, known) or any(node is part for part in parted)
    nodes = jax.tree.leaves(state, is_leaf=ours)
    periodic = [type(node) for node in nodes if isinstance(node, _PERIODIC)]
    if not periodic or all(ours(node) for node in nodes):
        return
    if LocalStepsState in periodic:
        warnings.warn(
            "local_steps stands beside an optimizer with a state, which runs at every "
            "step: on zeros within a round. Give it to local_steps: as inner, if each rank "
            "is to take a step of it, or as outer, if it is to move the anchor once a "
            "round.",
            stacklevel=2,
        )
    else:
        warnings.warn(
            "accumulate stands beside an optimizer with a state, which runs at every step: "
            "on zeros in between, so momentum, if it has any, decays, and the count of its "
            "steps grows k times as fast. Put it inside, where it sleeps: "
            "sparsejax.accumulate(optax.chain(sparsejax.zen_sync(), optax.adam(1e-3)), "
            "every=k).",
            stacklevel=2,
        )


def _without_injected(state):
    """Returns a state without the numbers of `inject_hyperparams`: no optimizer's state."""
    is_injected = lambda node: isinstance(node, _INJECTED)
    one = lambda node: _without_injected(node.inner_state) if is_injected(node) else node
    return jax.tree.map(one, state, is_leaf=is_injected)


def missing_keywords(error: TypeError) -> list[str]:
    """Returns the keyword-only arguments that a call lacks, by Python's message."""
    found = re.search(r"missing \d+ required keyword-only arguments?: (.*)", str(error))
    return re.findall(r"'(\w+)'", found[1]) if found else []


def check_not_inside(state):
    """Raises if optax would accumulate, test or pass on gradients that differ by rank."""
    for outer in find(state, tuple(_NOT_AROUND)):
        if find(tuple(outer), (PerRank, ExchangeState)):
            name, why = _NOT_AROUND[type(outer)]
            raise StateError(f"optax.{name} is around a synchronization: {why}")
