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


_PULLED = 4  # times as many entries come back as a rank sends


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

    A matrix is cut into blocks of 64 x 64 numbers, a vector into runs of 64. Every block
    sends the same number of entries. So the size of a message follows from the shapes: with
    the defaults 0.16 bits a parameter, 205 times less than float32.

    Up to eight ranks each send their message to all others. More ranks have owners of
    blocks: an owner is sent its blocks of all messages, sums them, and sends the `pull_k`
    largest entries of each sum to all. A rank then sends 0.66 bits a parameter at any
    number of ranks.

    With e the residual of a rank and g its gradient, in each step

        e    = decay e + g
        sent = the k largest entries of each block of e, rounded
        e    = e - sent

    `sparsejax.residuals(state)` shows e. An owner keeps what it does not send of a sum in
    the same way; that is not among the residuals of ranks. `sparsejax.restore` on other
    ranks gives it to their owners. A state with owners cannot be restored into one without:
    set `via` where that may be needed.

    At a density of 1.6% few ranks send the same entry. A mean over all ranks would then be
    many times smaller than what each sender sent. So by default an entry is divided by the
    number of ranks that sent it.

    `tx.update(grads, state, params, weight=tokens)` weighs ranks, by a number that each has
    for itself. A rank of weight 0 counts nothing, and keeps all that it has accumulated.

    A block with fewer than k non-zero numbers sends zeros, too. In one or two bits these
    are rounded to the smaller magnitude, and the next exchange takes that back. So a table
    few of whose rows have a gradient is better sent by `sparsejax.zen_sync`.

    NaN and infinity count as the largest magnitudes, and are sent. In one or two bits, one
    such number makes the whole sum of a leaf NaN or infinite: wrap the chain in
    `sparsejax.skip_nonfinite` where a gradient may have one.

    Args:
        axis_name: The mesh axis of the ranks; the only manual one if None.
        k: The number of entries that a whole block sends; smaller sends less.
        chunk: The numbers in a whole block, the square of its largest side. A side is the
            largest divisor of the dimension that is no longer than that. A smaller block
            sends round(k * its size / chunk) entries, at least one.
        values: How values are sent: "2bit" (the sign and one of two magnitudes),
            "2bit-bins" (SparseLoCo's four bins), "sign", "4bit" (the sign and a power of
            two), "int8", "fp8", "float16", "bfloat16" or "float32".
        over: What an entry of the sum is divided by: the number of its "senders", or of all
            "ranks".
        decay: The share of the residual that is added to the next gradient, in (0, 1];
            SparseLoCo's is 0.95.
        reduce: "mean", or "sum": that times the number of ranks.
        clip_to_median: Whether a rank scales what it sends of a leaf so that its norm is at
            most the median of all ranks. What is clipped stays in its residual. There are
            no owners then.
        transform: What the entries of a block are: its numbers if None, or with "dct" its
            cosine coefficients, as in DeMo. These are selected, sent and summed, and the
            sum is transformed back. Results are the same on all ranks on devices of one
            kind.
        via: "all_gather": each rank sends its message to all. "owners": blocks have owners.
            None: owners above eight ranks.
        pull_k: The number of entries of a whole block of a sum that its owner sends; 4 k if
            None. Fewer send less, and leave more for later steps.

    Returns:
        An `optax.GradientTransformationExtraArgs`, which goes before the optimizer.

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
    """Raises unless a block is a square, and has k entries."""
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
    """How many entries of a block of a sum come back; raises where ways do not fit."""
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
