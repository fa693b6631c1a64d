"""Ways to add up an array over ranks, one file each; `base` is their contract."""

from sparsejax.schemes.ag_sparse import AGSparse as AGSparse
from sparsejax.schemes.all_reduce import AllReduce as AllReduce
from sparsejax.schemes.balanced_parallelism import (
    BalancedParallelism as BalancedParallelism,
)
from sparsejax.schemes.base import (
    Reduced as Reduced,
    Scheme as Scheme,
    Stage as Stage,
    Traffic as Traffic,
)
from sparsejax.schemes.g_topk import GTopk as GTopk
from sparsejax.schemes.hierarchical_centralization import (
    HierarchicalCentralization as HierarchicalCentralization,
)
from sparsejax.schemes.lossy_strawman import LossyStrawman as LossyStrawman
from sparsejax.schemes.ok_topk import OkTopk as OkTopk
from sparsejax.schemes.omni_reduce import OmniReduce as OmniReduce
from sparsejax.schemes.spar_dl import SparDL as SparDL, fastest_teams as fastest_teams
from sparsejax.schemes.sparcml import SparCML as SparCML
from sparsejax.schemes.sparse_ps import SparsePS as SparsePS
from sparsejax.schemes.two_level import TwoLevel as TwoLevel
from sparsejax.schemes.zen import Zen as Zen, ZenState as ZenState
