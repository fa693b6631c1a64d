"""Schemes that sum an array over ranks, one file each; `base` is their contract."""

from sparsejax.schemes.ag_sparse import AGSparse as AGSparse
from sparsejax.schemes.all_reduce import AllReduce as AllReduce
from sparsejax.schemes.base import (
    Reduced as Reduced,
    Scheme as Scheme,
    Stage as Stage,
    Traffic as Traffic,
)
from sparsejax.schemes.baselines.omni_reduce import OmniReduce as OmniReduce
from sparsejax.schemes.baselines.power_sgd import PowerSGD as PowerSGD
from sparsejax.schemes.baselines.sparcml import SparCML as SparCML
from sparsejax.schemes.baselines.sparse_ps import SparsePS as SparsePS
from sparsejax.schemes.top_k.g_topk import GTopk as GTopk
from sparsejax.schemes.top_k.ok_topk import OkTopk as OkTopk
from sparsejax.schemes.top_k.spar_dl import SparDL as SparDL
from sparsejax.schemes.two_level import TwoLevel as TwoLevel
from sparsejax.schemes.zen.balanced import BalancedParallelism as BalancedParallelism
from sparsejax.schemes.zen.hierarchical import (
    HierarchicalCentralization as HierarchicalCentralization,
)
from sparsejax.schemes.zen.zen import Zen as Zen, ZenState as ZenState
