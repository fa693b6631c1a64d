"""`skip_nonfinite`: all ranks skip a step in which any rank has a non-finite number.

On the wire: one 32-bit word of each rank, before all else; see `state.finite`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sparsejax import axes, branches, errors
from sparsejax.axes import AxisName
from sparsejax.state import finite, sharded, tree
from sparsejax.state.finite import Found, Names
from sparsejax.state.per_rank import check_kind
from sparsejax.transforms.described import described
from sparsejax.transforms.entry import Entry
from sparsejax.transforms.wrappers.common import checked
from sparsejax.wire.collectives import Wire


_NAME = "sparsejax.skip_nonfinite"


class SkipState(NamedTuple):
    """State of `skip_nonfinite`.

    Attributes:
        skipped: int32: updates skipped because a gradient, or a sum, was not finite.
        inner: The state of the chain inside.
        found: A record of the last skipped update, with `report=True`; else None.
    """

    skipped: jax.Array
    inner: Any
    found: Found | None = None


@described
def skip_nonfinite(
    tx: optax.GradientTransformation,
    axis_name: AxisName | None = None,
    *,
    report: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Skips a step in which the gradient of any rank has a number that is not finite.

    In such a step updates are zero on all ranks, nothing is sent, and the state of the
    chain does not change, the optimizer's too. `sparsejax.metrics` counts such steps. As
    the outermost transformation under `sparsejax.data_parallel`, it leaves variables
    unchanged, too.

    Ranks agree on one word before anything else is sent. So all of them decide the same,
    before the number reaches a residual, a velocity or the optimizer. Ranks of weight 0
    count, too: set their gradients to zero, as the trainer does. If gradients are
    float16, or are sent as float16, a sum of finite numbers may overflow. Such sums are
    checked after the exchange, and what was computed from them is dropped.

    Args:
        tx: The whole chain, with the synchronization and the optimizer in it.
        axis_name: The mesh axis of the ranks; the only manual one if None.
        report: Whether the state records which rank had such a number in which leaf. The
            trainer of `sparsejax.data_parallel` then raises `errors.BadNumberError` on all
            processes; for that it waits for each step. In a loop of your own
            `sparsejax.transforms.check_numbers` raises it.

    Returns:
        An `optax.GradientTransformationExtraArgs`, the chain with the wrapper around it.

    Example:
        >>> tx = optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))
        >>> tx = sparsejax.skip_nonfinite(tx)

    See Also:
        `sparsejax.transforms.check_numbers`: raises for a step that was left out.
    """
    tx = checked(tx, "skip_nonfinite")

    def init(params):
        paths, _, _ = tree.flatten(params, _NAME, rows=True)
        with finite.watching():
            inner = tx.init(params)
        return SkipState(jnp.int32(0), inner, Found.first(paths) if report else None)

    entry = Entry(_NAME, axis_name, sums=False)

    def looked_at(updates, found, **entered):
        """Finds the first non-finite number.

        Returns:
            The gradients unchanged; the maximum over ranks of a word that is zero if all
            numbers are finite, and with `report` the words of all ranks, else None.
        """
        del entered
        wire = Wire.over(axis_name, f"update of {_NAME}")
        sharded.require_sent(updates, _NAME)
        paths, leaves, _ = tree.flatten(updates, _NAME, rows=True)
        hint = (
            f" Or {_NAME} comes after the synchronization: put it around the whole chain."
        )
        for path, leaf in zip(paths, leaves, strict=True):
            axes.require_local(path, tree.numbers(leaf), wire.axis, hint)
        known = range(len(paths)) if found is None else found.numbers_of(paths)
        word = finite.first_bad(leaves, known)
        if found is not None:
            words = finite.of_all(word, wire)
            return updates, (jnp.max(words), words)
        return updates, (wire.maximum(wire.per_rank(word))[0], None)

    def update(updates, state, params=None, **extra):
        check_kind(state, SkipState, _NAME)
        if (state.found is not None) != report:
            raise errors.StateError(
                f"{_NAME} has report={report}, and its state "
                f"{'does not say' if report else 'says'} where numbers were not finite: "
                "make it with the transformation that updates it, sparsejax.init(tx, "
                "params, mesh)."
            )
        own = updates, state.found, params
        updates, (word, words) = entry.run(looked_at, *own)
        paths, _, _ = tree.flatten(updates, _NAME, rows=True)
        names = state.found.names if report else Names(tuple(paths))

        def run(updates):
            out, inner = tx.update(updates, state.inner, params, **extra)
            done = tree.bare(out), inner
            over = finite.overflown(inner, names)
            if over is None:
                return *done, jnp.int32(0)
            dropped = lambda: (tree.nothing(done[0]), state.inner)
            return *branches.cond(over > 0, dropped, lambda: done), over

        def skip(updates):
            out, _, _ = jax.eval_shape(run, updates)
            return tree.nothing(out), state.inner, jnp.int32(0)

        out, inner, over = branches.cond(word > 0, skip, run, updates)
        skipped = state.skipped + ((word > 0) | (over > 0))
        found = None if words is None else state.found.after(words, over)
        return out, SkipState(skipped, inner, found)

    return tree.transformation(init, update)
