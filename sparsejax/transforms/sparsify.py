"""Sparsifiers as optax transformations, to be chained before a synchronization.

    tx = optax.chain(sparsejax.dgc(density=0.01), sparsejax.zen_sync(), optax.sgd(0.1))

For models whose gradients are dense: each rank sends a small part now and keeps the rest
for later. `init` needs the number of ranks (`sparsejax.init`, or `data_parallel`), because
what is kept differs by rank; `update` runs inside `jax.shard_map`, on local gradients.
"""

from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import optax

from sparsejax import arguments, sparsifiers
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError
from sparsejax.sparsifiers import base
from sparsejax.state.memories import Memory, Residual
from sparsejax.transforms import wrappers
from sparsejax.transforms.buckets import SPARSE_FROM
from sparsejax.transforms.described import described, without
from sparsejax.transforms.feedback import feedback
from sparsejax.transforms.select import Select
from sparsejax.wire import value_codes


MOMENTUM = "write memory=sparsejax.MomentumCorrection(momentum, nesterov, masking)."
_PLAIN = Residual()


class SparsifierOptions(TypedDict, total=False):
    """The arguments that every sparsifier takes; see `sparsify`."""

    axis_name: AxisName | None
    memory: Memory | None
    clip_norm: float | None
    global_: bool
    min_size: int
    compress: Callable[[str, Any], bool] | None
    model_axis: AxisName | None
    seed: int
    values: str | None


@described
def sparsify(
    sparsifier: base.Sparsifier,
    *,
    axis_name: AxisName | None = None,
    memory: Memory | None = _PLAIN,
    clip_norm: float | None = None,
    global_: bool = False,
    min_size: int = SPARSE_FROM,
    compress: Callable[[str, Any], bool] | None = None,
    model_axis: AxisName | None = None,
    seed: int = 0,
    values: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Sends a small part of each rank's gradient, and keeps the rest for later steps.

    `update` returns `SparseTensor`s, which only a synchronization of this library accepts:
    put other transformations after the synchronization. With
    `sparsejax.Residual()` nothing is lost:

        sum of gradients = sum of what was sent + residual

    where `sparsejax.residuals(state)` is the residual. NaN and infinity count as the
    largest magnitudes and are sent, so that they are seen in training; `RandomK` sends them
    when it draws their indices. `sparsejax.skip_nonfinite` skips such steps.

    Args:
        sparsifier: The rule that selects elements; see `sparsejax.sparsifiers`.
        axis_name: The mesh axis of the ranks; the only manual one if None.
        memory: How elements that were not sent are added to later gradients:
            `sparsejax.Residual()`; or `sparsejax.MomentumCorrection(0.9)`, with which the
            optimizer has no momentum of its own. With None they are lost.
        clip_norm: Clips each rank's gradient before it is added to the residual: at this
            norm over all leaves, divided by the square root of the number of ranks.
        global_: Whether all leaves share one threshold, instead of one each.
        min_size: Leaves with fewer elements are sent whole.
        compress: A function from a leaf's path and the leaf to whether it is sparsified.
            Leaves below `min_size` never are. See `sparsejax.advise.worthwhile`.
        model_axis: The mesh axis over which tensors are sharded. The threshold of a tensor
            is then computed from all its shards. Leaves that are replicated over this axis
            may be among them. See `param_specs` of `sparsejax.init`.
        seed: The seed of random selections, the same on all ranks.
        values: Rounds selected values to few bits: "2bit", "2bit-bins", "sign", "4bit",
            "int8", "fp8", "float16", "bfloat16" or "float32"; None keeps the gradient's
            dtype. The rounding error goes into the residual. `schemes.AGSparse` sends the
            codes. Other schemes send sums, which have no code, so they send the rounded
            values in full. Leaves that are sent whole are not rounded.

    Returns:
        An `optax.GradientTransformationExtraArgs`, to be chained before a synchronization.

    Example:
        >>> kind = sparsejax.sparsifiers.RandomK(0.01)
        >>> tx = optax.chain(sparsejax.sparsify(kind), sparsejax.zen_sync(), optax.sgd(0.1))

    See Also:
        `sparsejax.dgc`: sparsify with a sampled threshold.
        `sparsejax.top_k`: sparsify with an exact threshold.
    """
    if not isinstance(sparsifier, base.Sparsifier):
        raise ArgumentError(
            "sparsifier must be one of sparsejax.sparsifiers, such as DGC(0.01), got "
            f"{sparsifier!r}."
        )
    if memory is not None and not isinstance(memory, Memory):
        raise ArgumentError(
            "memory must be sparsejax.Residual(), sparsejax.MomentumCorrection(0.9) or "
            f"None, got {memory!r}."
        )
    if global_ and not isinstance(sparsifier, base.ByMagnitude):
        raise ArgumentError(
            f"global_=True needs a threshold for all leaves, and {sparsifier!r} has none; "
            "use TopK, DGC, Threshold, GaussianK, ReuseThreshold or Dragonn."
        )
    if clip_norm is not None:
        arguments.check_positive("clip_norm", clip_norm)
    if values is not None:
        value_codes.code_of(values)
        if isinstance(sparsifier, base.Rounding):
            raise ArgumentError(
                f"values={values!r} rounds what a sparsifier selects, and {sparsifier!r} "
                "selects nothing: it rounds all elements by itself. Leave values out."
            )
    for name, value in (("min_size", min_size), ("seed", seed)):
        arguments.check_whole(name, value, 0)
    select = Select(
        sparsifier,
        axis_name,
        memory is not None,
        global_,
        min_size,
        compress,
        model_axis,
        seed,
        values,
    )

    tx = feedback(select, memory)
    if clip_norm is not None:
        clip = wrappers.clip_by_rank(clip_norm, axis_name, model_axis=model_axis)
        tx = optax.chain(clip, tx)
    return optax.with_extra_args_support(tx)


@described
def top_k(
    density: base.Density = 0.01, **options: Unpack[SparsifierOptions]
) -> optax.GradientTransformationExtraArgs:
    """Sends the largest elements of each rank's gradient, and keeps the others for later.

    It is `sparsejax.sparsify` with `sparsifiers.TopK`: k elements exactly, those of the
    largest magnitudes.

    Args:
        density: The share of elements that are sent: a number, a `sparsifiers.Warmup` or a
            `sparsifiers.Schedule`.
        **options: Further arguments of `sparsejax.sparsify`.

    Returns:
        An `optax.GradientTransformationExtraArgs`, to be chained before a synchronization.

    Example:
        >>> tx = optax.chain(sparsejax.top_k(0.01), sparsejax.zen_sync(), optax.sgd(0.1))

    References:
        Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017

    See Also:
        `sparsejax.dgc`: about the same elements by a cheaper, sampled threshold.
        `sparsejax.sparsify`: the same for any sparsifier; its docstring has the options.
    """
    return sparsify(sparsifiers.TopK(density), **options)


@described
@without(dict.fromkeys(("momentum", "nesterov", "masking"), MOMENTUM))
def dgc(
    density: base.Density = 0.001, **options: Unpack[SparsifierOptions]
) -> optax.GradientTransformationExtraArgs:
    """Sends about the largest elements of each gradient: Deep Gradient Compression.

    It is `sparsejax.sparsify` with `sparsifiers.DGC`: a threshold that is estimated from a
    sample. The other parts of the paper are options:

    * Momentum correction is `memory=sparsejax.MomentumCorrection(0.9)`. Ranks then
      accumulate velocity, and the optimizer has no momentum of its own: `optax.sgd(rate)`.
    * Momentum factor masking is part of that memory: an element that was sent starts again
      without velocity. Where much the same elements are sent in every step, as those of
      frequent words, this is training without momentum. `masking=False` keeps the velocity.
    * Warm-up is a density, `sparsifiers.Warmup(0.001, steps)`.
    * Local gradient clipping is `clip_norm`.

    What a rank has not sent is added to later gradients, and acts as a momentum. With the
    learning rate and the momentum of dense training the steps may be too large, and
    training may diverge. Lower the rate, move the momentum into `memory`, or start densely
    (`sparsejax.warm_up`).

    Args:
        density: The share of elements that are sent: a number, a `sparsifiers.Warmup` or a
            `sparsifiers.Schedule`.
        **options: Further arguments of `sparsejax.sparsify`.

    Returns:
        An `optax.GradientTransformationExtraArgs`, to be chained before a synchronization.

    Example:
        >>> memory = sparsejax.MomentumCorrection(0.9)
        >>> dgc = sparsejax.dgc(density=0.01, memory=memory, clip_norm=1.0)
        >>> tx = optax.chain(dgc, sparsejax.zen_sync(), optax.sgd(0.1))

    References:
        Lin et al., Deep Gradient Compression: Reducing the Communication Bandwidth for
        Distributed Training, ICLR 2018

    See Also:
        `sparsejax.top_k`: the k largest elements exactly.
        `sparsejax.sparsify`: the same for any sparsifier; its docstring has the options.
    """
    return sparsify(sparsifiers.DGC(density), **options)
