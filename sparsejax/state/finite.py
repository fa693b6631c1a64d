"""Detects non-finite numbers, so that all ranks agree, and reports them.

On the wire: one 32-bit word of each rank, before anything else is sent; 0 if its gradient
is finite. To skip a step, the maximum of the words is enough (`wire.maximum`); to report
the rank and the leaf, all words are gathered. So all ranks decide by the same words.

Gradients are checked before the exchange, because a NaN never leaves a residual, a velocity
or the moments of Adam once it is in them. One thing cannot be known before: a sum may
overflow float16 though its summands do not. Sums are equal on all ranks, so they are
checked after the exchange without a collective: `Sums`. If each rank has only its piece of
a sum, that of a parameter that is sharded over the ranks, one more word is sent.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from sparsejax import arguments
from sparsejax.errors import ArgumentError, BadNumberError, StateError
from sparsejax.state import tree
from sparsejax.state.per_rank import find
from sparsejax.wire.collectives import Wire


_CALL = "sparsejax.transforms.check_numbers"
_KINDS = ("a NaN", "an infinity")
_SUM = -1  # in place of a rank: the sum over all

_WATCHING: contextvars.ContextVar[bool] = contextvars.ContextVar("watching", default=False)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Names:
    """The paths of leaves, static under `jit`; the position of a path is its number."""

    paths: tuple[str, ...]

    def numbers_of(self, paths: Sequence[str]) -> list[int]:
        """Returns the number of each path, or of the node that contains it, or -1."""
        own = {path: number for number, path in enumerate(self.paths)}

        def one(path):
            # The gradient of a leaf may be a node: `RowGrads`, or that of a column table.
            while path and path not in own:
                path = path.rpartition("/")[0]
            return own.get(path, -1)

        return list(map(one, paths))


class Sums(NamedTuple):
    """Whether the last sums of an exchange were finite, if they may overflow.

    Attributes:
        over: int32: 0, or 1 + the number of the first leaf whose sum was not finite.
        names: The paths of the exchange's leaves.
    """

    over: jax.Array
    names: Names

    def after(self, totals: Sequence[Any], wire: Wire, in_pieces: bool = False) -> "Sums":
        """Returns the state after an exchange, equal on all ranks.

        Args:
            totals: The sums.
            wire: The ranks.
            in_pieces: Whether a rank has only its piece of any of them, so that ranks have
                to agree by a collective.
        """
        word = first_bad(totals, range(len(totals)))
        if in_pieces:
            word = wire.maximum(word)[0]
        # The sum may have overflowed on one shard of another mesh axis alone.
        return self._replace(over=wire.same_elsewhere((word + 1) // 2))


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Makes exchanges whose state is initialized inside check their sums."""
    token = _WATCHING.set(True)
    try:
        yield
    finally:
        _WATCHING.reset(token)


def first_sums(paths: Sequence[str], dtypes: Sequence[Any]) -> Sums | None:
    """Returns the first `Sums`; None outside `watching`, or if no sum may overflow.

    Args:
        paths: The paths of the leaves.
        dtypes: For each leaf the narrowest dtype in which values are sent or returned.
    """
    # bfloat16 has the range of float32, whose sums are not checked either.
    least = min((float(jnp.finfo(dtype).max) for dtype in dtypes), default=np.inf)
    if not _WATCHING.get() or least > 1e38:
        return None
    return Sums(jnp.int32(0), Names(tuple(paths)))


def overflown(state: Any, names: Names) -> jax.Array | None:
    """Returns which sum of the last update was not finite, equal on all ranks.

    Args:
        state: The state after the update.
        names: The paths of all leaves.

    Returns:
        int32: 0, or 1 + the number of a leaf; None if no sum may overflow.
    """
    every = find(state, Sums)
    if not every:
        return None
    over = jnp.int32(0)
    for sums in every:
        numbers = [0, *(1 + max(i, 0) for i in names.numbers_of(sums.names.paths))]
        over = jnp.maximum(over, jnp.array(numbers, jnp.int32)[sums.over])
    return over


def first_bad(leaves: Sequence[Any], numbers: Sequence[int]) -> jax.Array:
    """Returns the word of this rank: int32, 0 if all elements of all leaves are finite.

    Else it is 1 + 2 * (the number of the first leaf with a non-finite element), plus 1 if
    that leaf has infinities but no NaN.

    Args:
        leaves: Arrays, entries or rows.
        numbers: The numbers of the leaves, for the word.
    """
    word = jnp.int32(0)
    for number, leaf in reversed(list(zip(numbers, leaves, strict=True))):
        x = tree.numbers(leaf)
        is_bad = jnp.any(~jnp.isfinite(x))
        kind = jnp.where(jnp.any(jnp.isnan(x)), 0, 1)
        word = jnp.where(is_bad, 1 + 2 * number + kind, word).astype(jnp.int32)
    return word


def of_all(word: jax.Array, wire: Wire) -> jax.Array:
    """Gathers the words of all ranks: int32 [ranks], equal on all of them."""
    return wire.all_gather(wire.same_elsewhere(wire.per_rank(word)))[0]


class Found(NamedTuple):
    """A record of the last skipped update, for the error message; equal on all ranks.

    Attributes:
        step: int32: updates so far, skipped ones included.
        last: int32 [5], of the last skipped update: its step; the first rank with a number
            that is not finite, or -1 if a sum over the ranks was not; the number of the
            leaf; 0 for NaN and 1 for infinity; and the number of ranks that had one.
        names: The paths of the leaves.
    """

    step: jax.Array
    last: jax.Array
    names: Names

    @classmethod
    def first(cls, paths: Sequence[str]) -> "Found":
        """Returns the record before the first update, for leaves with these paths."""
        return cls(jnp.int32(0), jnp.int32([-1, 0, 0, 0, 0]), Names(tuple(paths)))

    def numbers_of(self, paths: Sequence[str]) -> list[int]:
        """Returns the numbers of the leaves of a gradient; raises for unknown ones."""
        numbers = self.names.numbers_of(paths)
        if -1 in numbers:
            raise StateError(
                f"the gradients have the leaf {paths[numbers.index(-1)]!r}, and the state "
                "was made for others: make it with the parameters that are trained, "
                "sparsejax.init(tx, params, mesh)."
            )
        return numbers

    def after(self, words: jax.Array, over: jax.Array) -> "Found":
        """Returns the record after one more update.

        Args:
            words: int32 [ranks]: the words of all ranks, see `first_bad`.
            over: The result of `overflown`; 0 if it was None.
        """
        is_bad = words > 0
        rank = jnp.argmax(is_bad).astype(jnp.int32)
        word, many = words[rank] - 1, jnp.sum(is_bad, dtype=jnp.int32)
        of_rank = jnp.stack([self.step, rank, word // 2, word % 2, many])
        none = jnp.int32(0)
        of_sum = jnp.stack([self.step, jnp.int32(_SUM), over - 1, none, none])
        last = jnp.where(over > 0, of_sum, self.last)
        return self._replace(step=self.step + 1, last=jnp.where(many > 0, of_rank, last))

    def message(self) -> str:
        """Returns a message about the last skipped update; reads it from the device."""
        step, rank, leaf, kind, many = np.asarray(tree.here(self.last)).tolist()
        path = self.names.paths[leaf]
        kept = (
            "It was left out on all ranks: parameters, residuals and the optimizer's state "
            "are those before it."
        )
        if rank == _SUM:
            return (
                f"step {step}: the sum of {path!r} over the ranks is not finite, and all "
                f"that was summed is: it is too large for 16 bits. {kept} Make the loss, "
                "or its scale, smaller; or take bfloat16 instead of float16 for gradients "
                "and wire_dtype."
            )
        others = f", the first of {many} ranks that have such numbers" if many > 1 else ""
        return (
            f"step {step}: the gradient of {path!r} has {_KINDS[kind]} on rank {rank}"
            f"{others}. {kept} Look at what that rank was given, and at the learning rate; "
            "to go on without such steps: sparsejax.skip_nonfinite(tx)."
        )


def check_numbers(state: Any, since: int = 0) -> None:
    """Raises if an update was skipped because a number in it was not finite.

    It is for loops of your own. Nothing can be raised inside `jax.jit`, so
    `sparsejax.skip_nonfinite(tx, report=True)` skips such an update and records it in the
    state, which this function reads. It waits for the update, and sends nothing. The state
    is equal on all ranks and processes, so all of them raise. The trainer of
    `sparsejax.data_parallel` calls it after each step.

    Args:
        state: The optimizer's state, or any tree that contains it, outside `jax.jit`.
        since: The number of an update, counted from 0. Earlier updates are ignored, so that
            a loop may go on after one that was skipped.

    Raises:
        BadNumberError: With the rank, the leaf and the number of the last such update.

    Example:
        >>> tx = sparsejax.skip_nonfinite(tx, report=True)
        >>> opt_state = sparsejax.init(tx, params, mesh)
        >>> sparsejax.transforms.check_numbers(opt_state)  # and after each step

    See Also:
        `sparsejax.skip_nonfinite`: skips such an update.
    """
    arguments.check_whole("since", since, 0)
    every = find(state, Found)
    if not every:
        raise StateError(
            f"{_CALL} was given a state that does not say where numbers were not finite: "
            "make the transformation with sparsejax.skip_nonfinite(tx, report=True), and "
            "pass the optimizer's state."
        )
    for found in every:
        if isinstance(found.last, Tracer):
            raise ArgumentError(
                f"{_CALL} reads numbers, and was called where a function is traced: call "
                "it between steps, outside jax.jit and jax.shard_map."
            )
    tree.check_not_donated(state, _CALL)
    for found in every:
        if int(np.asarray(tree.here(found.last))[0]) >= since:
            raise BadNumberError(found.message())
