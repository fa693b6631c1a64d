"""Published methods of local steps, as calls of `sparsejax.local_steps`.

On the wire in each round: what the synchronization of the method sends.
"""

import jax
import optax

from sparsejax import arguments
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

    With d the mean of anchor minus parameters, and v the momentum:

        v      = d + momentum v
        anchor = anchor - lr (d + momentum v)

    The best `lr` grows with `every` and with the number of ranks. The authors' scaling laws
    have 0.6 for two and four ranks, and 0.8 for eight. For an `every` below 15 it is
    smaller.

    Args:
        inner: The optimizer of each rank; the paper's is AdamW.
        every: The number of steps of a round.
        lr: The learning rate of the outer optimizer.
        momentum: The momentum of the outer optimizer.
        sync: The synchronization; `sparsejax.dense_sync`, the mean, if None.
        axis_name: The mesh axis of the ranks; the only manual one if None.

    Returns:
        An `optax.GradientTransformationExtraArgs`, the whole optimizer.

    Example:
        >>> tx = sparsejax.rounds.diloco(optax.adamw(1e-3), every=30)
        >>> opt_state = sparsejax.init(tx, params, mesh)

    References:
        Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models,
        arXiv 2311.08105

        Charles et al., Communication-Efficient Language Model Training Scales Reliably and
        Robustly: Scaling Laws for DiLoCo, arXiv 2503.09799

    See Also:
        `sparsejax.local_steps`: the same with any outer optimizer and exchange.
        `sparsejax.rounds.streaming_diloco`: the same by fragments, with a delay.
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

    With d the mean offset of the ranks in a fragment at the end of a step, and v the
    momentum as in `diloco`, at the end of the step that is `delay` later:

        anchor               = anchor - lr (d + momentum v)
        parameters of a rank = blend (parameters of the rank) + (1 - blend) anchor

    A fragment is exchanged every `every / fragments` steps. With `Overlap` the exchange has
    the time of `delay` steps.

    Two things differ from the paper. Its fragments have three layers each, so that their
    number grows with the model; here `fragments` is given, and leaves are assigned by size.
    The rounding error of its four bits, the sign and a power of two, is added to the next
    round, where the paper drops it.

    Args:
        inner: The optimizer of each rank; the paper's is AdamW.
        every: The number of steps of a round.
        lr: The learning rate of the outer optimizer.
        momentum: The momentum of the outer optimizer.
        fragments: The number of parts of the parameters; a divisor of `every`.
        delay: The number of steps from an exchange to its result.
        blend: The share of its own parameters that a rank keeps.
        values: How values are sent; see `sparsejax.chunked_sync`.
        axis_name: The mesh axis of the ranks; the only manual one if None.

    Returns:
        An `optax.GradientTransformationExtraArgs`, the whole optimizer.

    Example:
        >>> tx = sparsejax.rounds.streaming_diloco(optax.adamw(1e-3), fragments=2)
        >>> params = {"body": params, "head": params}
        >>> opt_state = sparsejax.init(tx, params, mesh)

    References:
        Douillard et al., Streaming DiLoCo with Overlapping Communication, arXiv 2501.18512

    See Also:
        `sparsejax.local_steps`: the same with any outer optimizer and exchange.
        `sparsejax.rounds.diloco`: all parameters at once, without a delay.
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
    """SparseLoCo: AdamW on each rank, and the largest entries of offsets, in two bits.

    With d the offset of a rank, anchor minus parameters, and e its residual:

        e      = decay e + d
        sent   = the k largest of each block of 4,096 elements of e, in few bits
        e      = e - sent
        anchor = anchor - lr mean(sent)

    The outer optimizer has no momentum: the residual takes its place. A rank sends each
    other one 0.16 bits a parameter in a round. Above eight ranks blocks have owners, and a
    rank sends 0.66 bits a parameter in all.

    The authors' values are "2bit-bins". Their code divides an entry by its senders, where
    the paper divides by the ranks. Their `lr` is 1.0 in the paper, and 0.7 for large
    models.

    Args:
        inner: The optimizer of each rank; the paper's is AdamW.
        every: The number of steps of a round; the paper's are 15 to 250.
        lr: The learning rate of the outer optimizer.
        decay: The share of the residual that is added in the next round.
        k: The number of entries of each block of 4,096 elements.
        values: How values are sent; see `sparsejax.chunked_sync`.
        over: The divisor of an entry of the sum: the number of its "senders", or of all
            "ranks".
        via: "all_gather" or "owners"; see `sparsejax.chunked_sync`.
        pull_k: The number of entries of each block of a sum that its owner sends.
        axis_name: The mesh axis of the ranks; the only manual one if None.

    Returns:
        An `optax.GradientTransformationExtraArgs`, the whole optimizer.

    Example:
        >>> tx = sparsejax.rounds.sparse_loco(optax.adamw(1e-3), every=30)
        >>> opt_state = sparsejax.init(tx, params, mesh)

    References:
        Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, arXiv
        2508.15706

    See Also:
        `sparsejax.local_steps`: the same with any outer optimizer and exchange.
        `sparsejax.chunked_sync`: the exchange alone.
        `sparsejax.rounds.demo`: the largest cosine coefficients, in every step.
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
    """PULSELoCo: DiLoCo that sends only the offsets that change a bfloat16 parameter.

    The parameters are float32, and the model reads them in bfloat16. A change of less than
    about 1/256 of a parameter is not visible there. With d the offset of a rank, anchor
    minus parameters, and e its residual:

        e    = e + d
        sent = e    where bfloat16(anchor - lr e) is not bfloat16(anchor)
               0    elsewhere
        e    = e - sent

    DiLoCo's outer step is then taken with the mean of what was sent. The rule that selects
    entries assumes equal offsets on all ranks, and no momentum. Values are sent in float32,
    exactly, by `sparsejax.zen_sync`. At the learning rates of reinforcement learning, about
    1e-6, that is about one parameter in a hundred a step. Small changes accumulate in e
    until they are visible. Leaves below 65,536 elements are sent whole.

    Args:
        inner: The optimizer of each rank; the paper's is AdamW.
        every: The number of steps of a round.
        lr: The learning rate of the outer optimizer.
        momentum: The momentum of the outer optimizer.
        dtype: The dtype in which the loss reads the parameters.
        axis_name: The mesh axis of the ranks; the only manual one if None.

    Returns:
        An `optax.GradientTransformationExtraArgs`, the whole optimizer.

    Example:
        >>> tx = sparsejax.rounds.pulse_loco(optax.adamw(1e-6), every=8)
        >>> opt_state = sparsejax.init(tx, params, mesh)

    References:
        Miahi and Belilovsky, Understanding and Exploiting Weight Update Sparsity for
        Communication-Efficient Distributed RL, arXiv 2602.03839

    See Also:
        `sparsejax.local_steps`: the same with any outer optimizer and exchange.
    """
    arguments.check_positive("lr", lr)
    visible = sparsify(Visible(dtype=dtype, rate=lr), axis_name=axis_name)
    sync = optax.chain(visible, zen_sync(axis_name))
    return diloco(inner, every, lr, momentum, sync, axis_name)
