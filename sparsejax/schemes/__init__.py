"""Ways to add up an array over ranks, one file each; `base` is their contract."""

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
from sparsejax.schemes.hierarchical_centralization import (
    HierarchicalCentralization as HierarchicalCentralization,
)
from sparsejax.schemes.zen import Zen as Zen
