"""Numbers that are not finite: which rank has one, on which all agree, and who hears of it.

On the wire goes one word of 32 bits of each rank, before anything else is sent: 0 where all
of its gradient is finite. To leave a step out the largest word is enough (`wire.maximum`);
to say where it was all are gathered. So all ranks decide by the same words, and the same.

It is asked before, because what a NaN has reached it does not leave: a residual, a
velocity, the moments of Adam. One thing cannot be known before: a sum may be too large for
float16 where all that is summed is not. The sums are the same on all ranks, so they are
looked at after the exchange, and nothing more is sent: `Sums`. Where each rank has a piece
of a sum alone, as of a parameter that is sharded over the ranks, one more word is.
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
    """The paths of leaves: no array, and known when traced."""

    paths: tuple[str, ...]

    def numbers_of(self, paths: Sequence[str]) -> list[int]:
        """The number of each of some paths, or of what it is in; -1 where there is none."""
        own = {path: number for number, path in enumerate(self.paths)}

        def one(path):
            # The gradient of a leaf may be a node: rows, of a table by columns.
            while path and path not in own:
                path = path.rpartition("/")[0]
            return own.get(path, -1)

        return list(map(one, paths))


class Sums(NamedTuple):
    """Whether the last sums of an exchange were finite, where they may overflow.

    Attributes:
        over: int32: 0, or one more than the number of the first leaf whose sum was not.
        names: The exchange's leaves.
    """

    over: jax.Array
    names: Names

    def after(self, totals: Sequence[Any], wire: Wire, in_pieces: bool = False) -> "Sums":
        """What is said of other sums, the same on all ranks.

        Args:
            totals: The sums.
            wire: The ranks.
            in_pieces: Whether a rank has only its piece of one of them, so that the others
                ask it.
        """
        word = first_bad(totals, range(len(totals)))
        if in_pieces:
            word = wire.maximum(word)[0]
        # A shard of another mesh axis may be the only one that overflows.
        return self._replace(over=wire.same_elsewhere((word + 1) // 2))


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Lets exchanges whose state is made inside look at their sums."""
    token = _WATCHING.set(True)
    try:
        yield
    finally:
        _WATCHING.reset(token)


def first_sums(paths: Sequence[str], dtypes: Sequence[Any]) -> Sums | None:
    """The first state of an exchange's sums; None where nobody asks, or none overflows.

    Args:
        paths: Of the leaves.
        dtypes: The narrowest in which numbers of each leaf travel, or come out.
    """
    # bfloat16 has the range of float32, whose sums are not looked at either.
    least = min((float(jnp.finfo(dtype).max) for dtype in dtypes), default=np.inf)
    if not _WATCHING.get() or least > 1e38:
        return None
    return Sums(jnp.int32(0), Names(tuple(paths)))


def overflown(state: Any, names: Names) -> jax.Array | None:
    """Which sum of the last update was not finite, the same on all ranks.

    Args:
        state: The state after it.
        names: All leaves.

    Returns:
        int32: 0, or one more than the number of a leaf; None where nothing can overflow.
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
    """The word of this rank: int32, 0 where all numbers of all leaves are finite.

    Else 1 + 2 * number of the first leaf that has others, and 1 more where it has no NaN.

    Args:
        leaves: Arrays, entries or rows.
        numbers: Of the leaves, for the word.
    """
    word = jnp.int32(0)
    for number, leaf in reversed(list(zip(numbers, leaves, strict=True))):
        x = tree.numbers(leaf)
        is_bad = jnp.any(~jnp.isfinite(x))
        kind = jnp.where(jnp.any(jnp.isnan(x)), 0, 1)
        word = jnp.where(is_bad, 1 + 2 * number + kind, word).astype(jnp.int32)
    return word


def of_all(word: jax.Array, wire: Wire) -> jax.Array:
    """The words of all ranks, int32 [ranks], the same on every one."""
    return wire.all_gather(wire.same_elsewhere(wire.per_rank(word)))[0]


class Found(NamedTuple):
    """What was found so far, for the error that says it: the same on all ranks.

    Attributes:
        step: int32: updates so far, those that were left out among them.
        last: int32 [5]: of the last update that was left out the number; the first rank
            that had a number that is not finite, or -1 for the sum over the ranks; its
            leaf; 0 for NaN and 1 for infinity; and how many ranks had one.
        names: The leaves.
    """

    step: jax.Array
    last: jax.Array
    names: Names

    @classmethod
    def first(cls, paths: Sequence[str]) -> "Found":
        """Nothing yet, of leaves with these paths."""
        return cls(jnp.int32(0), jnp.int32([-1, 0, 0, 0, 0]), Names(tuple(paths)))

    def numbers_of(self, paths: Sequence[str]) -> list[int]:
        """The numbers of the leaves of a gradient; raises where it has others."""
        numbers = self.names.numbers_of(paths)
        if -1 in numbers:
            raise StateError(
                f"the gradients have the leaf {paths[numbers.index(-1)]!r}, and the state "
                "was made for others: make it with the parameters that are trained, "
                "sparsejax.init(tx, params, mesh)."
            )
        return numbers

    def after(self, words: jax.Array, over: jax.Array) -> "Found":
        """What is known after one more update.

        Args:
            words: Those of all ranks, as `first_bad` makes them.
            over: As `overflown` returns it; 0 where it was not asked.
        """
        is_bad = words > 0
        rank = jnp.argmax(is_bad).astype(jnp.int32)
        word, many = words[rank] - 1, jnp.sum(is_bad, dtype=jnp.int32)
        of_rank = jnp.stack([self.step, rank, word // 2, word % 2, many])
        none = jnp.int32(0)
        of_sum = jnp.stack([self.step, jnp.int32(_SUM), over - 1, none, none])
        last = jnp.where(over > 0, of_sum, self.last)
        return self._replace(step=self.step + 1, last=jnp.where(many > 0, of_rank, last))

    def said(self) -> str:
        """The last update that was left out, in words; read from the device."""
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
    """Raises where an update was left out because a number in it was not finite.

    It is for loops of your own. Inside `jax.jit` nothing can be raised, so
    `sparsejax.skip_nonfinite(tx, report=True)` leaves such an update out and records it in
    the state, which this function reads. It waits for the update, and sends nothing. The
    state is the same on all ranks and processes, so all raise. The trainer of
    `sparsejax.data_parallel` calls it after each step.

    Args:
        state: The optimizer's state, or any tree with it in, outside `jax.jit`.
        since: The number of an update, counted from 0: those before it are not looked at,
            so that a loop may go on after one that was left out.

    Raises:
        BadNumberError: With the rank, the leaf and the number of the last such update.

    Example:
        >>> tx = sparsejax.skip_nonfinite(tx, report=True)
        >>> opt_state = sparsejax.init(tx, params, mesh)
        >>> sparsejax.transforms.check_numbers(opt_state)  # and after each step

    See Also:
        `sparsejax.skip_nonfinite`: leaves such an update out.
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
    tree.check_there(state, _CALL)
    for found in every:
        if int(np.asarray(tree.here(found.last))[0]) >= since:
            raise BadNumberError(found.said())
