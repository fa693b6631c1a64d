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
from sparsejax.transforms.wrappers import check_reduce
from sparsejax.wire.value_codes import code_of


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
) -> optax.GradientTransformationExtraArgs:
    """Averages the k largest entries of each block, in few bits, by one message a rank.

    Matrices are cut into blocks of 64 x 64, vectors into runs of 64. Of every block as many
    entries are sent, so a message has one size, known from the shapes: with the defaults
    0.16 bits a parameter, 205 times less than float32. A rank sends it to each other one.
    What is not sent, and what rounding takes from what is, stays on the rank and is added
    to the next gradient: `sparsejax.residuals(state)` shows it.

    At a density of 1.6% few ranks send the same element. Divided by all ranks, as a mean
    over ranks is, an update is then many times smaller than that of each sender; so by
    default an element is divided by the number of ranks that sent it.

    `tx.update(grads, state, params, weight=tokens)` weighs ranks, by a number that each has
    for itself. A rank of weight 0 counts nothing, and keeps all that it accumulated.

    Of a block with fewer than k numbers that are not zero, zeros are sent as well. One bit
    or two round them to the smaller magnitude, and the next exchange takes that back: a
    table few of whose rows have a gradient is better sent by `sparsejax.zen_sync`.

    NaN and infinity count as the largest magnitudes, and are sent. Where one bit or two
    stand for a value, one such number makes all that a leaf receives NaN or infinite. Wrap
    the chain in `sparsejax.skip_nonfinite` where a gradient may be bad.

    Args:
        axis_name: The mesh axis of the ranks; the only manual one if None.
        k: How many entries of a whole block are sent; smaller sends less.
        chunk: Numbers in a whole block: a square, of the largest side of a block. A side is
            the largest divisor of the dimension that is no longer; of a smaller block
            round(k * its size / chunk) entries are sent, at least one.
        values: How values travel: "2bit" (the sign and one of two magnitudes), "2bit-bins"
            (SparseLoCo's four bins), "sign", "int8", "fp8", "float16", "bfloat16" or
            "float32".
        over: "senders", or "ranks": what an element of the sum is divided by.
        decay: The share of what was left out that comes back with the next gradient, in
            (0, 1]; SparseLoCo's is 0.95.
        reduce: "mean", or "sum": that times the number of ranks.
        clip_to_median: Whether what a rank sends of a leaf is scaled so that its norm is at
            most the median of all ranks. What is cut off stays with the rank.
        transform: What the entries of a block are: its numbers if None; "dct": its cosine
            coefficients, as in DeMo. Those are selected, sent and added up, and their sum
            is transformed back. It is the same on all ranks on devices of one kind.

    Example:
        >>> tx = optax.chain(sparsejax.chunked_sync(decay=0.95), optax.sgd(0.1))
        >>> opt_state = sparsejax.init(tx, params, mesh)

    References:
        Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo,
        arXiv 2508.15706
        Peng et al., DeMo: Decoupled Momentum Optimization, arXiv 2411.19870
    """
    check_axis_name(axis_name, "sparsejax.chunked_sync")
    _check_block(k, chunk)
    code_of(values)
    arguments.check_one_of("over", over, ("senders", "ranks"))
    check_reduce(reduce)
    _check_flag("clip_to_median", clip_to_median)
    arguments.check_one_of("transform", transform, (None, "dct"))
    by = over == "senders", reduce == "mean", clip_to_median, transform == "dct"
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


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be True or False, got {value!r}.")
