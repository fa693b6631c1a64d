"""The public transformation, and the two halves of its step."""

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
        schedule: The functions of the two halves of a step.
    """

    stands_alone = True
    schedule: HorizontalSchedule

    def begin(
        self,
        params: Any,
        state: HorizontalState,
        order: Sequence[str | tuple[str, ...]] | None = None,
    ) -> tuple[Any, Begun]:
        """Takes the first half of a step, inside `shard_map`: applies carried gradients.

        Args:
            params: The parameters.
            state: The state that the last `update`, or `init`, returned.
            order: The blocks in order, from `find_order`, if `horizontal` was given no
                order.

        Returns:
            The parameters at which to compute the gradients, and the state for `update`.
        """
        return self.schedule.begin(params, state, order)

    def flush(
        self,
        params: Any,
        state: HorizontalState,
        of_rest: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    ) -> tuple[Any, HorizontalState]:
        """Applies carried gradients without a new step, inside `shard_map`.

        Call it before parameters are evaluated, or saved without the state. A second flush
        changes nothing.

        Args:
            params: The parameters.
            state: The state that the last `update` returned.
            of_rest: A function that flushes the leaves that are not carried, such as
                `sparsejax.embrace.flush`: of the parameters, with an `optax.MaskedNode` for
                each that is carried, and the chain's state of them, to both.

        Returns:
            The parameters with all gradients applied, and the state, from which training
            may continue.
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

    The result must not be part of another chain. `sparsejax.data_parallel` takes it in
    place of `tx`, and parameters and losses are those of `tx`. Between steps the state is
    one update late: `trainer.flush(state)`, or the method `flush`, catches up. What selects
    from several leaves together, such as Ok-Topk or `dgc(global_=True)`, selects within
    each block.

    Args:
        tx: The whole chain, with the synchronization and the optimizer in it. It must treat
            leaves separately, as SGD, Adam, Adagrad and LAMB do. A transformation that
            combines all leaves, such as `optax.clip_by_global_norm`, or draws random
            numbers for several blocks raises an error.
        order: The blocks in the order in which the forward pass uses them: path prefixes,
            or a tuple of prefixes for one block; or a function from the paths to these. If
            None, blocks are found from the paths (`blocks`), and `data_parallel` finds
            their order from the loss. Without `data_parallel` call `find_order`.
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
