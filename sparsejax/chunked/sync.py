"""`chunked_sync`: the exchange of SparseLoCo as an optax transformation."""

import math
from typing import Any

import optax

from sparsejax import arguments
from sparsejax.axes import AxisName, check_axis_name
from sparsejax.chunked.exchange import ChunkedExchange
from sparsejax.errors import ArgumentError
from sparsejax.state.memories import Residual
from sparsejax.transforms.described import described
from sparsejax.transforms.feedback import feedback
from sparsejax.wire.value_codes import code_of


_PULLED = 4  # the default of `pull_k`, as a multiple of k


@described
def chunked_sync(
    axis_name: AxisName | None = None,
    *,
    k: int = 64,
    chunk: int = 4096,
    values: str = "2bit",
    over: str = "senders",
    decay: float = 1.0,
    reduce: str = "mean",
    clip_to_median: bool = False,
    transform: str | None = None,
    via: str | None = None,
    pull_k: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Averages the k largest entries of each block, in few bits, by messages of one size.

    A matrix is cut into blocks of 64 x 64 elements, a vector into segments of 64. Every
    block sends the same number of entries. So the size of a message follows from the
    shapes: with the defaults 0.16 bits per parameter, 205 times less than float32.

    Up to eight ranks each send their message to all others. Above eight ranks, blocks have
    owners: an owner receives its blocks of all messages, sums them, and sends the `pull_k`
    largest entries of each block of the sum to all. A rank then sends 0.66 bits per
    parameter at any number of ranks.

    With e the residual of a rank and g its gradient, in each step

        e    = decay e + g
        sent = the k largest entries of each block of e, rounded
        e    = e - sent

    `sparsejax.residuals(state)` returns e. An owner keeps the part of a sum that it does
    not send in the same way; this is not among the residuals of ranks. `sparsejax.restore`
    on another number of ranks moves it to their owners. A state with owners cannot be
    restored into one without: set `via` if that may be needed.

    At a density of 1.6% few ranks send the same entry. A mean over all ranks would then be
    many times smaller than the values that were sent. So by default an entry is divided by
    the number of ranks that sent it.

    `tx.update(grads, state, params, weight=tokens)` weighs ranks, each by its own number. A
    rank of weight 0 does not contribute, and keeps all that it has accumulated.

    A block with fewer than k non-zero elements sends zeros, too. In one or two bits these
    are rounded to the smaller magnitude, and the next exchange corrects that. So a table of
    which few rows have a gradient is better sent by `sparsejax.zen_sync`.

    NaN and infinity count as the largest magnitudes, and are sent. In one or two bits, one
    such value makes the whole sum of a leaf NaN or infinite: wrap the chain in
    `sparsejax.skip_nonfinite` if a gradient may have one.

    Args:
        axis_name: The mesh axis of the ranks; the only manual one if None.
        k: The number of entries that a whole block sends; smaller sends less.
        chunk: The number of elements of a whole block, a square. A side of a block is the
            largest divisor of its dimension that is at most sqrt(chunk). A smaller block
            sends round(k * its size / chunk) entries, at least one.
        values: How values are sent: "2bit" (the sign and one of two magnitudes),
            "2bit-bins" (SparseLoCo's four bins), "sign", "4bit" (the sign and a power of
            two), "int8", "fp8", "float16", "bfloat16" or "float32".
        over: The divisor of an entry of the sum: the number of its "senders", or of all
            "ranks".
        decay: The share of the residual that is added to the next gradient, in (0, 1];
            SparseLoCo's is 0.95.
        reduce: "mean", or "sum": the mean times the number of ranks.
        clip_to_median: Whether the entries that a rank sends of a leaf are scaled so that
            their norm is at most the median of all ranks. The rest stays in the residual.
            Blocks have no owners then.
        transform: None: the entries of a block are its elements. "dct": they are its
            cosine coefficients, as in DeMo. These are selected, sent and summed, and the
            sum is transformed back. Results are equal on all ranks if their devices are of
            one kind.
        via: "all_gather": each rank sends its message to all. "owners": blocks have owners.
            None: owners above eight ranks.
        pull_k: The number of entries of a whole block of a sum that its owner sends; 4 k,
            or chunk if that is less, if None. Smaller sends less, and leaves more for later
            steps.

    Returns:
        An `optax.GradientTransformationExtraArgs`, to be chained before the optimizer.

    Example:
        >>> tx = optax.chain(sparsejax.chunked_sync(decay=0.95), optax.sgd(0.1))
        >>> opt_state = sparsejax.init(tx, params, mesh)

    References:
        Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, arXiv
        2508.15706

        Peng et al., DeMo: Decoupled Momentum Optimization, arXiv 2411.19870

    See Also:
        `sparsejax.rounds.sparse_loco`: local steps with this exchange.
        `sparsejax.rounds.demo`: an optimizer with this exchange of cosine coefficients.
    """
    check_axis_name(axis_name, "sparsejax.chunked_sync")
    _check_block(k, chunk)
    code_of(values)
    arguments.check_one_of("over", over, ("senders", "ranks"))
    arguments.check_reduce(reduce)
    _check_flag("clip_to_median", clip_to_median)
    arguments.check_one_of("transform", transform, (None, "dct"))
    pull_k = _checked_way(via, pull_k, k, chunk, clip_to_median)
    by = over == "senders", reduce == "mean", clip_to_median, transform == "dct"
    by = *by, via, pull_k, decay
    exchange = ChunkedExchange(axis_name, k, chunk, values, *by)
    return feedback(exchange, Residual(decay))


def _check_block(k: Any, chunk: Any) -> None:
    """Raises unless chunk is a square, and k is at most chunk."""
    arguments.check_whole("chunk", chunk, 1)
    side = math.isqrt(chunk)
    if side * side != chunk:
        raise ArgumentError(
            f"chunk must be a square, of the side of a block of a matrix, got {chunk}: "
            f"take {side**2} or {(side + 1) ** 2}."
        )
    arguments.check_whole("k", k, 1)
    if k > chunk:
        raise ArgumentError(
            f"k must be at most chunk={chunk}, the numbers in a block, got {k}: take a "
            "smaller k, or a larger chunk."
        )


def _checked_way(via: Any, pull_k: Any, k: int, chunk: int, clipped: bool) -> int:
    """Returns pull_k, by default a multiple of k; raises if arguments do not fit `via`."""
    if via is not None:
        arguments.check_one_of("via", via, ("all_gather", "owners"))
    if via == "owners" and clipped:
        raise ArgumentError(
            "clip_to_median compares the norms of whole messages, and an owner has a part "
            'of each: leave clip_to_median out, or take via="all_gather".'
        )
    if pull_k is None:
        return min(_PULLED * k, chunk)
    if via == "all_gather":
        raise ArgumentError(
            f'pull_k={pull_k!r} is for owners, and via="all_gather" has none: leave it '
            'out, or take via="owners".'
        )
    arguments.check_whole("pull_k", pull_k, 1)
    if pull_k > chunk:
        raise ArgumentError(
            f"pull_k must be at most chunk={chunk}, the numbers in a block, got {pull_k}."
        )
    return pull_k


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be True or False, got {value!r}.")
