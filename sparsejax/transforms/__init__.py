"""The library as optax transformations, one file each.

The common ones are exported by `sparsejax`. Here are `clip_by_rank`, which clips each
rank's gradients; `check_numbers`, which raises if a step was skipped; `PerReplica`,
gradients that are stacked by replica; and the baselines of `zen_sync`, `ok_topk_sync` and
`spardl_sync`. `sparsejax.transforms.feedback` defines the protocol of lossy parts.
"""

from sparsejax.state.finite import check_numbers as check_numbers
from sparsejax.state.per_replica import PerReplica as PerReplica
from sparsejax.transforms.systems import (
    gaussian_k_sync as gaussian_k_sync,
    gtopk_sync as gtopk_sync,
    power_sgd_sync as power_sgd_sync,
    topk_a_sync as topk_a_sync,
    topk_dsa_sync as topk_dsa_sync,
)
from sparsejax.transforms.wrappers import clip_by_rank as clip_by_rank
