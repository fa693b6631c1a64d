"""The state of a training run, and the checks of it before and after a step."""

from collections.abc import Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sparsejax import axes
from sparsejax.errors import ArgumentError, StateError
from sparsejax.transforms.state import sharded, tree
from sparsejax.wire import Wire


class TrainState(NamedTuple):
    """The state of a training run.

    Attributes:
        step: int32: steps taken.
        params: The parameters, replicated.
        opt_state: The optimizer's state.
        variables: What the loss function changes and no gradient trains, such as batch
            statistics; None if there is nothing. What is kept by rank is `PerRank`.
        key: The PRNG key from which those of all ranks and steps are made, or None.

    Example:
        >>> trainer = sparsejax.data_parallel(loss_fn, tx, mesh)
        >>> state = trainer.init(params)
        >>> int(state.step)
        0
    """

    step: jax.Array
    params: Any
    opt_state: Any
    variables: Any = None
    key: jax.Array | None = None

    def key_of(self, wire: Wire) -> jax.Array | None:
        """The key of this rank in this step."""
        if self.key is None:
            return None
        of_step = jax.random.fold_in(self.key, self.step)
        return jax.random.fold_in(wire.per_rank(of_step), wire.rank)


def check_key(key: Any) -> None:
    """Raises unless it is a single PRNG key, or None."""
    if key is None:
        return
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        good = shape == ()
    else:  # as jax.random.PRNGKey makes it
        good = dtype == jnp.uint32 and len(shape or ()) == 1
    if not good:
        got = repr(key) if dtype is None else f"{dtype}{list(shape or ())}"
        raise ArgumentError(
            "key must be one PRNG key, such as jax.random.key(0), from which a key is made "
            f"for each rank and step; got {got}."
        )


def require_usable(state: Any, call: str) -> None:
    """Raises unless the state is a `TrainState` whose arrays are still there.

    Args:
        state: What the caller was given as a state.
        call: The method as the user knows it, for the message.
    """
    if not isinstance(state, TrainState):
        raise StateError(
            f"{call} needs a sparsejax.TrainState, as trainer.init(params) makes it or the "
            f"last trainer.step returned it; got a {type(state).__name__}."
        )
    tree.check_there(
        state,
        call,
        ", state, loss = trainer.step(state, batch); or make the trainer with "
        "sparsejax.data_parallel(..., donate=False), whose steps leave it as it is",
    )


def require_synchronized(
    updates: Any, opt_state: Any, opt_specs: Any, names: Set[str]
) -> None:
    """Raises where an update, or state declared equal on all ranks, differs by rank.

    Args:
        updates: What `tx.update` returned.
        opt_state: The optimizer's state that it returned.
        opt_specs: The PartitionSpecs of that state.
        names: The mesh axes of the ranks.
    """
    paths, leaves, _ = tree.flatten(sharded.apart(updates).rest, rows=True)
    for path, leaf in zip(paths, leaves, strict=True):
        if names & tree.axes_of(leaf):
            raise ArgumentError(
                f"after tx.update the update of {path!r} still differs by rank: tx does "
                "not synchronize it. Put sparsejax.zen_sync() first in the chain, behind a "
                "sparsifier if there is one; under optax.masked or optax.partition give "
                "the other leaves sparsejax.dense_sync()."
            )
    specs, structure = jax.tree.flatten(
        opt_specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    if jax.tree.structure(opt_state) != structure:
        return  # shard_map says in what they differ
    paths, leaves, _ = tree.flatten(opt_state)
    for path, leaf, spec in zip(paths, leaves, specs, strict=True):
        parts = (axes.axis_names(part) for part in spec if part is not None)
        declared = {name for part in parts for name in part}
        if (names - declared) & axes.varying_axes(leaf):
            raise ArgumentError(
                f"after tx.update the optimizer's state opt_state/{path} "
                "differs by rank, and is declared equal on all: what keeps it stands in "
                "front of the synchronization, and has seen this rank's own gradients. Put "
                "sparsejax.zen_sync() before the optimizer: "
                "optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))."
            )
