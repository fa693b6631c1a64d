"""Exact sparse gradient synchronization for JAX, as optax transformations.

`__all__` has the names that are clear without a prefix and may be imported bare. Write the
others with the prefix: `sparsejax.local`, `sparsejax.init`.

Six subpackages have what is needed less often: `sparsejax.sparsifiers`, the rules that
`sparsify` turns into transformations; `sparsejax.transforms`, clipping and the baseline
systems; `sparsejax.rows`, the rest of the interface for lazy optimizers;
`sparsejax.embrace`, tables that are sharded by columns; `sparsejax.rounds`, published
methods of local steps; `sparsejax.advise`, measurements and forecasts for the choice of a
scheme.
"""

import importlib.metadata

from pallas_kernels import use_kernels as use_kernels
from sparsejax import (
    advise as advise,
    embrace as embrace,
    errors as errors,
    rounds as rounds,
    rows as rows,
    schemes as schemes,
    sparsifiers as sparsifiers,
    transforms as transforms,
)
from sparsejax.advise.doctor.examination import doctor as doctor
from sparsejax.advise.explain.explanation import explain as explain
from sparsejax.advise.plan import Plan as Plan
from sparsejax.advise.planner import make_plan as make_plan
from sparsejax.advise.profile import profile as profile
from sparsejax.advise.summary import summary as summary
from sparsejax.checkpoints import restore as restore, save as save
from sparsejax.checkpoints.resizing import resized as resized
from sparsejax.chunked.sync import chunked_sync as chunked_sync
from sparsejax.embrace.column_lookup import column_lookup as column_lookup
from sparsejax.embrace.column_table import ColumnTable as ColumnTable
from sparsejax.embrace.vertical.sync import embrace_sync as embrace_sync
from sparsejax.jobs.start.check import check_job as check_job
from sparsejax.monitor.metrics import metrics as metrics, residuals as residuals
from sparsejax.monitor.replicas import check_replicas as check_replicas
from sparsejax.placement.initial import (
    abstract_state as abstract_state,
    bind as bind,
    init as init,
)
from sparsejax.placement.specs import state_specs as state_specs
from sparsejax.rounds.reading import local as local
from sparsejax.rounds.transformation import local_steps as local_steps
from sparsejax.rows.apply import apply_updates as apply_updates
from sparsejax.rows.lookup import lookup as lookup
from sparsejax.rows.updates.lazy import lazy as lazy
from sparsejax.rows.value_and_grad import value_and_grad as value_and_grad
from sparsejax.schemes.forecast import Network as Network
from sparsejax.state.memories import (
    MomentumCorrection as MomentumCorrection,
    Residual as Residual,
)
from sparsejax.training import (
    TrainState as TrainState,
    data_parallel as data_parallel,
)
from sparsejax.transforms.all_reduce import all_reduce as all_reduce
from sparsejax.transforms.entry.replicas import per_replica as per_replica
from sparsejax.transforms.sparsify import dgc as dgc, sparsify as sparsify, top_k as top_k
from sparsejax.transforms.sync import sync as sync
from sparsejax.transforms.systems import (
    dense_sync as dense_sync,
    ok_topk_sync as ok_topk_sync,
    spardl_sync as spardl_sync,
    zen_sync as zen_sync,
)
from sparsejax.transforms.wrappers import (
    accumulate as accumulate,
    skip_nonfinite as skip_nonfinite,
    warm_up as warm_up,
)
from sparsejax.units.row_grads import RowGrads as RowGrads
from sparsejax.units.sparse_tensor import SparseTensor as SparseTensor


__all__ = [
    "ColumnTable",
    "MomentumCorrection",
    "Network",
    "Plan",
    "Residual",
    "RowGrads",
    "SparseTensor",
    "TrainState",
    "abstract_state",
    "accumulate",
    "all_reduce",
    "check_job",
    "check_replicas",
    "column_lookup",
    "data_parallel",
    "dense_sync",
    "dgc",
    "embrace_sync",
    "make_plan",
    "ok_topk_sync",
    "per_replica",
    "residuals",
    "resized",
    "schemes",
    "skip_nonfinite",
    "spardl_sync",
    "sparsifiers",
    "sparsify",
    "state_specs",
    "use_kernels",
    "warm_up",
    "zen_sync",
]

# Public names that are vague or misleading without the prefix.
_WITH_PREFIX = ["advise", "apply_updates", "bind", "doctor", "embrace", "errors"]
_WITH_PREFIX += ["chunked_sync", "explain", "init"]
_WITH_PREFIX += ["lazy", "local", "local_steps", "lookup", "metrics", "profile", "restore"]
_WITH_PREFIX += ["rounds", "rows", "save", "summary", "sync"]
_WITH_PREFIX += ["top_k", "transforms", "value_and_grad"]


def _version() -> str:
    try:
        return importlib.metadata.version("sparsejax")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0"  # run from a source tree that was not installed


__version__ = _version()


def __dir__() -> list[str]:
    return sorted([*__all__, *_WITH_PREFIX, *(n for n in globals() if n.startswith("__"))])
