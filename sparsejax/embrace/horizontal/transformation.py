"""The transformation: what a user is given, and the two halves of a step."""

from collections.abc import Callable, Sequence
from typing import Any

import optax

from sparsejax import axes
from sparsejax.axes import AxisName
from sparsejax.embrace.horizontal import blocks
from sparsejax.embrace.horizontal.blocks import Order
from sparsejax.embrace.horizontal.schedule import Begun, HorizontalSchedule, HorizontalState
from sparsejax.errors import ArgumentError
from sparsejax.state import tree
from sparsejax.transforms.described import described


class Horizontal(tree.Transformation):
    """The transformation of `horizontal`; its update is the second half of a step.

    Attributes:
        schedule: What is done in a step.
    """

    stands_alone = True
    schedule: HorizontalSchedule

    def begin(
        self,
        params: Any,
        state: HorizontalState,
        order: Sequence[str | tuple[str, ...]] | None = None,
    ) -> tuple[Any, Begun]:
        """The first half of a step, inside `shard_map`: applies what is carried.

        Args:
            params: The parameters.
            state: As the last update returned it, or `init`.
            order: The blocks in order, as `find_order` finds them, where `horizontal` was
                given none.

        Returns:
            The parameters of which the gradients are to be taken, and the state for
            `update`.
        """
        return self.schedule.begin(params, state, order)

    def flush(
        self,
        params: Any,
        state: HorizontalState,
        of_rest: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    ) -> tuple[Any, HorizontalState]:
        """Applies what is carried, inside `shard_map`, and no step follows.

        Before parameters are evaluated, or saved without the state. A second flush changes
        nothing.

        Args:
            params: The parameters.
            state: As the last update returned it.
            of_rest: From the parameters that are not carried, with an `optax.MaskedNode`
                for each that is, and the chain's state of them, to both after a flush of
                their own, such as `sparsejax.embrace.flush`.

        Returns:
            The parameters as all gradients have left them, and the state, from which
            training may go on.
        """
        return self.schedule.flush(params, state, of_rest)


@described
def horizontal(
    tx: optax.GradientTransformation,
    order: Order | Callable[[list[str]], Order] | None = None,
    axis_name: AxisName | None = None,
    *,
    at_once: Sequence[str] = (),
) -> Horizontal:
    """Reduces the gradients of each block of a model just before its next forward pass.

    The result is a whole chain, with nothing around it. `sparsejax.data_parallel` takes it
    in place of `tx`, and parameters and losses are those of `tx`. Between steps the state
    is one update late: `trainer.flush(state)`, or the method `flush`, catches up.

    Args:
        tx: The whole chain, with the synchronization and the optimizer in it. It must treat
            leaves separately, as SGD, Adam, Adagrad and LAMB do. What combines all leaves,
            such as `optax.clip_by_global_norm`, is refused.
        order: The blocks in the order in which the forward pass uses them: path prefixes,
            or a tuple of prefixes for one block; or a function from the paths to these. If
            None, blocks are found from the paths (`blocks`), and `data_parallel` finds
            their order in the loss. Elsewhere call `find_order`.
        axis_name: The mesh axis of the ranks; the only manual one if None.
        at_once: Path prefixes of leaves that are updated at the end of each step instead,
            such as tables whose gradients are rows. A `ColumnTable` always is.

    Returns:
        A `Horizontal`, an optax transformation with the methods `begin` and `flush`.

    Example:
        >>> tx = optax.chain(sparsejax.dense_sync(), optax.adam(1e-3))
        >>> tx = sparsejax.embrace.horizontal(tx, order=["embed", "layers/0", "head"])

        Inside a `shard_map` of your own a step has two halves:

        >>> params, state = tx.begin(params, state)
        >>> grads = jax.grad(loss_fn)(sparsejax.local(params), batch)
        >>> updates, state = tx.update(grads, state, params)
        >>> params = sparsejax.apply_updates(params, updates)

    References:
        Li et al., EmbRace: Accelerating Sparse Communication for Distributed Training of
        NLP Neural Networks, ICPP 2022, section 4.2.1
    """
    if not isinstance(tx, optax.GradientTransformation):
        raise ArgumentError(
            "horizontal takes the whole chain, such as optax.chain("
            f"sparsejax.dense_sync(), optax.adam(1e-3)), got {tx!r}."
        )
    axes.check_axis_name(axis_name, "horizontal")
    if isinstance(at_once, str):
        at_once = (at_once,)
    if order is not None and not callable(order):
        blocks.check(order)
    schedule = HorizontalSchedule(
        optax.with_extra_args_support(tx), order, axis_name, tuple(at_once)
    )
    made = Horizontal(schedule.init, schedule.update)
    made.schedule = schedule
    return made
