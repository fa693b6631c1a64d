"""Wrappers around any chain with a synchronization: accumulate, warm up, skip, clip.

Each takes an optax transformation and returns one, and they nest:

    tx = sparsejax.accumulate(
        optax.chain(sparsejax.dgc(0.01), sparsejax.zen_sync(), optax.adam(1e-3)), every=4)

The optimizer belongs inside: in a step in which nothing is sent it does not run, and its
state, the momentum and the count of steps, does not change.

On the wire: what the wrapped chain sends, and for `skip_nonfinite` one number of each rank,
of which all ranks take the maximum (`state.finite`). Whether a step sends depends only on a
step counter or on that number, so all ranks decide the same.
"""

from sparsejax.transforms.wrappers.by_step import (
    AccumulateState as AccumulateState,
    WarmUpState as WarmUpState,
    accumulate as accumulate,
    warm_up as warm_up,
)
from sparsejax.transforms.wrappers.clipping import clip_by_rank as clip_by_rank
from sparsejax.transforms.wrappers.guarding import (
    SkipState as SkipState,
    skip_nonfinite as skip_nonfinite,
)
