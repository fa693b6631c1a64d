"""Sparsifiers as optax transformations, to stand before a synchronization.

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
    """Lets through a small part of each rank's gradient, and keeps the rest for later.

    What comes out are `SparseTensor`s, which a synchronization of this library takes as
    they are; other transformations belong after that. Nothing is lost: the sum of the
    gradients is what was sent and what `sparsejax.residuals` shows. NaN and infinity count
    as the largest magnitudes, and are sent, so that training shows them; `RandomK` sends
    them when it draws their places. `sparsejax.skip_nonfinite` leaves such steps out.

    Args:
        sparsifier: Which elements go; see `sparsejax.sparsifiers`.
        axis_name: The mesh axis of the ranks; the only manual one if None.
        memory: What is remembered of what did not go: `sparsejax.Residual()`;
            `sparsejax.MomentumCorrection(0.9)`, with which the optimizer should have no
            momentum of its own; or None: what does not go is lost.
        clip_norm: Clips each rank's gradient, before it is added to what waits, at this
            norm over all leaves, divided by the square root of the number of ranks.
        global_: Whether all leaves share one threshold, instead of one each.
        min_size: Smaller leaves go whole.
        compress: From a leaf's path and the leaf to whether it is sparsified; leaves below
            `min_size` never are. See `sparsejax.advise.worthwhile`.
        model_axis: The mesh axis over which tensors are sharded: their threshold is then
            found from all shards together. Leaves replicated over it may be among them.
            See `param_specs` of `sparsejax.init`.
        seed: Of everything that is drawn; the same on all ranks.
        values: Rounds selected values to few bits: "2bit", "2bit-bins", "sign", "4bit",
            "int8", "fp8", "float16", "bfloat16" or "float32"; None for the gradient's
            dtype. What that takes off waits with the rest. `schemes.AGSparse` sends the
            codes; schemes that send sums, which have no code, send the rounded
            values as they send others. Leaves that go whole are not rounded.

    Example:
        >>> kind = sparsejax.sparsifiers.RandomK(0.01)
        >>> tx = optax.chain(sparsejax.sparsify(kind), sparsejax.zen_sync(), optax.sgd(0.1))
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
    """The largest elements, exactly; options are those of `sparsejax.sparsify`.

    Example:
        >>> tx = optax.chain(sparsejax.top_k(0.01), sparsejax.zen_sync(), optax.sgd(0.1))
    """
    return sparsify(sparsifiers.TopK(density), **options)


@described
@without(dict.fromkeys(("momentum", "nesterov", "masking"), MOMENTUM))
def dgc(
    density: base.Density = 0.001, **options: Unpack[SparsifierOptions]
) -> optax.GradientTransformationExtraArgs:
    """Deep Gradient Compression: a sampled threshold; options are those of `sparsify`.

    What the paper adds to it are options, too. With
    `memory=sparsejax.MomentumCorrection(0.9)` ranks gather velocity, and the optimizer
    should have none of its own: optax.sgd(rate). Its masking is the paper's: an element
    that went starts again without velocity. Where much the same go in every step, as of
    frequent words, that is training without momentum; `masking=False` keeps the velocity.
    Warm-up is a density, `sparsifiers.Warmup(0.001, steps)`; clipping is `clip_norm`.

    What waits comes later all at once, and acts as a momentum of its own: with the learning
    rate and the momentum of dense training the steps may be too large, and diverge. Lower
    the rate, move the momentum here, or start densely (`Warmup`, `sparsejax.warm_up`).

    Example:
        >>> memory = sparsejax.MomentumCorrection(0.9)
        >>> dgc = sparsejax.dgc(density=0.01, memory=memory, clip_norm=1.0)
        >>> tx = optax.chain(dgc, sparsejax.zen_sync(), optax.sgd(0.1))
    """
    return sparsify(sparsifiers.DGC(density), **options)
