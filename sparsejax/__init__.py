"""Exact sparse gradient synchronization for JAX, as optax transformations."""

from importlib.metadata import PackageNotFoundError, version

from pallas_kernels import use_kernels as use_kernels
from sparsejax import errors as errors, schemes as schemes, sparsifiers as sparsifiers
from sparsejax.advise.explain.explanation import explain as explain
from sparsejax.advise.plan import LeafPlan as LeafPlan, Plan as Plan
from sparsejax.advise.planner import make_plan as make_plan
from sparsejax.advise.profile import (
    profile as profile,
    profile_from_state as profile_from_state,
)
from sparsejax.advise.teams import measure_teams as measure_teams
from sparsejax.advise.tensors import (
    CompressionCost as CompressionCost,
    measure_compression as measure_compression,
    worthwhile as worthwhile,
)
from sparsejax.axes import local as local
from sparsejax.schemes.forecast import Network as Network
from sparsejax.transforms.all_reduce import all_reduce as all_reduce
from sparsejax.transforms.data_parallel import (
    TrainState as TrainState,
    data_parallel as data_parallel,
)
from sparsejax.transforms.feedback import (
    MomentumCorrection as MomentumCorrection,
    Residual as Residual,
    feedback as feedback,
)
from sparsejax.transforms.sparsify import (
    dgc as dgc,
    dragonn as dragonn,
    gaussian_k as gaussian_k,
    ms_top_k as ms_top_k,
    qsgd as qsgd,
    random_k as random_k,
    reuse_threshold as reuse_threshold,
    sign as sign,
    sparsify as sparsify,
    threshold as threshold,
    top_k as top_k,
)
from sparsejax.transforms.state.metrics import metrics as metrics, residuals as residuals
from sparsejax.transforms.state.placed import (
    abstract_state as abstract_state,
    bind as bind,
    init as init,
)
from sparsejax.transforms.state.resizing import resized as resized
from sparsejax.transforms.state.specs import state_specs as state_specs
from sparsejax.transforms.sync import (
    dense_sync as dense_sync,
    sync as sync,
    zen_sync as zen_sync,
)
from sparsejax.transforms.systems import (
    gaussian_k_sync as gaussian_k_sync,
    gtopk_sync as gtopk_sync,
    ok_topk_sync as ok_topk_sync,
    spardl_sync as spardl_sync,
    topk_a_sync as topk_a_sync,
    topk_dsa_sync as topk_dsa_sync,
)
from sparsejax.transforms.wrappers import (
    accumulate as accumulate,
    clip_by_rank as clip_by_rank,
    skip_nonfinite as skip_nonfinite,
    warm_up as warm_up,
)
from sparsejax.units.sparse_tensor import SparseTensor as SparseTensor


try:
    __version__ = version("sparsejax")
except PackageNotFoundError:  # run from a source tree that was not installed
    __version__ = "0.0.0"
