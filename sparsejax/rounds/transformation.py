"""Local steps: every rank trains by itself, and all exchange what they have moved.

A round is `every` updates. In each of them a rank takes one step of its own inner optimizer
from its own parameters, and nothing is sent. The last one ends with

    difference of a rank = anchor - parameters of this rank
    mean                 = sync(difference)       the exchange, over the wire
    anchor               = anchor + outer(mean)   the same on all ranks, bit for bit

and all ranks go on from the anchor. On the wire is what `sync` sends, once a round.

The parameters of the script are the anchor. They are replicated and stay so, since `update`
returns zeros within a round, and at its end what the outer optimizer makes of a mean that
is equal on all ranks. What differs by rank, the offset of its parameters from the anchor
and the state of its inner optimizer, is in the state (`RankState`), with a rank axis.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax import arguments, axes
from sparsejax.axes import AxisName
from sparsejax.rounds import checks
from sparsejax.rounds.inner_steps import (
    Moved,
    OnRank,
    Stacked,
    first_state,
    nothing_moved,
)
from sparsejax.rounds.state import LocalStepsState
from sparsejax.state import observing, tree
from sparsejax.state.per_rank import check_kind
from sparsejax.transforms.described import described
from sparsejax.transforms.entry import Entry
from sparsejax.transforms.sync import dense_sync
from sparsejax.units.units import wide
from sparsejax.wire import Wire


@described
def local_steps(
    inner: optax.GradientTransformation,
    *,
    every: int,
    outer: optax.GradientTransformation | None = None,
    sync: optax.GradientTransformation | None = None,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Trains on each rank by itself, and exchanges what ranks have moved once a round.

    A round is `every` steps of `inner` on each rank, from the anchor. Then the anchor minus
    the parameters of each rank goes through `sync`, and `outer` is given what comes out as
    a gradient and moves the anchor. The defaults are DiLoCo.

    The parameters of the script are the anchor, equal on all ranks. `update` returns zeros
    within a round. The loss has to read the parameters of its rank:
    `sparsejax.local(params, axis_name, opt_state)`. `sparsejax.data_parallel` does that by
    itself. Gradients that were taken at the anchor look the same: each step
    would then begin at the same place, and nothing shows it but a higher loss.

    Offsets and exchanges are float32 or wider, also where parameters are bfloat16. Give
    `sync` a `wire_dtype` to send fewer bytes. Further arguments of `update` go to `sync`,
    and those of the last step of a round count. `weight=` is refused where nothing in
    `sync` reads it: of this library only `sparsejax.chunked_sync` does.

    Args:
        inner: The optimizer of each rank, any optax chain without a synchronization, such
            as `optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))`. Its state
            differs by rank and is kept from round to round.
        every: How many steps a round has; larger sends less often. 15 to 100 are usual.
        outer: The optimizer of the anchor; `optax.sgd(0.7, momentum=0.9, nesterov=True)` if
            None. It steps once a round.
        sync: The synchronization, with what belongs in front of it; `sparsejax.dense_sync`
            if None, which is the mean. A sparsifier in it keeps what it leaves out from
            round to round.
        axis_name: The mesh axis of the ranks; the only manual one if None.

    Returns:
        An `optax.GradientTransformationExtraArgs`, the whole optimizer: no transformation
        with a state belongs after it in a chain.

    Example:
        >>> tx = sparsejax.local_steps(optax.adamw(1e-3), every=30)
        >>> opt_state = sparsejax.init(tx, params, mesh)
        >>> def step(params, opt_state, batch):
        ...     own = sparsejax.local(params, "data", opt_state)
        ...     grads = jax.grad(loss_fn)(own, batch)
        ...     updates, opt_state = tx.update(grads, opt_state, params)
        ...     return optax.apply_updates(params, updates), opt_state

    References:
        Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models,
        2023
    """
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    sync = dense_sync(axis_name) if sync is None else sync
    axes.check_axis_name(axis_name, checks.CALL)
    arguments.check_whole("every", every, 1)
    for name, tx in (("inner", inner), ("outer", outer), ("sync", sync)):
        checks.check_transformation(name, tx)
    inner, outer, sync = map(optax.with_extra_args_support, (inner, outer, sync))
    entry = Entry(checks.CALL, axis_name)

    def offsets(params):
        why = f"{checks.CALL} (every={every}) trains on each rank by itself"
        return nothing_moved(params, axes.resolve_for_state(axis_name, checks.CALL, why))

    def init(params):
        if observing.is_observing():
            with observing.inside(observing.Wrapper(every=every, takes_rows=False)):
                seen = sync.init(_widened(params))
                return LocalStepsState(jnp.int32(0), None, None, seen, None)
        checks.check_parts(inner, outer, sync, params)
        mesh, anchor = entry.of_parameters(params), _widened(params)
        offset = entry.init(mesh, offsets, params) if mesh else offsets(params)
        own = first_state(inner, params, offset, mesh)
        of_round = sync.init(anchor), outer.init(anchor)
        return LocalStepsState(jnp.int32(0), offset, own, *of_round)

    def ranks_here(grads, state, params):
        """The ranks, as this is called: one by itself, or all of them stacked."""
        mesh = entry.outside(grads, state.offset, params)
        if mesh is not None:
            return Stacked.of(grads, state.offset, mesh)
        return OnRank(Wire.over(axis_name, checks.UPDATE))

    def update(grads, state, params=None, **extra):
        check_kind(state, LocalStepsState, f"{checks.CALL} (every={every})")
        checks.require_params(params)
        extra.pop("ids", None)
        ranks = ranks_here(grads, state, params)
        moved = ranks.step(inner, grads, Moved(state.offset, state.inner), params)

        def exchange(offset):
            anchor, differences = _widened(params), ranks.differences(offset)
            run = functools.partial(sync.update, differences, state.sync, anchor)
            weighed = lambda weight: run(**{**extra, "weight": weight})
            checks.check_weight(sync, params, weighed, extra.get("weight"))
            mean, after = run(**extra)
            updates, of_outer = outer.update(mean, state.outer, anchor)
            begun = offset.with_value(jax.tree.map(jnp.zeros_like, offset.value))
            return updates, begun, after, of_outer

        def go_on(offset):
            updates = tree.nothing(jax.eval_shape(exchange, offset)[0])
            return updates, offset, state.sync, state.outer

        is_due = state.step % every == every - 1
        updates, offset, *of_round = axes.cond(is_due, exchange, go_on, moved.offset)
        after = LocalStepsState(state.step + 1, offset, moved.inner, *of_round)
        return updates, after

    return tree.transformation(init, update)


def _widened(params: Any) -> Any:
    """The parameters in the dtypes of the offsets, in which differences are exchanged."""
    return jax.tree.map(lambda x: jnp.asarray(x, wide(jnp.result_type(x))), params)
