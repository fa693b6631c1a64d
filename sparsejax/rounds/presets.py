"""Published methods of local steps, as calls of `sparsejax.local_steps`.

On the wire in each round: what the synchronization of the method sends.
"""

import jax
import optax

from sparsejax.axes import AxisName
from sparsejax.chunked.sync import chunked_sync
from sparsejax.rounds.transformation import local_steps
from sparsejax.sparsifiers import Visible
from sparsejax.transforms.described import described
from sparsejax.transforms.sparsify import sparsify
from sparsejax.transforms.systems import zen_sync


@described
def diloco(
    inner: optax.GradientTransformation,
    every: int = 30,
    lr: float = 0.7,
    momentum: float = 0.9,
    sync: optax.GradientTransformation | None = None,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo: AdamW on each rank, and Nesterov momentum on the mean of their offsets.

    With v the momentum, d the mean of anchor minus parameters:

        v = d + momentum v    and    anchor = anchor - lr (d + momentum v)

    The best `lr` grows with `every` and with the number of ranks: the authors' scaling laws
    have 0.6 for two and for four ranks, and 0.8 for eight. At an `every` below 15 it is
    smaller.

    Args:
        inner: The optimizer of each rank; the paper's is AdamW.
        every: How many steps a round has.
        lr: Of the outer optimizer.
        momentum: Of the outer optimizer.
        sync: The synchronization; the mean, by dense sums, if None.
        axis_name: The mesh axis of the ranks; the only manual one if None.

    Example:
        >>> tx = sparsejax.rounds.diloco(optax.adamw(1e-3), every=30)
        >>> opt_state = sparsejax.init(tx, params, mesh)

    References:
        Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models,
        2023
        Charles et al., Communication-Efficient Language Model Training Scales Reliably and
        Robustly: Scaling Laws for DiLoCo, 2025
    """
    outer = optax.sgd(lr, momentum=momentum, nesterov=True)
    return local_steps(inner, every=every, outer=outer, sync=sync, axis_name=axis_name)


@described
def streaming_diloco(
    inner: optax.GradientTransformation,
    every: int = 100,
    lr: float = 0.4,
    momentum: float = 0.9,
    *,
    fragments: int = 4,
    delay: int = 5,
    blend: float = 0.5,
    values: str = "4bit",
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Streaming DiLoCo: DiLoCo of a fragment at a time, applied some steps later.

    With d the mean offset of the ranks in a fragment, at the end of a step, and v its
    momentum, as in `diloco`, at the end of the step `delay` later:

        anchor = anchor - lr (d + momentum v)
        parameters of a rank = blend (parameters of the rank) + (1 - blend) anchor

    A link carries a fragment every `every / fragments` steps, and has the time of `delay`
    steps for it where `Overlap` runs the exchange concurrently. The paper's fragments are
    three layers, so that their number grows with the model; here leaves are assigned by
    size. All numbers of a fragment are sent, in four bits each: the sign and a power of
    two. The paper drops what that takes from them; here it waits for the next round.

    Args:
        inner: The optimizer of each rank; the paper's is AdamW.
        every: How many steps a round has.
        lr: Of the outer optimizer.
        momentum: Of the outer optimizer.
        fragments: How many parts of the parameters; a divisor of `every`.
        delay: Steps from sending to applying.
        blend: The share of its own parameters that a rank keeps.
        values: How values travel; see `sparsejax.chunked_sync`.
        axis_name: The mesh axis of the ranks; the only manual one if None.

    Example:
        >>> tx = sparsejax.rounds.streaming_diloco(optax.adamw(1e-3), fragments=2)
        >>> params = {"body": params, "head": params}
        >>> opt_state = sparsejax.init(tx, params, mesh)

    References:
        Douillard et al., Streaming DiLoCo with overlapping communication, arXiv 2501.18512
    """
    sync = chunked_sync(axis_name, k=4096, values=values, over="ranks")
    return local_steps(
        inner,
        every=every,
        outer=optax.sgd(lr, momentum=momentum, nesterov=True),
        sync=sync,
        fragments=fragments,
        delay=delay,
        blend=blend,
        axis_name=axis_name,
    )


@described
def sparse_loco(
    inner: optax.GradientTransformation,
    every: int = 30,
    lr: float = 0.7,
    decay: float = 0.95,
    *,
    k: int = 64,
    values: str = "2bit",
    over: str = "senders",
    via: str | None = None,
    pull_k: int | None = None,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """SparseLoCo: AdamW on each rank, and the largest of their offsets, in two bits.

    With d the offset of a rank, anchor minus parameters, and e its residual:

        e = decay e + d
        sent = the k largest of each block of 4,096 numbers of e, rounded to few bits
        e = e - sent    and    anchor = anchor - lr mean(sent)

    The outer optimizer has no momentum: what is left out takes its place. A rank sends 0.16
    bits a parameter and round to each other one; above eight ranks 0.66 bits in all, since
    blocks have owners then. The authors' values are "2bit-bins", and
    their code divides by the senders of an entry, where the paper divides by the ranks.
    Their rate is 1.0 in the paper and 0.7 for large models.

    Args:
        inner: The optimizer of each rank; the paper's is AdamW.
        every: How many steps a round has; the paper's are 15 to 250.
        lr: Of the outer optimizer.
        decay: The share of what was left out that comes back in the next round.
        k: Entries of each block of 4,096 numbers.
        values: How values travel; see `sparsejax.chunked_sync`.
        over: "senders", or "ranks": what an entry of the sum is divided by.
        via: "all_gather", or "owners": how entries reach all ranks; see
            `sparsejax.chunked_sync`.
        pull_k: Entries of each block of a sum that come back from its owner.
        axis_name: The mesh axis of the ranks; the only manual one if None.

    Example:
        >>> tx = sparsejax.rounds.sparse_loco(optax.adamw(1e-3), every=30)
        >>> opt_state = sparsejax.init(tx, params, mesh)

    References:
        Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, 2025
    """
    entries = {"k": k, "values": values, "over": over}
    ways = {"via": via, "pull_k": pull_k}
    sync = chunked_sync(axis_name, decay=decay, **entries, **ways)
    return local_steps(
        inner, every=every, outer=optax.sgd(lr), sync=sync, axis_name=axis_name
    )


@described
def pulse_loco(
    inner: optax.GradientTransformation,
    every: int = 30,
    lr: float = 0.7,
    momentum: float = 0.9,
    *,
    dtype: jax.typing.DTypeLike = "bfloat16",
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """PULSELoCo: DiLoCo, of whose differences those go that a forward pass would see.

    Parameters are float32 and read in bfloat16, so a move of less than about a 256th of a
    parameter changes nothing yet. With d the offset of a rank, anchor minus parameters, and
    e what it has not sent:

        e = e + d
        sent = e where bfloat16(anchor - lr e) is not bfloat16(anchor)    else 0
        e = e - sent

    and DiLoCo's outer step on the mean of what was sent. The move that decides is that of
    plain SGD with the outer rate, as if the offsets of all ranks were equal; momentum is
    not part of it. What is sent is sent in float32, exactly, by `sparsejax.zen_sync`: at
    the rates of reinforcement learning, about 1e-6, it is about one parameter in a hundred
    a step. What is not sent is not lost, and small moves add up until they show. Leaves
    below 65,536 numbers go whole.

    Args:
        inner: The optimizer of each rank; the paper's is AdamW.
        every: How many steps a round has.
        lr: Of the outer optimizer.
        momentum: Of the outer optimizer.
        dtype: In which the loss reads parameters.
        axis_name: The mesh axis of the ranks; the only manual one if None.

    Example:
        >>> tx = sparsejax.rounds.pulse_loco(optax.adamw(1e-6), every=8)
        >>> opt_state = sparsejax.init(tx, params, mesh)

    References:
        Miahi and Belilovsky, Understanding and Exploiting Weight Update Sparsity for
        Communication-Efficient Distributed RL, arXiv 2602.03839
    """
    visible = sparsify(Visible(dtype=dtype, rate=lr), axis_name=axis_name)
    sync = optax.chain(visible, zen_sync(axis_name))
    return diloco(inner, every, lr, momentum, sync, axis_name)
