"""The published systems as optax transformations.

    tx = optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))
    tx = optax.chain(sparsejax.spardl_sync(density=0.01), optax.sgd(0.1))

All average gradients over the ranks of a mesh axis; `update` runs inside `jax.shard_map`.
Zen and the dense sum send everything. The others send a part, about `density` where there
is such an argument, and keep the rest for later: `sparsejax.residuals(state)` shows it.
Their `init` needs the number of ranks (`sparsejax.init`, or `data_parallel`).

Ok-Topk, SparDL and gTopk select again from partial sums, so that the number of entries a
rank sends does not depend on the number of ranks; they select from all leaves of the scheme
together. TopkA, TopkDSA and Gaussiank select once, on each rank, from each leaf: each is a
sparsifier with a lossless scheme. PowerSGD sends matrices of low rank.

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
    """Averages gradients with Zen: exactly, and sends only what is not zero.

    The result is that of `jax.lax.pmean`, for any gradient. Where there are too few zeros
    to save bytes, it is an all-reduce. For gradients that are dense, put a sparsifier
    before it in the chain, such as `sparsejax.dgc(0.01)`.

    Args:
        axis_name: The mesh axis of the ranks; the only manual one if None.
        **options: The keyword arguments of `sparsejax.sync`, but `memory`.

    Returns:
        An `optax.GradientTransformationExtraArgs`, which goes before the optimizer.

    Example:
        >>> tx = optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))

    References:
        Wang et al., Zen: Empowering Distributed Training with Sparsity-driven Data
        Synchronization, OSDI 2025

    See Also:
        `sparsejax.dense_sync`: the same mean by an all-reduce.
        `sparsejax.sync`: the same for any scheme; its docstring has the options.
        `sparsejax.all_reduce`: sums arrays, outside a chain.
    """
    return sync(schemes.Zen(), axis_name, **options)


@described
@without(GONE)
def dense_sync(
    axis_name: AxisName | None = None, **options: Unpack[SyncOptions]
) -> optax.GradientTransformationExtraArgs:
    """Averages gradients with a dense all-reduce, the baseline of all others.

    Zeros are sent, too.

    Args:
        axis_name: The mesh axis of the ranks; the only manual one if None.
        **options: The keyword arguments of `sparsejax.sync`, but `memory`.

    Returns:
        An `optax.GradientTransformationExtraArgs`, which goes before the optimizer.

    Example:
        >>> tx = optax.chain(sparsejax.dense_sync(), optax.adam(1e-3))

    See Also:
        `sparsejax.zen_sync`: the same mean, and sends only what is not zero.
        `sparsejax.sync`: the same for any scheme; its docstring has the options.
        `sparsejax.all_reduce`: sums arrays, outside a chain.
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
    """Averages the largest elements with Ok-Topk.

    It is `sparsejax.sync` with `schemes.OkTopk`, which describes the algorithm.

    What a rank has not sent is added to later gradients, and acts as a momentum. With the
    learning rate and the momentum of dense training the steps may be too large, and
    training may diverge. Lower the rate, move the momentum into `memory`, or start densely
    (`sparsejax.warm_up`).

    Args:
        density: The share of elements that are sent; smaller sends less.
        axis_name: The mesh axis of the ranks; the only manual one if None.
        threshold_every: Thresholds are computed exactly once in this number of steps.
        repartition_every: The bounds of regions are computed once in this number of steps.
        code: How indices are sent; "coo32" is the paper's.
        split: "all_to_all", or "rotated": to one owner of a region after another.
        memory: How unsent elements are added to later gradients; see `sparsejax.sync`.
        **options: `reduce`, `rules`, `wire_dtype`, `deterministic` of `sparsejax.sync`.

    Returns:
        An `optax.GradientTransformationExtraArgs`, which goes before the optimizer.

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
    """Averages the largest elements with SparDL.

    It is `sparsejax.sync` with `schemes.SparDL`, which describes the algorithm. Steps may
    be too large for what was not sent: see `sparsejax.ok_topk_sync`.

    Args:
        density: The share of elements that are sent; smaller sends less.
        axis_name: The mesh axis of the ranks; the only manual one if None.
        teams: The number of teams. More teams send fewer messages and more bytes. "auto"
            takes the fastest number on `network`.
        between: How teams exchange their blocks: "swaps" (R-SAG), "gather" (B-SAG) or
            "auto".
        network: The network, for teams="auto".
        code: How indices are sent; "coo32" is the paper's.
        memory: How unsent elements are added to later gradients; see `sparsejax.sync`.
        **options: `reduce`, `rules`, `wire_dtype`, `deterministic` of `sparsejax.sync`.

    Returns:
        An `optax.GradientTransformationExtraArgs`, which goes before the optimizer.

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
    """Averages the largest elements with gTopk.

    It is `sparsejax.sync` with `schemes.GTopk`, which describes the algorithm. Steps may be
    too large for what was not sent: see `sparsejax.ok_topk_sync`.

    Args:
        density: The share of elements that are sent; smaller sends less.
        axis_name: The mesh axis of the ranks; the only manual one if None.
        code: How indices are sent; "coo32" is the paper's.
        memory: How unsent elements are added to later gradients; see `sparsejax.sync`.
        **options: `reduce`, `rules`, `wire_dtype`, `deterministic` of `sparsejax.sync`.

    Returns:
        An `optax.GradientTransformationExtraArgs`, which goes before the optimizer.

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
    """Averages matrices as products of two thin ones, with PowerSGD.

    It is `sparsejax.sync` with `schemes.PowerSGD`, which describes the algorithm. Leaves
    that it does not make half as large, such as vectors and narrow matrices, are averaged
    densely. The momentum belongs in the optimizer. Gradients of the first epochs have no
    low rank: training is better where these are dense (`sparsejax.warm_up`).

    Args:
        rank: The rank of the product; smaller sends less.
        axis_name: The mesh axis of the ranks; the only manual one if None.
        **options: `reduce`, `rules`, `wire_dtype`, `deterministic` of `sparsejax.sync`.

    Returns:
        An `optax.GradientTransformationExtraArgs`, which goes before the optimizer.

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
    """Averages each rank's largest elements, gathered on all ranks (TopkA).

    It is `sparsejax.top_k` before `sparsejax.sync` with `schemes.AGSparse`: each rank
    selects once, and sends its entries to all. The bytes grow with the number of ranks.

    Args:
        density: The share of elements that each rank sends; smaller sends less.
        axis_name: The mesh axis of the ranks; the only manual one if None.
        code: How indices are sent; see `schemes.AGSparse`.
        gather: How entries are gathered; see `schemes.AGSparse`.
        **options: `reduce`, `rules`, `wire_dtype`, `deterministic` of `sparsejax.sync`.

    Returns:
        An `optax.GradientTransformationExtraArgs`, which goes before the optimizer.

    Example:
        >>> tx = optax.chain(sparsejax.transforms.topk_a_sync(0.01), optax.sgd(0.1))

    References:
        Renggli et al., SparCML: High-Performance Sparse Communication for Machine Learning,
        SC 2019
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
    """Averages each rank's largest elements, summed by regions (TopkDSA).

    It is `sparsejax.top_k` before `sparsejax.sync` with `schemes.SparCML` and its algorithm
    "ssar_split_all_gather": owners sum regions, and the sums are sent back, densely where
    they fill up.

    Args:
        density: The share of elements that each rank sends; smaller sends less.
        axis_name: The mesh axis of the ranks; the only manual one if None.
        code: How indices are sent; see `schemes.SparCML`.
        **options: `reduce`, `rules`, `wire_dtype`, `deterministic` of `sparsejax.sync`.

    Returns:
        An `optax.GradientTransformationExtraArgs`, which goes before the optimizer.

    Example:
        >>> tx = optax.chain(sparsejax.transforms.topk_dsa_sync(0.01), optax.sgd(0.1))

    References:
        Renggli et al., SparCML: High-Performance Sparse Communication for Machine Learning,
        SC 2019
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
    """Averages each rank's elements above a threshold of a normal distribution (Gaussiank).

    It is `sparsejax.sparsify` with `sparsifiers.GaussianK` before `sparsejax.sync` with
    `schemes.AGSparse`.

    Args:
        density: The share of elements that each rank sends; smaller sends less.
        axis_name: The mesh axis of the ranks; the only manual one if None.
        code: How indices are sent; see `schemes.AGSparse`.
        gather: How entries are gathered; see `schemes.AGSparse`.
        **options: `reduce`, `rules`, `wire_dtype`, `deterministic` of `sparsejax.sync`.

    Returns:
        An `optax.GradientTransformationExtraArgs`, which goes before the optimizer.

    Example:
        >>> tx = optax.chain(sparsejax.transforms.gaussian_k_sync(0.01), optax.sgd(0.1))

    References:
        Shi et al., Understanding Top-k Sparsification in Distributed Deep Learning, arXiv
        1911.08772
    """
    scheme = schemes.AGSparse(gather, code)
    return _chosen_once(sparsifiers.GaussianK(density), scheme, axis_name, options)


def _chosen_once(
    sparsifier: sparsifiers.TopK | sparsifiers.GaussianK,
    scheme: schemes.Scheme,
    axis_name: AxisName | None,
    options: SystemOptions,
) -> optax.GradientTransformationExtraArgs:
    """Returns a chain of a sparsifier, for the leaves that use a scheme, and the scheme."""
    assignment = ByRules(scheme, options.get("rules"))

    def uses(path, leaf):
        if not assignment.uses(path, leaf):
            return False
        top_k.check_size(path, leaf.size, sparsifier.density)
        return True

    select = sparsify(sparsifier, axis_name=axis_name, min_size=1, compress=uses)
    tx = optax.chain(select, sync(scheme, axis_name, two_level=False, **options))
    return optax.with_extra_args_support(tx)
