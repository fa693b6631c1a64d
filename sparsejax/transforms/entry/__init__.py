"""Entering a `shard_map` from `jit`: unreduced gradients, or ones stacked by replica."""

from sparsejax.transforms.entry.entry import Entry as Entry, Reduction as Reduction
