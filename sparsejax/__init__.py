"""Exact sparse gradient synchronization for JAX, as optax transformations."""

from importlib.metadata import PackageNotFoundError, version

from pallas_kernels import use_kernels as use_kernels
from sparsejax import errors as errors, schemes as schemes, sparsifiers as sparsifiers
from sparsejax.axes import local as local
from sparsejax.choosing import (
    gaussian_k_sync as gaussian_k_sync,
    gtopk_sync as gtopk_sync,
    ok_topk_sync as ok_topk_sync,
    spardl_sync as spardl_sync,
    topk_a_sync as topk_a_sync,
    topk_dsa_sync as topk_dsa_sync,
)
from sparsejax.data_parallel import data_parallel as data_parallel
from sparsejax.explanation import explain as explain
from sparsejax.memory import (
    MomentumCorrection as MomentumCorrection,
    Residual as Residual,
)
from sparsejax.plan import LeafPlan as LeafPlan, Plan as Plan
from sparsejax.planner import (
    make_plan as make_plan,
    profile as profile,
    profile_from_state as profile_from_state,
)
from sparsejax.reduce import all_reduce as all_reduce
from sparsejax.resizing import resized as resized
from sparsejax.sparse_tensor import SparseTensor as SparseTensor
from sparsejax.sparsifying import (
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
from sparsejax.specs import init as init, state_specs as state_specs
from sparsejax.state import metrics as metrics, residuals as residuals
from sparsejax.team_times import measure_teams as measure_teams
from sparsejax.tensor_selection import (
    CompressionCost as CompressionCost,
    measure_compression as measure_compression,
    worthwhile as worthwhile,
)
from sparsejax.transforms import (
    dense_sync as dense_sync,
    sync as sync,
    zen_sync as zen_sync,
)


try:
    __version__ = version("sparsejax")
except PackageNotFoundError:  # run from a source tree that was not installed
    __version__ = "0.0.0"
