"""Local steps: every rank trains independently, and all exchange their offsets.

A round is `every` updates. In each of them a rank takes one step of its own inner optimizer
from its own parameters (`inner_steps`), and nothing is sent. At the end of a round ranks
exchange their offsets, which move the anchor (`outer_steps`). On the wire: what `sync`
sends, once a round, or one fragment at a time at several steps of it (`fragments`).

The parameters of the script are the anchor. They are replicated and stay so, because
`update` returns zeros in steps without an exchange, and otherwise the outer optimizer's
update for a mean that is equal on all ranks. What differs by rank, the offset of its
parameters from the anchor and the state of its inner optimizer, is in the state
(`RankState`), with a rank axis.

With a delay, the offsets are copied to `outgoing` at the end of the step at which they are
sent, and the update in which the result is due computes the exchange from the copy. Nothing
that the exchange reads changes in between. So it can run concurrently with the steps in
between (`overlap`), with the same result.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax import axes, branches
from sparsejax.axes import AxisName
from sparsejax.rounds import checks
from sparsejax.rounds.fragments import Fragments, FragmentSchedule
from sparsejax.rounds.inner_steps import (
    Moved,
    OnRank,
    Stacked,
    first_state,
    nothing_moved,
)
from sparsejax.rounds.outer_steps import OuterSteps
from sparsejax.rounds.state import FragmentState, LocalStepsState, OuterState
from sparsejax.state import observing, tree
from sparsejax.state.per_rank import check_kind
from sparsejax.transforms.described import described
from sparsejax.transforms.entry import Entry
from sparsejax.transforms.systems import dense_sync
from sparsejax.units.units import wide
from sparsejax.wire.collectives import Wire


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Inner steps, exchanges and outer steps, as separate functions.

    Attributes:
        inner: The optimizer of each rank.
        outer: The exchange, and the optimizer of the anchor.
        schedule: When a fragment is sent, and when it is applied.
        axis_name: The mesh axis of the ranks; the only manual one if None.
    """

    inner: optax.GradientTransformationExtraArgs
    outer: OuterSteps
    schedule: FragmentSchedule
    axis_name: AxisName | None

    def fragments(self, params: Any) -> Fragments:
        """Returns the fragments of the parameters."""
        return Fragments.of(params, self.schedule.fragments)

    def init(self, params: Any) -> LocalStepsState:
        """Returns the first state; while observed, only the states of `sync`."""
        checks.check_dtypes(params)
        fragments = self.fragments(params)
        anchors = [fragments.only(n, widened(params)) for n in range(fragments.count)]
        if observing.is_observing():
            observing.observed(self.outer.sync, params)  # its rules are of all fragments
            wrapper = observing.Wrapper(
                every=self.schedule.every, takes_rows=False, is_round=True
            )
            with observing.inside(wrapper):
                seen = tuple(OuterState(self.outer.first_sync(x), None) for x in anchors)
            return LocalStepsState(jnp.int32(0), None, None, None, seen)
        checks.check_parts(self.inner, self.outer.outer, self.outer.sync, params)
        mesh = self._entry.of_parameters(params)
        make = functools.partial(self._entry.init, mesh) if mesh else lambda f, x: f(x)
        offset = make(self._offsets, params)
        inner = first_state(self.inner, params, offset, mesh)
        outgoing = make(self._offsets, params) if self.schedule.delay else None
        of_outer = tuple(map(self.outer.init, anchors))
        period = self.schedule.period
        return LocalStepsState(jnp.int32(0), offset, inner, outgoing, of_outer, period)

    def update(
        self, grads: Any, state: LocalStepsState, params: Any = None, **extra: Any
    ) -> tuple[Any, LocalStepsState]:
        """Takes an inner step, and the exchanges and outer steps that are due after it."""
        extra.pop("ids", None)
        checks.check_delayed(self.schedule.delay, extra)
        ranks, after = self.advance(grads, state, params, extra)
        fragments, updates, states = self.fragments(params), [], []
        for number in range(fragments.count):
            own = self._sent(after.fragment(fragments, number), state.step, number)
            run = functools.partial(
                self._exchanged,
                ranks.only(fragments, number),
                widened(fragments.only(number, params)),
                extra,
            )
            stay = functools.partial(_unmoved, run)
            is_due = self.schedule.is_applied(state.step, number)
            update, own = branches.cond(is_due, run, stay, own)
            updates.append(update)
            states.append(own)
        return fragments.together(updates), after.with_fragments(fragments, states)

    def advance(
        self, grads: Any, state: LocalStepsState, params: Any, extra: Mapping[str, Any]
    ) -> tuple[OnRank | Stacked, LocalStepsState]:
        """Takes an inner step; returns the ranks and the state after it. Sends nothing.

        Args:
            grads: The gradients.
            state: The state before the step.
            params: The anchor.
            extra: Further arguments of the inner optimizer.
        """
        check_kind(state, LocalStepsState, f"{checks.CALL} (every={self.schedule.every})")
        if self.schedule.period is not None:
            self.schedule.period.check(state.period, checks.CALL)
        checks.require_params(params)
        mesh = self._entry.outside(grads, state.offset, params)
        if mesh is not None:
            ranks = Stacked.of(grads, state.offset, mesh)
        else:
            ranks = OnRank(Wire.over(self.axis_name, checks.UPDATE))
        before = Moved(state.offset, state.inner)
        moved = ranks.step(self.inner, grads, before, params, extra)
        return ranks, state._replace(step=state.step + 1, **moved._asdict())

    @property
    def _entry(self):
        return Entry(checks.CALL, self.axis_name)

    def _offsets(self, params):
        """Returns the first offsets, inside `shard_map`."""
        why = f"{checks.CALL} (every={self.schedule.every}) trains on each rank by itself"
        axis_name = axes.resolve_for_state(self.axis_name, checks.CALL, why)
        return nothing_moved(params, axis_name)

    def _sent(self, own, step, number):
        """Returns the state of a fragment, with its offsets copied if it is sent now."""
        if own.outgoing is None:
            return own
        is_sent = self.schedule.is_sent(step, number)
        copied = lambda own: own._replace(outgoing=own.offset)
        return branches.cond(is_sent, copied, lambda own: own, own)

    def _exchanged(self, ranks, anchor, extra, own):
        """Exchanges a fragment; returns the anchor's updates and the fragment's state."""
        sent = own.offset if own.outgoing is None else own.outgoing
        exchanged = self.outer.exchange(ranks, sent, own.of_outer.sync, anchor, **extra)
        return self.outer.apply(exchanged, own, anchor)


def _unmoved(run, own: FragmentState):
    """Returns zero updates and the state unchanged, with the types that `run` returns."""
    return tree.nothing(jax.eval_shape(run, own)[0]), own


def widened(params: Any) -> Any:
    """Casts parameters to the dtypes of the offsets, in which differences are exchanged."""
    return jax.tree.map(lambda x: jnp.asarray(x, wide(jnp.result_type(x))), params)


class LocalSteps(tree.Transformation):
    """The transformation of `local_steps`.

    Attributes:
        rounds: The inner steps, the exchange and the outer steps.
    """

    rounds: Rounds


@described
def local_steps(
    inner: optax.GradientTransformation,
    *,
    every: int,
    outer: optax.GradientTransformation | None = None,
    sync: optax.GradientTransformation | None = None,
    fragments: int = 1,
    delay: int = 0,
    blend: float = 0.0,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Trains on each rank independently, and exchanges the ranks' offsets once a round.

    The parameters of the script are the anchor, equal on all ranks. In a round each rank
    takes `every` steps of `inner` from the anchor. With p_r the parameters of rank r, then

        d_r    = anchor - p_r              the offset of a rank
        d      = sync(d_r)                 by default the mean over the ranks
        anchor = anchor + outer(d)         d stands for a gradient

    The defaults are DiLoCo. `update` returns zeros within a round. The loss must read the
    parameters of its rank: `sparsejax.local(params, axis_name, opt_state)`.
    `sparsejax.data_parallel` does that by itself. A loss that reads the anchor raises no
    error: each step then begins at the same point, and the loss is higher.

    Offsets and exchanges are float32 or wider, also where parameters are bfloat16. Give
    `sync` a `wire_dtype` to send fewer bytes.

    With `fragments=P` a part of the parameters is exchanged every `every / P` steps, each
    part once in a round. With `delay` the result of an exchange is applied that many steps
    after it began, and `sparsejax.rounds.Overlap` runs the exchange during these steps.

    Further arguments of `update` go to `inner`, as `value=` of
    `optax.contrib.reduce_on_plateau`, and to `sync`, which is given those of the last step
    of a round. Under `jit`, `value=` may be an array of the losses of all ranks, of which
    each gets its own.

    With `weight=w`, a number that may differ by rank, the mean is sum(w d_r) / sum(w). A
    rank of weight 0 does not contribute. Its offset is lost if `sync` sends everything. A
    lossy `sync` refuses weights, except for `sparsejax.chunked_sync`, which keeps that
    offset in the residual.

    Args:
        inner: The optimizer of each rank: any optax chain without a synchronization, such
            as `optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))`. Its state
            differs by rank, and is kept from round to round.
        every: The number of steps of a round; larger sends less often. 15 to 100 are usual.
        outer: The optimizer of the anchor; `optax.sgd(0.7, momentum=0.9, nesterov=True)` if
            None. It steps once a round.
        sync: The synchronization, with any sparsifier before it; `sparsejax.dense_sync`,
            the mean, if None. The residual of a sparsifier is kept from round to round.
        fragments: The number of parts of the parameters that are exchanged at different
            steps; a divisor of `every`. Leaves are assigned by size.
        delay: The number of steps from the end of the step in which an exchange begins to
            the end of the step in which its result is applied; less than `every`.
        blend: The share of its own parameters that a rank keeps when a delayed result is
            applied, in [0, 1). The rest is the anchor. With 0 the steps that it took during
            the delay are lost.
        axis_name: The mesh axis of the ranks; the only manual one if None.

    Returns:
        An `optax.GradientTransformationExtraArgs`, the whole optimizer. No transformation
        with a state may follow it in a chain.

    Raises:
        ArgumentError: A number is out of range, `fragments` does not divide `every`, or
            `inner`, `outer` or `sync` is not a transformation that can have this role. What
            depends on the parameters is checked by `init`.

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
        arXiv 2311.08105

        Douillard et al., Streaming DiLoCo with Overlapping Communication, arXiv 2501.18512

    See Also:
        `sparsejax.accumulate`: adds up gradients at one point between exchanges.
        `sparsejax.rounds.diloco`: the defaults, with DiLoCo's arguments.
        `sparsejax.rounds.streaming_diloco`: fragments, a delay, and four bits.
        `sparsejax.rounds.sparse_loco`: the largest entries of offsets, in two bits.
        `sparsejax.rounds.pulse_loco`: the entries that change a bfloat16 parameter.
    """
    axes.check_axis_name(axis_name, checks.CALL)
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    sync = dense_sync(axis_name) if sync is None else sync
    schedule = FragmentSchedule(every, fragments, delay)
    checks.check_blend(blend, delay)
    for name, tx in (("inner", inner), ("outer", outer), ("sync", sync)):
        checks.check_transformation(name, tx)
    inner, outer, sync = map(optax.with_extra_args_support, (inner, outer, sync))
    rounds = Rounds(inner, OuterSteps(outer, sync, blend), schedule, axis_name)
    init: Any = rounds.init
    update: Any = rounds.update
    tx = LocalSteps(init, update)
    tx.rounds = rounds
    return tx
