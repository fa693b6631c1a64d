"""Published methods of local steps, as calls of `sparsejax.local_steps`.

On the wire in each round: what the synchronization of the method sends.
"""

import optax

from sparsejax.axes import AxisName
from sparsejax.rounds.transformation import local_steps
from sparsejax.transforms.described import described


@described
def diloco(
    inner: optax.GradientTransformation,
    every: int = 30,
    lr: float = 0.7,
    momentum: float = 0.9,
    sync: optax.GradientTransformation | None = None,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo: AdamW on each rank, and Nesterov momentum on the mean of what they moved.

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
