"""Exchanges that run concurrently with the steps, each as a separate program: `Overlap`.

On the wire: what the exchanges of `local_steps` send, and nothing else; the program of a
step has no collective. After each step `turn` is called on the host, on all processes. The
number of the step alone determines what it does with each fragment:

    sent       copies the offsets of the fragment, and starts its exchange in a thread
    applied    waits for the exchange, and moves the anchor

So exchanges run in one order on all processes. The copies are in the state, too: a state
that is saved between the two is complete, and a run that is restored from it starts the
exchange again. Results equal those of `tx.update` up to rounding, which computes the same
exchange in the step in which it is applied.
"""

import functools
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sparsejax.axes import axis_names
from sparsejax.errors import ArgumentError, StateError, missing_axis
from sparsejax.jobs import background
from sparsejax.rounds.inner_steps import Stacked
from sparsejax.rounds.state import FragmentState, LocalStepsState
from sparsejax.rounds.transformation import LocalSteps, widened
from sparsejax.state import tree
from sparsejax.state.per_rank import check_kind


_CALL = "sparsejax.rounds.Overlap"


class Overlap:
    """Runs the exchanges of `sparsejax.local_steps` concurrently with later steps.

    With a delay of n steps an exchange has the time of n steps. A step calls
    `overlap.steps.update` instead of `tx.update`. After each step, outside of `jit`, all
    processes call `overlap.turn`.

    A step must send nothing itself, not even for the mean of the loss: return the loss of
    each rank. Before another program of yours that sends, such as an evaluation in a
    `shard_map`, call `overlap.wait()`. This library's own programs wait automatically.

    On CPUs with one device a process, an exchange runs concurrently with the steps. With
    several devices in a process XLA:CPU runs one program after another, and so does a GPU's
    compute stream. Results are then the same, and no time is saved.

    Args:
        tx: The result of `sparsejax.local_steps` or of a preset of `sparsejax.rounds`.
        mesh: The mesh.

    Attributes:
        steps: The transformation of a step: it takes inner steps, and its updates are
            zeros.

    Example:
        >>> tx = sparsejax.local_steps(optax.adamw(1e-3), every=30, delay=5, blend=0.5)
        >>> overlap = sparsejax.rounds.Overlap(tx, mesh)
        >>> opt_state = sparsejax.init(tx, params, mesh)
        >>> specs = sparsejax.state_specs(opt_state)
        >>> def step(params, opt_state, batch):
        ...     own = sparsejax.local(params, "data", opt_state)
        ...     loss, grads = jax.value_and_grad(loss_fn)(own, batch)
        ...     _, opt_state = overlap.steps.update(grads, opt_state, params)
        ...     return opt_state, loss[None]
        >>> in_specs, out_specs = (P(), specs, P("data")), (specs, P("data"))
        >>> step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=in_specs,
        ...                              out_specs=out_specs))
        >>> for batch in batches:
        ...     opt_state, losses = step(params, opt_state, batch)
        ...     params, opt_state = overlap.turn(params, opt_state)
    """

    def __init__(self, tx: optax.GradientTransformation, mesh: Mesh):
        if not isinstance(tx, LocalSteps):
            raise ArgumentError(
                f"{_CALL}(tx, mesh) takes what sparsejax.local_steps returns, or a preset "
                f"such as sparsejax.rounds.diloco, got {tx!r}: put wrappers and chains "
                "into its inner= and outer=."
            )
        if not isinstance(mesh, Mesh):
            raise ArgumentError(
                f"{_CALL}(tx, mesh) takes a jax.sharding.Mesh, got a "
                f"{type(mesh).__name__}: jax.make_mesh((8,), ('data',))."
            )
        self.steps = tree.transformation(tx.init, self._step)
        self._rounds, self._mesh = tx.rounds, mesh
        self._programs: dict[Any, Any] = {}
        self._running: dict[int, Future] = {}
        self._last: int | None = None

    def turn(self, params: Any, opt_state: LocalStepsState) -> tuple[Any, LocalStepsState]:
        """Begins and applies the exchanges that are due; called after each step.

        Args:
            params: The anchor.
            opt_state: The state that the step returned. The call waits for the step to end.

        Returns:
            The anchor and the state for the next step.
        """
        check_kind(opt_state, LocalStepsState, f"{_CALL}.turn")
        for name in axis_names(opt_state.offset.axis_name):
            if name not in self._mesh.axis_names:
                raise missing_axis(f"{_CALL}.turn", name, self._mesh.axis_names)
        step = self._ended(opt_state)
        schedule, fragments = self._rounds.schedule, self._rounds.fragments(params)
        for number in range(fragments.count):
            if not schedule.is_pending(step, number):
                continue
            own = opt_state.fragment(fragments, number)
            anchor = fragments.only(number, params)
            if schedule.is_sent(step, number):
                own = self._sent(own, anchor, number)
            elif number not in self._running:
                self._begin(own.outgoing, own, anchor, number)
            if schedule.is_applied(step, number):
                anchor, own = self._applied(own, anchor, number)
            params = fragments.replaced(number, params, anchor)
            opt_state = opt_state.with_fragment(fragments, number, own)
        return params, opt_state

    def restart(self) -> None:
        """Drops running exchanges, and follows another run, as after a restore."""
        self.wait()
        self._running.clear()
        self._last = None

    def wait(self) -> None:
        """Waits for the running exchanges; called before other programs that send."""
        background.wait()

    def _step(self, grads, state, params=None, **extra):
        """Takes an inner step, and returns zeros as updates."""
        extra.pop("ids", None)
        for name in ("weight", "dense"):
            given = extra.pop(name, None)
            if given is not None and given is not False:
                raise ArgumentError(
                    f"update of {_CALL}.steps was given {name}=, which is for the "
                    "exchange, and that is a program of its own here: leave it out, or "
                    "call tx.update, without Overlap."
                )
        _, state = self._rounds.advance(grads, state, params, extra)
        return jax.tree.map(jnp.zeros_like, params), state

    def _ended(self, opt_state):
        """Returns the number of the last step, from 0; raises if a call was left out."""
        done = int(np.asarray(opt_state.step.addressable_data(0)))
        if self._last is not None and done != self._last + 1:
            raise StateError(
                f"{_CALL}.turn follows one run, and is called once after each step: the "
                f"last one was called after step {self._last}, and this state is that of "
                f"step {done}. After a restore call restart() before the next step."
            )
        self._last = done
        return done - 1

    def _sent(self, own, anchor, number):
        """Starts the exchange of a fragment, and returns its next state."""
        if own.outgoing is None:
            self._begin(own.offset, own, anchor, number)
            return own
        own = own._replace(outgoing=_copy(own.offset))
        self._begin(own.outgoing, own, anchor, number)
        return own

    def _begin(self, outgoing, own: FragmentState, anchor, number):
        """Starts an exchange in the background thread."""
        # They are copies, because the next step may donate the buffers of the state.
        given = _copy((outgoing, own.of_outer.sync, anchor))
        ranks = self._ranks(anchor, outgoing)

        def exchange(outgoing, state, anchor):
            return self._rounds.outer.exchange(ranks, outgoing, state, widened(anchor))

        places = jax.tree.map(lambda x: x.sharding, (anchor, own.of_outer.sync))
        program = self._compiled(("exchange", number), exchange, given, places)
        self._running[number] = background.submit(program, *given)

    def _applied(self, own, anchor, number):
        """Waits for an exchange; returns the fragment's anchor and state after it."""
        exchanged = self._running.pop(number).result()

        def apply(exchanged, own, anchor):
            updates, own = self._rounds.outer.apply(exchanged, own, widened(anchor))
            return optax.apply_updates(anchor, updates), own

        given = exchanged, own, anchor
        places = jax.tree.map(lambda x: x.sharding, (anchor, own))
        program = self._compiled(("apply", number), apply, given, places)
        return program(*given)

    def _compiled(self, key, function, given, places):
        """Returns the compiled program of a function, from a cache."""
        if key not in self._programs:
            with jax.set_mesh(self._mesh):
                jitted = jax.jit(function, out_shardings=places)
                self._programs[key] = jitted.lower(*given).compile()
        return self._programs[key]

    def _ranks(self, anchor, offset):
        """Returns the ranks, stacked, with the shardings of the anchor."""
        specs = [_spec_of(x) for x in jax.tree.leaves(anchor)]
        return Stacked(offset.axis_name, self._mesh, specs)


def _spec_of(x):
    """Returns the spec of a concrete array; `P()` without a named sharding."""
    is_named = isinstance(x.sharding, NamedSharding)
    return x.sharding.spec if is_named else PartitionSpec()


@functools.partial(jax.jit)
def _copy(values):
    return jax.tree.map(lambda x: jnp.array(x, copy=True), values)
