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
    """What `lazy` returns: a transformation, and how to see the parameters that it trains.

    Attributes:
        inside: The optimizer inside, and what is known of it.

    Example:
        >>> adam = sparsejax.lazy(optax.adam(1e-3))
        >>> isinstance(adam, sparsejax.rows.Lazy)
        True
        >>> tx = optax.chain(sparsejax.zen_sync(), adam)
    """

    inside: RowOptimizer

    def reader(self, params: Any, state: Any) -> LateRowReader:
        """What `sparsejax.value_and_grad(loss_fn, read=...)` reads rows with.

        Hand it to the update of the same parameters and state, too,
        `tx.update(grads, state, params, read=read)`, which uses what it has made to catch
        rows up. Without it the update makes that itself, and comes to the same numbers.
        One of another step is an error under checkify.

        Args:
            params: The parameters.
            state: The state of this transformation, or of a chain that it is in.
        """
        return LateRowReader(self.inside, params, state)


@described
def lazy(tx: optax.GradientTransformation, *, exact: bool = True) -> Lazy:
    """Makes an optimizer update only the rows that a gradient lists.

    Where a leaf of the updates is `RowGrads`, the rows that it lists are gathered from the
    parameter and from each array of the optimizer's state that has such rows, `tx` updates
    them, and they are scattered back in place: a step costs what it touches. Leaves that
    are arrays are passed to `tx` unchanged. Apply the updates with
    `sparsejax.apply_updates`. It goes last in a chain: what comes after would change
    rows once that stand for several steps.

    With exact=True parameters are those of the dense optimizer. There, rows without a
    gradient change too, as their momentum continues and weights decay. Here they catch up
    on the steps that they have missed, step by step, when they are listed again, and when
    they are read: pass `read=lazy_tx.reader(params, state)` to `sparsejax.value_and_grad`,
    and to `update`, which uses what reading has made; and take `settle(params, state,
    lazy_tx)` for evaluation and for other reads of whole tables. Where a gradient of zero
    changes no parameter, as with SGD without momentum, Adagrad and RMSProp, nothing is read
    anew. What a fading momentum has missed, as that of SGD, Adam, NAdam and AdamW with a
    fixed learning rate in float32, is added up at once, to a relative error of 1e-5 (where
    numbers show that it is: not if v fades as fast as m). Elsewhere, as with AdamW and a
    schedule, Lion or injected hyperparameters, it takes as many turns of a loop over the
    rows in question as the longest time that one of them which still moves has missed.
    Schedules have the value of the step that is caught up on. So do hyperparameters of
    `optax.inject_hyperparams` that are set by hand: the last 64 values of each are
    remembered. A row that missed a step which depends on a forgotten value becomes NaN,
    rather than wrong: `settle` from time to time, where they change at each step. Rows that
    do not move need no history: those that were never listed, unless weights decay, and all
    rows of Adagrad and RMSProp.

    Under `jit` on an explicit mesh a table may be sharded by rows, over any mesh axes.
    Each device then reads and updates the rows of its shard.

    With exact=False rows that are not listed keep their bytes, in the parameter and in the
    state, and only numbers of steps are common to all rows: the same rows move as with
    `SparseAdam` of PyTorch and `LazyAdam` of TensorFlow, by the numbers of optax's Adam,
    whose eps is added elsewhere.

    `tx` must keep rows separate: what it does to one must not depend on others. All of
    `optax.sgd`, `adam`, `adamw`, `adagrad`, `rmsprop`, `lion`, `adabelief` and `nadam` do,
    with `optax.clip`, `centralize` (within a row), `masked` and `partition`. A norm of the
    whole leaf or of all leaves (`clip_by_global_norm`, LAMB, LARS), factors of it
    (Adafactor) or a product with it (Muon) do not: these are refused by name, in `init` if
    no leaf is left, else where such a leaf gets `RowGrads`. A program that does what is not
    known is refused too.

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

    Args:
        tx: The optimizer.
        exact: Whether rows catch up on the steps that they have missed.

    Returns:
        A transformation with state `LazyState`. Its updates have `RowGrads` of distinct,
        ascending ids where the gradients have `RowGrads`. It needs the parameters where
        rows catch up. Where they do that at once, a step lists a 16,384th part of a table
        besides, one part after another, so that no row waits for longer.

    Raises:
        ArgumentError: The optimizer mixes the rows of every parameter.
    """
    if not isinstance(tx, optax.GradientTransformation):
        raise ArgumentError(
            "lazy: tx must be an optax transformation, such as optax.adam(1e-3), got "
            f"{type(tx).__name__}."
        )
    inside = RowOptimizer(optax.with_extra_args_support(tx), exact)

    def init(params):
        if observing.is_observing():
            observing.report_rows(made, steps.tables(inside, params))
        return steps.init(inside, params)

    made = Lazy(init, functools.partial(steps.update, inside))
    made.inside = inside
    return made


def settle(params: Any, state: Any, tx: Lazy, *, flushed: bool = False) -> tuple[Any, Any]:
    """Catches all rows up: for evaluation, for saving, for what reads whole tables.

    It costs a pass over the tables, or where steps are taken one by one, a pass for each
    that the longest unseen row that still moves has missed. Training may continue from what
    it returns, or from what it was given.

    Args:
        params: The parameters.
        state: The state of `lazy`, or of a chain that it is in.
        tx: What `lazy` has returned, which may be in a chain.
        flushed: Whether `sparsejax.embrace_sync` in the chain delays nothing, as
            after `sparsejax.embrace.flush`, which settles, too.

    Returns:
        The parameters as the dense optimizer has them, and the state that belongs to them.

    Example:
        >>> sgd = sparsejax.lazy(optax.sgd(0.1))
        >>> opt_state = sgd.init(params)
        >>> params, opt_state = sparsejax.rows.settle(params, opt_state, sgd)
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
