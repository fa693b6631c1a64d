"""Exact sparse gradient synchronization for JAX, as optax transformations."""

from importlib.metadata import PackageNotFoundError, version

from pallas_kernels import use_kernels as use_kernels
from sparsejax import errors as errors, schemes as schemes
from sparsejax.axes import local as local
from sparsejax.data_parallel import data_parallel as data_parallel
from sparsejax.explanation import explain as explain
from sparsejax.plan import LeafPlan as LeafPlan, Plan as Plan
from sparsejax.planner import (
    make_plan as make_plan,
    profile as profile,
    profile_from_state as profile_from_state,
)
from sparsejax.reduce import all_reduce as all_reduce
from sparsejax.sparse_tensor import SparseTensor as SparseTensor
from sparsejax.state import (
    init as init,
    metrics as metrics,
    state_specs as state_specs,
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
