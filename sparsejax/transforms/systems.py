"""The published systems as optax transformations.

    tx = optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))
    tx = optax.chain(sparsejax.spardl_sync(density=0.01), optax.sgd(0.1))

All average gradients over the ranks of a mesh axis; `update` runs inside `jax.shard_map`.
Zen and the dense sum send everything. The others send a part, about `density` where there
is such an argument, and keep the rest for later: `sparsejax.residuals(state)` shows it.
Their `init` needs the number of ranks (`sparsejax.init`, or `data_parallel`).

PowerSGD sends matrices of low rank instead of entries.

Ok-Topk, SparDL and gTopk select again from partial sums, so the size of what each rank
sends does not depend on their number. TopkA, TopkDSA and Gaussiank choose once, on each
rank: each is a sparsifier and a lossless scheme, and the others are compared with it.
Entries are chosen from the leaves that rules, or their sizes, give the scheme: Ok-Topk,
SparDL and gTopk choose from all of those together, the others from each leaf. Other options
are those of `sparsejax.sync`.

NaN and infinity count as the largest magnitudes, and are sent first; those that do not fit
stay in the residual, and are sent in the next steps. Where a gradient may be bad, wrap the
chain in `sparsejax.skip_nonfinite`.
"""

from typing import Unpack

import optax

from sparsejax import schemes, sparsifiers
from sparsejax.axes import AxisName
from sparsejax.schemes.forecast import Network
from sparsejax.schemes.top_k import base as top_k
from sparsejax.schemes.top_k.spar_dl import NETWORK
from sparsejax.state.memories import Memory, Residual
from sparsejax.transforms.buckets import ByRules
from sparsejax.transforms.described import described, without
from sparsejax.transforms.sparsify import MOMENTUM, sparsify
from sparsejax.transforms.sync import GONE, SystemOptions, sync


_RESIDUAL = Residual()

_GONE = GONE | {"two_level": "it adds up over both axes of a pair as one; leave it out."}
_MOMENTUM = _GONE | {"momentum": MOMENTUM}


class SyncOptions(SystemOptions, total=False):
    """The arguments of `sync` that `zen_sync` and `dense_sync` take, too."""

    two_level: bool


@described
@without(GONE)
def zen_sync(
    axis_name: AxisName | None = None, **options: Unpack[SyncOptions]
) -> optax.GradientTransformationExtraArgs:
    """Averages gradients with Zen: exact, and sends only what is not zero.

    The result is that of `jax.lax.pmean`, for any gradient; where zeros are too few to
    matter it becomes an all-reduce. A sparsifier stands before it in a chain, as
    `sparsejax.dgc(0.01)`. Other options are those of `sparsejax.sync`.

    Args:
        axis_name: The mesh axis of the ranks; the only manual one if None.
        **options: See `sparsejax.sync`.

    Example:
        >>> import optax, sparsejax
        >>> tx = optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))

    References:
        Wang et al., Zen: Empowering Distributed Training with Sparsity-driven Data
        Synchronization, OSDI 2025
    """
    return sync(schemes.Zen(), axis_name, **options)


@described
@without(GONE)
def dense_sync(
    axis_name: AxisName | None = None, **options: Unpack[SyncOptions]
) -> optax.GradientTransformationExtraArgs:
    """Averages gradients with a dense all-reduce: the yardstick.

    Other options are those of `sparsejax.sync`.

    Args:
        axis_name: The mesh axis of the ranks; the only manual one if None.
        **options: See `sparsejax.sync`.

    Example:
        >>> tx = optax.chain(sparsejax.dense_sync(), optax.adam(1e-3))
    """
    return sync(schemes.AllReduce(), axis_name, **options)


@described
@without(_MOMENTUM)
def ok_topk_sync(
    density: float,
    axis_name: AxisName | None = None,
    *,
    threshold_every: int = 32,
    repartition_every: int = 64,
    code: str = "auto",
    split: str = "all_to_all",
    memory: Memory = _RESIDUAL,
    **options: Unpack[SystemOptions],
) -> optax.GradientTransformationExtraArgs:
    """Averages the largest elements with Ok-Topk; see `schemes.OkTopk`.

    What waits comes later all at once, and acts as a momentum of its own: with the learning
    rate and the momentum of dense training the steps may be too large, and diverge. Lower
    the rate, move the momentum into `memory`, or start densely (`sparsejax.warm_up`).

    Args:
        density: The share of elements that are sent; smaller sends less.
        axis_name: The mesh axis of the ranks; the only manual one if None.
        threshold_every: Thresholds are found exactly once in this number of steps.
        repartition_every: Regions are bounded anew once in this number of steps.
        code: How indices travel; "coo32" is the paper's.
        split: "all_to_all", or "rotated" for one rank after another.
        memory: As in `sparsejax.sync`.
        **options: See `sparsejax.sync`.

    Example:
        >>> tx = optax.chain(sparsejax.ok_topk_sync(density=0.01), optax.sgd(0.1))
        >>> opt_state = sparsejax.init(tx, params, mesh)

    References:
        Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP
        2022
    """
    scheme = schemes.OkTopk(
        density,
        code,
        threshold_every=threshold_every,
        repartition_every=repartition_every,
        split=split,
    )
    return sync(scheme, axis_name, two_level=False, memory=memory, **options)


@described
@without(_MOMENTUM)
def spardl_sync(
    density: float,
    axis_name: AxisName | None = None,
    *,
    teams: int | str = 1,
    between: str = "auto",
    network: Network | tuple[float, float] = NETWORK,
    code: str = "auto",
    memory: Memory = _RESIDUAL,
    **options: Unpack[SystemOptions],
) -> optax.GradientTransformationExtraArgs:
    """Averages the largest elements with SparDL; see `schemes.SparDL`.

    What waits comes later all at once, and acts as a momentum of its own: with the learning
    rate and the momentum of dense training the steps may be too large, and diverge. Lower
    the rate, move the momentum into `memory`, or start densely (`sparsejax.warm_up`).

    Args:
        density: The share of elements that are sent; smaller sends less.
        axis_name: The mesh axis of the ranks; the only manual one if None.
        teams: How many teams; more of them mean fewer messages and more bytes. "auto" takes
            what is fastest on `network`.
        between: How teams add up: "swaps" (R-SAG), "gather" (B-SAG) or "auto".
        network: The network for "auto".
        code: How indices travel; "coo32" is the paper's.
        memory: As in `sparsejax.sync`.
        **options: See `sparsejax.sync`.

    Example:
        >>> tx = optax.chain(sparsejax.spardl_sync(density=0.01), optax.sgd(0.1))
        >>> opt_state = sparsejax.init(tx, params, mesh)

    References:
        Zhao et al., SparDL: Distributed Deep Learning Training with Efficient Sparse
        Communication, ICDE 2024
    """
    scheme = schemes.SparDL(density, code, teams, between, network)
    return sync(scheme, axis_name, two_level=False, memory=memory, **options)


@described
@without(_MOMENTUM)
def gtopk_sync(
    density: float,
    axis_name: AxisName | None = None,
    *,
    code: str = "auto",
    memory: Memory = _RESIDUAL,
    **options: Unpack[SystemOptions],
) -> optax.GradientTransformationExtraArgs:
    """Averages the largest elements with gTopk; see `schemes.GTopk`.

    Example:
        >>> tx = optax.chain(sparsejax.transforms.gtopk_sync(0.01), optax.sgd(0.1))

    References:
        Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification
        for Low Bandwidth Networks, ICDCS 2019
    """
    scheme = schemes.GTopk(density, code)
    return sync(scheme, axis_name, two_level=False, memory=memory, **options)


@described
@without(_GONE)
def power_sgd_sync(
    rank: int = 4,
    axis_name: AxisName | None = None,
    **options: Unpack[SystemOptions],
) -> optax.GradientTransformationExtraArgs:
    """Averages matrices by their projections on a few directions; see `schemes.PowerSGD`.

    Leaves that it does not make half as large (vectors, narrow matrices) are averaged
    densely. Momentum belongs in the optimizer. It pays from the first step on, but
    learns best where the first epochs are dense (`sparsejax.warm_up`): those gradients have
    no low rank.

    Args:
        rank: How many directions; smaller sends less.
        axis_name: The mesh axis of the ranks; the only manual one if None.
        **options: See `sparsejax.sync`.

    Example:
        >>> tx = optax.chain(sparsejax.transforms.power_sgd_sync(rank=2), optax.sgd(0.1))
        >>> opt_state = sparsejax.init(tx, params, mesh)

    References:
        Vogels, Karimireddy and Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for
        Distributed Optimization, NeurIPS 2019
    """
    return sync(schemes.PowerSGD(rank), axis_name, two_level=False, **options)


@described
@without(_GONE)
def topk_a_sync(
    density: float,
    axis_name: AxisName | None = None,
    *,
    code: str = "auto",
    gather: str = "auto",
    **options: Unpack[SystemOptions],
) -> optax.GradientTransformationExtraArgs:
    """Averages each rank's largest elements; every rank sends its own to all (TopkA).

    Example:
        >>> tx = optax.chain(sparsejax.transforms.topk_a_sync(0.01), optax.sgd(0.1))
    """
    scheme = schemes.AGSparse(gather, code)
    return _chosen_once(sparsifiers.TopK(density), scheme, axis_name, options)


@described
@without(_GONE)
def topk_dsa_sync(
    density: float,
    axis_name: AxisName | None = None,
    *,
    code: str = "auto",
    **options: Unpack[SystemOptions],
) -> optax.GradientTransformationExtraArgs:
    """Averages each rank's largest elements by regions, densely where sums fill up.

    TopkDSA: SparCML's split all-gather after an exact top-k.

    Example:
        >>> tx = optax.chain(sparsejax.transforms.topk_dsa_sync(0.01), optax.sgd(0.1))
    """
    scheme = schemes.SparCML("ssar_split_all_gather", code)
    return _chosen_once(sparsifiers.TopK(density), scheme, axis_name, options)


@described
@without(_GONE)
def gaussian_k_sync(
    density: float,
    axis_name: AxisName | None = None,
    *,
    code: str = "auto",
    gather: str = "auto",
    **options: Unpack[SystemOptions],
) -> optax.GradientTransformationExtraArgs:
    """Averages what is above an estimated threshold on each rank (Gaussiank).

    Example:
        >>> tx = optax.chain(sparsejax.transforms.gaussian_k_sync(0.01), optax.sgd(0.1))
    """
    scheme = schemes.AGSparse(gather, code)
    return _chosen_once(sparsifiers.GaussianK(density), scheme, axis_name, options)


def _chosen_once(
    sparsifier: sparsifiers.TopK | sparsifiers.GaussianK,
    scheme: schemes.Scheme,
    axis_name: AxisName | None,
    options: SystemOptions,
) -> optax.GradientTransformationExtraArgs:
    """A sparsifier of the leaves that use a scheme, and the scheme."""
    assignment = ByRules(scheme, options.get("rules"))

    def uses(path, leaf):
        if not assignment.uses(path, leaf):
            return False
        top_k.check_size(path, leaf.size, sparsifier.density)
        return True

    select = sparsify(sparsifier, axis_name=axis_name, min_size=1, compress=uses)
    tx = optax.chain(select, sync(scheme, axis_name, two_level=False, **options))
    return optax.with_extra_args_support(tx)
