"""Local steps: every rank trains independently, and all exchange their offsets.

A round is `every` updates. In each of them a rank takes one step of its own inner optimizer
from its own parameters (`inner_steps`), and nothing is sent. At the end of a round ranks
exchange their offsets, which move the anchor (`outer_steps`). On the wire is what `sync`
sends, once a round, or a fragment at several steps of it (`fragments`).

The parameters of the script are the anchor. They are replicated and stay so, since `update`
returns zeros where nothing is due, and else what the outer optimizer makes of a mean that
is equal on all ranks. What differs by rank, the offset of its parameters from the anchor
and the state of its inner optimizer, is in the state (`RankState`), with a rank axis.

With a delay, what is sent at the end of a step is a copy of the offsets, `outgoing`, and
the update in which the result is due computes the exchange from it. Nothing that it reads
changes in between. So it can run concurrently with the steps in between (`overlap`), with
the same result.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax import axes
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
from sparsejax.wire import Wire


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Inner steps, exchanges and outer steps, each a function of its own.

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
        """The fragments of the parameters."""
        return Fragments.of(params, self.schedule.fragments)

    def init(self, params: Any) -> LocalStepsState:
        """The first state."""
        fragments = self.fragments(params)
        anchors = [fragments.only(n, widened(params)) for n in range(fragments.count)]
        if observing.is_observing():
            wrapper = observing.Wrapper(
                every=self.schedule.every, takes_rows=False, is_round=True
            )
            with observing.inside(wrapper):
                seen = tuple(OuterState(self.outer.sync.init(x), None) for x in anchors)
            return LocalStepsState(jnp.int32(0), None, None, None, seen)
        checks.check_parts(self.inner, self.outer.outer, self.outer.sync, params)
        mesh = self._entry.of_parameters(params)
        make = functools.partial(self._entry.init, mesh) if mesh else lambda f, x: f(x)
        offset = make(self._offsets, params)
        inner = first_state(self.inner, params, offset, mesh)
        outgoing = make(self._offsets, params) if self.schedule.delay else None
        of_outer = tuple(map(self.outer.init, anchors))
        return LocalStepsState(jnp.int32(0), offset, inner, outgoing, of_outer)

    def update(
        self, grads: Any, state: LocalStepsState, params: Any = None, **extra: Any
    ) -> tuple[Any, LocalStepsState]:
        """An inner step, and what is due at its end."""
        extra.pop("ids", None)
        checks.check_delayed(self.schedule.delay, extra)
        ranks, after = self.advance(grads, state, params)
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
            update, own = axes.cond(is_due, run, stay, own)
            updates.append(update)
            states.append(own)
        return fragments.together(updates), after.with_fragments(fragments, states)

    def advance(
        self, grads: Any, state: LocalStepsState, params: Any
    ) -> tuple[OnRank | Stacked, LocalStepsState]:
        """The ranks, and the state after an inner step; nothing is sent."""
        check_kind(state, LocalStepsState, f"{checks.CALL} (every={self.schedule.every})")
        checks.require_params(params)
        mesh = self._entry.outside(grads, state.offset, params)
        if mesh is not None:
            ranks = Stacked.of(grads, state.offset, mesh)
        else:
            ranks = OnRank(Wire.over(self.axis_name, checks.UPDATE))
        moved = ranks.step(self.inner, grads, Moved(state.offset, state.inner), params)
        return ranks, state._replace(step=state.step + 1, **moved._asdict())

    @property
    def _entry(self):
        return Entry(checks.CALL, self.axis_name)

    def _offsets(self, params):
        """The first offsets, inside `shard_map`."""
        why = f"{checks.CALL} (every={self.schedule.every}) trains on each rank by itself"
        axis_name = axes.resolve_for_state(self.axis_name, checks.CALL, why)
        return nothing_moved(params, axis_name)

    def _sent(self, own, step, number):
        """A fragment after its offsets were copied, if it is sent in this step."""
        if own.outgoing is None:
            return own
        is_sent = self.schedule.is_sent(step, number)
        copied = lambda own: own._replace(outgoing=own.offset)
        return axes.cond(is_sent, copied, lambda own: own, own)

    def _exchanged(self, ranks, anchor, extra, own):
        """The updates of a fragment, and its state after an exchange and an outer step."""
        sent = own.offset if own.outgoing is None else own.outgoing
        exchanged = self.outer.exchange(ranks, sent, own.of_outer.sync, anchor, **extra)
        return self.outer.apply(exchanged, own, anchor)


def _unmoved(run, own: FragmentState):
    """As what `run` returns, where nothing is due."""
    return tree.nothing(jax.eval_shape(run, own)[0]), own


def widened(params: Any) -> Any:
    """The parameters in the dtypes of the offsets, in which differences are exchanged."""
    return jax.tree.map(lambda x: jnp.asarray(x, wide(jnp.result_type(x))), params)


class LocalSteps(tree.Transformation):
    """The transformation of `local_steps`.

    Attributes:
        rounds: Its parts.
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

    A round is `every` steps of `inner` on each rank, from the anchor. Then the anchor minus
    the parameters of each rank goes through `sync`, and `outer` is given what comes out as
    a gradient and moves the anchor. The defaults are DiLoCo.

    The parameters of the script are the anchor, equal on all ranks. `update` returns zeros
    within a round. The loss has to read the parameters of its rank:
    `sparsejax.local(params, axis_name, opt_state)`. `sparsejax.data_parallel` does that by
    itself. Gradients that were taken at the anchor look the same: each step
    would then begin at the same place, and nothing shows it but a higher loss.

    Offsets and exchanges are float32 or wider, also where parameters are bfloat16. Give
    `sync` a `wire_dtype` to send fewer bytes.

    With `fragments=P` a part of the parameters is exchanged every `every / P` steps, each
    once in a round. With `delay` the result of an exchange is applied that many steps after
    it began, and `sparsejax.rounds.Overlap` hides the exchange in them.

    Further arguments of `update` go to `sync`, and those of the last step of a round count:
    with `weight=`, a number that each rank has for itself, the mean is
    sum(weight * difference) / sum(weight), and a rank of weight 0 counts nothing. What it
    has moved is lost, where `sync` sends everything; of those that leave something out
    `sparsejax.chunked_sync` takes weights, and keeps it.

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
        fragments: How many parts of the parameters are exchanged at steps of their own; a
            divisor of `every`. Leaves are assigned by size.
        delay: Steps from the end of the step in which an exchange begins to the one at
            whose end its result is applied; less than `every`.
        blend: The share of its own parameters that a rank keeps when a delayed result is
            applied, in [0, 1); the rest is the anchor. With 0 what it has moved during the
            delay is lost.
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
        Douillard et al., Streaming DiLoCo with overlapping communication, arXiv 2501.18512
    """
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    sync = dense_sync(axis_name) if sync is None else sync
    axes.check_axis_name(axis_name, checks.CALL)
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
