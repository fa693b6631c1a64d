"""Optimizers that update the rows of tables which have a gradient, and no others."""

import functools
from typing import Any

import optax

from sparsejax.errors import ArgumentError
from sparsejax.rows.updates import steps
from sparsejax.rows.updates.optimizer import RowOptimizer
from sparsejax.rows.updates.reader import LateRowReader
from sparsejax.state import observing, tree
from sparsejax.state.pending import Pending
from sparsejax.state.per_rank import find
from sparsejax.transforms.described import described


class Lazy(tree.Transformation):
    """The result of `lazy`: a transformation with a reader of late rows.

    Attributes:
        inside: The optimizer inside, with its plans.

    Example:
        >>> adam = sparsejax.lazy(optax.adam(1e-3))
        >>> isinstance(adam, sparsejax.rows.Lazy)
        True
        >>> tx = optax.chain(sparsejax.zen_sync(), adam)
    """

    inside: RowOptimizer

    def reader(self, params: Any, state: Any) -> LateRowReader:
        """Returns the `read` argument of `sparsejax.value_and_grad`.

        Give it to the update of the same parameters and state, too: `tx.update(grads,
        state, params, read=read)` does not compute the rows again. Without it the result is
        the same. A reader of another step raises an error under checkify.

        Args:
            params: The parameters.
            state: The state of this transformation, or of a chain that contains it.
        """
        return LateRowReader(self.inside, params, state)


@described
def lazy(tx: optax.GradientTransformation, *, exact: bool = True) -> Lazy:
    """Makes an optimizer update only the rows that a gradient lists.

    If a leaf of the gradients is `RowGrads`, its rows are gathered from the parameter and
    from the arrays of the optimizer's state, `tx` updates them, and they are scattered back
    in place. So the cost of a step is that of the rows that it lists. Leaves that are
    arrays are passed to `tx` unchanged. Apply the updates with `sparsejax.apply_updates`.
    It must be the last transformation of a chain: one after it would change a row once for
    several steps.

    **exact=True.** Parameters are those of the dense optimizer, in which rows without a
    gradient change, too: their momentum continues, and weights decay. Here a row catches up
    on the steps that it has missed when it is listed again, and when it is read. For reads
    inside the loss, pass `read=tx.reader(params, state)` to `sparsejax.value_and_grad` and
    to `update`. For evaluation and other reads of whole tables, call `settle(params, state,
    tx)`.

    * If a gradient of zero changes no parameter, as with SGD without momentum, Adagrad and
      RMSProp, there is nothing to catch up on.
    * For SGD with momentum, Adam, NAdam and AdamW, with a fixed learning rate and float32,
      the sum of the missed steps is computed at once, to a relative error of 1e-5, unless
      the second moment decays as fast as the first.
    * For others, such as Lion, or AdamW with a schedule or injected hyperparameters,
      catching up is a loop over the missed steps, as long as the largest number of steps
      missed by a row that is listed or read and still changes.
    * A schedule is evaluated at the missed step. Hyperparameters of
      `optax.inject_hyperparams` that are set by hand are remembered: the last 64 values of
      each. A row that missed a step with a forgotten value becomes NaN. If they change
      at each step, call `settle` from time to time.

    Under `jit` on an explicit mesh a table may be sharded by rows, over any mesh axes. Each
    device then reads and updates the rows of its shard.

    **exact=False.** Rows that are not listed stay bitwise unchanged, in the parameter and
    in the state. Only the number of steps is common to all rows. The same rows change as
    with `SparseAdam` of PyTorch and `LazyAdam` of TensorFlow, by the formulas of optax.

    `tx` must treat rows separately. `optax.sgd`, `adam`, `adamw`, `adagrad`, `rmsprop`,
    `lion`, `adabelief` and `nadam` do, with `optax.clip`, `centralize` (within a row),
    `masked` and `partition`. Optimizers with a norm of a leaf or of all leaves
    (`clip_by_global_norm`, LAMB, LARS), with factors of a leaf (Adafactor) or a product
    with it (Muon) do not. They raise an error that names the transformation: in `init` if
    no leaf can be updated by rows, else in `update` for a leaf that has `RowGrads`. So does
    an update with an unknown operation.

    Args:
        tx: The optimizer.
        exact: Whether rows catch up on the steps that they have missed.

    Returns:
        A `Lazy`, a transformation with the state `LazyState`. Its updates are `RowGrads` of
        distinct, ascending ids where the gradients are `RowGrads`. It needs the parameters
        if rows catch up. If they catch up at once, each step also lists one 16,384th part
        of a table, in turn, so that no row misses more than 16,384 steps.

    Raises:
        ArgumentError: The optimizer mixes the rows of every parameter.

    Example:
        >>> tx = sparsejax.lazy(optax.adam(1e-3))
        >>> state = tx.init(params)
        >>> def step(params, state, batch):
        ...     read = tx.reader(params, state)
        ...     value, grads = sparsejax.value_and_grad(loss_fn, read=read)(
        ...         params, batch
        ...     )
        ...     updates, state = tx.update(grads, state, params, read=read)
        ...     return sparsejax.apply_updates(params, updates), state, value
    """
    if not isinstance(tx, optax.GradientTransformation):
        raise ArgumentError(
            "lazy: tx must be an optax transformation, such as optax.adam(1e-3), got "
            f"{type(tx).__name__}."
        )
    if isinstance(tx, Lazy):
        raise ArgumentError(
            "lazy: tx is the result of sparsejax.lazy already: use it as it is, or give "
            "lazy the optimizer inside it."
        )
    inside = RowOptimizer(optax.with_extra_args_support(tx), exact)

    def init(params):
        if observing.is_observing():
            observing.report_rows(made, steps.tables(inside, params))
        return steps.init(inside, params)

    update = functools.partial(steps.update, inside)
    made = Lazy(tree.promoting()(init), tree.promoting()(update))
    made.inside = inside
    return made


def settle(params: Any, state: Any, tx: Lazy, *, flushed: bool = False) -> tuple[Any, Any]:
    """Applies all missed steps to all rows.

    Call it before an evaluation, before saving, and before other reads of whole tables. It
    costs a pass over the tables. If missed steps are taken one by one, it costs one pass
    for each step that the row with the most missed steps needs. Training may continue from
    its result, or from its arguments.

    Args:
        params: The parameters.
        state: The state of `lazy`, or of a chain that contains it.
        tx: The result of `lazy`, which may be in a chain.
        flushed: Whether a `sparsejax.embrace_sync` in the chain has no delayed rows, as
            after `sparsejax.embrace.flush`.

    Returns:
        The parameters of the dense optimizer, and the state that belongs to them.

    Example:
        >>> sgd = sparsejax.lazy(optax.sgd(0.1))
        >>> opt_state = sgd.init(params)
        >>> params, opt_state = sparsejax.rows.settle(params, opt_state, sgd)

    See Also:
        `sparsejax.embrace.flush`: also applies the rows that `embrace_sync` delays.
    """
    if not isinstance(tx, Lazy):
        raise ArgumentError(
            f"settle: tx must be what sparsejax.lazy has returned, got a "
            f"{type(tx).__name__}. Keep it when you chain it: "
            "rows = sparsejax.lazy(optax.adam(1e-3)); tx = optax.chain(..., rows)."
        )
    if not flushed and find(state, Pending):
        raise ArgumentError(
            "settle: embrace_sync(vertical=True) in this chain may hold back rows of a "
            "step that would count as missed then. Take trainer.flush(state), or "
            "sparsejax.embrace.flush(params, state, tx), which applies them, and settles."
        )
    return steps.settled(tx.inside, params, state)
