"""The library as optax transformations, one file each.

What most need is at the top, in `sparsejax`. Here are clipping of each rank's gradients by
itself, what raises for a step that was left out, gradients that are stacked by replica, and
the systems with which `zen_sync`, `ok_topk_sync` and `spardl_sync` are compared;
`sparsejax.transforms.feedback` has the contract of what leaves something out.
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
