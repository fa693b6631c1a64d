"""A step and an evaluation of one rank, inside `shard_map`."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from sparsejax import axes, rows
from sparsejax.axes import AxisName
from sparsejax.embrace.vertical import gradients
from sparsejax.errors import ArgumentError, AxisError
from sparsejax.rounds.reading import local
from sparsejax.rounds.state import find_state
from sparsejax.rows import Capacity
from sparsejax.state import observing
from sparsejax.training import numbers, variables as of_variables
from sparsejax.training.on_rank import asked, halves, outputs
from sparsejax.training.on_rank.by_rows import (
    bounded,
    caught_up,
    only,
    reader,
    scaled,
    takes_rows,
    updated,
    weighted,
)
from sparsejax.training.on_rank.losses import Loss
from sparsejax.training.on_rank.shares import Share
from sparsejax.training.train_state import TrainState, require_synchronized
from sparsejax.wire.collectives import Wire


@dataclasses.dataclass(frozen=True)
class Program:
    """The step and the evaluation of one rank: loss, gradients, exchange and update.

    Attributes:
        tx: The optimizer.
        axis_name: The mesh axis of the ranks.
        loss: The loss of a step.
        eval_loss: The loss of an evaluation.
        aux: The reduction of auxiliary outputs, if losses return any: see `outputs`.
        weight: A function from this rank's share of a batch to its weight; None if all
            ranks have equal weights.
        ids: A function from this rank's share of a batch to the `ids` argument of
            `tx.update`, or None.
        capacity: The capacity of lists of rows: see `within_capacity`, or None.
        mean_loss: Whether the loss is the mean over ranks; else it is that of each rank.
    """

    tx: optax.GradientTransformationExtraArgs
    axis_name: AxisName
    loss: Loss
    eval_loss: Loss
    aux: Any
    weight: Callable[[Any], Any] | None
    ids: Callable[[Any], Any] | None
    capacity: Capacity | None
    mean_loss: bool = True

    def step(
        self,
        state: TrainState,
        batches: Sequence[Any],
        opt_specs: Any,
        gives_value: bool = False,
    ) -> tuple[TrainState, Any]:
        """Returns the next state, and the loss, or the loss and auxiliary outputs.

        Args:
            state: The state on this rank.
            batches: This rank's share of the batch, and of the next one if it was given.
            opt_specs: The PartitionSpecs of the optimizer's state.
            gives_value: Whether the optimizer is given the loss, as `value`.

        Raises:
            NeedsValueError: The optimizer needs `value`, and is not given it.
        """
        wire, batch = Wire(self.axis_name), batches[0]
        share = Share.of(batch, self.weight, wire)
        loss_fn = self._loss_of(state, batch, share)
        before = halves.begun(self.tx, state.params, state.opt_state, loss_fn)
        params = local(before[0], wire.axis, before[1])
        seen = observing.observed(self.tx, params)
        _check_axes(seen, wire.axis)
        _check_weight(self.weight, state.opt_state, seen)
        by_rows, read = takes_rows(seen), reader(seen, params, halves.of_rest(before[1]))
        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
        if by_rows or read is not None:
            by_row = gradients.value_and_grad if seen.ahead else rows.value_and_grad
            value_and_grad = by_row(loss_fn, has_aux=True, read=read)
        (loss, (aux, new)), grads = value_and_grad(params)
        _check_own(loss, wire.axis)
        grads = scaled(only(grads, by_rows), share)
        extra = {"ids": self.ids(batch)} if self.ids else {}
        if read is not None:
            extra["read"] = read
        if seen.ahead:
            extra["next_ids"] = self._read_next(state, params, batches[1:])
        if gives_value:
            # The number that the step returns, too, so that it is summed once.
            loss = extra["value"] = self._loss_of_all(loss, share)

        def update(grads, params, opt_state):
            with asked.errors_named(gives_value, self.mean_loss):
                updates, opt_state = updated(self.tx, grads, opt_state, params, extra)
            names = frozenset(axes.axis_names(wire.axis))
            require_synchronized(updates, opt_state, opt_specs, names)
            return rows.apply_updates(params, updates), opt_state

        if self.capacity is not None:
            update = bounded(update, self.capacity, wire.axis)
        params, opt_state = update(grads, *before)
        variables = state.variables
        if variables is not None:
            new = of_variables.merged(variables, new, share)
            variables = numbers.kept(before[1], opt_state, variables, new)
        after = TrainState(state.step + 1, params, opt_state, variables, state.key)
        if not gives_value:
            loss = self._loss_of_all(loss, share)
        return after, self._with_aux(loss, aux, share)

    def evaluation(self, state: TrainState, batch: Any, settle: bool) -> Any:
        """Returns the loss, or the loss and auxiliary outputs.

        Args:
            state: The state on this rank; its `opt_state` may be None if not needed.
            batch: This rank's share of the batch.
            settle: Whether updates that wait for the next step are applied first.
        """
        if settle:
            state = halves.settled(self.tx, state)
        wire = Wire(self.axis_name)
        share = Share.of(batch, self.weight, wire)
        seen = observing.observed(self.tx, state.params)
        params = caught_up(seen, state.params, halves.of_rest(state.opt_state))
        params = local(params, wire.axis)
        given = of_variables.keywords(state, wire)
        loss, (aux, _) = self.eval_loss(params, batch, given)
        return self._with_aux(self._loss_of_all(loss, share), aux, share)

    def output_specs(self) -> Any:
        """Returns the PartitionSpecs of the loss, and of auxiliary outputs."""
        loss = PartitionSpec() if self.mean_loss else PartitionSpec(self.axis_name)
        return (loss, outputs.specs(self.aux, self.axis_name)) if self.has_aux else loss

    @property
    def has_aux(self) -> bool:
        """Whether the losses return auxiliary outputs."""
        return self.loss.has_aux

    def _loss_of(self, state, batch, share):
        """Makes the function from parameters to the loss on a share of a batch."""
        given = of_variables.keywords(state, Wire(self.axis_name))
        return lambda params: self.loss(weighted(params, share), batch, given)

    def _read_next(self, state, params, batches):
        """Returns the ids that this rank reads in the next step; None at the end."""
        if not batches:
            return None
        share = Share.of(batches[0], self.weight, Wire(self.axis_name))
        following = state._replace(step=state.step + 1)
        loss_fn = self._loss_of(following, batches[0], share)
        return gradients.rows_read(loss_fn, has_aux=True)(params)

    def _loss_of_all(self, loss, share):
        """Returns the mean of the loss over the ranks, or that of each."""
        share.require_same_elsewhere("what loss_fn returns", loss)
        return share.mean(loss) if self.mean_loss else share.wire.per_rank(loss[None])

    def _with_aux(self, loss, aux, share):
        """Returns the loss, and auxiliary outputs if there are any, over the ranks."""
        if not self.has_aux:
            return loss
        return loss, outputs.put_together(aux, self.aux, share)


def check_sends_nothing(aux: Any, weight: Any) -> None:
    """Raises if weights or auxiliary outputs need communication, for steps without it."""
    if weight is not None:
        raise ArgumentError(
            "data_parallel: weight= puts shares together in each step, and with "
            "overlap=True a step sends nothing: leave one of them out."
        )
    for kind in jax.tree.leaves(aux):
        if kind != "stack":
            raise ArgumentError(
                "data_parallel: with overlap=True a step sends nothing, and auxiliary "
                f"outputs cannot be put together as {kind!r}: take aux='stack', which "
                "leaves them on their ranks."
            )


def _check_axes(seen, axis_name):
    """Raises if a synchronization is over a mesh axis that is none of the ranks'."""
    names = axes.axis_names(axis_name)
    for one in seen.exchanges:
        own = one.part.axis_name
        if own is None or {*axes.axis_names(own)} <= {*names}:
            continue
        raise AxisError(
            f"data_parallel: axis_name is {axis_name!r}, over which shares of the batch "
            f"and so gradients differ, and {one.part.name} in tx synchronizes over "
            f"{own!r}: give the same to both, such as sparsejax.zen_sync({axis_name!r}), "
            f"or data_parallel(..., axis_name={own!r})."
        )


def _check_weight(weight, opt_state, seen):
    """Raises if shares have weights, and `tx` does not average over all ranks."""
    if weight is None:
        return
    if find_state(opt_state, "data_parallel") is not None:
        raise ArgumentError(
            "data_parallel: weight= says how gradients count in a mean over the ranks, and "
            "within a round of sparsejax.local_steps there is none: each rank takes steps "
            "by its own gradients. Leave weight out, average in loss_fn over the examples "
            "that a share has, and where a rank runs out of data start the next epoch at a "
            "round boundary, on all ranks; or write a shard_map of your own, whose "
            "tx.update(..., weight=...) in the last step of a round says how much this "
            "rank counts in it, with 0 not at all."
        )
    for one in seen.exchanges:
        if getattr(one.part, "senders", False):
            raise ArgumentError(
                "data_parallel: weight= scales gradients so that their mean over all ranks "
                f"is the weighted one, and {one.part.name} divides an element by the ranks "
                'that sent it: give it over="ranks".'
            )


def _check_own(loss, axis_name):
    """Raises if the type of a loss shows that it was reduced over the ranks.

    Parameters are local, so the loss of a rank's share varies over the axis. A loss that
    does not was reduced over the ranks: each rank's gradient is then its part of the mean,
    and the mean of gradients is too small by a factor of the number of ranks.
    """
    missing = set(axes.axis_names(axis_name)) - axes.varying_axes(loss)
    if missing and axes.is_checking(axis_name):
        name = min(missing)
        raise ArgumentError(
            f"loss_fn returns a loss that does not vary over {name!r}: it is reduced over "
            f"the ranks, as by lax.pmean(loss, {name!r}), and the mean of "
            "gradients would be too small by their number. Return the loss of this rank's "
            "share of the batch; a step returns the mean of all."
        )
