"""How units travel: the only collectives, messages of several sizes, and index codes."""

from sparsejax.axes import AxisName as AxisName
from sparsejax.wire.channels import (
    Channel as Channel,
    pull_channel as pull_channel,
    push_channel as push_channel,
    swap_channel as swap_channel,
)
from sparsejax.wire.collectives import (
    Permutation as Permutation,
    agree as agree,
    all_gather as all_gather,
    all_reduce as all_reduce,
    all_reduce_bytes as all_reduce_bytes,
    all_reduce_cost as all_reduce_cost,
    all_to_all as all_to_all,
    branch as branch,
    maximum as maximum,
    mean_of as mean_of,
    per_rank as per_rank,
    permute as permute,
    psum as psum,
    rank as rank,
    ranks as ranks,
    reduce_scatter as reduce_scatter,
    same_elsewhere as same_elsewhere,
    travelling as travelling,
)
from sparsejax.wire.gathers import doubling_schedule as doubling_schedule
