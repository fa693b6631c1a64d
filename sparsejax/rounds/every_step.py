"""Published methods that exchange a little in every step, as optax chains.

On the wire in each step: what `sparsejax.chunked_sync` sends, or the entries that a
sparsifier selects, by an all-reduce where all ranks select the same.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from sparsejax import arguments
from sparsejax.axes import AxisName, mesh_of
from sparsejax.chunked.sync import chunked_sync
from sparsejax.errors import ArgumentError
from sparsejax.rounds.checks import check_transformation
from sparsejax.sparsifiers import RandomK, Striding
from sparsejax.state.memories import Residual
from sparsejax.transforms.described import described
from sparsejax.transforms.sparsify import sparsify
from sparsejax.transforms.systems import dense_sync, zen_sync


REPLICATORS = ("demo", "random", "striding", "full")


@described
def demo(
    lr: optax.ScalarOrSchedule = 4e-4,
    decay: float = 0.999,
    *,
    weight_decay: float = 0.0,
    k: int = 32,
    chunk: int = 4096,
    values: str = "float32",
    reduce: str = "mean",
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """DeMo: the largest cosine coefficients of the momentum, and the sign of their mean.

    A rank accumulates its gradients g in e. It sends the largest coefficients of each block
    of 64 x 64 elements of a matrix, and of each run of 64 elements of a vector. With C the
    orthonormal DCT-II of the blocks, in every step

        e    = decay e + lr g
        sent = the k largest of each block of C(e)
        e    = e - inverse C(sent)
        p    = p (1 - lr weight_decay) - lr sign(inverse C(mean of sent over its senders))

    It is the whole optimizer, and has no other momentum. Two things differ from the
    authors' code. Sums are taken in rank order, so replicas are equal bit for bit on
    devices of one kind. A block smaller than `chunk` sends round(k * its size / chunk)
    coefficients, at least one, where their code sends k.

    Args:
        lr: The learning rate, or a schedule. For 1B parameters the authors' is 4e-4, with
            250 steps of warm-up and a cosine decay.
        decay: The share of e that is kept in a step.
        weight_decay: The weight decay; it is multiplied by the learning rate.
        k: The number of coefficients of a whole block.
        chunk: The number of elements of a whole block; see `sparsejax.chunked_sync`.
        values: How values are sent; see `sparsejax.chunked_sync`. The authors send float32.
        reduce: "mean"; or "sum" for partial sums under `jit`, whose sign is the same.
        axis_name: The mesh axis of the ranks; the only manual one if None.

    Returns:
        An `optax.GradientTransformationExtraArgs`, the whole optimizer.

    Example:
        >>> tx = sparsejax.rounds.demo(optax.cosine_decay_schedule(4e-4, 10_000))
        >>> opt_state = sparsejax.init(tx, params, mesh)

    References:
        Peng et al., DeMo: Decoupled Momentum Optimization, arXiv 2411.19870

    See Also:
        `sparsejax.rounds.flex_demo`: the same exchange before any optimizer.
        `sparsejax.chunked_sync`: the exchange alone.
        `sparsejax.rounds.sparse_loco`: local steps, and the largest entries of offsets.
    """
    arguments.check_at_least("weight_decay", weight_decay)
    options = {"values": values, "reduce": reduce}
    return optax.chain(
        _times_rate(lr),
        _cosines(axis_name, k, chunk, decay, **options),
        optax.scale_by_sign(),
        optax.add_decayed_weights(weight_decay) if weight_decay else optax.identity(),
        optax.scale_by_learning_rate(lr),
    )


@described
def flex_demo(
    inner: optax.GradientTransformation,
    replicator: str = "demo",
    *,
    sign: bool = True,
    share: float = 0.1,
    decay: float = 0.999,
    k: int = 32,
    chunk: int = 4096,
    values: str = "float32",
    reduce: str = "mean",
    seed: int = 0,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """FlexDeMo: a part of each shard's accumulated gradient, sent over the slow mesh axis.

    Parameters are sharded over a fast mesh axis, and `axis_name` is the slow one. Each
    device keeps in e what its shard has not sent. It exchanges with the devices that have
    the same shard on other hosts:

        e    = decay e + g         g the gradient of the shard, summed over the fast axis
        sent = a part of e, by the replicator
        e    = e - sent
        p    = inner(p, sign(mean of sent over the ranks))

    The replicators are

    * "demo": the k largest cosine coefficients of each block, as in `demo`. Their mean is
      over the senders of each.
    * "random": a random share of the elements, equal on all ranks, drawn anew in each step.
      No indices are sent.
    * "striding": every s-th element, s about 1 / share, from another start in each step. No
      indices are sent.
    * "full": all elements; nothing is accumulated.

    "random" and "striding" send leaves below 65,536 elements whole. The authors'
    `replicate_every` is `sparsejax.accumulate` around the transformation. The authors
    accumulate lr g. With a constant rate that is the same for a sign, and for AdamW but for
    its epsilon.

    Args:
        inner: The optimizer that follows, `optax.sgd` or `optax.adamw`. It is given the
            same gradient on all ranks. The authors refuse AdamW with "demo".
        replicator: "demo", "random", "striding" or "full".
        sign: Whether the optimizer is given signs.
        share: The share of elements that "random" and "striding" send.
        decay: The share of e that is kept in a step.
        k: The number of coefficients of a whole block, for "demo".
        chunk: The number of elements of a whole block, for "demo".
        values: How values are sent, for "demo"; see `sparsejax.chunked_sync`.
        reduce: "mean"; or "sum" for partial sums under `jit`.
        seed: The seed of "random".
        axis_name: The mesh axis of the ranks, the slow one; the only manual one if None.

    Returns:
        An `optax.GradientTransformationExtraArgs`, the whole optimizer.

    Example:
        >>> tx = sparsejax.rounds.flex_demo(optax.sgd(4e-4), "random")
        >>> opt_state = sparsejax.init(tx, params, mesh)

    References:
        From et al., DeToNATION: Decoupled Torch Network-Aware Training on Interlinked
        Online Nodes, arXiv 2502.06728

    See Also:
        `sparsejax.rounds.demo`: DeMo as its authors have it, the whole optimizer.
    """
    check_transformation("inner", inner, "sparsejax.rounds.flex_demo")
    arguments.check_one_of("replicator", replicator, REPLICATORS)
    _check_decay(decay)
    if not isinstance(sign, bool):
        raise ArgumentError(f"sign must be True or False, got {sign!r}.")
    if replicator == "demo":
        options = {"values": values, "reduce": reduce}
        sync = _cosines(axis_name, k, chunk, decay, **options)
    elif replicator == "full":
        sync = dense_sync(axis_name, reduce=reduce)
    else:
        kind = RandomK(share) if replicator == "random" else Striding(share)
        part = {"axis_name": axis_name, "memory": Residual(decay), "seed": seed}
        sync = optax.chain(sparsify(kind, **part), zen_sync(axis_name, reduce=reduce))
    return optax.chain(sync, optax.scale_by_sign() if sign else optax.identity(), inner)


def _cosines(axis_name, k, chunk, decay, **options):
    """Returns the exchange of the largest cosine coefficients of each block.

    They are averaged over their senders.
    """
    _check_decay(decay)
    blocks = {"k": k, "chunk": chunk, "transform": "dct", "over": "senders"}
    return chunked_sync(axis_name, **blocks, decay=decay, **options)


def _times_rate(lr):
    """Returns a transformation that multiplies gradients by the learning rate."""
    schedule = lr if callable(lr) else lambda step: lr

    def init(params):
        del params
        return optax.ScaleByScheduleState(jnp.int32(0))

    def update(updates, state, params=None):
        del params
        rate = jnp.asarray(schedule(state.count), jnp.float32)
        scaled = jax.tree.map(lambda x: x * _as_factor(rate, x), updates)
        return scaled, optax.ScaleByScheduleState(optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)


def _as_factor(rate, x):
    """Casts the rate to the dtype of x; to reduced, if x is unreduced."""
    mesh, rate = mesh_of(x), rate.astype(x.dtype)
    over = jax.typeof(x).sharding.spec.unreduced
    if mesh is None or not over:
        return rate
    return jax.reshard(rate, NamedSharding(mesh, PartitionSpec(reduced=over)))


def _check_decay(decay):
    """Raises unless a decay lies in (0, 1), so that residuals decay."""
    if not arguments.is_number(decay) or not 0 < decay < 1:
        raise ArgumentError(
            f"decay must lie in (0, 1), got {decay!r}: at 1 gradients that were not sent "
            "add up for ever, and their momentum has no end. Take 0.999."
        )
