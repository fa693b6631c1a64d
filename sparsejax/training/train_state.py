"""The state of a training run, and the checks of it before and after a step."""

from collections.abc import Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from sparsejax import arguments, axes
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError, SparsejaxError, StateError
from sparsejax.monitor.replicas import check_replicas
from sparsejax.state import sharded, tree
from sparsejax.wire.collectives import Wire


class TrainState(NamedTuple):
    """The state of a training run.

    Attributes:
        step: int32 [], the number of steps taken.
        params: The parameters, replicated.
        opt_state: The state of the optimizer.
        variables: Arrays that the loss function changes and that are not trained by
            gradients, such as batch statistics, or None. Those kept by rank are `PerRank`.
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
        """Returns the PRNG key of this rank in this step."""
        if self.key is None:
            return None
        of_step = jax.random.fold_in(self.key, self.step)
        return jax.random.fold_in(wire.per_rank(of_step), wire.rank)


def check_key(key: Any) -> None:
    """Raises unless `key` is a single PRNG key, or None."""
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
    """Raises unless the state is a `TrainState` whose arrays are not deleted.

    Args:
        state: The state that the caller was given.
        call: The name of the public method, for the error.
    """
    if not isinstance(state, TrainState):
        raise StateError(
            f"{call} needs a sparsejax.TrainState, as trainer.init(params) makes it or the "
            f"last trainer.step returned it; got a {type(state).__name__}."
        )
    tree.check_not_donated(
        state,
        call,
        ", state, loss = trainer.step(state, batch); or make the trainer with "
        "sparsejax.data_parallel(..., donate=False), whose steps leave it as it is",
    )


def require_not_traced(state: TrainState, why: str) -> None:
    """Raises if an array of the state that `trainer.step` was given is being traced.

    Args:
        state: The state.
        why: Why none may be, for the error.
    """
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, Tracer):
            raise ArgumentError(
                f"trainer.step was given a state whose leaf {tree.named(keys)!r} is being "
                f"traced, {jax.typeof(leaf)}: {why}"
            )


def require_opt_state(state: TrainState, tx: optax.GradientTransformation) -> None:
    """Raises if a state is without the state that the optimizer keeps.

    `evaluate` takes such a state, and a step does not.

    Args:
        state: The state that `trainer.step` was given.
        tx: The optimizer.
    """
    if state.opt_state is not None:
        return
    try:
        made = jax.eval_shape(tx.init, state.params)
    except SparsejaxError:  # it is kept by rank, and so is not None
        made = state
    if made is not None:
        raise StateError(
            "trainer.step was given a state whose opt_state is None, which is enough for "
            "trainer.evaluate alone: give it the state that trainer.init(params) made, or "
            "that the last trainer.step returned."
        )


def require_synchronized(
    updates: Any, opt_state: Any, opt_specs: Any, names: Set[str]
) -> None:
    """Raises if an update, or an array declared equal on all ranks, varies over them.

    Args:
        updates: The updates from `tx.update`.
        opt_state: The optimizer's state from `tx.update`.
        opt_specs: The PartitionSpecs of that state.
        names: The mesh axes of the ranks.
    """
    shards = sharded.apart(updates)
    why = ""
    if shards.paths:
        why = (
            " Or tx takes a norm over the columns that a rank holds of the table "
            f"{shards.paths[0]!r}: give tables an optimizer of their own, by "
            "optax.partition."
        )
    paths, leaves, _ = tree.flatten(shards.rest, rows=True)
    for path, leaf in zip(paths, leaves, strict=True):
        if names & tree.axes_of(leaf):
            raise ArgumentError(
                f"after tx.update the update of {path!r} still differs by rank: tx does "
                "not synchronize it. Put sparsejax.zen_sync() first in the chain, after a "
                "sparsifier if there is one; under optax.masked or optax.partition give "
                "the other leaves sparsejax.dense_sync(). Set the gradient of a frozen "
                "leaf to zero first, optax.chain(optax.masked(optax.set_to_zero(), "
                f"frozen), sparsejax.zen_sync(), ...): then nothing is sent of it.{why}"
            )
    specs, structure = jax.tree.flatten(
        opt_specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    if jax.tree.structure(opt_state) != structure:
        return  # shard_map raises, and names the difference
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


class Checked:
    """Compares the states before some steps over the ranks.

    Steps are counted on the host: the number in a state is on the device, and reading it
    would wait for all steps that were started there.
    """

    def __init__(self, every: int | None, axis_name: AxisName):
        """Compares nothing yet.

        Args:
            every: The number of steps after which a state is compared; never if None.
            axis_name: The mesh axis of the ranks.
        """
        if every is not None:
            arguments.check_whole("check_every", every, 1, " or None")
        self._every = every
        self._axis_name = axis_name
        self._step: jax.Array | None = None  # `TrainState.step` after the last step
        self._number: int | None = None  # the same number, counted on the host

    def is_last(self, state: TrainState) -> bool:
        """Returns whether a state is the result of the last step, or of a flush."""
        return state.step is self._step

    def before(self, state: TrainState) -> None:
        """Compares a state, if its step is due, or if it is no result of the last step.

        A state of the latter kind is the first one, or was restored; its number is read.

        Raises:
            ReplicaError: Ranks have different bits of arrays that should be equal.
        """
        if self._every is None:
            return
        number = self._number if self.is_last(state) else None
        if number is None:
            self._number = int(np.asarray(tree.here(state.step)))
            self._step = state.step
        elif number % self._every:
            return
        check_replicas(state, self._axis_name, step=self._number)

    def after(self, state: TrainState) -> None:
        """Counts a step that has returned this state."""
        self._step = state.step
        self._number = None if self._number is None else self._number + 1

    def flushed(self, state: TrainState, after: TrainState) -> None:
        """Continues from the flushed state, with the same number of steps."""
        if not self.is_last(state):
            self._number = None
        self._step = after.step
